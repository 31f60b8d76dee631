//! Owns the tiny models of the golden files as servers: every draft worker, in chains and trees, beside plain decoding
//! of the same target. Chains lie on single slots, trees on pages.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Value, json};
use tests::{Server, ServerOptions, shared};

use crate::support::output_ids;

/// Positions that the tiny models have.
pub(crate) const CONTEXT: usize = 512;

/// A draft worker with its depth, branches and width.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Worker {
    pub(crate) algorithm: &'static str,
    target: &'static str,
    /// `None` where it needs no checkpoint beside the target's.
    draft: Option<&'static str>,
    pub(crate) steps: usize,
    pub(crate) topk: usize,
    /// Width of a verify step, the root included.
    pub(crate) width: usize,
    pub(crate) page_size: &'static str,
    /// Flags beyond those.
    flags: &'static [&'static str],
}

const fn chain(algorithm: &'static str, target: &'static str, draft: &'static str, steps: usize) -> Worker {
    Worker {
        algorithm,
        target,
        draft: Some(draft),
        steps,
        topk: 1,
        width: steps + 1,
        page_size: "1",
        flags: &[],
    }
}

pub(crate) const EAGLE: Worker = chain("EAGLE", "llama-tiny", "eagle1-tiny/draft", 5);
pub(crate) const EAGLE3: Worker = chain("EAGLE3", "eagle3-tiny", "eagle3-tiny/draft", 5);
pub(crate) const STANDALONE: Worker = chain("STANDALONE", "llama-tiny", "standalone-tiny/draft", 6);
/// N-grams where they know enough, the model elsewhere.
pub(crate) const MIXED: Worker = Worker { algorithm: "EAGLE+NGRAM", ..EAGLE };
/// Depth that moves at nearly every step.
pub(crate) const ADAPTIVE: Worker = Worker {
    flags: &[
        "--speculative-adaptive",
        "--speculative-adaptive-config",
        concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/adaptive/restless.json"),
    ],
    ..EAGLE
};
/// With a layer of the target's own checkpoint.
pub(crate) const NEXTN: Worker =
    Worker { algorithm: "NEXTN", target: "mtp-tiny", draft: None, steps: 4, width: 5, ..EAGLE };
/// With one such layer per step.
pub(crate) const MULTI_LAYER: Worker =
    Worker { steps: 3, width: 4, flags: &["--enable-multi-layer-eagle"], ..NEXTN };
pub(crate) const MULTI_LAYER_PAGED: Worker = Worker { steps: 2, width: 3, page_size: "16", ..MULTI_LAYER };
pub(crate) const NGRAM: Worker = Worker {
    algorithm: "NGRAM",
    target: "llama-tiny",
    draft: None,
    steps: 1,
    topk: 10,
    width: 12,
    page_size: "1",
    flags: &[],
};
/// A block is one step.
pub(crate) const DFLASH: Worker =
    Worker { width: 8, flags: &[], ..chain("DFLASH", "dflash-tiny", "dflash-tiny/draft", 1) };
pub(crate) const DFLASH_FIXED: Worker =
    Worker { page_size: "16", flags: &["--speculative-dflash-fixed-block"], ..DFLASH };
const TREE: Worker = Worker { steps: 4, topk: 4, width: 13, page_size: "16", ..EAGLE };
pub(crate) const EAGLE_TREE: Worker = TREE;
pub(crate) const EAGLE3_TREE: Worker =
    Worker { algorithm: "EAGLE3", target: "eagle3-tiny", draft: EAGLE3.draft, ..TREE };
pub(crate) const NEXTN_TREE: Worker = Worker { algorithm: "NEXTN", target: "mtp-tiny", draft: None, ..TREE };
pub(crate) const STANDALONE_TREE: Worker =
    Worker { steps: 3, topk: 2, width: 7, page_size: "16", ..STANDALONE };

fn fixtures() -> PathBuf {
    tests::repository().join("tests/fixtures/golden")
}

