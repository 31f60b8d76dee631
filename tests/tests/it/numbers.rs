//! Every place that tells an acceptance number tells the same one, for every draft worker: replies, `/metrics`,
//! `/server_info` and the log.

use std::time::Duration;

use proto::SpecCounters;
use serde_json::{Value, json};
use tests::{Metrics, Server, wait_until};

use crate::golden_counts::Run;
use crate::support::{number, output_ids};
use crate::told::Told;
use crate::workers::{EAGLE, NGRAM, Worker, ask, together, with};

/// A server of its own, so that its counters are those of one test; one log line per decode step.
fn start(worker: Worker) -> Server {
    Server::start(worker.options().with(&["--decode-log-interval", "1"]))
}

/// Acceptance lengths and rates of all decode lines so far, as they are printed.
fn decode_lines(server: &Server) -> Vec<(String, String)> {
    let read = |line: &str| {
        let (_, rest) = line.split_once("accept len: ")?;
        let (length, rest) = rest.split_once(", accept rate: ")?;
        let (rate, _) = rest.split_once(',')?;
        Some((length.to_owned(), rate.to_owned()))
    };
    let logs = server.logs();
    logs.lines().filter(|line| line.contains("Decode batch")).filter_map(read).collect()
}

fn printed(proposed: usize, accepted: usize) -> (String, String) {
    let rate = if proposed > 0 { accepted as f64 / proposed as f64 } else { 0.0 };
    (format!("{:.2}", (accepted + 1) as f64), format!("{rate:.2}"))
}

/// Streamed and whole answers, several at once, some cut off by a stop, some that opted out.
fn load(worker: Worker, server: &Server) -> Told {
    let prompts = worker.prompts();
    let stop = output_ids(&worker.plain().generate(&ask(&prompts[0], 20)))[9];
    let mut bodies: Vec<Value> = prompts.iter().map(|prompt| ask(prompt, 33)).collect();
    bodies.push(with(ask(&prompts[0], 60), json!({"stop_token_ids": [stop]})));
    bodies.push(with(ask(&prompts[1], 25), json!({"temperature": 0.6, "sampling_seed": 8})));
    for speculative in [json!(false), json!({"max_draft_tokens": 2})] {
        let mut body = ask(&prompts[2], 20);
        body["speculative"] = speculative;
        bodies.push(body);
    }
    let mut told = Told::default();
    together(server, &bodies).iter().for_each(|reply| told.add(&reply["meta_info"]));
    for mut body in bodies {
        body["stream"] = json!(true);
        told.add(&server.stream("/generate", &body).all().pop().unwrap()["meta_info"]);
    }
    told
}

/// One request after the other, then many at once, each told about in four places.
pub(crate) fn agree(worker: Worker) {
    let server = start(worker);
    let average = || server.internal_state()["avg_spec_accept_length"].clone();
    assert_eq!(average(), Value::Null, "{worker:?}: nothing is measured yet");
    let mut told = Told::default();
    told.add(&server.generate(&ask(&worker.prompts()[0], 3))["meta_info"]);
    assert!(told.spec.verify_ct > 0);
    assert_eq!(
        average().as_f64(),
        told.spec.accept_length(),
        "known from the first verify step on, {worker:?}"
    );
    for prompt in worker.prompts() {
        told.add(&server.generate(&ask(&prompt, 48))["meta_info"]);
    }
    check_lines(worker, &server, &told.spec);
    check_depths(worker, &told.arrive_at(&server));

    told.add_all(&load(worker, &server));
    let metrics = told.arrive_at(&server);
    assert_eq!(average().as_f64(), told.spec.accept_length(), "{worker:?}");
    assert!(told.spec.accepted_drafts > 0, "{worker:?}");
    // A decode step makes a token per row, and one per accepted draft.
    let decoded = metrics.sum_with("sglang:realtime_tokens_total", &[("mode", "decode")]);
    let without_drafts = 2.0 * (20.0 - 1.0);
    let verified = (told.spec.verify_ct + told.spec.accepted_drafts) as f64;
    assert_eq!(decoded, verified + without_drafts, "{worker:?}");
    check_sources(worker, &metrics, &server.internal_state());
    check_shape(worker, &metrics, &server.internal_state());
    assert_eq!(server.get("/server_info").ok()["speculative_algorithm"], worker.shown_as());
}

