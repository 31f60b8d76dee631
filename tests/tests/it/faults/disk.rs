//! A disk that takes nothing more, for every process that writes: service goes on, numbers do not go down, and are
//! whole again when there is room.

use std::process::Command;
use std::sync::atomic::AtomicBool;

use nix::unistd::Pid;
use serde_json::Value;
use tests::{Metrics, Server, ServerOptions, wait_until};

use super::common::{PATIENCE, finish, same, server, under_way};
use super::load::{Told, counted};
use super::watch::{Watch, launcher_page};
use crate::support::{greedy, number};

/// No file of these processes may grow beyond so many bytes. Unlike a full disk it needs no rights and no mount, and it
/// fails the same calls in the same place: a write is cut short at the limit, and the next one fails.
fn limit(processes: &[Pid], bytes: &str) {
    for pid in processes {
        let limit = format!("--fsize={bytes}:unlimited");
        let done = Command::new("prlimit").args(["--pid", &pid.to_string(), &limit]).status().unwrap();
        assert!(done.success(), "{pid}");
    }
}

/// The launcher and all its children.
fn processes(server: &Server) -> Vec<Pid> {
    let names = ["scheduler-proc", "detokenizer-proc", "tokenizer-proc"];
    let children = names.iter().filter_map(|name| server.child(name));
    children.chain([server.launcher()]).collect()
}

#[test]
fn a_full_disk_stops_no_service_and_takes_back_no_number() {
    let server = server(ServerOptions::tiny_eagle());
    let body = greedy("no room", 100);
    let expected = server.generate(&body);
    let (stop, mut told) = (AtomicBool::new(false), Told::default());
    std::thread::scope(|scope| {
        let watch = Watch::start(scope, &server, &stop);
        for bytes in ["0", "1000"] {
            limit(&processes(&server), bytes);
            same(&server.generate(&body), &expected);
            // A successor inherits the limit: it has nothing to go by but what its clients have.
            let stream = under_way(&server, &body, 20);
            server.kill_child("scheduler-proc");
            same(&finish(stream), &expected);
            assert!(server.operate(&["restart", "detokenizer"]).status.success());
            same(&server.generate(&body), &expected);
            assert_eq!(server.get("/metrics").status, 200);
            limit(&processes(&server), "unlimited");
        }
        // With room again, every later count is exact.
        let there_is_room = || Metrics::parse(&launcher_page(&server)).sum("sglang:process_up") == 3.0;
        assert!(wait_until(PATIENCE, there_is_room));
        server.generate(&body);
        let before = counted(&server);
        let replies: Vec<Value> =
            (0..3).map(|i| server.generate(&greedy(&format!("room {i}"), 50))).collect();
        replies.iter().for_each(|reply| told.add(&reply["meta_info"]));
        told.check(&server, before);
        assert_eq!(watch.stop(), [""; 0]);
    });
    for role in ["detokenizer", "tokenizer"] {
        let restarts = number(&server.report(role), "restarts");
        assert_eq!(restarts, if role == "detokenizer" { 2 } else { 0 }, "{role} died of a full disk");
    }
}
