//! The earliest end of an answer wins, wherever in a block of accepted drafts it lies: stop strings and patterns, stop
//! tokens, the end token, the limit. What should come out is worked out here from the plain answer, token by token.

use serde_json::{Value, json};

use crate::support::{check_identities, output_ids};
use crate::workers::{Worker, ask, assert_same, together, with};

const EOS: u64 = 2;
/// Answer tokens looked at, more than one block of any worker.
const LOOKED_AT: usize = 14;
const WHOLE: usize = 40;

/// What a target says to a prompt when nothing ends it.
struct Whole {
    prompt: Vec<u64>,
    ids: Vec<u64>,
    texts: Vec<String>,
}

/// What may end an answer, beside its limit.
#[derive(Debug, Clone, Default)]
struct Ends {
    tokens: Vec<u64>,
    strings: Vec<String>,
}

impl Whole {
    fn of(worker: Worker) -> Vec<Self> {
        let plain = worker.plain();
        let whole = |prompt: Vec<u64>| {
            let mut body = ask(&prompt, WHOLE);
            body["return_logprob"] = json!(true);
            body["return_text_in_logprobs"] = json!(true);
            let reply = plain.generate(&body);
            let entries = reply["meta_info"]["output_token_logprobs"].as_array().unwrap();
            let texts = entries.iter().map(|entry| entry[2].as_str().unwrap().to_owned()).collect();
            Self { prompt, ids: output_ids(&reply), texts }
        };
        worker.prompts().into_iter().take(2).map(whole).collect()
    }

    /// Tokens of the answer with these ends inside a limit, and why it ends.
    fn until(&self, ends: &Ends, limit: usize) -> (usize, Value) {
        let mut text = String::new();
        for at in 0..limit {
            text.push_str(&self.texts[at]);
            let first = |string: &&String| text.find(string.as_str());
            let string = ends.strings.iter().filter(|string| first(string).is_some()).min_by_key(first);
            if let Some(string) = string {
                return (at + 1, json!({"type": "stop", "matched": string}));
            }
            if ends.tokens.contains(&self.ids[at]) {
                return (at + 1, json!({"type": "stop", "matched": self.ids[at]}));
            }
        }
        (limit, json!({"type": "length", "length": limit}))
    }

    /// A text that a stop can be: the characters that this token adds.
    fn string(&self, at: usize) -> Option<&String> {
        Some(&self.texts[at]).filter(|text| !text.is_empty() && text.is_ascii())
    }

    /// The end of one token and the start of the next.
    fn straddling(&self, at: usize) -> Option<String> {
        let (left, right) = (self.string(at)?, self.string(at + 1)?);
        let last = left.chars().last()?;
        Some(format!("{last}{}", right.chars().next()?))
    }
}

/// One request and what must come of it.
struct Case<'a> {
    whole: &'a Whole,
    ends: Ends,
    limit: usize,
}

impl Case<'_> {
    fn body(&self) -> Value {
        let params = json!({
            "stop": self.ends.strings, "stop_token_ids": self.ends.tokens, "skip_special_tokens": false,
        });
        with(ask(&self.whole.prompt, self.limit), params)
    }

    fn check(&self, reply: &Value, what: &str) {
        let (len, reason) = self.whole.until(&self.ends, self.limit);
        let what = format!("{:?} within {} for {what}", self.ends, self.limit);
        assert_eq!(output_ids(reply), self.whole.ids[..len], "{what}");
        assert_eq!(reply["meta_info"]["finish_reason"], reason, "{what}");
        for string in &self.ends.strings {
            assert!(!reply["text"].as_str().unwrap().contains(string), "{what}: {reply}");
        }
        check_identities(&reply["meta_info"]);
    }
}

fn check(worker: Worker, cases: &[Case<'_>]) {
    let (server, plain) = (worker.server(), worker.plain());
    for cases in cases.chunks(8) {
        let bodies: Vec<Value> = cases.iter().map(Case::body).collect();
        let what = format!("{worker:?}");
        for ((case, body), reply) in cases.iter().zip(&bodies).zip(together(&server, &bodies)) {
            case.check(&reply, &what);
            // Its text, too; a limit has no other text than its tokens.
            if case.limit == WHOLE {
                assert_same(&reply, &plain.generate(body), &what);
            }
        }
    }
}

/// An end at this token with limits before it, at it, behind it, and far off.
fn around(whole: &Whole, at: usize, ends: Ends) -> impl Iterator<Item = Case<'_>> {
    [at, at + 1, at + 2, WHOLE].into_iter().map(move |limit| Case { whole, ends: ends.clone(), limit })
}

/// A stop token ends the answer anywhere in a block.
pub(crate) fn stop_tokens(worker: Worker) {
    let wholes = Whole::of(worker);
    let at = |at: usize| {
        let whole = &wholes[at % wholes.len()];
        around(whole, at, Ends { tokens: vec![whole.ids[at]], ..Ends::default() })
    };
    check(worker, &(0..LOOKED_AT).flat_map(at).collect::<Vec<_>>());
}

/// So does a stop string, inside a token or across two.
pub(crate) fn stop_strings(worker: Worker) {
    let wholes = Whole::of(worker);
    let mut cases = Vec::new();
    for whole in &wholes {
        for at in 0..LOOKED_AT {
            let strings = [whole.string(at).cloned(), whole.straddling(at)];
            for string in strings.into_iter().flatten() {
                cases.extend(around(whole, at, Ends { strings: vec![string], ..Ends::default() }));
            }
        }
    }
    assert!(cases.len() >= 40, "only {} cases for {worker:?}", cases.len());
    check(worker, &cases);
}