fn check_shape(worker: Worker, metrics: &Metrics, state: &Value) {
    for (name, fixed) in [("num_steps", worker.steps), ("num_draft_tokens", worker.width)] {
        let told = number(state, &format!("speculative_{name}"));
        assert_eq!(metrics.sum(&format!("sglang:spec_{name}")), told as f64, "{name} of {worker:?}");
        assert!(worker.is_adaptive() || told == fixed as u64, "{name} of {worker:?}");
    }
}

/// Whoever drafts here is named, and together they made all drafts.
fn check_sources(worker: Worker, metrics: &Metrics, state: &Value) {
    let names: &[&str] = match (worker.is_ngram(), worker.remembers()) {
        (true, _) => &["ngram"],
        (false, true) => &["model", "ngram"],
        (false, false) => &["model"],
    };
    for what in ["proposed", "accepted"] {
        let by_source = metrics.by_label(&format!("sglang:spec_{what}_by_source_total"), "source");
        assert_eq!(by_source.keys().map(String::as_str).collect::<Vec<_>>(), names, "{worker:?}");
        let all = metrics.sum(&format!("sglang:spec_{what}_drafts_total"));
        assert_eq!(by_source.values().sum::<f64>(), all, "{what} by {worker:?}");
        for (source, &count) in &by_source {
            assert!(count > 0.0, "{what} by {source}, {worker:?}");
            let told = number(&state["speculative_draft_sources"][source], &format!("{what}_drafts"));
            assert_eq!(told as f64, count, "{what} by {source}, {worker:?}");
        }
    }
}

/// With a line per step, the lines of requests that ran alone are the steps behind their histograms; those of a
/// reference run are its own, number by number.
fn check_lines(worker: Worker, server: &Server, told: &SpecCounters) {
    let complete = || decode_lines(server).len() as u64 == told.verify_ct;
    assert!(wait_until(Duration::from_secs(5), complete), "{} lines, {told:?}", decode_lines(server).len());
    let lines = decode_lines(server);
    let mut logged = vec![0; told.acceptance_histogram.len()];
    for (length, rate) in &lines {
        logged[length.parse::<f64>().unwrap() as usize - 1] += 1;
        assert!((0.0..=1.0).contains(&rate.parse::<f64>().unwrap()), "{rate}");
    }
    assert_eq!(logged, told.acceptance_histogram, "{worker:?}");
    if let Some(steps) = reference(worker) {
        let expected: Vec<_> =
            steps.iter().map(|&(proposed, accepted)| printed(proposed, accepted)).collect();
        assert_eq!(lines, expected, "{worker:?}");
    }
}

/// Proposed and accepted drafts of every step that [`agree`] makes one after the other, where they are known.
fn reference(worker: Worker) -> Option<Vec<(usize, usize)>> {
    let runs = Run::chains(worker, worker.nodes());
    let known = worker.topk == 1 && !runs.is_empty() && !worker.remembers() && !worker.is_adaptive();
    let all = || runs[0].limited(3).into_iter().chain(runs.iter().flat_map(|run| run.limited(48)));
    known.then(|| all().collect())
}

fn check_depths(worker: Worker, metrics: &Metrics) {
    let Some(steps) = reference(worker) else { return };
    for depth in 0..worker.nodes() {
        let label = depth.to_string();
        let counted = |what: &str| {
            metrics.sum_with(&format!("sglang:spec_{what}_at_position_total"), &[("position", &label)])
        };
        let deep =
            |of: fn(&(usize, usize)) -> usize| steps.iter().filter(|step| of(step) > depth).count() as f64;
        assert_eq!(counted("proposed"), deep(|step| step.0), "position {depth}, {worker:?}");
        assert_eq!(counted("accepted"), deep(|step| step.1), "position {depth}, {worker:?}");
    }
}

