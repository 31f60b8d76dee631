//! A request may draft less than the server, or not at all, on every route and beside any others.

use proto::SpecCounters;
use serde_json::{Map, Value, json};
use tests::Server;

use crate::support::{number, output_ids, spec_counters};
use crate::workers::{EAGLE, NGRAM, STANDALONE, Worker, ask, ids, together};

const MAX_TOKENS: usize = 40;

#[derive(Debug, Clone, Copy)]
enum Route {
    Native,
    Completions,
    Chat,
}

const ROUTES: [Route; 3] = [Route::Native, Route::Completions, Route::Chat];

/// `speculative` as it is written, and the drafts it allows.
fn settings() -> [(Value, usize); 5] {
    [
        (Value::Null, usize::MAX),
        (json!(false), 0),
        (json!({"max_draft_tokens": 0}), 0),
        (json!({"max_draft_tokens": 1}), 1),
        (json!({"max_draft_tokens": 3}), 3),
    ]
}

/// What a route answers, in one shape.
#[derive(Debug)]
struct Told {
    ids: Vec<u64>,
    spec: Value,
}

impl Route {
    fn body(self, prompt: &[u64], speculative: &Value) -> Value {
        let mut body = match self {
            Self::Native => ask(prompt, MAX_TOKENS),
            Self::Completions => json!({"model": "x", "prompt": prompt}),
            Self::Chat => json!({"model": "x", "input_ids": prompt, "messages": []}),
        };
        body["speculative"] = speculative.clone();
        if !matches!(self, Self::Native) {
            let rest = json!({
                "temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": true, "return_token_ids": true,
                "return_spec_tokens_details": true,
            });
            body.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        }
        body
    }

    fn path(self) -> &'static str {
        match self {
            Self::Native => "/generate",
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }

    fn send(self, server: &Server, body: &Value) -> Told {
        let reply = server.post(self.path(), body).ok();
        match self {
            Self::Native => Told { ids: output_ids(&reply), spec: reply["meta_info"].clone() },
            Self::Completions | Self::Chat => {
                let choice = &reply["choices"][0];
                let told = [&choice["token_ids"], &choice["response_token_ids"]];
                let told = told.into_iter().find(|ids| ids.is_array());
                let told = told.unwrap_or_else(|| panic!("no token ids in {reply}"));
                Told { ids: ids(told), spec: reply["sglext"]["spec_tokens_details"].clone() }
            }
        }
    }
}

fn check(spec: &Value, most: usize, what: &str) {
    let SpecCounters { verify_ct, proposed_drafts, .. } = spec_counters(spec);
    assert_eq!(spec_counters(spec).check(), Ok(()), "{what}");
    match most {
        0 => {
            assert_eq!(number(spec, "spec_verify_ct"), 0, "{what}: {spec}");
            for absent in ["spec_accept_rate", "spec_accept_length"] {
                assert!(spec.get(absent).is_none(), "{what}: {absent} in {spec}");
            }
            assert_eq!(spec["spec_proposed_drafts"], 0, "{what}");
        }
        _ => {
            assert!(verify_ct > 0, "{what}: {spec}");
            assert!(proposed_drafts <= verify_ct.saturating_mul(most as u64), "{what}: {spec}");
        }
    }
}

