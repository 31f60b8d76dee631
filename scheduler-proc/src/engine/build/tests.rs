//! Whole engines over the tiny golden models, driven as a scheduler drives them: the rig that the tests share.

mod cache;
mod golden;
mod hot_tokens;
mod lossless;
mod refusals;
mod sampled;
mod self_checked;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;

use proto::{
    AcceptanceRule, DflashConfig, DraftModelConfig, Dtype, NgramConfig, NgramFirst, NgramMatchType,
    SamplingParams, SpecAlgorithm, SpecConfig, SpecCounters, TokenId, Weights,
};
use tch::Tensor;

use super::*;
use crate::batch::{Batch, BatchRow, DraftLimit, DraftSource, EngineSlot, RowKind, RowOutput, RowParams};
use crate::cache::{Lease, PrefixCache};
use crate::engine::DraftStatus;
use crate::engine::model::tests::{config, fixtures};
use crate::engine::models::tests::mtp_checkpoint;
use crate::engine::spec::tree::DraftTree;
use crate::engine::spec::{Commit, DraftDraw, DraftInput, Drafter};

type Algorithm = fn(DraftModelConfig) -> SpecAlgorithm;

/// A target with a draft model.
#[derive(Debug, Clone, Copy)]
struct Pair {
    target: &'static str,
    draft: &'static str,
    algorithm: Algorithm,
    /// Folder of the reference runs.
    golden: &'static str,
    /// Two that it can draft in: chains, and trees where there are any.
    shapes: [Shape; 2],
    /// N-grams draft first.
    mixed: bool,
}

const EAGLE: Pair = Pair {
    target: "llama-tiny",
    draft: "eagle1-tiny/draft",
    algorithm: SpecAlgorithm::Eagle,
    golden: "eagle1-tiny",
    shapes: CHAIN_AND_TREE,
    mixed: false,
};
const EAGLE_BARE: Pair = Pair { draft: "eagle1-tiny/draft_nobias_noembed", ..EAGLE };
const EAGLE3: Pair = Pair {
    target: "eagle3-tiny",
    draft: "eagle3-tiny/draft",
    algorithm: SpecAlgorithm::Eagle3,
    golden: "eagle3-tiny",
    shapes: CHAIN_AND_TREE,
    mixed: false,
};
const STANDALONE: Pair = Pair {
    target: "llama-tiny",
    draft: "standalone-tiny/draft",
    algorithm: SpecAlgorithm::Standalone,
    golden: "standalone-tiny",
    shapes: CHAIN_AND_TREE,
    mixed: false,
};
/// With the layer that the target brings along, in MiMo's layout.
const NEXTN: Pair = Pair {
    target: "mtp-tiny",
    draft: "mtp-tiny/target",
    algorithm: SpecAlgorithm::Eagle,
    golden: "mtp-tiny",
    shapes: CHAIN_AND_TREE,
    mixed: false,
};
/// With a layer per step, in MiMo's layout: all of them fed by the target.
const MULTI_LAYER: Pair =
    Pair { algorithm: SpecAlgorithm::MultiLayerEagle, shapes: [chain(3), chain(2)], ..NEXTN };

/// A block is no longer than what the request may still draft.
const DFLASH: Pair = Pair {
    target: "dflash-tiny",
    draft: "dflash-tiny/draft",
    algorithm: |model| SpecAlgorithm::Dflash(DflashConfig { model, fixed_block: false, mask_token: None }),
    golden: "dflash-tiny",
    shapes: [chain(7), chain(4)],
    mixed: false,
};
const DFLASH_FIXED: Pair = Pair {
    algorithm: |model| SpecAlgorithm::Dflash(DflashConfig { model, fixed_block: true, mask_token: None }),
    ..DFLASH
};

