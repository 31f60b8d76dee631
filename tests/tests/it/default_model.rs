//! The default model at full length: every worker that it has a draft for answers as plain decoding does.
//!
//! Answers are cut to 32 tokens, which a busy machine has time for; with `DRAFTHORSE_FULL_PARITY` set they are 96 long.

use std::collections::HashMap;
use std::path::PathBuf;

use serde_json::{Value, json};
use tests::{Server, ServerOptions, shared};

use crate::support::{output_ids, plain, spec_counters};
use crate::workers::together;

/// Two likeliest tokens closer than this may change places with the order of a sum.
const NEAR_TIE: f64 = 1e-3;

/// A draft for the default model.
struct Draft {
    algorithm: &'static str,
    path: Option<PathBuf>,
    flags: &'static [&'static str],
}

/// Every draft in the repository. A model drafting for itself is the slowest of drafts and the best.
fn drafts() -> Vec<Draft> {
    let model = tests::repository().join("models/SmolLM2-135M-Instruct");
    vec![
        Draft { algorithm: "NGRAM", path: None, flags: &[] },
        Draft { algorithm: "STANDALONE", path: Some(model), flags: &["--speculative-num-steps", "3"] },
    ]
}

impl Draft {
    fn options(&self) -> ServerOptions {
        let options = ServerOptions::plain().with(&["--dtype", "float32"]);
        let options = options.with(&["--speculative-algorithm", self.algorithm]).with(self.flags);
        match &self.path {
            Some(path) => options.with(&["--speculative-draft-model-path", path.to_str().unwrap()]),
            None => options,
        }
    }
}

/// Prompts of the golden file with the limits of their answers.
fn prompts() -> Vec<Value> {
    let tokens = if std::env::var_os("DRAFTHORSE_FULL_PARITY").is_some() { 96 } else { 32 };
    let path = tests::repository().join("tests/fixtures/golden/smollm2-greedy.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let prompts = golden["prompts"].as_array().unwrap();
    assert_eq!(prompts.len(), 12);
    let body = |prompt: &Value| {
        json!({"input_ids": prompt["prompt_ids"], "sampling_params": {
            "temperature": 0, "max_new_tokens": tokens, "ignore_eos": true,
        }})
    };
    prompts.iter().map(body).collect()
}

fn sampled(greedy: &[Value]) -> Vec<Value> {
    let body = |(seed, body): (usize, &Value)| {
        let mut body = body.clone();
        body["sampling_params"]["temperature"] = json!(0.8);
        body["sampling_params"]["sampling_seed"] = json!(seed);
        body
    };
    greedy.iter().take(4).enumerate().map(body).collect()
}

/// Eight at a time, so that no answer takes longer than a client waits.
fn in_batches(server: &Server, bodies: &[Value]) -> Vec<Value> {
    bodies.chunks(8).flat_map(|batch| together(server, batch)).collect()
}

/// How much likelier the likeliest token was than the next, at every place of the answer.
fn margins(reply: &Value) -> Vec<f64> {
    let tops = reply["meta_info"]["output_top_logprobs"].as_array().unwrap();
    tops.iter().map(|top| top[0][0].as_f64().unwrap() - top[1][0].as_f64().unwrap()).collect()
}

#[test]
fn drafts_for_the_default_model_leave_its_answers_alone() {
    let greedy = prompts();
    let sampled = sampled(&greedy);
    let scored: Vec<Value> = greedy
        .iter()
        .cloned()
        .map(|mut body| {
            body["return_logprob"] = json!(true);
            body["top_logprobs_num"] = json!(2);
            body
        })
        .collect();
    let expected = in_batches(&plain(), &[scored, sampled.clone()].concat());
    let bodies = [greedy, sampled].concat();
    let mut seen = HashMap::new();
    for draft in drafts() {
        let server = shared(draft.options());
        for (body, (reply, expected)) in bodies.iter().zip(in_batches(&server, &bodies).iter().zip(&expected))
        {
            let (told, whole) = (output_ids(reply), output_ids(expected));
            assert_eq!(told.len(), whole.len());
            let what = format!("{} for {body}", draft.algorithm);
            if let Some(at) = (0..whole.len()).find(|&at| told[at] != whole[at]) {
                let is_sampled = body["sampling_params"]["temperature"] != 0;
                assert!(!is_sampled, "sampled token {at} differs, {what}");
                let margin = margins(expected)[at];
                assert!(margin < NEAR_TIE, "token {at} differs at a margin of {margin}, {what}");
            }
            let spec = spec_counters(&reply["meta_info"]);
            assert_eq!(spec.check(), Ok(()), "{what}");
            *seen.entry(draft.algorithm).or_insert(0) += spec.accepted_drafts;
        }
    }
    assert!(seen.values().all(|&accepted| accepted > 20), "little was drafted: {seen:?}");
}
