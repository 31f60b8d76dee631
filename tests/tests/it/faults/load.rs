//! Owns what clients send while processes die, what they must get, and what they were told in sum.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use proto::SpecCounters;
use serde_json::{Value, json};
use tests::{Server, wait_until};

use crate::support::{greedy, number, output_ids, sampled, spec_counters};

/// What a client has in the end.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Answer {
    pub(super) ids: Vec<u64>,
    pub(super) text: String,
    pub(super) finish: Value,
}

/// Requests, and their answers when nothing happens.
pub(super) struct Load {
    bodies: Vec<Value>,
    expected: Vec<Answer>,
}

/// What is known of the requests in flight: tokens so far, and when the latest came.
#[derive(Default)]
pub(super) struct Flow {
    tokens: AtomicUsize,
    ended: AtomicUsize,
    latest: Mutex<Option<Instant>>,
}

/// How one request ended.
pub(super) type Ended = Result<Value, String>;

/// The acceptance counts that clients were told.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Told {
    pub(super) spec: SpecCounters,
}

impl Flow {
    pub(super) fn tokens(&self) -> usize {
        self.tokens.load(Ordering::SeqCst)
    }

    pub(super) fn ended(&self) -> usize {
        self.ended.load(Ordering::SeqCst)
    }

    /// When a token came after this moment.
    pub(super) fn token_after(&self, moment: Instant) -> Option<Instant> {
        self.latest.lock().unwrap().filter(|latest| *latest > moment)
    }

    fn saw(&self, tokens: usize) {
        if tokens > 0 {
            self.tokens.fetch_add(tokens, Ordering::SeqCst);
            *self.latest.lock().unwrap() = Some(Instant::now());
        }
    }
}

impl Load {
    /// Sixteen requests: greedy and seeded, with stops and log-probabilities, streamed but for two.
    pub(super) fn new(server: &Server, prompts: &[&str], max_new_tokens: u32) -> Self {
        let bodies: Vec<Value> = (0..16_u64)
            .map(|i| {
                let prompt = prompts[i as usize % prompts.len()];
                let mut body = match i % 2 {
                    0 => greedy(&format!("{prompt} {i}"), max_new_tokens),
                    _ => sampled(&format!("{prompt} {i}"), max_new_tokens, i),
                };
                body["stream"] = json!(i % 8 != 7);
                body["return_logprob"] = json!(i % 5 == 4);
                if i % 4 == 2 {
                    body["sampling_params"]["stop"] = json!(["never said by anyone", "\u{1}\u{2}"]);
                }
                body
            })
            .collect();
        let expected = bodies.iter().map(|body| undisturbed(server, body)).collect();
        Self { bodies, expected }
    }

    pub(super) fn len(&self) -> usize {
        self.bodies.len()
    }

    /// Sends all at once; `meanwhile` runs while they are answered.
    pub(super) fn run(&self, server: &Server, meanwhile: impl FnOnce(&Flow)) -> Vec<Ended> {
        let flow = Flow::default();
        std::thread::scope(|scope| {
            let flow = &flow;
            let requests: Vec<_> = self
                .bodies
                .iter()
                .zip(&self.expected)
                .map(|(body, expected)| scope.spawn(move || check(server, body, expected, flow)))
                .collect();
            meanwhile(flow);
            requests.into_iter().map(|request| request.join().unwrap()).collect()
        })
    }
}

/// As [`check`] without anything to check.
fn undisturbed(server: &Server, body: &Value) -> Answer {
    let mut whole = body.clone();
    whole["stream"] = json!(false);
    answer(&server.generate(&whole))
}

fn answer(reply: &Value) -> Answer {
    Answer {
        ids: output_ids(reply),
        text: reply["text"].as_str().unwrap().to_owned(),
        finish: reply["meta_info"]["finish_reason"].clone(),
    }
}

/// One request to its end; its `meta_info`, or what was wrong with it.
fn check(server: &Server, body: &Value, expected: &Answer, flow: &Flow) -> Ended {
    let outcome =
        if body["stream"] == true { streamed(server, body, flow) } else { whole(server, body, flow) };
    flow.ended.fetch_add(1, Ordering::SeqCst);
    let reply = outcome?;
    let got = answer(&reply);
    if got != *expected {
        return Err(format!("changed: {expected:?} became {got:?}"));
    }
    if body["return_logprob"] == true {
        let told = reply["meta_info"]["output_token_logprobs"].as_array().map_or(0, Vec::len);
        if told != got.ids.len() {
            return Err(format!("{told} log-probabilities for {} tokens", got.ids.len()));
        }
    }
    Ok(reply["meta_info"].clone())
}

fn whole(server: &Server, body: &Value, flow: &Flow) -> Result<Value, String> {
    let reply = server.try_post("/generate", body).map_err(|error| format!("lost: {error}"))?;
    if reply.status != 200 {
        return Err(format!("status {}: {}", reply.status, reply.body));
    }
    flow.saw(output_ids(&reply.json()).len());
    Ok(reply.json())
}

/// Follows a stream whose chunks carry everything so far: it only grows, and ends exactly once.
fn streamed(server: &Server, body: &Value, flow: &Flow) -> Result<Value, String> {
    let mut stream = server.try_stream("/generate", body).map_err(|error| format!("lost: {error}"))?;
    let (mut text, mut count, mut last) = (String::new(), 0, Value::Null);
    while let Some(event) = stream.next() {
        if last["meta_info"]["finish_reason"].is_object() {
            return Err(format!("something after the end: {event}"));
        }
        let Some(so_far) = event["text"].as_str() else { return Err(format!("no text: {event}")) };
        let tokens = number(&event["meta_info"], "completion_tokens") as usize;
        if !so_far.starts_with(&text) || tokens < count {
            return Err(format!("taken back: {text:?} became {so_far:?}, {count} tokens {tokens}"));
        }
        flow.saw(tokens - count);
        (text, count, last) = (so_far.to_owned(), tokens, event);
    }
    match last["meta_info"]["finish_reason"].is_object() && stream.is_done() {
        true => Ok(last),
        false => Err(format!("broke off after {count} tokens")),
    }
}

impl Told {
    pub(super) fn add(&mut self, meta: &Value) {
        let spec = spec_counters(meta);
        spec.check().unwrap_or_else(|broken| panic!("{broken} in {meta}"));
        self.spec.add(&spec);
    }

    fn counts(&self) -> [f64; 4] {
        let spec = &self.spec;
        [spec.verify_ct, spec.proposed_drafts, spec.accepted_drafts, spec.delivered_drafts].map(|n| n as f64)
    }

    /// Waits until the counters have grown since `before` by exactly what was told.
    pub(super) fn check(&self, server: &Server, before: [f64; 4]) {
        let grown = || {
            let now = counted(server);
            std::array::from_fn(|i| now[i] - before[i])
        };
        let exact = wait_until(std::time::Duration::from_secs(20), || grown() == self.counts());
        assert!(exact, "the counters grew by {:?}, clients were told {:?}", grown(), self.counts());
    }
}

/// The acceptance counters: verify steps, proposed, accepted, delivered.
pub(super) fn counted(server: &Server) -> [f64; 4] {
    let metrics = server.metrics();
    ["verify_steps", "proposed_drafts", "accepted_drafts", "delivered_drafts"]
        .map(|what| metrics.sum(&format!("sglang:spec_{what}_total")))
}
