//! `/metrics` counts what the clients were told, exactly.

use std::time::Duration;

use proto::SpecCounters;
use serde_json::{Value, json};
use tests::{Metrics, Server, ServerOptions, wait_until};

use crate::support::{REPETITIVE, STORY, check_identities, greedy, number, sampled, spec_counters};

/// What all requests of a load were told, summed.
#[derive(Default)]
struct Told {
    requests: u64,
    prompt_tokens: u64,
    completion_tokens: u64,
    spec: SpecCounters,
}

impl Told {
    fn add(&mut self, meta: &Value) {
        check_identities(meta);
        self.requests += 1;
        self.prompt_tokens += number(meta, "prompt_tokens");
        self.completion_tokens += number(meta, "completion_tokens");
        self.spec.add(&spec_counters(meta));
    }
}

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

fn spec_of(metrics: &Metrics) -> [f64; 4] {
    ["verify_steps", "proposed_drafts", "accepted_drafts", "delivered_drafts"]
        .map(|what| metrics.sum(&format!("sglang:spec_{what}_total")))
}

#[test]
fn the_sums_of_all_replies_are_the_counters() {
    let server = Server::start(ServerOptions::ngram());
    let told = mixed_load(&server);
    let spec = [
        told.spec.verify_ct,
        told.spec.proposed_drafts,
        told.spec.accepted_drafts,
        told.spec.delivered_drafts,
    ]
    .map(|count| count as f64);
    assert!(told.spec.accepted_drafts > 0, "the load made no use of speculation");

    // Processes write snapshots at intervals: the totals arrive soon, and then stay.
    let arrived = wait_until(Duration::from_secs(5), || spec_of(&server.metrics()) == spec);
    let metrics = server.metrics();
    assert!(arrived, "counters {:?}, replies {spec:?}", spec_of(&metrics));
    assert_eq!(metrics.sum("sglang:num_requests_total"), told.requests as f64);
    assert_eq!(metrics.sum("sglang:prompt_tokens_total"), told.prompt_tokens as f64);
    assert_eq!(metrics.sum("sglang:generation_tokens_total"), told.completion_tokens as f64);
    assert_eq!(metrics.sum("sglang:spec_verify_calls_total"), told.spec.verify_ct as f64);
    assert_eq!(metrics.sum("sglang:e2e_request_latency_seconds_count"), told.requests as f64);

    let accepted_by_depth = metrics.by_label("sglang:spec_accepted_at_position_total", "position");
    assert_eq!(accepted_by_depth.values().sum::<f64>(), told.spec.accepted_drafts as f64);
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