fn tiny(target: &str) -> ServerOptions {
    let tokenizer = fixtures().join("llama-tiny/target");
    let tokenizer = tokenizer.to_str().expect("the repository's path is text");
    ServerOptions::plain().model(&fixtures().join(target).join("target")).with(&[
        "--tokenizer-path",
        tokenizer,
        "--dtype",
        "float32",
        "--max-total-tokens",
        "8192",
        "--max-running-requests",
        "8",
    ])
}

impl Worker {
    /// The flags of a server with this worker; tests may add to them.
    pub(crate) fn options(&self) -> ServerOptions {
        let options = tiny(self.target).with(&[
            "--speculative-algorithm",
            self.algorithm,
            "--page-size",
            self.page_size,
        ]);
        let options = options.with(self.flags);
        if self.is_ngram() {
            return options;
        }
        let [steps, topk, width] = [self.steps, self.topk, self.width].map(|number| number.to_string());
        let draft = self.draft.map(|draft| fixtures().join(draft));
        let draft = draft.iter().flat_map(|path| {
            ["--speculative-draft-model-path", path.to_str().expect("the repository's path is text")]
        });
        let options = options.with(&draft.collect::<Vec<_>>());
        if self.is_dflash() {
            return options.with(&["--speculative-dflash-block-size", &width]);
        }
        options.with(&[
            "--speculative-num-steps",
            &steps,
            "--speculative-eagle-topk",
            &topk,
            "--speculative-num-draft-tokens",
            &width,
        ])
    }

    /// The server that the tests share.
    pub(crate) fn server(&self) -> Arc<Server> {
        shared(self.options())
    }

    /// The same target without speculation.
    pub(crate) fn plain_options(&self) -> ServerOptions {
        tiny(self.target)
    }

    pub(crate) fn plain(&self) -> Arc<Server> {
        shared(self.plain_options())
    }

    /// The same worker with chains of another depth.
    pub(crate) fn of_depth(self, steps: usize) -> Self {
        Self { steps, topk: 1, width: steps + 1, ..self }
    }

    /// Whether it drafts from what it saw, without a model.
    pub(crate) fn is_ngram(&self) -> bool {
        self.algorithm == "NGRAM"
    }

    /// Whether it drafts what was said before, and so drafts better the second time.
    pub(crate) fn remembers(&self) -> bool {
        self.algorithm.ends_with("NGRAM")
    }

    pub(crate) fn is_adaptive(&self) -> bool {
        self.flags == ADAPTIVE.flags
    }

    pub(crate) fn is_dflash(&self) -> bool {
        self.algorithm == DFLASH.algorithm
    }

    /// The algorithm in force: NEXTN is another name for one.
    pub(crate) fn shown_as(&self) -> &'static str {
        if self.algorithm == NEXTN.algorithm { EAGLE.algorithm } else { self.algorithm }
    }

    /// Drafts of one verify step at most.
    pub(crate) fn nodes(&self) -> usize {
        self.width - 1
    }

    /// The reference runs of this pair of models; n-grams, which have none, borrow the prompts of others.
    pub(crate) fn golden(&self) -> Value {
        let case = match self.draft {
            Some(draft) => draft.split('/').next().expect("a draft lies in its case's folder"),
            None if self.is_ngram() => "standalone-tiny",
            None => self.target,
        };
        let text = std::fs::read_to_string(fixtures().join(case).join("golden.json")).unwrap();
        let golden = serde_json::from_str(&text).unwrap();
        match case {
            _ if case == NEXTN.target => {
                layer_runs(golden, if self.flags.is_empty() { "ar1" } else { "nonchain3" })
            }
            _ if self.is_dflash() => fixed_block_runs(golden, self.flags.is_empty()),
            _ => golden,
        }
    }

    /// Prompts whose answers the draft has learned to guess, shortest first.
    pub(crate) fn prompts(&self) -> Vec<Vec<u64>> {
        self.golden()["prompts"].as_array().unwrap().iter().map(|prompt| ids(&prompt["ids"])).collect()
    }
}

