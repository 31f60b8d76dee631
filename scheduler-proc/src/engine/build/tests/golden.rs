//! Every draft, every accepted count and every bonus of the reference runs, step by step.

use serde::Deserialize;

use super::*;

#[derive(Deserialize)]
struct Golden {
    prompts: Vec<GoldenPrompt>,
    #[serde(default)]
    trees: Vec<GoldenTree>,
    #[serde(default)]
    tree_runs: Vec<GoldenTreeRun>,
}

#[derive(Deserialize)]
struct GoldenPrompt {
    ids: Vec<TokenId>,
    greedy: Vec<TokenId>,
    #[serde(default)]
    runs: Vec<GoldenRun>,
}

/// The reference runs of one target with layers in several layouts.
#[derive(Deserialize)]
struct GoldenLayouts {
    prompts: Vec<GoldenPrompt>,
    variants: BTreeMap<String, GoldenLayout>,
}

#[derive(Deserialize)]
struct GoldenLayout {
    modes: BTreeMap<String, Vec<GoldenMode>>,
}

#[derive(Deserialize)]
struct GoldenMode {
    prompt_len: usize,
    runs: Vec<GoldenRun>,
}

#[derive(Deserialize)]
struct GoldenRun {
    #[serde(rename = "K")]
    k: u32,
    verify_ct: u64,
    proposed_drafts: u64,
    accepted_drafts: u64,
    accept_histogram: Vec<u64>,
    steps: Vec<GoldenStep>,
}

#[derive(Debug, Deserialize, PartialEq)]
struct GoldenStep {
    committed: usize,
    drafted: Vec<TokenId>,
    accepted: usize,
    bonus: TokenId,
}

#[derive(Deserialize)]
struct GoldenTree {
    key: String,
    topk: u32,
    levels: u32,
    draft_nodes: u32,
    prompt_len: usize,
    nodes: Vec<GoldenNode>,
    cut_gap: f64,
    accepted: usize,
    bonus: TokenId,
}

#[derive(Deserialize)]
struct GoldenNode {
    token: TokenId,
    parent: usize,
}

#[derive(Deserialize)]
struct GoldenTreeRun {
    prompt_len: usize,
    topk: u32,
    levels: u32,
    draft_nodes: u32,
    verify_ct: u64,
    accepted_drafts: u64,
    accept_histogram: Vec<u64>,
    steps: Vec<GoldenTreeStep>,
}

#[derive(Deserialize)]
struct GoldenTreeStep {
    committed: usize,
    tree_tokens: Vec<TokenId>,
    tree_parents: Vec<usize>,
    accepted: usize,
    bonus: TokenId,
    cut_gap: f64,
}

/// Where the scores at a tree's edge lie closer than this, either node may be in it.
const NEAR_TIE: f64 = 1e-3;

fn golden(pair: Pair) -> Golden {
    golden_file(pair)
}

fn golden_file<T: serde::de::DeserializeOwned>(pair: Pair) -> T {
    serde_json::from_slice(&std::fs::read(fixtures().join(pair.golden).join("golden.json")).unwrap()).unwrap()
}

/// The prompts with the runs of one layout's first layer, up to a depth.
fn layout_prompts(pair: Pair, layout: &str, mode: &str, longest: u32) -> Vec<GoldenPrompt> {
    let GoldenLayouts { mut prompts, mut variants } = golden_file(pair);
    let modes = variants.remove(layout).unwrap().modes.remove(mode).unwrap();
    for GoldenMode { prompt_len, mut runs } in modes {
        runs.retain(|run| run.k <= longest);
        prompts.iter_mut().find(|prompt| prompt.ids.len() == prompt_len).unwrap().runs = runs;
    }
    prompts
}

fn overshooting(prompt: &[TokenId], max_new: usize) -> Ask {
    Ask { clipped: false, ..greedy(prompt, max_new) }
}

fn check_chains(pair: Pair) {
    check_runs(pair, &golden(pair).prompts);
}

