//! The law of what comes out, as a whole: three tokens at once, decided by verify steps of all sorts, against the
//! exact law. Every rule has a test that it passes and flawed workers that it must not pass with.

use std::collections::BTreeMap;

use proto::AcceptanceRule;

use super::*;
use crate::engine::rng::{Noise, Stream};
use crate::engine::sample::{Chooser, Path};
use crate::engine::spec::growth::{Chain, Growth, Tree};
use crate::engine::spec::tree::Law;

const SIZE: u32 = 8;
const PROMPT: [TokenId; 2] = [0, 1];
/// The token after the prompt, made without a draft, is always this one.
const FIRST: TokenId = 2;
const LEN: usize = 3;
const DRAWS: u64 = 20_000;
const BOUND: f64 = 0.02;
const DEPTH: usize = 3;
const REJECTION: AcceptanceRule = AcceptanceRule::Rejection;

/// Logits by rank; the token of a rank depends on the token before.
fn ranked(path: &[TokenId], logits: [f32; SIZE as usize]) -> Vec<f32> {
    let last = path.last().copied().unwrap_or(0);
    (0..SIZE).map(|token| logits[((token * 3 + last) % SIZE) as usize]).collect()
}

fn target(path: &[TokenId]) -> Vec<f32> {
    if path.len() == PROMPT.len() {
        return (0..SIZE).map(|token| if token == FIRST { 1e4 } else { 0.0 }).collect();
    }
    ranked(path, [2.0, 1.2, 0.4, -0.5, -1.0, -2.0, -3.0, -4.0])
}

fn draft(path: &[TokenId]) -> Vec<f32> {
    ranked(path, [1.5, 1.7, 0.9, 0.5, -1.0, -2.0, -3.0, -4.0])
}

/// Has a part of the target's first token, nothing of its others, and most on one that the target may not take.
fn distant(path: &[TokenId]) -> Vec<f32> {
    ranked(path, [1.0, -10.0, -10.0, 1.93, -10.0, -10.0, -10.0, -10.0])
}

/// Each leaves two or three tokens per position, so that 20,000 draws tell laws apart.
const SETTINGS: [(f64, f64); 2] = [(0.3, 0.98), (1.5, 0.75)];

fn sampling((temperature, top_p): (f64, f64)) -> SamplingParams {
    SamplingParams { temperature, top_p, ..SamplingParams::default() }
}

/// What temperature and top_p leave, the long way.
fn law(logits: &[f32], sampling: &SamplingParams) -> Law {
    let masses: Vec<f64> =
        logits.iter().map(|&logit| (f64::from(logit) / sampling.temperature).exp()).collect();
    let total: f64 = masses.iter().sum();
    let mut order: Vec<usize> = (0..masses.len()).collect();
    order.sort_by(|&a, &b| masses[b].total_cmp(&masses[a]));
    let mut law = vec![0.0; masses.len()];
    let mut before = 0.0;
    for token in order {
        if before <= sampling.top_p * total {
            law[token] = masses[token];
        }
        before += masses[token];
    }
    let kept: f64 = law.iter().sum();
    law.into_iter().map(|mass| mass / kept).collect()
}

/// Probability by answer.
type Answers = BTreeMap<Vec<TokenId>, f64>;

fn distance(a: &Answers, b: &Answers) -> f64 {
    let at = |answers: &Answers, key| answers.get(key).copied().unwrap_or(0.0);
    let keys: std::collections::BTreeSet<_> = a.keys().chain(b.keys()).collect();
    keys.into_iter().map(|key| (at(a, key) - at(b, key)).abs()).sum::<f64>() / 2.0
}

/// The target's own law.
fn exact(sampling: &SamplingParams) -> Answers {
    let mut answers = Answers::from([(Vec::new(), 1.0)]);
    for _ in 0..LEN {
        let mut longer = Answers::new();
        for (answer, probability) in answers {
            let path = [&PROMPT, &[FIRST][..], &answer].concat();
            for (token, p) in (0..).zip(law(&target(&path), sampling)).filter(|&(_, p)| p > 0.0) {
                longer.insert([answer.as_slice(), &[token]].concat(), probability * p);
            }
        }
        answers = longer;
    }
    answers
}