/// The runs of one layer that drafts again and again, or of one per step, put where other references have theirs: with
/// the prompts.
fn layer_runs(mut golden: Value, mode: &str) -> Value {
    let modes = golden["variants"]["mimo7b"]["modes"][mode].take();
    for prompt in golden["prompts"].as_array_mut().unwrap() {
        let of_prompt = modes.as_array().unwrap().iter().find(|mode| mode["prompt_len"] == prompt["len"]);
        prompt["runs"] = of_prompt.unwrap()["runs"].clone();
    }
    golden
}

/// The runs of whole blocks, put where other references have theirs. There are none for blocks that end with the
/// answer, since those depend on its length.
fn fixed_block_runs(mut golden: Value, shortened: bool) -> Value {
    for prompt in golden["prompts"].as_array_mut().unwrap() {
        let run = prompt["fixed_block_run"].take();
        prompt["greedy_extra"] = overshoot(&run);
        prompt["runs"] = if shortened { json!([]) } else { json!([run]) };
    }
    golden
}

/// What the last step of a run made beyond the answer.
fn overshoot(run: &Value) -> Value {
    let last = run["steps"].as_array().unwrap().last().unwrap();
    let mut made = ids(&last["drafted"]);
    made.truncate(last["accepted"].as_u64().unwrap() as usize);
    made.extend(last["bonus"].as_u64());
    let beyond = run["overshoot_tokens_in_last_step"].as_u64().unwrap() as usize;
    json!(made[made.len() - beyond..])
}

pub(crate) fn ids(list: &Value) -> Vec<u64> {
    list.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

/// A greedy request that only its limit ends.
pub(crate) fn ask(prompt: &[u64], max_new_tokens: usize) -> Value {
    json!({"input_ids": prompt, "sampling_params": {
        "temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": true,
    }})
}

/// The same request with other sampling parameters.
pub(crate) fn with(mut body: Value, params: Value) -> Value {
    let Value::Object(params) = params else { panic!("{params} is no object") };
    body["sampling_params"].as_object_mut().unwrap().extend(params);
    body
}

/// All requests at once, answers in order.
pub(crate) fn together(server: &Server, bodies: &[Value]) -> Vec<Value> {
    std::thread::scope(|scope| {
        let running: Vec<_> = bodies.iter().map(|body| scope.spawn(move || server.generate(body))).collect();
        running.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

/// All prompts in one request, which the scheduler gets in one go however busy the machine is; answers in order.
pub(crate) fn in_one_request(server: &Server, bodies: &[Value]) -> Vec<Value> {
    let list = |key: &str| bodies.iter().map(|body| body[key].clone()).collect::<Vec<_>>();
    let body = json!({"input_ids": list("input_ids"), "sampling_params": list("sampling_params")});
    server.generate(&body).as_array().expect("a list is answered by a list").clone()
}

/// Checks that two answers say the same to the client: tokens, text, end and log-probabilities.
pub(crate) fn assert_same(drafted: &Value, plain: &Value, what: &str) {
    assert_eq!(output_ids(drafted), output_ids(plain), "{what}");
    assert_eq!(drafted["text"], plain["text"], "{what}");
    let (drafted, plain) = (&drafted["meta_info"], &plain["meta_info"]);
    for key in ["finish_reason", "prompt_tokens", "completion_tokens"] {
        assert_eq!(drafted[key], plain[key], "{key} of {what}");
    }
    for key in
        ["input_token_logprobs", "output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"]
    {
        assert_close(&drafted[key], &plain[key], &format!("{key} of {what}"));
    }
}

/// Equal but for numbers with a fraction, which may differ by 1e-4.
fn assert_close(left: &Value, right: &Value, what: &str) {
    match (left, right) {
        (Value::Array(left), Value::Array(right)) => {
            assert_eq!(left.len(), right.len(), "{what}");
            left.iter().zip(right).for_each(|(left, right)| assert_close(left, right, what));
        }
        (Value::Number(a), Value::Number(b)) if a.is_f64() && b.is_f64() => {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            assert!((a - b).abs() <= 1e-4, "{a} is not {b} in {what}");
        }
        _ => assert_eq!(left, right, "{what}"),
    }
}
