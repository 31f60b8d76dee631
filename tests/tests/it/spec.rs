//! Speculation never changes an answer, and its numbers add up.

use serde_json::{Value, json};

use crate::support::{
    REPETITIVE, STORY, check_identities, greedy, ngram, number, output_ids, plain, sampled, spec_counters,
};

fn requests() -> Vec<Value> {
    let mut bodies = vec![greedy(REPETITIVE, 64), greedy(STORY, 48)];
    bodies.extend((0..3).map(|seed| sampled(REPETITIVE, 48, seed)));
    bodies.extend((0..3).map(|seed| sampled(STORY, 48, seed)));
    let mut penalised = sampled(REPETITIVE, 32, 11);
    penalised["sampling_params"]["frequency_penalty"] = json!(0.5);
    penalised["sampling_params"]["min_p"] = json!(0.02);
    bodies.push(penalised);
    let mut stopped = greedy(REPETITIVE, 64);
    stopped["sampling_params"]["stop"] = json!(["Sunday"]);
    bodies.push(stopped);
    bodies
}

#[test]
fn a_seeded_request_gives_the_same_tokens_with_ngram_on_and_off() {
    let (with, without) = (ngram(), plain());
    for body in requests() {
        let (on, off) = (with.generate(&body), without.generate(&body));
        assert_eq!(output_ids(&on), output_ids(&off), "{body}");
        assert_eq!(on["text"], off["text"], "{body}");
        assert_eq!(on["meta_info"]["finish_reason"], off["meta_info"]["finish_reason"], "{body}");
    }
}

#[test]
fn the_numbers_of_every_request_add_up() {
    let server = ngram();
    for body in requests() {
        check_identities(&server.generate(&body)["meta_info"]);
    }
}

#[test]
fn a_repetitive_text_is_guessed() {
    let reply = ngram().generate(&greedy(REPETITIVE, 64));
    let counters = spec_counters(&reply["meta_info"]);
    assert!(counters.accepted_drafts >= 32, "only {counters:?} of 64 tokens were guessed");
    assert!(counters.verify_ct < 32, "{counters:?}");
}

#[test]
fn a_server_without_speculation_shows_none() {
    let server = plain();
    let meta = server.generate(&greedy(REPETITIVE, 8))["meta_info"].clone();
    assert_eq!(meta.get("spec_verify_ct").and_then(Value::as_u64).unwrap_or(0), 0);
    assert!(meta.get("spec_accept_rate").is_none());
    let info = server.get("/server_info").ok();
    assert!(info["speculative_algorithm"].is_null(), "{info}");
}

#[test]
fn a_request_gives_the_same_tokens_alone_and_in_a_full_batch() {
    let server = ngram();
    let alone = server.generate(&sampled(STORY, 32, 5));
    let crowded = std::thread::scope(|scope| {
        let server = &server;
        for seed in 0..7 {
            scope.spawn(move || server.generate(&sampled(REPETITIVE, 40, 100 + seed)));
        }
        server.generate(&sampled(STORY, 32, 5))
    });
    assert_eq!(output_ids(&alone), output_ids(&crowded));
}

#[test]
fn the_server_tells_its_settings() {
    let info = ngram().get("/server_info").ok();
    assert_eq!(info["speculative_algorithm"], "NGRAM");
    assert_eq!(number(&info, "speculative_num_draft_tokens"), 12);
    assert_eq!(number(&info["internal_states"][0], "speculative_num_draft_tokens"), 12);
}
