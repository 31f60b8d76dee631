//! The default model at full length: every worker that it has a draft for answers as plain decoding does.
//!
//! Answers are cut to 32 tokens, which a busy machine has time for; with `DRAFTHORSE_FULL_PARITY` set they are 96 long.

use std::collections::{HashMap, HashSet};

use proto::SpecCounters;
use serde_json::{Value, json};
use tests::{Server, ServerOptions, shared};

use crate::support::{output_ids, plain, spec_counters};
use crate::workers::together;

/// Two likeliest tokens closer than this may change places with the order of a sum.
const NEAR_TIE: f64 = 1e-3;

/// Every draft in the repository. A model drafting for itself is the slowest of drafts and the best.
fn drafts() -> Vec<(&'static str, ServerOptions)> {
    let model = tests::repository().join("models/SmolLM2-135M-Instruct").display().to_string();
    let itself = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", &model];
    let drafts = [
        ("NGRAM", ServerOptions::ngram()),
        ("STANDALONE", ServerOptions::plain().with(&itself).with(&["--speculative-num-steps", "3"])),
        ("EAGLE", ServerOptions::eagle()),
        ("EAGLE3", ServerOptions::eagle3()),
        ("multi-layer EAGLE", ServerOptions::multi_layer_eagle()),
        ("DFLASH", ServerOptions::dflash()),
        ("EAGLE+NGRAM", ServerOptions::eagle_and_ngram()),
    ];
    drafts.map(|(name, options)| (name, options.with(&["--dtype", "float32"]))).into()
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
    for (algorithm, options) in drafts() {
        let server = shared(options);
        for (body, (reply, expected)) in bodies.iter().zip(in_batches(&server, &bodies).iter().zip(&expected))
        {
            let (told, whole) = (output_ids(reply), output_ids(expected));
            assert_eq!(told.len(), whole.len());
            let what = format!("{algorithm} for {body}");
            if let Some(at) = (0..whole.len()).find(|&at| told[at] != whole[at]) {
                let is_sampled = body["sampling_params"]["temperature"] != 0;
                assert!(!is_sampled, "sampled token {at} differs, {what}");
                let margin = margins(expected)[at];
                assert!(margin < NEAR_TIE, "token {at} differs at a margin of {margin}, {what}");
            }
            let spec = spec_counters(&reply["meta_info"]);
            assert_eq!(spec.check(), Ok(()), "{what}");
            *seen.entry(algorithm).or_insert(0) += spec.accepted_drafts;
        }
    }
    assert!(seen.values().all(|&accepted| accepted > 20), "little was drafted: {seen:?}");
}

/// Everyday questions about topics that the heads were not trained on.
const QUESTIONS: [&str; 6] = [
    "I only have one hour a week for making friends in a new city. How should I use it?",
    "Five bullet points on crocodiles, please.",
    "What are the pros and cons of yoga?",
    "Write a short story about a dragon without fire and the train.",
    "Explain what black holes are in simple words.",
    "Give me three arguments in favour of the Pythagorean theorem.",
];

/// The heads that lie in the repository guess what they are known to guess, less some for other processors.
#[test]
fn the_heads_of_the_repository_draft_well() {
    let shaped = |options: ServerOptions, steps: &str, topk: &str, width: &str| {
        let flags = ["--speculative-num-steps", steps, "--speculative-eagle-topk", topk];
        options.with(&flags).with(&["--speculative-num-draft-tokens", width])
    };
    let chain = |options| shaped(options, "3", "1", "4");
    let tree = |options| shaped(options, "4", "4", "12");
    // Tokens per verify step that each must reach.
    let heads = [
        ("EAGLE, chain", chain(ServerOptions::eagle()), 1.5),
        ("EAGLE, tree", tree(ServerOptions::eagle()), 1.8),
        ("EAGLE3, chain", chain(ServerOptions::eagle3()), 1.5),
        ("EAGLE3, tree", tree(ServerOptions::eagle3()), 1.8),
        ("multi-layer EAGLE", chain(ServerOptions::multi_layer_eagle()), 1.4),
        ("its first layer, tree", tree(ServerOptions::nextn()), 1.6),
        ("DFLASH", ServerOptions::dflash(), 1.2),
    ];
    for (head, options, bound) in heads {
        let server = shared(options);
        let bodies = QUESTIONS.map(|question| {
            json!({
                "model": "default", "messages": [{"role": "user", "content": question}],
                "temperature": 0, "max_tokens": 96, "return_spec_tokens_details": true,
            })
        });
        let mut sum = SpecCounters::default();
        for body in &bodies {
            let reply = server.post("/v1/chat/completions", body).ok();
            let spec = spec_counters(&reply["sglext"]["spec_tokens_details"]);
            assert_eq!(spec.check(), Ok(()));
            sum.add(&spec);
        }
        let length = sum.accept_length().unwrap();
        assert!(length > bound, "{head}: {length} tokens per verify step");
    }
}

/// Sampled continuations at temperature 1 are those of plain decoding seed by seed, so their law is as well.
#[test]
fn a_real_head_leaves_the_law_of_samples_alone() {
    let prompt = &prompts()[0]["input_ids"];
    let sample = |seed: u64| {
        json!({"input_ids": prompt, "sampling_params": {
            "temperature": 1, "max_new_tokens": 4, "ignore_eos": true, "sampling_seed": seed,
        }})
    };
    let bodies: Vec<Value> = (0..64).map(sample).collect();
    let (plain, drafted) = (plain(), shared(ServerOptions::eagle().with(&["--dtype", "float32"])));
    let told = |server: &Server| in_batches(server, &bodies).iter().map(output_ids).collect::<Vec<_>>();
    let (expected, told) = (told(&plain), told(&drafted));
    assert_eq!(told, expected);
    let different: HashSet<_> = expected.iter().collect();
    assert!(different.len() > 16, "{} continuations of 64 samples", different.len());
}