/// A depth that was never proposed is not observed: there is no series that looks like a rate of 0.
#[test]
fn a_depth_that_no_request_drafted_is_not_observed() {
    let server = start(EAGLE);
    let mut told = Told::default();
    for prompt in EAGLE.prompts() {
        let mut body = ask(&prompt, 30);
        body["speculative"] = json!({"max_draft_tokens": 2});
        told.add(&server.generate(&body)["meta_info"]);
    }
    let metrics = told.arrive_at(&server);
    let proposed = metrics.by_label("sglang:spec_proposed_at_position_total", "position");
    assert_eq!(proposed.keys().collect::<Vec<_>>(), ["0", "1"]);
}

/// Gauges of load fall to 0 with the last request, and windows without a verify step divide by nothing.
#[test]
fn an_idle_server_shows_no_load() {
    for worker in [EAGLE, NGRAM] {
        let server = start(worker);
        let mut body = ask(&worker.prompts()[0], 30);
        body["speculative"] = json!(false);
        server.generate(&body);
        let done = || server.metrics().sum("sglang:num_requests_total") == 1.0;
        assert!(wait_until(Duration::from_secs(5), done));
        let metrics = server.metrics();
        for gauge in
            ["num_running_reqs", "num_queue_reqs", "gen_throughput", "decode_sum_seq_lens", "token_usage"]
        {
            assert_eq!(metrics.sum(&format!("sglang:{gauge}")), 0.0, "{gauge}");
        }
        assert_eq!(metrics.sum("sglang:spec_accept_length"), 0.0);
        assert_eq!(metrics.sum("sglang:spec_accept_rate"), 0.0);
        assert_eq!(server.internal_state()["avg_spec_accept_length"], Value::Null);
    }
}

/// Every request ends in one outcome, and an answer of n tokens has n - 1 gaps, however it was chunked.
#[test]
fn outcomes_and_gaps_are_counted_once() {
    let server = start(EAGLE);
    let prompts = EAGLE.prompts();
    let stop = output_ids(&EAGLE.plain().generate(&ask(&prompts[1], 20)))[9];
    let mut stopped = with(ask(&prompts[1], 40), json!({"stop_token_ids": [stop]}));
    let mut told = Told::default();
    told.add(&server.generate(&stopped)["meta_info"]);
    told.add(&server.generate(&ask(&prompts[0], 10))["meta_info"]);
    assert_eq!(server.post("/generate", &json!({"input_ids": [9000]})).status, 400);
    stopped["stream"] = json!(true);
    told.add(&server.stream("/generate", &stopped).all().pop().unwrap()["meta_info"]);
    let gaps = told.arrive_at(&server).sum("sglang:inter_token_latency_seconds_count");
    assert_eq!(gaps, (told.completion_tokens - told.requests) as f64);

    let mut left = with(ask(&prompts[3], 440), json!({"stream_interval": 1}));
    left["stream"] = json!(true);
    let mut stream = server.stream("/generate", &left);
    assert!(stream.next().is_some());
    drop(stream);
    let outcomes = || server.metrics().by_label("sglang:request_outcomes_total", "reason");
    let all = || outcomes().values().sum::<f64>() == 4.0;
    assert!(wait_until(Duration::from_secs(5), all), "{:?}", outcomes());
    // The one that was left may have been done before it was noticed.
    let (length, abort) = (outcomes()["length"], outcomes().get("abort").copied().unwrap_or(0.0));
    assert_eq!((outcomes()["stop"], length + abort), (2.0, 2.0), "{:?}", outcomes());
    assert_eq!(server.metrics().sum("sglang:num_requests_total"), 4.0);
}
