//! Whatever a request asks for, every draft worker gives the answer of plain decoding, alone and in a batch.

use serde_json::{Value, json};

use crate::support::{check_identities, number, output_ids, spec_counters};
use crate::workers::{ALL, CONTEXT, NGRAM, Worker, ask, assert_same, ids, together, with};

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
        ("filtered", with(prompt(2), json!({"temperature": 1.3, "top_k": 20, "top_p": 0.9, "sampling_seed": 4}))),
        ("min_p", logprobs(with(prompt(3), json!({"temperature": 1.0, "min_p": 0.1, "sampling_seed": 9})))),
        ("biased", logprobs(with(prompt(1), json!({"logit_bias": {third.to_string(): -100, "7": 3.5}})))),
        (
            "penalised",
            logprobs(with(prompt(0), json!({"frequency_penalty": 1.2, "presence_penalty": 0.6}))),
        ),
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

fn check(worker: Worker) {
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

#[test]
fn every_option_gives_the_answer_of_plain_decoding_with_every_worker() {
    ALL.into_iter().for_each(check);
}

/// A biased token never comes, at any position of any block.
#[test]
fn a_forbidden_token_never_appears() {
    for worker in ALL {
        let prompt = &worker.prompts()[0];
        let frequent = output_ids(&worker.plain().generate(&ask(prompt, LONG)))[1];
        for temperature in [0.0, 1.0] {
            let params = json!({
                "logit_bias": {frequent.to_string(): -100}, "max_new_tokens": 120, "temperature": temperature,
                "sampling_seed": 3,
            });
            let told = output_ids(&worker.server().generate(&with(ask(prompt, 0), params)));
            assert_eq!(told.len(), 120);
            assert!(!told.contains(&frequent), "{worker:?} at {temperature}");
        }
    }
}

/// Copy `j` of a prompt draws with seed + j, in one request, as one of many, or alone.
#[test]
fn copies_are_the_requests_they_stand_for() {
    for worker in ALL {
        let (server, plain) = (worker.server(), worker.plain());
        let prompt = worker.prompts().remove(1);
        let sampled = |seed: u64| with(ask(&prompt, 24), json!({"temperature": 0.9, "sampling_seed": seed}));
        let alone: Vec<Value> = (5..8).map(|seed| plain.generate(&sampled(seed))).collect();
        let copies = server.generate(&with(sampled(5), json!({"n": 3})));
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
}

/// Rows that speculate and rows that do not, rows that end early and rows that come late: none sees the others.
#[test]
fn rows_of_a_changing_batch_are_as_alone() {
    for worker in ALL {
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
}

/// Prompts up to the last position: drafts are clipped, the answer ends with the context.
#[test]
fn an_answer_ends_with_the_context() {
    for worker in ALL {
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
}

/// The trie is shared, but what one request left in it cannot touch the answer of the next.
#[test]
fn what_the_trie_learned_from_others_changes_no_answer() {
    let (server, plain) = (NGRAM.server(), NGRAM.plain());
    let prompts = NGRAM.prompts();
    for round in 0..3 {
        for prompt in &prompts {
            let body = with(ask(prompt, 30), json!({"temperature": 1.1, "sampling_seed": round}));
            assert_same(&server.generate(&body), &plain.generate(&body), "sampled");
            let reply = server.generate(&ask(prompt, 30));
            assert_same(&reply, &plain.generate(&ask(prompt, 30)), "greedy");
            // From the second time on the answer is known.
            let spec = spec_counters(&reply["meta_info"]);
            assert!(round == 0 || spec.accepted_drafts >= 15, "round {round}: {spec:?}");
        }
    }
}

/// A prompt that is cached is drafted for as well as one that is not, and answered the same.
#[test]
fn the_second_run_of_a_prompt_accepts_as_the_first() {
    for worker in ALL.into_iter().filter(|worker| worker.algorithm != NGRAM.algorithm) {
        let server = worker.server();
        // A prompt of its own, so that the first run is the first.
        let mut prompt = worker.prompts().pop().unwrap();
        prompt[0] = 77;
        let first = server.generate(&ask(&prompt, LONG));
        let second = server.generate(&ask(&prompt, LONG));
        assert_same(&second, &first, &format!("{worker:?}"));
        let cached = |reply: &Value| number(&reply["meta_info"], "cached_tokens");
        assert_eq!(cached(&first), 0, "{worker:?}");
        assert!(cached(&second) >= 32 && cached(&second) < prompt.len() as u64, "{worker:?}");
        assert_eq!(spec_counters(&first["meta_info"]), spec_counters(&second["meta_info"]), "{worker:?}");
    }
}