/// Drafts from a table of its own.
struct Worker {
    chooser: Chooser,
    draws: Draws,
    table: Table,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Draws {
    /// A chain as the engine asks for it.
    Chain,
    /// The likeliest, as a tree.
    Likeliest,
    /// A tree of two siblings per node, drawn one after the other without replacement.
    Siblings,
    /// Flawed: a chain with the noise of the choice, weighed all the same.
    SharedNoise,
    /// Wasteful: a chain that hides its law, as if its tokens were sure to be tried.
    HiddenLaw,
    /// Flawed: a chain that tells its law without temperature and filters.
    PlainLaw,
}

impl Worker {
    fn new(draws: Draws, table: Table) -> Self {
        Self { chooser: Chooser::default(), draws, table }
    }

    fn tree(&mut self, input: &DraftInput<'_>) -> DraftTree {
        let path = Path::new(input.params, input.tokens, input.prompt_len);
        match self.draws {
            Draws::Chain => self.grow(Growth::Chain(Chain::new(path, input.draw)), input),
            Draws::Likeliest => self.grow(Growth::Tree(Tree::new(2)), input),
            Draws::Siblings => self.siblings(input),
            Draws::SharedNoise | Draws::HiddenLaw | Draws::PlainLaw => self.flawed(input, path),
        }
    }

    fn grow(&mut self, mut growth: Growth<'_>, input: &DraftInput<'_>) -> DraftTree {
        let mut paths = vec![input.tokens.to_vec()];
        for _ in 0..DEPTH.min(input.limit.depth) {
            let rows: Vec<_> = paths.iter().map(|path| (self.table)(path)).collect();
            let rows: Vec<_> = rows.iter().map(Vec::as_slice).collect();
            let leaves = growth.grow(&mut self.chooser, &rows, None);
            let path = |leaf: &crate::engine::spec::growth::Leaf| {
                [paths[leaf.parent].as_slice(), &[leaf.token]].concat()
            };
            paths = leaves.iter().map(path).collect();
        }
        growth.finish(DraftLimit { nodes: input.limit.nodes.min(6), ..input.limit })
    }

    fn siblings(&mut self, input: &DraftInput<'_>) -> DraftTree {
        let sampling = &input.params.sampling;
        let mut tree = DraftTree::new();
        let mut parents = vec![(0, input.tokens.to_vec())];
        for _ in 0..2.min(input.limit.depth) {
            let mut next = Vec::new();
            for (parent, path) in parents {
                let noise = Noise::new(sampling.sampling_seed, path.len() as u64, Stream::Draft);
                let mut left = law(&(self.table)(&path), sampling);
                for _ in 0..2 {
                    let Some(token) = pick(&left, noise.uniform(tree.len() as TokenId)) else { break };
                    let node = tree.push_drawn(parent, token, Some(left.clone())).unwrap();
                    next.push((node, [path.as_slice(), &[token]].concat()));
                    left[token as usize] = 0.0;
                    let total: f64 = left.iter().sum();
                    left.iter_mut().for_each(|p| *p /= total);
                }
            }
            parents = next;
        }
        tree
    }

