//! Owns what several modules need: the shared servers, request bodies, and the acceptance figures of a reply.

use std::sync::Arc;

use proto::SpecCounters;
use serde_json::{Value, json};
use tests::{Server, ServerOptions, shared};

/// The server most tests use: n-gram speculation, float32, so that outputs can be compared with goldens.
pub(crate) fn ngram() -> Arc<Server> {
    shared(ServerOptions::ngram().with(&["--dtype", "float32"]))
}

/// The same without speculation.
pub(crate) fn plain() -> Arc<Server> {
    shared(ServerOptions::plain().with(&["--dtype", "float32"]))
}

/// Text that a model likes to go on copying.
pub(crate) const REPETITIVE: &str = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, \
    Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday, Wednesday, Thursday,";

pub(crate) const STORY: &str = "Once upon a time, in a village by the sea, there lived";

pub(crate) fn greedy(text: &str, max_new_tokens: u32) -> Value {
    json!({"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": true}})
}

pub(crate) fn sampled(text: &str, max_new_tokens: u32, seed: u64) -> Value {
    json!({"text": text, "sampling_params": {
        "temperature": 0.8, "top_p": 0.95, "sampling_seed": seed, "max_new_tokens": max_new_tokens, "ignore_eos": true,
    }})
}

/// The ids of a `/generate` reply.
pub(crate) fn output_ids(reply: &Value) -> Vec<u64> {
    let ids = reply["output_ids"].as_array().unwrap_or_else(|| panic!("no output_ids in {reply}"));
    ids.iter().map(|id| id.as_u64().unwrap()).collect()
}

pub(crate) fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or_else(|| panic!("no number {name} in {value}"))
}

/// The acceptance counts of one `meta_info`; all zero when the request was not speculated for.
pub(crate) fn spec_counters(meta: &Value) -> SpecCounters {
    if meta["spec_verify_ct"].as_u64().unwrap_or(0) == 0 {
        return SpecCounters::default();
    }
    let histogram =
        meta["spec_accept_histogram"].as_array().unwrap_or_else(|| panic!("no histogram in {meta}"));
    SpecCounters {
        verify_ct: number(meta, "spec_verify_ct"),
        proposed_drafts: number(meta, "spec_proposed_drafts"),
        accepted_drafts: number(meta, "spec_accepted_drafts"),
        delivered_drafts: number(meta, "spec_delivered_drafts"),
        acceptance_histogram: histogram.iter().map(|count| count.as_u64().unwrap()).collect(),
    }
}

/// Checks every identity that one finished request must satisfy.
pub(crate) fn check_identities(meta: &Value) {
    let counters = spec_counters(meta);
    counters.check().unwrap_or_else(|broken| panic!("{broken} in {meta}"));
    let completion = number(meta, "completion_tokens");
    if counters.verify_ct == 0 {
        assert!(meta.get("spec_accept_rate").is_none(), "a rate of nothing in {meta}");
        return;
    }
    // One token comes from the prefill of each residence; every verify step delivers at most one bonus.
    let prefilled = 1 + number(meta, "num_retractions");
    let made = counters.delivered_drafts + counters.verify_ct;
    assert!(completion <= prefilled + made, "{completion} <= {prefilled} + {made} in {meta}");
    assert!(completion + 1 >= prefilled.min(1) + counters.delivered_drafts, "{meta}");
    let length = meta["spec_accept_length"].as_f64().unwrap_or_else(|| panic!("no accept length in {meta}"));
    assert!((length - completion as f64 / counters.verify_ct as f64).abs() < 1e-9, "{meta}");
    match counters.accept_rate() {
        Some(rate) => assert!((meta["spec_accept_rate"].as_f64().unwrap() - rate).abs() < 1e-9, "{meta}"),
        None => assert!(meta.get("spec_accept_rate").is_none(), "{meta}"),
    }
    for (name, alias) in [
        ("spec_accepted_drafts", "spec_num_correct_drafts"),
        ("spec_proposed_drafts", "spec_num_proposed_drafts"),
        ("spec_accept_histogram", "spec_correct_drafts_histogram"),
    ] {
        assert_eq!(meta[name], meta[alias], "{alias}");
    }
}
