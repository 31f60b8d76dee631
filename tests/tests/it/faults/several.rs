//! Several tokenizer processes and detokenizers behind one socket: each dies, hangs and returns on its own.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tests::{Server, ServerOptions, Stream, is_alive, wait_until};

use super::common::{PATIENCE, finish, same, server, under_way};
use super::load::{Told, counted};
use super::watch::Watch;
use crate::support::{greedy, number, output_ids, sampled};

const FRONTS: [&str; 2] = ["tokenizer-proc-0", "tokenizer-proc-1"];

fn two_of_each() -> Server {
    let flags = ["--tokenizer-worker-num", "2", "--detokenizer-worker-num", "2"];
    server(ServerOptions::tiny_eagle().with(&flags))
}

/// Does something while all other tokenizer processes stand still, so that this one's is the connection.
fn at_front<T>(server: &Server, front: usize, does: impl FnOnce() -> T) -> T {
    let others = FRONTS.iter().enumerate().filter(|(number, _)| *number != front);
    let stopped: Vec<Pid> = others.map(|(_, name)| server.signal_child(name, Signal::SIGSTOP)).collect();
    let stands = |pid: &Pid| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.contains(") T ")
    };
    assert!(wait_until(PATIENCE, || stopped.iter().all(stands)));
    let done = does();
    stopped.iter().for_each(|pid| kill(*pid, Signal::SIGCONT).unwrap());
    done
}

/// Kills a process for good, and waits until its successor works.
fn kill_and_wait(server: &Server, binary: &str, meanwhile: impl FnOnce()) {
    let name = binary.replace("-proc", "");
    let before = number(&server.report(&name), "restarts");
    let dead = server.signal_child(binary, Signal::SIGKILL);
    assert!(wait_until(PATIENCE, || !is_alive(dead)));
    meanwhile();
    let is_back = || {
        let report = server.report(&name);
        number(&report, "restarts") == before + 1 && report["state"] == "ready"
    };
    assert!(wait_until(PATIENCE, is_back), "{name} does not come back");
}

fn restarts(server: &Server) -> Vec<u64> {
    let names = ["scheduler", "detokenizer-0", "detokenizer-1", "tokenizer-0", "tokenizer-1"];
    names.iter().map(|name| number(&server.report(name), "restarts")).collect()
}

#[test]
fn a_killed_front_takes_down_its_own_connections_and_no_others() {
    let server = two_of_each();
    let bodies = [greedy("abc", 300), sampled("abc", 300, 5)];
    let expected: Vec<Value> = bodies.iter().map(|body| server.generate(body)).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = Watch::start(scope, &server, &stop);
        let before = server.metrics().sum("sglang:num_requests_total");
        for dies in [0, 1] {
            let mut lost = at_front(&server, dies, || under_way(&server, &bodies[0], 5));
            let kept: Vec<Stream> = bodies
                .iter()
                .map(|body| at_front(&server, 1 - dies, || under_way(&server, body, 5)))
                .collect();
            kill_and_wait(&server, FRONTS[dies], || {
                // The other one takes whoever comes, and says that it does.
                let health = server.get("/health");
                assert_eq!(health.status, 200, "{health:?}");
                same(&server.generate(&bodies[1]), &expected[1]);
            });
            for (stream, expected) in kept.into_iter().zip(&expected) {
                same(&finish(stream), expected);
            }
            while lost.next().is_some() {}
            assert!(!lost.is_done(), "a dead process ended a stream");
            assert!(wait_until(PATIENCE, || server.requests_held() == 0), "its requests are still run");
        }
        // Three ended in each round, at one front or the other; what the dead ones counted is not lost.
        let ended = || server.metrics().sum("sglang:num_requests_total") - before;
        assert!(wait_until(PATIENCE, || ended() == 6.0), "{} ended", ended());
        assert_eq!(watch.stop(), [""; 0]);
    });
    assert_eq!(restarts(&server), [0, 0, 0, 1, 1]);
    let metrics = server.metrics();
    assert_eq!(metrics.sum("sglang:process_up"), 5.0);
    let first = [("role", "tokenizer"), ("number", "0")];
    assert_eq!(metrics.sum_with("sglang:process_restarts_total", &first), 1.0);
}

#[test]
fn a_killed_detokenizer_or_scheduler_costs_the_clients_of_no_front_a_token() {
    let server = two_of_each();
    let bodies = [greedy("one two", 300), sampled("one two", 300, 9)];
    let expected: Vec<Value> = bodies.iter().map(|body| server.generate(body)).collect();
    let (mut told, before) = (Told::default(), counted(&server));
    for binary in ["detokenizer-proc-0", "detokenizer-proc-1", "scheduler-proc"] {
        let streams: Vec<(Stream, &Value)> = [0, 1, 0, 1]
            .into_iter()
            .map(|i| (at_front(&server, i, || under_way(&server, &bodies[i], 5)), &expected[i]))
            .collect();
        kill_and_wait(&server, binary, || ());
        for (stream, expected) in streams {
            let reply = finish(stream);
            same(&reply, expected);
            told.add(&reply["meta_info"]);
        }
    }
    told.check(&server, before);
    assert_eq!(restarts(&server), [1, 1, 1, 0, 0]);
    server.wait_ready();
    let health = server.get("/health").ok();
    assert_eq!(health["status"], "ok", "{health}");
    assert_eq!(health["processes"]["detokenizer-1"]["restarts"], 1, "{health}");
    assert_eq!(health["processes"].as_object().map(serde_json::Map::len), Some(5), "{health}");
}