const NGRAM_CONFIG: NgramConfig = NgramConfig {
    min_bfs_breadth: 1,
    max_bfs_breadth: 4,
    match_type: NgramMatchType::Bfs,
    max_trie_depth: 18,
    capacity: 1_000_000,
};
/// Without a draft model; the prompts are those of another.
const NGRAM: Pair = Pair { algorithm: |_| SpecAlgorithm::Ngram(NGRAM_CONFIG), ..STANDALONE };
const EAGLE_NGRAM: Pair = Pair { mixed: true, ..EAGLE };
const EAGLE3_NGRAM: Pair = Pair { mixed: true, ..EAGLE3 };

/// The same target with its layers in another layout, in a folder that the caller keeps.
fn in_layout(layout: &str, pair: Pair) -> (tempfile::TempDir, Pair) {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("target");
    mtp_checkpoint(&target, layout);
    let name = |path: &std::path::Path| -> &'static str { path.display().to_string().leak() };
    let pair = Pair { target: name(dir.path()), draft: name(&target), ..pair };
    (dir, pair)
}

/// `(steps, topk, draft tokens)`.
type Shape = (u32, u32, u32);

const fn chain(steps: u32) -> Shape {
    (steps, 1, steps + 1)
}

const CHAIN_AND_TREE: [Shape; 2] = [chain(4), (4, 4, 13)];

fn serve_config(pair: Pair, shape: Option<Shape>) -> ServeConfig {
    let weights = |case: &str| Weights::Safetensors(fixtures().join(case));
    let mut config = config(weights(&format!("{}/target", pair.target)), Dtype::Float32);
    let draft = DraftModelConfig { path: pair.draft.into(), weights: weights(pair.draft), token_map: None };
    config.schedule.num_threads = 1;
    config.spec = shape.map(|(num_steps, eagle_topk, num_draft_tokens)| SpecConfig {
        algorithm: (pair.algorithm)(draft),
        num_steps,
        eagle_topk,
        num_draft_tokens,
        acceptance: AcceptanceRule::Equality,
        adaptive: None,
        ngram_first: pair.mixed.then_some(NgramFirst { ngram: NGRAM_CONFIG, min_match: 2 }),
    });
    config
}

/// The prompts whose answers the draft was trained on, shortest first: others it hardly guesses.
fn prompts(pair: Pair) -> Vec<Vec<TokenId>> {
    #[derive(serde::Deserialize)]
    struct Golden {
        prompts: Vec<Prompt>,
    }
    #[derive(serde::Deserialize)]
    struct Prompt {
        ids: Vec<TokenId>,
    }
    let text = std::fs::read(fixtures().join(pair.golden).join("golden.json")).unwrap();
    let Golden { prompts } = serde_json::from_slice(&text).unwrap();
    prompts.into_iter().map(|prompt| prompt.ids).collect()
}

/// The longest of them.
fn prompt(pair: Pair) -> Vec<TokenId> {
    prompts(pair).pop().unwrap()
}

type Trees = Rc<RefCell<BTreeMap<EngineSlot, DraftTree>>>;

/// Notes what a worker drafts.
struct Noted {
    inner: BoxedDrafter,
    trees: Trees,
    draw: Rc<Cell<Option<DraftDraw>>>,
}