    fn flawed(&mut self, input: &DraftInput<'_>, mut path: Path<'_>) -> DraftTree {
        let mut tree = DraftTree::new();
        let mut tokens = input.tokens.to_vec();
        for end in 0..DEPTH.min(input.limit.depth) {
            let row = (self.table)(&tokens);
            let (drawn, law) = self.chooser.draw(&row, &path).unwrap();
            let (token, law) = match self.draws {
                Draws::SharedNoise => (self.chooser.guess(&row, &path).unwrap(), Some(law)),
                Draws::PlainLaw => (drawn, Some(self::law(&row, &SamplingParams::default()))),
                _ => (drawn, None),
            };
            tree.push_drawn(end, token, law).unwrap();
            tokens.push(token);
            path.push(token);
        }
        tree
    }
}

/// The token whose part of `0..1` a uniform number falls in; `None` where nothing is left.
fn pick(law: &[f64], uniform: f64) -> Option<TokenId> {
    let mut before = 0.0;
    let hit = law.iter().position(|p| {
        before += p;
        uniform < before
    });
    hit.map(|token| token as TokenId)
}

impl Drafter for Worker {
    fn draft(&mut self, inputs: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError> {
        Ok(inputs.iter().map(|input| self.tree(input)).collect())
    }

    fn commit(&mut self, _: &[Commit<'_>], _: Option<&()>) -> Result<(), EngineError> {
        Ok(())
    }

    fn release(&mut self, _: EngineSlot) {}

    fn flush(&mut self) {}

    fn status(&self) -> DraftStatus {
        DraftStatus { num_steps: DEPTH, num_draft_tokens: 7 }
    }
}

fn params(sampling: &SamplingParams, seed: u64) -> RowParams {
    let sampling = SamplingParams { sampling_seed: seed, ..sampling.clone() };
    RowParams { sampling, terminators: Vec::new(), logprobs: None }
}

/// A step may overshoot by one, so that the last token of an answer is verified too.
fn limit(made: usize) -> DraftLimit {
    DraftLimit { enabled: true, nodes: 6, depth: LEN - made }
}

/// What the engine answers, over the seeds `0..DRAWS`, and how many drafts it accepted.
fn answers(rule: AcceptanceRule, worker: Worker, sampling: &SamplingParams) -> (Answers, usize) {
    let (engine, _) = engine_over(target, Some(Box::new(worker)));
    let mut engine = engine.accepting_by(rule);
    let kv_slots: Vec<KvSlot> = (0..32).collect();
    let mut answers = Answers::new();
    let mut accepted = 0;
    for seed in 0..DRAWS {
        let params = params(sampling, seed);
        let mut tokens = PROMPT.to_vec();
        while tokens.len() < PROMPT.len() + 1 + LEN {
            let extends = tokens.len() == PROMPT.len();
            let row = BatchRow {
                slot: EngineSlot(0),
                kind: match extends {
                    true => RowKind::Extend,
                    false => RowKind::Decode { draft: limit(tokens.len() - PROMPT.len() - 1) },
                },
                params: &params,
                tokens: &tokens,
                prompt_len: PROMPT.len(),
                computed_len: if extends { 0 } else { tokens.len() - 1 },
                extend_len: if extends { tokens.len() } else { 1 },
                kv_slots: &kv_slots,
            };
            let output = engine.step(&Batch { rows: vec![row] }).unwrap().rows.remove(0);
            accepted += output.verify.map_or(0, |verify| verify.accepted);
            tokens.extend(output.tokens.iter().map(|token| token.id));
        }
        engine.release(EngineSlot(0));
        assert_eq!(tokens[PROMPT.len()], FIRST);
        let answer = tokens[PROMPT.len() + 1..][..LEN].to_vec();
        *answers.entry(answer).or_default() += 1.0 / DRAWS as f64;
    }
    (answers, accepted)
}

/// How far from the target's law the answers are, and how many drafts were accepted.
fn measure(rule: AcceptanceRule, draws: Draws, table: Table, setting: (f64, f64)) -> (f64, usize) {
    let sampling = sampling(setting);
    let (answers, accepted) = answers(rule, Worker::new(draws, table), &sampling);
    assert!(accepted > DRAWS as usize / 20, "{rule:?} {draws:?} {setting:?} accepts {accepted}");
    let off = distance(&answers, &exact(&sampling));
    println!("{rule:?} {draws:?} {setting:?}: {accepted} accepted, off by {off:.4}");
    (off, accepted)
}

fn off(rule: AcceptanceRule, draws: Draws, table: Table, setting: (f64, f64)) -> f64 {
    measure(rule, draws, table, setting).0
}

#[test]
fn equality_keeps_the_targets_law() {
    for setting in SETTINGS {
        for draws in [Draws::Chain, Draws::Likeliest] {
            let off = off(AcceptanceRule::Equality, draws, draft, setting);
            assert!(off < BOUND, "{draws:?} {setting:?}: {off}");
        }
    }
}

#[test]
fn rejection_sampling_keeps_the_targets_law_in_chains_and_trees() {
    for setting in SETTINGS {
        for draws in [Draws::Chain, Draws::Siblings, Draws::Likeliest] {
            let off = off(REJECTION, draws, draft, setting);
            assert!(off < BOUND, "{draws:?} {setting:?}: {off}");
        }
        let off = off(REJECTION, Draws::Chain, distant, setting);
        assert!(off < BOUND, "a distant draft, {setting:?}: {off}");
    }
}

/// Each mistake shows, so the test above would find it.
#[test]
fn a_ratio_with_shared_noise_or_a_wrong_law_is_found_out() {
    let flaws: [(Draws, Table); 2] = [(Draws::SharedNoise, distant), (Draws::PlainLaw, draft)];
    for (draws, table) in flaws {
        let worst =
            SETTINGS.map(|setting| off(REJECTION, draws, table, setting)).into_iter().fold(0.0, f64::max);
        assert!(worst > 2.0 * BOUND, "{draws:?}: {worst}");
    }
}

/// Taken for sure, a drawn token is accepted with all of the target's probability of it: right, but seldom.
#[test]
fn a_hidden_law_costs_acceptance_only() {
    for setting in SETTINGS {
        let (_, told) = measure(REJECTION, Draws::Chain, draft, setting);
        let (off, hidden) = measure(REJECTION, Draws::HiddenLaw, draft, setting);
        assert!(off < BOUND && hidden * 20 < told * 19, "{setting:?}: {off}, {hidden} of {told}");
    }
}

const LENIENT: [AcceptanceRule; 4] = [
    AcceptanceRule::Thresholds { single: 1.0, acc: 0.6 },
    AcceptanceRule::Thresholds { single: 0.25, acc: 1.0 },
    AcceptanceRule::Thresholds { single: 0.5, acc: 0.8 },
    AcceptanceRule::Thresholds { single: 0.0, acc: 0.0 },
];

#[test]
fn thresholds_of_one_keep_the_targets_law_in_chains_and_trees() {
    for setting in SETTINGS {
        for draws in [Draws::Chain, Draws::Likeliest] {
            let off = off(AcceptanceRule::Thresholds { single: 1.0, acc: 1.0 }, draws, draft, setting);
            assert!(off < BOUND, "{draws:?} {setting:?}: {off}");
        }
    }
}

#[test]
fn lower_thresholds_have_the_law_that_their_rule_makes() {
    let mut biased = 0;
    for setting in SETTINGS {
        let sampling = sampling(setting);
        for rule in LENIENT {
            for draws in [Draws::Chain, Draws::Likeliest] {
                let expect = Enumeration::of(rule, draws, &sampling);
                let total: f64 = expect.values().sum();
                assert!((total - 1.0).abs() < 1e-9, "{total}");
                let (answers, _) = answers(rule, Worker::new(draws, draft), &sampling);
                let off = distance(&answers, &expect);
                assert!(off < BOUND, "{rule:?} {draws:?} {setting:?}: {off}");
                biased += usize::from(distance(&expect, &exact(&sampling)) > 2.0 * BOUND);
            }
        }
    }
    assert!(biased >= 8, "thresholds below 1 lean towards the draft in {biased} of 16 cases");
}

/// Every way through the verify steps of a worker that draws nothing, with its probability.
struct Enumeration<'a> {
    single: f64,
    acc: f64,
    worker: Worker,
    sampling: &'a SamplingParams,
    answers: Answers,
}

impl Enumeration<'_> {
    fn of(rule: AcceptanceRule, draws: Draws, sampling: &SamplingParams) -> Answers {
        let AcceptanceRule::Thresholds { single, acc } = rule else { panic!("{rule:?}") };
        let worker = Worker::new(draws, draft);
        let mut all = Enumeration { single, acc, worker, sampling, answers: Answers::new() };
        all.step(&[&PROMPT, &[FIRST][..]].concat(), 1.0);
        all.answers
    }