fn check_runs(pair: Pair, prompts: &[GoldenPrompt]) {
    let longest = prompts[0].runs.iter().map(|run| run.k).max().unwrap();
    for k in 1..=longest {
        let mut rig = Rig::new(pair, Some(chain(k)), PLAIN);
        for prompt in prompts {
            let Some(run) = prompt.runs.iter().find(|run| run.k == k) else { continue };
            let what = format!("{}, K = {k}, prompt of {}", pair.draft, prompt.ids.len());
            let answer = rig.serve_one(&overshooting(&prompt.ids, prompt.greedy.len()));
            let steps: Vec<_> = answer
                .verified
                .iter()
                .map(|step| GoldenStep {
                    committed: step.committed,
                    drafted: step.tree.tokens().to_vec(),
                    accepted: step.accepted,
                    bonus: step.bonus,
                })
                .collect();
            for (at, (step, expect)) in steps.iter().zip(&run.steps).enumerate() {
                assert_eq!(step, expect, "{what}, step {at}");
            }
            assert_eq!(steps.len(), run.steps.len(), "{what}");
            assert_eq!(answer.ids[..prompt.greedy.len()], prompt.greedy, "{what}");
            let counters = &answer.counters;
            assert_eq!(counters.verify_ct, run.verify_ct, "{what}");
            assert_eq!(counters.proposed_drafts, run.proposed_drafts, "{what}");
            assert_eq!(counters.accepted_drafts, run.accepted_drafts, "{what}");
            assert_eq!(trimmed(&counters.acceptance_histogram), trimmed(&run.accept_histogram), "{what}");
        }
    }
}

/// Without the zeros at the end.
fn trimmed(histogram: &[u64]) -> &[u64] {
    &histogram[..histogram.iter().rposition(|&count| count > 0).map_or(0, |last| last + 1)]
}

fn check_trees(pair: Pair) {
    let golden = golden(pair);
    let mut exact = 0;
    for expect in &golden.trees {
        let shape = (expect.levels, expect.topk, expect.draft_nodes + 1);
        let mut rig = Rig::new(pair, Some(shape), PLAIN);
        let prompt = golden.prompts.iter().find(|prompt| prompt.ids.len() == expect.prompt_len).unwrap();
        let answer = rig.serve_one(&overshooting(&prompt.ids, 2));
        let step = &answer.verified[0];
        if expect.cut_gap >= NEAR_TIE {
            let tokens: Vec<_> = expect.nodes.iter().map(|node| node.token).collect();
            let parents: Vec<_> = expect.nodes.iter().map(|node| node.parent).collect();
            assert_eq!(step.tree.tokens(), tokens, "{}", expect.key);
            assert_eq!(step.tree.parents(), parents, "{}", expect.key);
            assert_eq!((step.accepted, step.bonus), (expect.accepted, expect.bonus), "{}", expect.key);
            exact += 1;
        }
    }
    assert!(exact * 2 > golden.trees.len(), "{exact} trees were compared");
}

fn check_tree_runs(pair: Pair) {
    let golden = golden(pair);
    for run in &golden.tree_runs {
        let mut rig = Rig::new(pair, Some((run.levels, run.topk, run.draft_nodes + 1)), PLAIN);
        let prompt = golden.prompts.iter().find(|prompt| prompt.ids.len() == run.prompt_len).unwrap();
        let answer = rig.serve_one(&overshooting(&prompt.ids, prompt.greedy.len()));
        assert_eq!(answer.ids[..prompt.greedy.len()], prompt.greedy);
        let what = format!("{}, prompt of {}", pair.draft, run.prompt_len);
        for (step, expect) in answer.verified.iter().zip(&run.steps) {
            assert_eq!(step.committed, expect.committed, "{what}");
            if expect.cut_gap >= NEAR_TIE {
                assert_eq!(step.tree.tokens(), expect.tree_tokens, "{what} at {}", expect.committed);
                assert_eq!(step.tree.parents(), expect.tree_parents, "{what} at {}", expect.committed);
            }
            assert_eq!((step.accepted, step.bonus), (expect.accepted, expect.bonus), "{what}");
        }
        assert_eq!(answer.counters.verify_ct, run.verify_ct, "{what}");
        assert_eq!(answer.counters.accepted_drafts, run.accepted_drafts, "{what}");
        assert_eq!(trimmed(&answer.counters.acceptance_histogram), trimmed(&run.accept_histogram), "{what}");
    }
}

#[test]
fn eagle_chains_are_the_references() {
    check_chains(EAGLE);
}

/// The same weights but for the bias, so only the answer is the reference's.
#[test]
fn eagle_without_bias_and_embedding_drafts_well_too() {
    let golden = golden(EAGLE_BARE);
    let mut rig = Rig::new(EAGLE_BARE, Some(chain(3)), PLAIN);
    for prompt in &golden.prompts {
        let answer = rig.serve_one(&greedy(&prompt.ids, prompt.greedy.len()));
        assert_eq!(answer.ids, prompt.greedy);
        assert!(answer.counters.accepted_drafts > answer.counters.verify_ct, "{:?}", answer.counters);
    }
}

#[test]
fn eagle_trees_are_the_references() {
    check_trees(EAGLE);
    check_tree_runs(EAGLE);
}