impl Drafter<Option<Tensor>> for Noted {
    fn draft(&mut self, inputs: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError> {
        let draw = |input: &DraftInput<'_>| self.draw.get().unwrap_or(input.draw);
        let drawn: Vec<_> =
            inputs.iter().map(|input| DraftInput { draw: draw(input), ..input.clone() }).collect();
        let trees = self.inner.draft(&drawn)?;
        self.trees.borrow_mut().extend(inputs.iter().map(|input| input.slot).zip(trees.iter().cloned()));
        Ok(trees)
    }

    fn commit(&mut self, commits: &[Commit<'_>], hidden: Option<&Option<Tensor>>) -> Result<(), EngineError> {
        self.inner.commit(commits, hidden)
    }

    fn release(&mut self, slot: EngineSlot) {
        self.inner.release(slot);
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn status(&self) -> DraftStatus {
        self.inner.status()
    }
}

/// How the rig schedules.
#[derive(Debug, Clone, Copy)]
struct Schedule {
    page: usize,
    radix: bool,
    /// Prompt tokens per request and step.
    chunk: usize,
    /// At this step the first running request loses its slots and starts over.
    retract_at: Option<usize>,
}

const PLAIN: Schedule = Schedule { page: 1, radix: true, chunk: 512, retract_at: None };

#[derive(Debug, Clone)]
struct Ask {
    prompt: Vec<TokenId>,
    params: RowParams,
    max_new: usize,
    speculates: bool,
    /// Drafts stay inside the budget, as the scheduler has it; golden runs overshoot.
    clipped: bool,
}

fn greedy(prompt: &[TokenId], max_new: usize) -> Ask {
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let params = RowParams { sampling, terminators: vec![2], logprobs: None };
    Ask { prompt: prompt.to_vec(), params, max_new, speculates: true, clipped: true }
}

/// One verify step.
#[derive(Debug, Clone, PartialEq)]
struct Verified {
    committed: usize,
    tree: DraftTree,
    accepted: usize,
    bonus: TokenId,
}

#[derive(Debug, Default)]
struct Answer {
    ids: Vec<TokenId>,
    cached: usize,
    verified: Vec<Verified>,
    counters: SpecCounters,
}

struct Rig {
    engine: SpecEngine<TargetModel>,
    cache: PrefixCache,
    trees: Trees,
    /// Replaces what the rule asks of a worker.
    draw: Rc<Cell<Option<DraftDraw>>>,
    schedule: Schedule,
    /// Depths of the steps, over and over; the shape's where there are none.
    depths: &'static [usize],
}

struct Running<'a> {
    ask: &'a Ask,
    slot: EngineSlot,
    tokens: Vec<TokenId>,
    computed: usize,
    lease: Option<Lease>,
    answer: Answer,
}

impl Rig {
    fn new(pair: Pair, shape: Option<Shape>, schedule: Schedule) -> Self {
        Self::by(pair, shape, schedule, AcceptanceRule::Equality)
    }

    fn by(pair: Pair, shape: Option<Shape>, schedule: Schedule, rule: AcceptanceRule) -> Self {
        Self::of(&serve_config(pair, shape), schedule, rule)
    }

    fn of(config: &ServeConfig, schedule: Schedule, rule: AcceptanceRule) -> Self {
        let Parts { target, drafter, .. } = load(config, &mut |_, _| {}).unwrap();
        let trees = Trees::default();
        let draw = Rc::default();
        let noted = |inner| {
            Box::new(Noted { inner, trees: Rc::clone(&trees), draw: Rc::clone(&draw) }) as BoxedDrafter
        };
        let drafter = drafter.map(noted);
        let limits = target.limits().clone();
        let cache = PrefixCache::new(limits.kv_slots, schedule.page, schedule.radix);
        let engine = SpecEngine::new(target, limits, drafter).accepting_by(rule);
        Self { engine, cache, trees, draw, schedule, depths: &[] }
    }

    /// Serves all to their ends, one more admitted every second step.
    fn serve(&mut self, asks: &[Ask]) -> Vec<Answer> {
        let mut all: Vec<_> = (0..).zip(asks).map(|(slot, ask)| Running::new(slot, ask)).collect();
        for step in 0.. {
            let admitted = asks.len().min(step / 2 + 1);
            if all.iter().all(Running::is_done) {
                break;
            }
            let active: Vec<_> = (0..admitted).filter(|&index| !all[index].is_done()).collect();
            if self.schedule.retract_at == Some(step)
                && let Some(&first) = active.first()
            {
                self.vacate(&mut all[first]);
            }
            active.iter().for_each(|&index| self.seat(&mut all[index]));
            let row = |&index: &usize| self.capped(all[index].row(self.schedule.chunk), step);
            let rows = active.iter().map(row).collect();
            let outputs = self.engine.step(&Batch { rows }).unwrap().rows;
            for (&index, output) in active.iter().zip(outputs) {
                self.take(&mut all[index], output);
            }
            let leases = all.iter().filter_map(|running| running.lease.as_ref());
            assert_eq!(self.cache.check(leases), Ok(()));
        }
        all.into_iter().map(|running| running.answer).collect()
    }

    fn serve_one(&mut self, ask: &Ask) -> Answer {
        self.serve(std::slice::from_ref(ask)).remove(0)
    }

    /// The row within what its step may draft.
    fn capped<'a>(&self, row: BatchRow<'a>, step: usize) -> BatchRow<'a> {
        let (Some(&most), RowKind::Decode { draft }) =
            (self.depths.get(step % self.depths.len().max(1)), row.kind)
        else {
            return row;
        };
        // Trees are wider than they are deep.
        let draft = DraftLimit { nodes: draft.nodes.min(3 * most), depth: draft.depth.min(most), ..draft };
        BatchRow { kind: RowKind::Decode { draft }, ..row }
    }