/// At one token a string goes before an id; otherwise whichever comes first.
pub(crate) fn several_ends(worker: Worker) {
    let wholes = Whole::of(worker);
    let mut cases = Vec::new();
    for whole in &wholes {
        for at in (0..LOOKED_AT).filter(|&at| whole.string(at).is_some()) {
            let strings = vec![whole.string(at).unwrap().clone()];
            for other in [at.saturating_sub(1), at, at + 1] {
                let ends = Ends { tokens: vec![whole.ids[other]], strings: strings.clone() };
                cases.extend(around(whole, at, ends));
            }
        }
    }
    check(worker, &cases);
}

/// A pattern ends the answer as in plain decoding.
pub(crate) fn stop_patterns(worker: Worker) {
    let (server, plain) = (worker.server(), worker.plain());
    for whole in Whole::of(worker) {
        let stops = (0..LOOKED_AT).filter_map(|at| whole.string(at)).map(|text| text.trim());
        for text in stops.filter(|text| text.chars().all(|c| c.is_ascii_alphanumeric())) {
            let pattern = format!("({text}|never here)");
            let body = with(ask(&whole.prompt, WHOLE), json!({"stop_regex": [pattern]}));
            let reply = server.generate(&body);
            assert_same(&reply, &plain.generate(&body), &format!("{pattern}, {worker:?}"));
        }
    }
}

/// An answer is as long as its limit, from nothing on.
pub(crate) fn limits(worker: Worker) {
    let wholes = Whole::of(worker);
    let limits = 0..=worker.steps.max(8) + 2;
    let cases = limits.map(|limit| Case { whole: &wholes[1], ends: Ends::default(), limit });
    check(worker, &cases.collect::<Vec<_>>());
}

/// Bias that makes the end token the first choice at one position and at none before it, with that position.
fn bias_to_end(worker: Worker, prompt: &[u64]) -> (f64, usize) {
    let mut body = ask(prompt, WHOLE);
    body["return_logprob"] = json!(true);
    body["token_ids_logprob"] = json!([EOS]);
    let meta = worker.plain().generate(&body)["meta_info"].clone();
    let list = |name: &str| meta[name].as_array().unwrap().clone();
    let gaps: Vec<f64> = list("output_token_logprobs")
        .iter()
        .zip(list("output_token_ids_logprobs"))
        .map(|(chosen, end)| chosen[0].as_f64().unwrap() - end[0][0].as_f64().unwrap())
        .collect();
    // The farthest position that is nearer to its end than all before it.
    let mut nearest = f64::INFINITY;
    let mut found = None;
    for (at, &gap) in gaps.iter().enumerate() {
        if gap < nearest - 0.2 {
            found = Some((gap + 0.1, at)).filter(|(_, at)| *at > 0).or(found);
        }
        nearest = nearest.min(gap);
    }
    found.unwrap_or_else(|| panic!("no position is near its end: {gaps:?}"))
}

/// The end token ends the answer, unless it is ignored or comes too early.
pub(crate) fn end_token(worker: Worker) {
    let (server, plain) = (worker.server(), worker.plain());
    for prompt in worker.prompts() {
        let (bias, at) = bias_to_end(worker, &prompt);
        let biased = |limit: usize, params: Value| {
            let bias = json!({"logit_bias": {EOS.to_string(): bias}, "ignore_eos": false});
            with(with(ask(&prompt, limit), bias), params)
        };
        let same = |body: &Value| {
            let reply = server.generate(body);
            assert_same(&reply, &plain.generate(body), &format!("{body} for {worker:?}"));
            reply
        };
        for limit in [at + 1, at + 2, WHOLE] {
            let reply = same(&biased(limit, json!({})));
            assert_eq!(reply["meta_info"]["finish_reason"], json!({"type": "stop", "matched": EOS}));
            assert_eq!(output_ids(&reply).len(), at + 1, "nothing comes behind the end");
            assert_eq!(output_ids(&reply)[at], EOS);
        }
        let short = same(&biased(at, json!({})));
        assert_eq!(short["meta_info"]["finish_reason"], json!({"type": "length", "length": at}));
        let ignored = same(&biased(WHOLE, json!({"ignore_eos": true})));
        assert_eq!((output_ids(&ignored).len(), output_ids(&ignored)[at]), (WHOLE, EOS));
        let early = same(&biased(WHOLE, json!({"min_new_tokens": at + 2})));
        assert!(output_ids(&early).len() >= at + 2 && !output_ids(&early)[..=at].contains(&EOS));
    }
}

/// The matched string stays when asked for, and what comes behind it does not: neither text, nor ids, nor their
/// log-probabilities.
pub(crate) fn kept_stops(worker: Worker) {
    let (server, plain) = (worker.server(), worker.plain());
    let mut kept = 0;
    for whole in Whole::of(worker) {
        for string in (0..LOOKED_AT).filter_map(|at| whole.string(at)) {
            let mut body = with(
                ask(&whole.prompt, WHOLE),
                json!({"stop": [string], "no_stop_trim": true, "skip_special_tokens": false}),
            );
            body["return_logprob"] = json!(true);
            let reply = server.generate(&body);
            assert_same(&reply, &plain.generate(&body), string);
            assert!(reply["text"].as_str().unwrap().ends_with(string.as_str()), "{string:?}: {reply}");
            let scored = reply["meta_info"]["output_token_logprobs"].as_array().unwrap();
            assert_eq!(scored.len(), output_ids(&reply).len(), "{reply}");
            kept += 1;
        }
    }
    assert!(kept >= 4, "only {kept} stops");
}
