//! Whatever a request asks for, every draft worker gives the answer of plain decoding, alone and in a batch.

use serde_json::{Value, json};

use crate::support::{check_identities, number, output_ids, spec_counters};
use crate::workers::{CONTEXT, Worker, ask, assert_same, ids, together, with};

const LONG: usize = 40;

/// One request of every kind, with log-probabilities where they are of interest.
fn requests(worker: Worker) -> Vec<(&'static str, Value)> {
    let prompts = worker.prompts();
    let prompt = |index: usize| ask(&prompts[index % prompts.len()], LONG);
    // The answer to work against: what is frequent in it is forbidden, penalised or an end.
    let plain = output_ids(&worker.plain().generate(&prompt(1)));
    let third = plain[2];
    let logprobs = |mut body: Value| {
        body["return_logprob"] = json!(true);
        body["top_logprobs_num"] = json!(5);
        body["token_ids_logprob"] = json!([7, third, 2]);
        body["return_text_in_logprobs"] = json!(true);
        body
    };
    let from_start = |mut body: Value| {
        body["logprob_start_len"] = json!(1);
        body
    };
    let warm = |seed: u64| json!({"temperature": 0.8, "sampling_seed": seed});
    vec![
        ("greedy", logprobs(prompt(0))),
        ("greedy, prompt scored", from_start(logprobs(prompt(2)))),
        ("sampled", logprobs(with(prompt(1), warm(11)))),
        (
            "filtered",
            with(prompt(2), json!({"temperature": 1.3, "top_k": 20, "top_p": 0.9, "sampling_seed": 4})),
        ),
        ("min_p", logprobs(with(prompt(3), json!({"temperature": 1.0, "min_p": 0.1, "sampling_seed": 9})))),
        ("biased", logprobs(with(prompt(1), json!({"logit_bias": {third.to_string(): -100, "7": 3.5}})))),
        ("penalised", logprobs(with(prompt(0), json!({"frequency_penalty": 1.2, "presence_penalty": 0.6})))),
        (
            "penalised and sampled",
            with(prompt(3), json!({"repetition_penalty": 1.3, "temperature": 0.7, "sampling_seed": 2})),
        ),
        (
            "no end before 12 tokens",
            logprobs(with(prompt(1), json!({"min_new_tokens": 12, "stop_token_ids": [third, plain[4]]}))),
        ),
        ("with end tokens", with(prompt(2), json!({"ignore_eos": false, "logit_bias": {"2": 4}}))),
        ("end tokens ignored", with(prompt(2), json!({"ignore_eos": true, "logit_bias": {"2": 4}}))),
        ("stopped by a token", logprobs(with(prompt(1), json!({"stop_token_ids": [third]})))),
        ("special tokens shown", with(prompt(0), json!({"skip_special_tokens": false}))),
    ]
}

/// One entry per token that was delivered, each for that token.
fn check_logprobs(reply: &Value, what: &str) {
    let meta = &reply["meta_info"];
    let Some(entries) = meta.get("output_token_logprobs").and_then(Value::as_array) else { return };
    let scored: Vec<u64> = entries.iter().map(|entry| entry[1].as_u64().unwrap()).collect();
    assert_eq!(scored, output_ids(reply), "{what}");
    for list in ["output_top_logprobs", "output_token_ids_logprobs"] {
        assert_eq!(meta[list].as_array().unwrap().len(), scored.len(), "{list} of {what}");
    }
    for (entry, top) in entries.iter().zip(meta["output_top_logprobs"].as_array().unwrap()) {
        assert_eq!(top.as_array().unwrap().len(), 5, "{what}");
        assert!(entry[0].as_f64().unwrap() <= top[0][0].as_f64().unwrap() + 1e-6, "{what}");
    }
}

/// Every option alone, streamed, and in a batch of six.
pub(crate) fn options(worker: Worker) {
    let (server, plain) = (worker.server(), worker.plain());
    let asked = requests(worker);
    let expected: Vec<Value> = asked.iter().map(|(_, body)| plain.generate(body)).collect();
    for ((name, body), expected) in asked.iter().zip(&expected) {
        let what = format!("{name}, {worker:?}");
        let reply = server.generate(body);
        assert_same(&reply, expected, &what);
        check_logprobs(&reply, &what);
        check_identities(&reply["meta_info"]);
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        assert_same(&server.stream("/generate", &streamed).all().pop().unwrap(), expected, &what);
    }
    // The prefix cache holds all of them now, and six run at a time.
    for (mates, expected) in asked.chunks(6).zip(expected.chunks(6)) {
        let bodies: Vec<Value> = mates.iter().map(|(_, body)| body.clone()).collect();
        for (((name, _), reply), expected) in mates.iter().zip(together(&server, &bodies)).zip(expected) {
            assert_same(&reply, expected, &format!("{name} in a batch, {worker:?}"));
        }
    }
}