    /// Opens a lease where there is none, and makes it hold what the next step needs.
    fn seat(&mut self, running: &mut Running<'_>) {
        if running.lease.is_none() {
            let lease = self.cache.open(&None, &running.tokens[..running.tokens.len() - 1]);
            running.computed = lease.shared_len();
            running.answer.cached += lease.shared_len();
            running.lease = Some(lease);
        }
        let lease = running.lease.as_mut().unwrap();
        let nodes = self.engine.draft_status().max_nodes();
        self.cache.reserve(lease, running.tokens.len() + nodes).unwrap();
    }

    fn vacate(&mut self, running: &mut Running<'_>) {
        if let Some(lease) = running.lease.take() {
            self.cache.release(lease, &running.tokens[..running.computed]);
        }
        self.engine.release(running.slot);
    }

    fn take(&mut self, running: &mut Running<'_>, output: RowOutput) {
        assert_eq!(output.error, None);
        let row = running.row(self.schedule.chunk);
        let (ran, extends, committed) = (row.extend_len, row.kind == RowKind::Extend, running.tokens.len());
        let ids: Vec<_> = output.tokens.iter().map(|token| token.id).collect();
        if let Some(verify) = output.verify {
            running.answer.counters.record(verify.proposed(), verify.accepted, verify.accepted);
            running.answer.verified.push(Verified {
                committed,
                tree: self.trees.borrow_mut().remove(&running.slot).unwrap_or_default(),
                accepted: verify.accepted,
                bonus: *ids.last().unwrap(),
            });
        }
        running.computed += ran + ids.len().saturating_sub(1);
        running.tokens.extend(&ids);
        running.answer.ids.extend(&ids);
        if running.is_done() {
            self.vacate(running);
        } else if extends {
            let lease = running.lease.as_mut().unwrap();
            self.cache.commit(lease, &running.tokens[..running.computed]);
        }
    }
}

impl<'a> Running<'a> {
    fn new(slot: u32, ask: &'a Ask) -> Self {
        Self {
            ask,
            slot: EngineSlot(slot),
            tokens: ask.prompt.clone(),
            computed: 0,
            lease: None,
            answer: Answer::default(),
        }
    }

    fn is_done(&self) -> bool {
        self.answer.ids.len() >= self.ask.max_new
    }

    fn row(&self, chunk: usize) -> BatchRow<'_> {
        let missing = self.tokens.len() - self.computed;
        let decodes = missing == 1 && self.tokens.len() > self.ask.prompt.len();
        let budget = self.ask.max_new.saturating_sub(self.answer.ids.len() + 1);
        let depth = if self.ask.clipped { budget } else { usize::MAX };
        let draft = match self.ask.speculates {
            true => DraftLimit { enabled: true, nodes: usize::MAX, depth },
            false => DraftLimit::OFF,
        };
        BatchRow {
            slot: self.slot,
            kind: if decodes { RowKind::Decode { draft } } else { RowKind::Extend },
            params: &self.ask.params,
            tokens: &self.tokens,
            prompt_len: self.ask.prompt.len(),
            computed_len: self.computed,
            extend_len: missing.min(chunk),
            kv_slots: self.lease.as_ref().map_or(&[], Lease::slots),
        }
    }
}