#[test]
fn a_front_that_stands_still_holds_up_nobody_and_is_replaced() {
    let flags = ["--tokenizer-worker-num", "2", "--heartbeat-timeout", "3"];
    let server = server(ServerOptions::tiny().with(&flags));
    let body = greedy("still", 200);
    let expected = server.generate(&body);
    let stopped = server.signal_child(FRONTS[0], Signal::SIGSTOP);
    // The clients of the other see nothing of it, neither before nor after it is found out.
    while is_alive(stopped) {
        same(&server.generate(&body), &expected);
    }
    same(&server.generate(&body), &expected);
    assert!(wait_until(PATIENCE, || server.report("tokenizer-0")["state"] == "ready"));
    let end = server.report("tokenizer-0")["last_end"].as_str().unwrap().to_owned();
    assert!(end.starts_with("gave no sign of life for "), "{end}");
}

#[test]
fn an_abort_reaches_a_request_at_another_front() {
    let server = two_of_each();
    for abort in [json!({"rid": "job"}), json!({"abort_all": true})] {
        let mut body = greedy("stop me", 400);
        body["rid"] = json!("job");
        let stream = at_front(&server, 0, || under_way(&server, &body, 3));
        at_front(&server, 1, || assert_eq!(server.post("/abort_request", &abort).status, 200));
        let reply = finish(stream);
        assert_eq!(reply["meta_info"]["finish_reason"]["type"], "abort", "{reply}");
        server.wait_idle();
    }
    // Names that nobody has, or that are empty, are what they are with one front.
    assert_eq!(server.post("/abort_request", &json!({"rid": "nobody"})).status, 200);
    assert_eq!(server.post("/abort_request", &json!({"rid": ""})).status, 400);
}

#[test]
fn a_full_queue_is_told_to_whoever_asked() {
    let flags = ["--tokenizer-worker-num", "2", "--max-running-requests", "1", "--max-queued-requests", "1"];
    let server = server(ServerOptions::tiny().with(&flags));
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let ask = |i: usize| server.post("/generate", &greedy(&format!("crowd {i}"), 100)).status;
        let clients: Vec<_> = (0..12).map(|i| scope.spawn(move || ask(i))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    assert!(statuses.iter().all(|status| [200, 503].contains(status)), "{statuses:?}");
    assert!(statuses.contains(&200) && statuses.contains(&503), "{statuses:?}");
    server.wait_idle();
}

#[test]
fn one_front_shares_its_requests_out_to_three_detokenizers() {
    let server = server(ServerOptions::tiny_eagle().with(&["--detokenizer-worker-num", "3"]));
    let body = greedy("share", 100);
    let expected = server.generate(&body);
    let replies: Vec<Value> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..12).map(|_| scope.spawn(|| server.generate(&body))).collect();
        for number in 0..3 {
            server.kill_child(&format!("detokenizer-proc-{number}"));
        }
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    replies.iter().for_each(|reply| same(reply, &expected));
}

/// Sends requests over new connections until told to stop; gives how many were answered, all as they should.
fn knock(server: &Server, stop: &AtomicBool, answered: &AtomicUsize) {
    while !stop.load(Ordering::SeqCst) {
        let reply = server.try_post("/generate", &greedy("knock", 3));
        let reply = reply.unwrap_or_else(|error| panic!("a connection failed: {error:?}"));
        assert_eq!(output_ids(&reply.ok()).len(), 3);
        answered.fetch_add(1, Ordering::SeqCst);
    }
}

/// Replaces all tokenizer processes while clients come and go, and others are being answered.
fn replaced_under_load(server: &Server, fronts: u64) {
    let body = greedy("a long one", 400);
    let expected = server.generate(&body);
    let (stop, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let answered_more = |than: usize| wait_until(PATIENCE, || answered.load(Ordering::SeqCst) > than);
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4).map(|_| scope.spawn(|| knock(server, &stop, &answered))).collect();
        let streams: Vec<Stream> = (0..4).map(|_| under_way(server, &body, 3)).collect();
        assert!(answered_more(4));
        let replaced = scope.spawn(|| server.operate(&["restart", "tokenizer", "--json"]));
        streams.into_iter().for_each(|stream| same(&finish(stream), &expected));
        let replaced = replaced.join().unwrap();
        assert!(replaced.status.success(), "{replaced:?}");
        assert!(answered_more(answered.load(Ordering::SeqCst) + 4), "nobody is answered any more");
        stop.store(true, Ordering::SeqCst);
        clients.into_iter().for_each(|client| client.join().unwrap());
    });
    let metrics = server.metrics();
    let restarts = metrics.sum_with("sglang:process_restarts_total", &[("role", "tokenizer")]);
    assert_eq!(restarts, fronts as f64);
    let refused = metrics.sum_with("sglang:http_responses_total", &[("status_code", "503")]);
    assert_eq!(refused, 0.0, "somebody was turned away");
}

#[test]
fn a_front_is_replaced_without_a_client_noticing() {
    replaced_under_load(&server(ServerOptions::tiny()), 1);
}

#[test]
fn two_fronts_are_replaced_in_turn_without_a_client_noticing() {
    replaced_under_load(&server(ServerOptions::tiny().with(&["--tokenizer-worker-num", "2"])), 2);
}
