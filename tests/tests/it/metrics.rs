//! `/metrics` counts what the clients were told, exactly.

use serde_json::{Value, json};
use tests::{Server, ServerOptions};

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