/// Every setting on every route, all of them at once.
pub(crate) fn settings_in_a_batch(worker: Worker) {
    let (server, plain, prompts) = (worker.server(), worker.plain(), worker.prompts());
    let plain: Vec<_> =
        prompts.iter().map(|prompt| output_ids(&plain.generate(&ask(prompt, MAX_TOKENS)))).collect();
    let asked: Vec<_> = ROUTES
        .into_iter()
        .flat_map(|route| settings().map(|(speculative, most)| (route, speculative, most)))
        .enumerate()
        .map(|(at, (route, speculative, most))| (at % prompts.len(), route, speculative, most))
        .collect();
    let told: Vec<Told> = std::thread::scope(|scope| {
        let running: Vec<_> = asked
            .iter()
            .map(|(prompt, route, speculative, _)| {
                let body = route.body(&prompts[*prompt], speculative);
                let server = &server;
                scope.spawn(move || route.send(server, &body))
            })
            .collect();
        running.into_iter().map(|one| one.join().unwrap()).collect()
    });
    for ((prompt, route, speculative, most), told) in asked.iter().zip(&told) {
        let what = format!("{worker:?}, {route:?}, speculative {speculative}");
        assert_eq!(told.ids, plain[*prompt], "{what}");
        check(&told.spec, (*most).min(worker.nodes()), &what);
    }
}

/// A chain proposes exactly what is allowed, but for the end of the answer.
#[test]
fn a_cap_is_the_depth_of_a_chain() {
    for worker in [EAGLE, STANDALONE] {
        let server = worker.server();
        for cap in 1..=worker.nodes() {
            let bodies: Vec<Value> = worker.prompts().iter().map(|prompt| capped(prompt, cap)).collect();
            for reply in together(&server, &bodies) {
                let spec = spec_counters(&reply["meta_info"]);
                let full = spec.verify_ct * cap as u64;
                let clipped = (1..=cap as u64).sum::<u64>();
                assert!(spec.proposed_drafts <= full && spec.proposed_drafts + clipped >= full, "{spec:?}");
                assert!(spec.acceptance_histogram.len() <= cap + 1, "{spec:?}");
            }
        }
    }
}

fn capped(prompt: &[u64], cap: usize) -> Value {
    let mut body = ask(prompt, MAX_TOKENS);
    body["speculative"] = json!({"max_draft_tokens": cap});
    body
}

/// The opt-in details of the OpenAI routes, streamed and not, say what `/generate` says.
#[test]
fn openai_replies_tell_the_same_numbers_on_request() {
    let server = EAGLE.server();
    let prompt = EAGLE.prompts().remove(2);
    let native = server.generate(&ask(&prompt, MAX_TOKENS))["meta_info"].clone();
    let native: Map<String, Value> =
        native.as_object().unwrap().clone().into_iter().filter(|(key, _)| key.starts_with("spec_")).collect();
    assert!(native.len() >= 10, "{native:?}");
    for route in [Route::Completions, Route::Chat] {
        let mut body = route.body(&prompt, &Value::Null);
        let whole = server.post(route.path(), &body).ok();
        assert_eq!(whole["sglext"]["spec_tokens_details"], Value::Object(native.clone()), "{route:?}");
        body["stream"] = json!(true);
        let chunks = server.stream(route.path(), &body).all();
        let told: Vec<&Value> = chunks.iter().filter(|chunk| chunk.get("sglext").is_some()).collect();
        assert_eq!(told.len(), 1, "{route:?}");
        assert_eq!(told[0]["sglext"], whole["sglext"], "{route:?}");
        // Nobody asked: nothing is said.
        body["stream"] = json!(false);
        body["return_spec_tokens_details"] = json!(false);
        assert!(server.post(route.path(), &body).ok().get("sglext").is_none(), "{route:?}");
        body["return_spec_tokens_details"] = json!(true);
        body["n"] = json!(2);
        let both = server.post(route.path(), &body).ok();
        assert_eq!(both["sglext"]["spec_tokens_details"].as_array().unwrap().len(), 2, "{both}");
    }
}

#[test]
fn what_is_no_setting_is_refused() {
    let server = NGRAM.server();
    for speculative in [json!(1), json!("no"), json!({"max_draft_tokens": -1}), json!({"depth": 2})] {
        for route in ROUTES {
            let reply = server.post(route.path(), &route.body(&[5, 6], &speculative));
            assert_eq!(reply.status, 400, "{route:?} {speculative}: {}", reply.body);
        }
    }
}