#[test]
fn eagle3_chains_are_the_references() {
    check_chains(EAGLE3);
}

#[test]
fn eagle3_trees_are_the_references() {
    check_trees(EAGLE3);
    check_tree_runs(EAGLE3);
}

/// The one layer again and again, as EAGLE would.
#[test]
fn nextn_chains_are_the_references() {
    let prompts = layout_prompts(NEXTN, "mimo7b", "ar1", 4);
    assert_eq!(prompts.iter().map(|prompt| prompt.runs.len()).sum::<usize>(), 4 * 4);
    check_runs(NEXTN, &prompts);
}

/// Of this layout there are runs with a layer per step only, whose first step is the first layer's.
#[test]
fn the_first_drafts_in_nextns_own_layout_are_the_references() {
    let prompts = layout_prompts(NEXTN, "nextn", "chain3", 1);
    assert_eq!(prompts.iter().map(|prompt| prompt.runs.len()).sum::<usize>(), 4);
    let (_dir, pair) = in_layout("nextn", NEXTN);
    check_runs(pair, &prompts);
}

fn check_multi_layer(pair: Pair, layout: &str, mode: &str) {
    let prompts = layout_prompts(pair, layout, mode, 3);
    assert_eq!(prompts.iter().map(|prompt| prompt.runs.len()).sum::<usize>(), 4 * 3);
    check_runs(pair, &prompts);
}

/// Every layer on the target's own states, with two sides of its last norm.
#[test]
fn layers_that_the_target_feeds_draft_as_the_references() {
    check_multi_layer(MULTI_LAYER, "mimo7b", "nonchain3");
    let (_dir, pair) = in_layout("mimo_v2", MULTI_LAYER);
    check_multi_layer(pair, "mimo_v2", "nonchain3");
}

#[test]
fn chained_layers_draft_as_the_references() {
    let (_dir, pair) = in_layout("nextn", MULTI_LAYER);
    check_multi_layer(pair, "nextn", "chain3");
}

#[test]
fn standalone_chains_are_the_references() {
    check_chains(STANDALONE);
}

#[derive(Deserialize)]
struct GoldenBlocks {
    prompts: Vec<GoldenBlockPrompt>,
}

#[derive(Deserialize)]
struct GoldenBlockPrompt {
    ids: Vec<TokenId>,
    greedy: Vec<TokenId>,
    steps: Vec<GoldenBlock>,
    proposed_drafts: u64,
    accepted_drafts: u64,
    accept_histogram: Vec<u64>,
    fixed_block_run: GoldenRun,
}

#[derive(Deserialize)]
struct GoldenBlock {
    /// Of the last committed token.
    start: usize,
    drafted: Vec<TokenId>,
    accepted: usize,
    bonus: TokenId,
}

/// The package's own runs, whose last block is shorter: no longer than the answer may still get, its bonus left out.
#[test]
fn dflash_blocks_are_the_references() {
    let mut rig = Rig::new(DFLASH, Some(chain(7)), PLAIN);
    for prompt in golden_file::<GoldenBlocks>(DFLASH).prompts {
        let answer = rig.serve_one(&greedy(&prompt.ids, prompt.greedy.len() + 1));
        assert_eq!(answer.ids[..prompt.greedy.len()], prompt.greedy);
        for (step, expect) in answer.verified.iter().zip(&prompt.steps) {
            let what = format!("prompt of {} at {}", prompt.ids.len(), expect.start);
            assert_eq!(step.committed, expect.start + 1, "{what}");
            assert_eq!(step.tree.tokens(), expect.drafted, "{what}");
            assert_eq!((step.accepted, step.bonus), (expect.accepted, expect.bonus), "{what}");
        }
        let counters = answer.counters;
        assert_eq!(counters.verify_ct, prompt.steps.len() as u64);
        assert_eq!(counters.proposed_drafts, prompt.proposed_drafts);
        assert_eq!(counters.accepted_drafts, prompt.accepted_drafts);
        assert_eq!(trimmed(&counters.acceptance_histogram), trimmed(&prompt.accept_histogram));
    }
}

/// The same with whole blocks to the end, as SGLang has them.
#[test]
fn fixed_dflash_blocks_are_the_references() {
    let prompts = golden_file::<GoldenBlocks>(DFLASH).prompts.into_iter().map(|prompt| GoldenPrompt {
        ids: prompt.ids,
        greedy: prompt.greedy,
        runs: vec![prompt.fixed_block_run],
    });
    check_runs(DFLASH_FIXED, &prompts.collect::<Vec<_>>());
}
