//! The reference runs through the whole stack: tokens and every count exact, HTTP in, `meta_info` out.

use proto::SpecCounters;
use serde_json::{Value, json};
use tests::Server;

use crate::support::{check_identities, number, output_ids, spec_counters};
use crate::workers::{
    DFLASH, DFLASH_FIXED, EAGLE, EAGLE_TREE, EAGLE3, EAGLE3_TREE, MULTI_LAYER, NEXTN, STANDALONE, Worker,
    ask, ids, with,
};

/// One reference run: a prompt, what the target says to it, and the drafts' fate step by step.
pub(crate) struct Run {
    pub(crate) prompt: Vec<u64>,
    /// Longer than the run.
    answer: Vec<u64>,
    steps: Vec<Step>,
    /// What the reference counted, delivered drafts apart.
    counted: SpecCounters,
}

#[derive(Debug, Clone, Copy)]
struct Step {
    /// Tokens of the answer before the step.
    made: usize,
    proposed: usize,
    accepted: usize,
}

impl Run {
    /// The chains of depth `k`.
    pub(crate) fn chains(worker: Worker, k: usize) -> Vec<Self> {
        let golden = worker.golden();
        let of_prompt = |prompt: &Value| {
            let runs = prompt["runs"].as_array().unwrap();
            let run = runs.iter().find(|run| number(run, "K") == k as u64)?;
            Some(Self::read(prompt, run, "drafted"))
        };
        golden["prompts"].as_array().unwrap().iter().filter_map(of_prompt).collect()
    }

    fn trees(worker: Worker) -> Vec<Self> {
        let golden = worker.golden();
        let of_run = |run: &Value| {
            assert_eq!(number(run, "draft_nodes") as usize, worker.nodes());
            let mut prompts = golden["prompts"].as_array().unwrap().iter();
            let prompt = prompts.find(|prompt| prompt["len"] == run["prompt_len"]).unwrap();
            Self::read(prompt, run, "tree_tokens")
        };
        golden["tree_runs"].as_array().unwrap().iter().map(of_run).collect()
    }

    fn read(prompt: &Value, run: &Value, drafts: &str) -> Self {
        let ids_of = |name: &str| ids(&prompt[name]);
        let first = ids_of("ids").len() as u64;
        let step = |step: &Value| Step {
            made: (number(step, "committed") - first) as usize,
            proposed: step[drafts].as_array().unwrap().len(),
            accepted: number(step, "accepted") as usize,
        };
        let steps: Vec<Step> = run["steps"].as_array().unwrap().iter().map(step).collect();
        let proposed = steps.iter().map(|step| step.proposed as u64).sum();
        if let Some(counted) = run["proposed_drafts"].as_u64() {
            assert_eq!(counted, proposed, "the reference contradicts itself");
        }
        let histogram = ids(&run["accept_histogram"]);
        let counted = SpecCounters {
            verify_ct: number(run, "verify_ct"),
            proposed_drafts: proposed,
            accepted_drafts: number(run, "accepted_drafts"),
            delivered_drafts: 0,
            acceptance_histogram: trimmed(histogram),
        };
        let answer = [ids_of("greedy"), ids_of("greedy_extra")].concat();
        Self { prompt: ids_of("ids"), answer, steps, counted }
    }

    /// Proposed and accepted drafts of every step when the answer is limited: a draft never reaches beyond it.
    pub(crate) fn limited(&self, limit: usize) -> Vec<(usize, usize)> {
        let inside = self.steps.iter().filter(|step| step.made < limit);
        let clip = |step: &Step| {
            let room = limit - step.made - 1;
            (step.proposed.min(room), step.accepted.min(room))
        };
        inside.map(clip).collect()
    }

    /// A token that ends the run in its last step and no earlier, with the length of the answer then.
    fn end(&self) -> Option<(u64, usize)> {
        let last = self.steps.last()?;
        let block = last.made..last.made + last.accepted + 1;
        let at = block.clone().rev().find(|&at| !self.answer[..at].contains(&self.answer[at]))?;
        Some((self.answer[at], at + 1))
    }

    /// The reference's counts when the answer ends inside the last step.
    fn ended(&self, len: usize) -> SpecCounters {
        let last = self.steps.last().unwrap();
        let dropped = last.accepted - last.accepted.min(len - last.made);
        SpecCounters {
            delivered_drafts: self.counted.accepted_drafts - dropped as u64,
            ..self.counted.clone()
        }
    }
}

/// Without the zeros at the end.
fn trimmed(mut histogram: Vec<u64>) -> Vec<u64> {
    while histogram.last() == Some(&0) {
        histogram.pop();
    }
    histogram
}

fn sum(steps: &[(usize, usize)]) -> SpecCounters {
    let mut sum = SpecCounters::default();
    steps.iter().for_each(|&(proposed, accepted)| sum.record(proposed, accepted, accepted));
    sum
}

/// The same request as a whole and as a stream, whose counts grow and add up at every chunk.
fn both_ways(server: &Server, body: &Value) -> Value {
    let whole = server.generate(body);
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let chunks = server.stream("/generate", &streamed).all();
    let mut before = 0;
    for chunk in &chunks {
        let counters = spec_counters(&chunk["meta_info"]);
        assert_eq!(counters.check(), Ok(()), "{chunk}");
        assert!(counters.verify_ct >= before, "{chunk}");
        before = counters.verify_ct;
    }
    let last = chunks.last().unwrap();
    assert_eq!(output_ids(last), output_ids(&whole));
    assert_eq!(spec_counters(&last["meta_info"]), spec_counters(&whole["meta_info"]));
    check_identities(&whole["meta_info"]);
    whole
}

