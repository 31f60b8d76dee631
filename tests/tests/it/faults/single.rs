//! One fault at a time, each with what must follow from it.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;

use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use tests::{Metrics, Server, ServerOptions, is_alive, wait_until};

use super::common::{PATIENCE, finish, kill_for_good, same, server, under_way, wait_restarted};
use super::load::{Told, counted};
use super::watch::{Watch, launcher_page};
use crate::support::{REPETITIVE, STORY, greedy, number, output_ids, sampled};

#[test]
fn a_killed_scheduler_or_detokenizer_costs_no_client_a_token() {
    let server = server(ServerOptions::ngram().with(&["--dtype", "float32"]));
    let mut told = Told::default();
    let bodies = [greedy(REPETITIVE, 60), sampled(STORY, 60, 7)];
    let expected: Vec<Value> = bodies.iter().map(|body| server.generate(body)).collect();
    expected.iter().for_each(|reply| told.add(&reply["meta_info"]));
    for binary in ["scheduler-proc", "detokenizer-proc"] {
        let role = binary.strip_suffix("-proc").unwrap();
        let before = server.report(role);
        for (body, expected) in bodies.iter().zip(&expected) {
            let stream = under_way(&server, body, 20);
            let dead = server.signal_child(binary, Signal::SIGKILL);
            let reply = finish(stream);
            same(&reply, expected);
            told.add(&reply["meta_info"]);
            assert!(!is_alive(dead));
        }
        wait_restarted(&server, role, 2);
        let after = server.report(role);
        assert_eq!(number(&after, "restarts"), 2, "{after}");
        assert_ne!(after["pid"], before["pid"]);
        assert_ne!(after["incarnation"], before["incarnation"]);
        assert_eq!(after["last_end"], "was killed by signal 9 (SIGKILL)");
    }
    told.check(&server, [0.0; 4]);
    let metrics = server.metrics();
    assert_eq!(metrics.sum_with("sglang:process_restarts_total", &[("role", "scheduler")]), 2.0);
    assert_eq!(metrics.sum("sglang:process_up"), 3.0);
}

#[test]
fn a_killed_front_loses_its_own_connections_only() {
    let server = server(ServerOptions::tiny_eagle());
    let expected = server.generate(&greedy("abc", 100));
    let mut lost = under_way(&server, &greedy("once", 400), 5);
    let address = server.base().to_owned();
    kill_for_good(&server, "tokenizer-proc");
    // While nobody listens, connections wait.
    let waiting =
        TcpStream::connect(address.strip_prefix("http://").unwrap()).expect("the launcher holds it");
    same(&server.generate(&greedy("abc", 100)), &expected);
    while lost.next().is_some() {}
    assert!(!lost.is_done(), "a dead process ended a stream");
    drop(waiting);
    assert!(wait_until(PATIENCE, || server.requests_held() == 0), "its requests are still run");
    assert_eq!(number(&server.report("tokenizer"), "restarts"), 1);
    assert_eq!(number(&server.report("scheduler"), "restarts"), 0);
}

#[test]
fn a_request_that_kills_two_schedulers_fails_alone() {
    let server = server(ServerOptions::ngram());
    let poison = under_way(&server, &greedy(STORY, 4000), 2);
    server.kill_child("scheduler-proc");
    wait_restarted(&server, "scheduler", 1);
    let innocent = under_way(&server, &greedy(REPETITIVE, 40), 1);
    server.kill_child("scheduler-proc");
    let reply = finish(poison);
    let reason = &reply["meta_info"]["finish_reason"];
    assert_eq!(
        (reason["type"].as_str(), reason["status_code"].as_u64()),
        (Some("abort"), Some(500)),
        "{reply}"
    );
    let reply = finish(innocent);
    assert_eq!(number(&reply["meta_info"], "completion_tokens"), 40);
}

#[test]
fn a_scheduler_killed_again_while_it_loads_loses_nothing() {
    let server = server(ServerOptions::ngram());
    let body = greedy(STORY, 30);
    let expected = server.generate(&body);
    let stream = under_way(&server, &body, 10);
    let mut dead = server.signal_child("scheduler-proc", Signal::SIGKILL);
    for _ in 0..2 {
        // The next one, as soon as it exists.
        assert!(wait_until(PATIENCE, || server.child("scheduler-proc").is_some_and(|pid| pid != dead)));
        dead = server.signal_child("scheduler-proc", Signal::SIGKILL);
    }
    same(&finish(stream), &expected);
    assert_eq!(number(&server.report("scheduler"), "restarts"), 3);
}

