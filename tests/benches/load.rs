//! Owns one measurement: many prompts at once on one server, timed between first and last tokens.

use std::time::Instant;

use serde_json::{Value, json};
use tests::Server;

use crate::stats::Sample;

pub(crate) const NEW_TOKENS: usize = 128;

/// Runs all prompts at once and measures between the first and the last token of each. What earlier rounds
/// left in the prefix cache and the n-gram trie is forgotten first.
pub(crate) fn decode(server: &Server, prompts: &[String], temperature: f64) -> Sample {
    forget(server);
    std::thread::scope(|scope| {
        let spawn = |(seed, prompt)| scope.spawn(move || stream(server, prompt, seed, temperature));
        let streams: Vec<_> = prompts.iter().map(String::as_str).enumerate().map(spawn).collect();
        streams.into_iter().map(|stream| stream.join().expect("no request failed")).collect()
    })
}

/// The same for one prompt alone.
pub(crate) fn decode_one(server: &Server, prompt: &str, seed: usize, temperature: f64) -> Sample {
    forget(server);
    stream(server, prompt, seed, temperature)
}

fn forget(server: &Server) {
    assert_eq!(server.post("/flush_cache", &json!({})).status, 200, "the server is idle");
}

fn stream(server: &Server, prompt: &str, seed: usize, temperature: f64) -> Sample {
    let body = json!({
        "text": prompt, "stream": true,
        "sampling_params": {
            "temperature": temperature, "sampling_seed": seed, "max_new_tokens": NEW_TOKENS, "ignore_eos": true,
        },
    });
    let mut events = server.stream("/generate", &body);
    let first = events.next().expect("an answer has a first token");
    let (start, before) = (Instant::now(), completion_tokens(&first));
    let mut last = first;
    let mut end = start;
    while let Some(event) = events.next() {
        end = Instant::now();
        last = event;
    }
    let meta = &last["meta_info"];
    Sample {
        start,
        end,
        tokens: completion_tokens(&last) - before,
        mean_context: meta["prompt_tokens"].as_f64().expect("a count") + NEW_TOKENS as f64 / 2.0,
        requests: 1,
        verify_steps: meta["spec_verify_ct"].as_u64().unwrap_or(0),
        accepted: meta["spec_accepted_drafts"].as_u64().unwrap_or(0),
        histogram: meta["spec_accept_histogram"]
            .as_array()
            .map_or_else(Vec::new, |steps| steps.iter().filter_map(Value::as_u64).collect()),
    }
}

fn completion_tokens(event: &Value) -> u64 {
    event["meta_info"]["completion_tokens"].as_u64().expect("every event counts its tokens")
}