    fn step(&mut self, tokens: &[TokenId], probability: f64) {
        let made = tokens.len() - PROMPT.len() - 1;
        let tree = if made < LEN {
            let params = params(self.sampling, 0);
            self.worker.tree(&DraftInput {
                slot: EngineSlot(0),
                tokens,
                prompt_len: PROMPT.len(),
                params: &params,
                kv_slots: &[],
                limit: limit(made),
                draw: DraftDraw::Likeliest,
            })
        } else {
            DraftTree::new()
        };
        self.node(&tree, 0, tokens, probability);
    }

    fn node(&mut self, tree: &DraftTree, at: usize, tokens: &[TokenId], probability: f64) {
        if tokens.len() == PROMPT.len() + 1 + LEN {
            *self.answers.entry(tokens[PROMPT.len() + 1..].to_vec()).or_default() += probability;
            return;
        }
        let mut left = law(&target(tokens), self.sampling);
        // Coins below `covered` accept a sibling seen so far.
        let (mut mass, mut covered) = (0.0, 0.0f64);
        for node in tree.children(at) {
            let token = tree.tokens()[node];
            let p = left[token as usize];
            mass += p;
            let reach = match p {
                0.0 => covered,
                p if p >= self.single => 1.0,
                _ => (mass / self.acc.max(1e-9)).min(1.0).max(covered),
            };
            if reach > covered {
                let longer = [tokens, &[token]].concat();
                self.node(tree, node + 1, &longer, probability * (reach - covered));
            }
            covered = reach;
            left[token as usize] = 0.0;
        }
        let total: f64 = left.iter().sum();
        for (token, p) in (0..).zip(left).filter(|&(_, p)| p > 0.0 && covered < 1.0) {
            let longer = [tokens, &[token]].concat();
            self.step(&longer, probability * (1.0 - covered) * p / total);
        }
    }
}