#[test]
fn detokenizer_and_scheduler_killed_together_lose_nothing() {
    let server = server(ServerOptions::ngram());
    let body = sampled(STORY, 30, 3);
    let expected = server.generate(&body);
    let stream = under_way(&server, &body, 10);
    server.kill_child("detokenizer-proc");
    server.kill_child("scheduler-proc");
    same(&finish(stream), &expected);
}

#[test]
fn a_process_that_is_stopped_for_long_is_replaced_and_health_says_so() {
    let server = server(ServerOptions::tiny().with(&["--heartbeat-timeout", "5"]));
    let body = greedy("a story", 300);
    let expected = server.generate(&body);
    for (binary, role) in [("scheduler-proc", "scheduler"), ("detokenizer-proc", "detokenizer")] {
        let stream = under_way(&server, &body, 3);
        let stopped = server.signal_child(binary, Signal::SIGSTOP);
        assert!(wait_until(PATIENCE, || !is_alive(stopped)), "{role} was not replaced");
        same(&finish(stream), &expected);
        wait_restarted(&server, role, 1);
        let end = server.report(role)["last_end"].as_str().unwrap().to_owned();
        assert!(end.starts_with("gave no sign of life for "), "{end}");
    }
    let health = server.get("/health").ok();
    assert_eq!(health["status"], "ok");
    assert_eq!(health["processes"]["scheduler"]["restarts"], 1, "{health}");
    assert_eq!(health["processes"]["detokenizer"]["ready"], true, "{health}");
}

#[test]
fn a_short_pause_changes_nothing() {
    let server = server(ServerOptions::tiny_eagle());
    let body = sampled("a pause", 300, 5);
    let expected = server.generate(&body);
    for binary in ["scheduler-proc", "detokenizer-proc", "tokenizer-proc"] {
        let stream = under_way(&server, &body, 3);
        let paused = server.signal_child(binary, Signal::SIGSTOP);
        let stat = format!("/proc/{paused}/stat");
        assert!(
            wait_until(PATIENCE, || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") T ")))
        );
        kill(paused, Signal::SIGCONT).unwrap();
        same(&finish(stream), &expected);
    }
    for role in ["scheduler", "detokenizer", "tokenizer"] {
        assert_eq!(number(&server.report(role), "restarts"), 0);
    }
}

#[test]
fn a_crash_loop_ends_the_server_with_the_reason() {
    let mut server = Server::start(ServerOptions::tiny().with(&["--restart-limit", "3"]));
    for life in 0..3 {
        let dead = server.signal_child("detokenizer-proc", Signal::SIGKILL);
        let next = || server.has_ended() || server.child("detokenizer-proc").is_some_and(|pid| pid != dead);
        assert!(wait_until(PATIENCE, next), "nothing followed death {life}");
    }
    let ended = server.wait_for_end();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.logs);
    let reason = "error: detokenizer: died 3 times within 60 s, at last: was killed by signal 9 (SIGKILL)";
    assert!(ended.logs.contains(reason), "{}", ended.logs);
    assert_eq!(server.leftovers(), [""; 0]);
}

#[test]
fn a_server_with_a_dead_process_can_still_be_ended() {
    let server = Server::start(ServerOptions::tiny());
    server.kill_child("scheduler-proc");
    let ended = server.end(Signal::SIGTERM);
    assert_eq!(ended.status.code(), Some(0), "{}", ended.logs);
}

#[test]
fn junk_on_every_socket_and_bad_metric_files_do_no_harm() {
    let server = server(ServerOptions::tiny_eagle());
    let body = greedy("junk", 200);
    let expected = server.generate(&body);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = Watch::start(scope, &server, &stop);
        let stream = under_way(&server, &body, 3);
        let run_dir = server.run_dir();
        let sockets = || std::fs::read_dir(&run_dir).unwrap().flatten().map(|entry| entry.path());
        let mut hit = 0;
        for path in sockets().filter(|path| path.extension().is_some_and(|ending| ending == "sock")) {
            for junk in [b"".as_slice(), b"GET / HTTP/1.1\r\n\r\n", &[0xff; 300], &[0; 4096]] {
                let Ok(mut socket) = UnixStream::connect(&path) else { continue };
                let _ = socket.write_all(junk);
                hit += 1;
            }
        }
        assert!(hit >= 20, "only {hit} sockets took junk");
        std::fs::write(run_dir.join("metrics/scheduler.00000000000000ff.pb"), b"\xff\xff\xff\x7fjunk")
            .unwrap();
        std::fs::write(run_dir.join("metrics/tokenizer.0000000000000001.pb"), [0xff; 64]).unwrap();
        same(&finish(stream), &expected);
        same(&server.generate(&body), &expected);
        let skipped = || server.metrics().sum("sglang:metrics_files_skipped_total");
        assert!(wait_until(PATIENCE, || skipped() == 2.0), "{} files skipped", skipped());
        server.kill_child("scheduler-proc");
        same(&server.generate(&body), &expected);
        assert_eq!(watch.stop(), [""; 0]);
    });
    for role in ["detokenizer", "tokenizer"] {
        assert_eq!(number(&server.report(role), "restarts"), 0, "{role}");
    }
}