/// `change` is what a request says beyond the prompt and its end. Returns how many runs were compared to their end.
fn check(server: &Server, runs: &[Run], change: impl Fn(Value) -> Value, what: &str) -> usize {
    let mut ended = 0;
    for run in runs {
        let what = format!("{what}, prompt of {}", run.prompt.len());
        let Some((token, len)) = run.end() else { continue };
        // Its end, not its limit, ends the answer, and every draft before it fits.
        let body = with(ask(&run.prompt, run.answer.len() + 16), json!({"stop_token_ids": [token]}));
        let reply = both_ways(server, &change(body));
        assert_eq!(output_ids(&reply), run.answer[..len], "{what}");
        let meta = &reply["meta_info"];
        assert_eq!(spec_counters(meta), run.ended(len), "{what}");
        assert_eq!(meta["finish_reason"], json!({"type": "stop", "matched": token}), "{what}");
        ended += 1;
    }
    ended
}

/// As [`check`] for answers that their limit ends.
fn check_limited(server: &Server, runs: &[Run], change: impl Fn(Value) -> Value, what: &str) {
    for run in runs {
        for limit in [48, 31] {
            let what = format!("{what}, prompt of {}, at most {limit}", run.prompt.len());
            let reply = both_ways(server, &change(ask(&run.prompt, limit)));
            assert_eq!(output_ids(&reply), run.answer[..limit], "{what}");
            assert_eq!(spec_counters(&reply["meta_info"]), sum(&run.limited(limit)), "{what}");
        }
    }
}

/// Every depth of the reference: the greatest as the server's own, smaller ones as the request's limit.
fn check_chains(worker: Worker) {
    let server = worker.server();
    let mut ended = 0;
    for k in 1..=worker.steps {
        let runs = Run::chains(worker, k);
        assert_eq!(runs.len(), 4);
        let capped = |mut body: Value| {
            if k < worker.steps {
                body["speculative"] = json!({"max_draft_tokens": k});
            }
            body
        };
        let what = format!("{}, depth {k}", worker.algorithm);
        ended += check(&server, &runs, capped, &what);
        check_limited(&server, &runs, capped, &what);
    }
    assert!(ended >= 3 * worker.steps, "only {ended} runs were compared to their end");
}

/// A depth that is the server's.
fn check_depth(worker: Worker, steps: usize) {
    let worker = worker.of_depth(steps);
    let (server, runs) = (worker.server(), Run::chains(worker, steps));
    let what = format!("{} of depth {steps}", worker.algorithm);
    assert!(check(&server, &runs, |body| body, &what) >= 3);
    check_limited(&server, &runs, |body| body, &what);
}

fn check_trees(worker: Worker) {
    let runs = Run::trees(worker);
    assert_eq!(check(&worker.server(), &runs, |body| body, &format!("{} tree", worker.algorithm)), 4);
}

#[test]
fn eagle_counts_as_the_reference() {
    check_chains(EAGLE);
    check_depth(EAGLE, 2);
    check_trees(EAGLE_TREE);
}

#[test]
fn eagle3_counts_as_the_reference() {
    check_chains(EAGLE3);
    check_depth(EAGLE3, 3);
    check_trees(EAGLE3_TREE);
}

#[test]
fn nextn_counts_as_the_reference() {
    check_chains(NEXTN);
    check_depth(NEXTN, 3);
}

#[test]
fn multi_layer_eagle_counts_as_the_reference() {
    check_chains(MULTI_LAYER);
    check_depth(MULTI_LAYER, 2);
}

/// Whole blocks are cut by the limit alone, so every limit is known.
#[test]
fn dflash_counts_as_the_reference() {
    let runs = Run::chains(DFLASH_FIXED, DFLASH_FIXED.nodes());
    assert_eq!(runs.len(), 4);
    let server = DFLASH_FIXED.server();
    assert!(check(&server, &runs, |body| body, "DFLASH") >= 3);
    check_limited(&server, &runs, |body| body, "DFLASH");
}

/// The package shortens the last block to what it may still answer, and a token more: its own last one is extra here.
#[test]
fn shortened_dflash_blocks_count_as_the_reference() {
    for golden in DFLASH.golden()["prompts"].as_array().unwrap() {
        let answer = ids(&golden["greedy"]);
        let reply = both_ways(&DFLASH.server(), &ask(&ids(&golden["ids"]), answer.len() + 1));
        assert_eq!(output_ids(&reply)[..answer.len()], answer);
        let counted = spec_counters(&reply["meta_info"]);
        assert_eq!(counted.verify_ct, number(golden, "verify_ct"));
        assert_eq!(counted.proposed_drafts, number(golden, "proposed_drafts"));
        assert_eq!(counted.accepted_drafts, number(golden, "accepted_drafts"));
        assert_eq!(counted.acceptance_histogram, trimmed(ids(&golden["accept_histogram"])));
    }
}

#[test]
fn standalone_counts_as_the_reference() {
    check_chains(STANDALONE);
    check_depth(STANDALONE, 4);
}

/// Where the target takes every draft the rate is exactly 1, not more.
#[test]
fn a_draft_that_is_always_right_has_a_rate_of_one() {
    let server = EAGLE.server();
    let mut body = ask(&Run::chains(EAGLE, 1)[0].prompt, 49);
    body["speculative"] = json!({"max_draft_tokens": 1});
    let meta = &server.generate(&body)["meta_info"];
    assert_eq!((number(meta, "spec_verify_ct"), number(meta, "spec_accepted_drafts")), (24, 24), "{meta}");
    assert_eq!((&meta["spec_accept_rate"], &meta["spec_accept_histogram"]), (&json!(1.0), &json!([0, 24])));
}
