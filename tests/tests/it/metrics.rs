//! `/metrics` counts what the clients were told, exactly.

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tests::{Exposition, KEPT_FOR_DASHBOARDS, Server, ServerOptions, complaints, wait_until};

use crate::support::{REPETITIVE, STORY, greedy, sampled};
use crate::told::Told;

/// Greedy and sampled, streamed and not, stopped inside blocks, without speculation of its own, several at once.
fn mixed_load(server: &Server) -> Told {
    let mut bodies: Vec<Value> = (0..4).map(|seed| sampled(STORY, 20 + seed as u32, seed)).collect();
    bodies.extend([greedy(REPETITIVE, 40), greedy(STORY, 1), greedy("Two, four, six,", 25)]);
    let mut stopped = greedy(REPETITIVE, 60);
    stopped["sampling_params"]["stop"] = json!(["Saturday"]);
    bodies.push(stopped);
    let mut told = Told::default();
    std::thread::scope(|scope| {
        let threads: Vec<_> = bodies
            .iter()
            .enumerate()
            .map(|(i, body)| {
                scope.spawn(move || {
                    if i % 2 == 0 {
                        return server.generate(body);
                    }
                    let mut body = body.clone();
                    body["stream"] = json!(true);
                    server.stream("/generate", &body).all().pop().unwrap()
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| told.add(&thread.join().unwrap()["meta_info"]));
    });
    told
}

#[test]
fn the_sums_of_all_replies_are_the_counters() {
    let server = Server::start(ServerOptions::ngram());
    let told = mixed_load(&server);
    assert!(told.spec.accepted_drafts > 0, "the load made no use of speculation");
    told.arrive_at(&server);
}

#[test]
fn both_kinds_of_request_are_told_apart_and_probes_are_not_counted() {
    let server = Server::start(ServerOptions::plain());
    assert_eq!(server.get("/health_generate").status, 200);
    server.generate(&greedy(STORY, 4));
    let mut body = greedy(STORY, 4);
    body["stream"] = json!(true);
    server.stream("/generate", &body).all();
    let metrics = server.metrics();
    for streaming in ["True", "False"] {
        let labels = [("is_streaming", streaming)];
        assert_eq!(metrics.sum_with("sglang:num_requests_total", &labels), 1.0, "{streaming}");
    }
    // Gauges exist without speculation, at zero.
    assert!(metrics.has("sglang:spec_accept_length"));
    assert_eq!(metrics.sum("sglang:spec_num_draft_tokens"), 0.0);
    assert_eq!(server.get("/metrics/").status, 200);
}

/// What Prometheus' own linter says, where it is installed, of a page without the names that are kept for dashboards.
fn linted(page: &str) -> Option<Vec<String>> {
    let mut linter = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .ok()?;
    // It would complain of every colon.
    linter.stdin.take()?.write_all(page.replace("sglang:", "sglang_").as_bytes()).ok()?;
    let said = String::from_utf8_lossy(&linter.wait_with_output().ok()?.stderr).into_owned();
    let of_kept =
        |line: &str| KEPT_FOR_DASHBOARDS.iter().any(|name| line.starts_with(&name.replace(':', "_")));
    Some(said.lines().filter(|line| !of_kept(line)).map(str::to_owned).collect())
}

/// Both forms of a page with every kind of series on it keep every rule, and readers that are not ours read them.
#[test]
fn both_forms_of_the_page_keep_the_rules() {
    let odd_name = "a \"model\" of\\ours";
    let server = Server::start(ServerOptions::tiny_eagle().with(&["--served-model-name", odd_name]));
    server.generate(&greedy("measure", 40));
    let mut body = sampled("measure", 40, 3);
    body["stream"] = json!(true);
    server.stream("/generate", &body).all();
    server.get("/made/up");
    let told = || server.metrics().sum("sglang:num_requests_total") == 2.0;
    assert!(wait_until(Duration::from_secs(20), told));
    let text = server.get("/metrics").body;
    assert_eq!(complaints(&text, Exposition::Prometheus), [""; 0], "{text}");
    let parsed = openmetrics_parser::prometheus::parse_prometheus(&text);
    assert!(parsed.is_ok(), "{:?}", parsed.err());
    let open = server.get_as("/metrics", "application/openmetrics-text; version=1.0.0").body;
    assert_eq!(complaints(&open, Exposition::OpenMetrics), [""; 0], "{open}");
    let parsed = openmetrics_parser::openmetrics::parse_openmetrics(&open);
    assert!(parsed.is_ok(), "{:?}", parsed.err());
    assert_eq!(linted(&text).unwrap_or_default(), [""; 0]);
    // The same series in both.
    let samples = |page: &str| page.lines().filter(|line| !line.starts_with('#')).count();
    assert_eq!(samples(&text), samples(&open));
}

/// What an operator balances load by is there while there is load, and gone with it.
#[test]
fn load_is_on_the_page_while_it_lasts() {
    let server = Server::start(ServerOptions::tiny());
    let patience = Duration::from_secs(60);
    let running = || server.metrics().sum("sglang:num_running_reqs");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (server, stop) = (&server, &stop);
        let clients: Vec<_> = (0..4)
            .map(|i| {
                scope.spawn(move || {
                    while !stop.load(Ordering::SeqCst) {
                        server.generate(&greedy(&format!("load {i}"), 400));
                    }
                })
            })
            .collect();
        let seen = wait_until(patience, || running() > 0.0);
        stop.store(true, Ordering::SeqCst);
        clients.into_iter().for_each(|client| client.join().unwrap());
        assert!(seen, "the page shows no load");
    });
    assert!(wait_until(patience, || running() == 0.0), "the load does not go away");
}