/// A disk that takes nothing more: where the metrics should lie, there is a file.
#[test]
fn a_run_directory_that_cannot_be_written_stops_no_service() {
    let server = server(ServerOptions::tiny_eagle());
    let body = greedy("no room", 100);
    let expected = server.generate(&body);
    let metrics = server.run_dir().join("metrics");
    assert!(wait_until(PATIENCE, || {
        // Writers may put something in between.
        let _ = std::fs::remove_dir_all(&metrics);
        std::fs::write(&metrics, "").is_ok()
    }));
    same(&server.generate(&body), &expected);
    server.kill_child("scheduler-proc");
    same(&server.generate(&body), &expected);
    kill_for_good(&server, "tokenizer-proc");
    same(&server.generate(&body), &expected);
}

#[test]
fn counters_outlive_twenty_schedulers_and_their_files_do_not() {
    let server = server(ServerOptions::tiny_eagle());
    let mut told = Told::default();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = Watch::start(scope, &server, &stop);
        for life in 0..20 {
            told.add(&server.generate(&greedy(&format!("life {life}"), 50))["meta_info"]);
            server.kill_child("scheduler-proc");
        }
        told.add(&server.generate(&greedy("the last", 50))["meta_info"]);
        assert_eq!(watch.stop(), [""; 0]);
    });
    told.check(&server, [0.0; 4]);
    let files = std::fs::read_dir(server.run_dir().join("metrics")).unwrap().count();
    assert!(files <= 10, "{files} files");
    // The other page says the same.
    let page = Metrics::parse(&launcher_page(&server));
    assert_eq!(page.sum("sglang:spec_verify_steps_total"), counted(&server)[0]);
}

#[test]
fn an_operator_sees_and_replaces_processes() {
    let server = server(ServerOptions::tiny());
    let found = server.operate(&["ps"]);
    let table = String::from_utf8_lossy(&found.stdout).into_owned();
    assert!(found.status.success() && table.lines().count() == 4, "{found:?}");
    assert!(table.starts_with("ROLE "), "{table}");
    let before = server.report("scheduler");
    assert!(number(&before, "rss_bytes") > 1 << 20, "{before}");
    for role in ["scheduler", "detokenizer", "tokenizer"] {
        let done = server.operate(&["restart", role, "--json"]);
        assert!(done.status.success(), "{done:?}");
        assert_eq!(number(&server.report(role), "restarts"), 1);
        server.wait_ready();
        assert_eq!(output_ids(&server.generate(&greedy("x", 4))).len(), 4);
    }
    // Sent away any number of times, a scheduler was killed by no request.
    let expected = server.generate(&greedy("long", 400));
    let stream = under_way(&server, &greedy("long", 400), 2);
    for _ in 0..2 {
        assert!(server.operate(&["restart", "scheduler"]).status.success());
    }
    same(&finish(stream), &expected);
    let logs = server.operate(&["logs", "scheduler", "-n", "3", "--json"]);
    let lines: Value = serde_json::from_slice(&logs.stdout).unwrap();
    assert_eq!(lines.as_array().map(Vec::len), Some(3), "{lines}");
    let mut server = server;
    let run_dir = server.run_dir().display().to_string();
    assert!(server.operate(&["drain"]).status.success());
    assert_eq!(server.wait_for_end().status.code(), Some(0));
    let gone = server.operate(&["ps", "--run-dir", &run_dir]);
    assert_eq!(gone.status.code(), Some(1), "{gone:?}");
}

#[test]
fn eight_servers_started_at_once_come_up_and_do_not_disturb_each_other() {
    let servers: Vec<Server> = std::thread::scope(|scope| {
        let starts: Vec<_> = (0..8).map(|_| scope.spawn(|| Server::start(ServerOptions::tiny()))).collect();
        starts.into_iter().map(|start| start.join().unwrap()).collect()
    });
    let expected = output_ids(&servers[0].generate(&greedy("x", 20)));
    servers[3].kill_child("scheduler-proc");
    for server in &servers {
        assert_eq!(output_ids(&server.generate(&greedy("x", 20))), expected);
        let port: u16 = server.base().rsplit(':').next().unwrap().parse().unwrap();
        assert!(TcpListener::bind(("127.0.0.1", port)).is_err(), "two servers share port {port}");
    }
}