/// A biased token never comes, at any position of any block.
pub(crate) fn forbidden_token(worker: Worker) {
    let (server, plain) = (worker.server(), worker.plain());
    let prompt = &worker.prompts()[0];
    let frequent = output_ids(&plain.generate(&ask(prompt, LONG)))[1];
    for temperature in [0.0, 1.0] {
        let params = json!({
            "logit_bias": {frequent.to_string(): -100}, "temperature": temperature, "sampling_seed": 3,
        });
        let told = output_ids(&server.generate(&with(ask(prompt, 120), params)));
        assert_eq!(told.len(), 120);
        assert!(!told.contains(&frequent), "{worker:?} at {temperature}");
    }
}

/// Copy `j` of a prompt draws with seed + j, in one request, as one of many, or alone.
pub(crate) fn copies(worker: Worker) {
    let (server, plain) = (worker.server(), worker.plain());
    let prompt = worker.prompts().remove(1);
    let sampled = |seed: u64| with(ask(&prompt, 24), json!({"temperature": 0.9, "sampling_seed": seed}));
    let alone: Vec<Value> = (5..8).map(|seed| plain.generate(&sampled(seed))).collect();
    let copies = server.generate(&with(sampled(5), json!({"n": 3})));
    assert_eq!(copies.as_array().unwrap().len(), 3);
    for (copy, alone) in copies.as_array().unwrap().iter().zip(&alone) {
        assert_same(copy, alone, &format!("{worker:?}"));
    }
    let body = json!({
        "model": "x", "prompt": prompt, "n": 3, "seed": 5, "temperature": 0.9, "max_tokens": 24, "ignore_eos": true,
        "return_token_ids": true,
    });
    let choices = server.post("/v1/completions", &body).ok()["choices"].clone();
    let told: Vec<_> = choices.as_array().unwrap().iter().map(|choice| ids(&choice["token_ids"])).collect();
    assert_eq!(told, alone.iter().map(output_ids).collect::<Vec<_>>(), "{worker:?}");
}

/// Rows that speculate and rows that do not, rows that end early and rows that come late: none sees the others.
pub(crate) fn changing_batch(worker: Worker) {
    let (server, plain) = (worker.server(), worker.plain());
    let prompts = worker.prompts();
    let body = |index: usize| {
        let params = json!({"temperature": (index % 3) as f64 * 0.6, "sampling_seed": index});
        let mut body = with(ask(&prompts[index % prompts.len()], 6 + 7 * (index % 5)), params);
        body["speculative"] = json!(index % 4 != 3);
        body
    };
    // More than run at once: the queue refills the batch as rows end.
    let bodies: Vec<Value> = (0..14).map(body).collect();
    let expected: Vec<_> = bodies.iter().map(|body| plain.generate(body)).collect();
    for (index, (reply, expected)) in together(&server, &bodies).iter().zip(&expected).enumerate() {
        assert_same(reply, expected, &format!("row {index} of {worker:?}"));
    }
}

/// Prompts up to the last position: drafts are clipped, the answer ends with the context.
pub(crate) fn context_end(worker: Worker) {
    let (server, plain) = (worker.server(), worker.plain());
    let period = worker.prompts().pop().unwrap();
    let prompt: Vec<u64> = period.iter().copied().cycle().take(CONTEXT).collect();
    for left in 1..=worker.steps.max(8) + 2 {
        let body = with(ask(&prompt[..CONTEXT - left], 0), json!({"max_new_tokens": null}));
        let what = format!("{left} tokens are left, {worker:?}");
        let reply = server.generate(&body);
        assert_same(&reply, &plain.generate(&body), &what);
        assert_eq!(output_ids(&reply).len(), left, "{what}");
        assert_eq!(reply["meta_info"]["finish_reason"]["type"], "length", "{what}");
    }
    let reply = server.post("/generate", &ask(&prompt, 1));
    assert_eq!(reply.status, 400, "{worker:?}: {}", reply.body);
}

/// What a worker learned or cached from one run of a prompt changes no answer of the next, and does not make it guess
/// worse: a draft model guesses exactly as before, n-grams know the answer.
pub(crate) fn second_run(worker: Worker) {
    let (server, plain) = (worker.server(), worker.plain());
    let mut prompt = worker.prompts().pop().unwrap();
    // A prompt of its own, so that the first run is the first.
    prompt[0] = 77;
    let expected = plain.generate(&ask(&prompt, LONG));
    let runs = [(); 3].map(|()| server.generate(&ask(&prompt, LONG)));
    runs.iter().for_each(|run| assert_same(run, &expected, &format!("{worker:?}")));
    let [first, second, third] = &runs;
    let cached = |reply: &Value| number(&reply["meta_info"], "cached_tokens");
    assert_eq!(cached(first), 0, "{worker:?}");
    assert!(cached(second) >= 32 && cached(second) < prompt.len() as u64, "{worker:?}");
    let spec = |reply: &Value| spec_counters(&reply["meta_info"]);
    if worker.remembers() {
        assert!(spec(third).accepted_drafts >= 25, "{:?}", spec(third));
    } else if !worker.is_adaptive() {
        assert_eq!(spec(first), spec(second), "{worker:?}");
        assert_eq!(spec(first), spec(third), "{worker:?}");
    }
    let warm = with(ask(&prompt, 30), json!({"temperature": 1.1, "sampling_seed": 5}));
    assert_same(&server.generate(&warm), &plain.generate(&warm), &format!("sampled, {worker:?}"));
}
