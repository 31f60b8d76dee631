//! Pressure: a process that takes nothing in, and input that never repeats. New work is turned away, memory stays flat,
//! and nothing is lost once things go on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};
use tests::{ServerOptions, wait_until};

use super::common::{finish, same, server};
use super::watch::launcher_page;
use crate::support::{greedy, number};

/// Clients whose answers make the pressure.
const CLIENTS: usize = 12;
/// Further ones, one after the other, until one is turned away.
const MOST_ASKED: usize = 200;
const NEXT: Duration = Duration::from_millis(300);

#[test]
fn a_detokenizer_that_does_not_read_makes_new_requests_503_and_recovers() {
    let flags = ["--heartbeat-timeout", "300", "--max-running-requests", "2"];
    let server = server(ServerOptions::tiny().with(&flags));
    let mut body = greedy("pressure", 480);
    let expected = server.generate(&body);
    // Streamed, so that every step makes a message.
    body["stream"] = json!(true);
    let streamed = || finish(server.stream("/generate", &body));
    let memory = || number(&server.report("scheduler"), "rss_bytes");
    let before = memory();
    let stopped = server.signal_child("detokenizer-proc", Signal::SIGSTOP);
    let turned_away = AtomicBool::new(false);
    let answers: Vec<Value> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(streamed)).collect();
        // Every step leaves a message that nobody takes, until there are too many. Who asks before that has to wait.
        for _ in 0..MOST_ASKED {
            scope.spawn(|| {
                let status = server.post("/generate", &greedy("one more", 1)).status;
                assert!([200, 503].contains(&status), "{status}");
                turned_away.fetch_or(status == 503, Ordering::SeqCst);
            });
            if wait_until(NEXT, || turned_away.load(Ordering::SeqCst)) {
                break;
            }
        }
        assert!(memory() < before + (64 << 20), "{before} bytes became {}", memory());
        kill(stopped, Signal::SIGCONT).unwrap();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    assert!(turned_away.load(Ordering::SeqCst), "everything was taken on");
    answers.iter().for_each(|reply| same(reply, &expected));
    same(&streamed(), &expected);
}

/// Whoever asks how the server is doing is answered while the scheduler is not.
#[test]
fn a_scheduler_that_stands_still_holds_up_no_scrape_and_no_probe() {
    let server = server(ServerOptions::tiny().with(&["--heartbeat-timeout", "300"]));
    let expected = server.generate(&greedy("still", 20));
    let before = server.metrics().counters();
    let stopped = server.signal_child("scheduler-proc", Signal::SIGSTOP);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| server.generate(&greedy("still", 20)));
        for _ in 0..20 {
            let now = server.metrics().counters();
            assert!(before.iter().all(|(series, value)| now[series] >= *value));
            assert!(!launcher_page(&server).is_empty());
            let health = server.get("/health").json();
            assert!(health["processes"]["scheduler"]["alive"].as_bool().unwrap(), "{health}");
        }
        assert!(!waiting.is_finished(), "a scheduler that stands still has answered");
        kill(stopped, Signal::SIGCONT).unwrap();
        same(&waiting.join().unwrap(), &expected);
    });
}

/// What was tokenised once is not kept for ever.
#[test]
fn prompts_that_never_come_back_leave_no_memory_behind() {
    let server = server(ServerOptions::tiny());
    let texts = |from: usize| -> Vec<String> {
        (from..from + 1000).map(|i| format!("{i:x}").repeat(12) + &format!(" word{i} is new{i}")).collect()
    };
    let ask = |from: usize| {
        let reply = server.post("/tokenize", &json!({"prompt": texts(from)})).ok();
        assert_eq!(reply["tokens"].as_array().map(Vec::len), Some(1000));
    };
    let memory = || number(&server.report("tokenizer"), "rss_bytes");
    (0..30).for_each(|round| ask(round * 1000));
    let warm = memory();
    (30..90).for_each(|round| ask(round * 1000));
    assert!(memory() < warm + (24 << 20), "{warm} bytes became {} with 60000 prompts more", memory());
}
