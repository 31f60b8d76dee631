//! Owns the multi-layer EAGLE draft worker: as many multi-token-prediction layers as draft steps, each used once.
//!
//! Layer `k` sees the rows that the first layer sees, with the tokens moved on by `k`: its row `i` joins a state of
//! position `i` with token `i + 1 + k`, and lies where the target keeps that token (see [`super::backlog`]). The last
//! `k` rows of a step have drafts for tokens; they live in scratch slots and are computed again with the true tokens
//! once those are final, so no draft is ever made from a refused one. The state is the target's own, or, chained, what
//! the layer before left for the same row.

use std::time::{Duration, Instant};

use proto::TokenId;
use tch::Tensor;

use super::backlog::{Backlog, RequestRows};
use super::draft_model::{DRAFT_ROWS, select};
use super::growth::Chain;
use super::plan::{BoxedDrafter, DraftMemory, WorkerPlan};
use super::tree::DraftTree;
use super::{Commit, DraftInput, Drafter};
use crate::batch::{EngineSlot, KvSlot};
use crate::engine::model::{Features, TargetModel};
use crate::engine::models::draft::{DraftModel, Inherited};
use crate::engine::models::mtp_head::MtpLayers;
use crate::engine::sample::{Chooser, Path};
use crate::engine::shim::InferenceMode;
use crate::engine::target::{ForwardRow, LogitRows};
use crate::engine::{DraftStatus, EngineError};

/// The worker before it is loaded.
pub struct MultiLayerPlan {
    pub layers: MtpLayers,
    /// Requests that run at once at most.
    pub rows: usize,
}

impl MultiLayerPlan {
    fn group(&self) -> usize {
        self.rows.clamp(1, DRAFT_ROWS)
    }
}

impl WorkerPlan for MultiLayerPlan {
    fn features(&self) -> Features {
        self.layers.features()
    }

    fn memory(&self) -> DraftMemory {
        DraftMemory {
            weights: self.layers.weight_values(),
            per_slot: self.layers.slot_values(),
            scratch_slots: self.group() * (self.layers.count() - 1),
        }
    }

    fn load(
        self: Box<Self>,
        target: &TargetModel,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<BoxedDrafter, EngineError> {
        let (group, scratch) = (self.group(), self.memory().scratch_slots);
        let limits = target.limits();
        let chained = self.layers.are_chained();
        let room = (limits.kv_slots + scratch, limits.context_len);
        let layers = self.layers.load(target, room, progress)?;
        let width = layers[0].feature_width();
        Ok(Box::new(MultiLayerDrafter {
            backlog: Backlog::new(layers.len(), width, limits.kv_slots, target.placement()),
            layers,
            chained,
            group,
            first_scratch: limits.kv_slots as KvSlot,
            chooser: Chooser::default(),
            caught_up: Duration::ZERO,
        }))
    }
}

struct MultiLayerDrafter {
    /// One per draft step.
    layers: Vec<Box<dyn DraftModel>>,
    chained: bool,
    group: usize,
    backlog: Backlog,
    first_scratch: KvSlot,
    chooser: Chooser,
    /// See [`Drafter::caught_up`].
    caught_up: Duration,
}

/// One request on its way through the layers.
struct Job {
    /// Known tokens, and drafts behind them.
    tokens: Vec<TokenId>,
    /// Where each of them is kept.
    slots: Vec<KvSlot>,
    /// Of the tokens those that are final.
    known: usize,
    /// Per layer the first row to compute.
    from: Vec<usize>,
    /// Rows that end with a draft for a token are computed, too.
    drafts: bool,
}

/// Tokens that layer `k` is ahead of its rows.
fn lead(layer: usize) -> usize {
    layer + 1
}

impl Job {
    /// Rows of layers `0..layers` whose tokens are final.
    fn settling(rows: &RequestRows, layers: usize, chained: bool) -> Self {
        Self::new(
            (rows.tokens[..rows.possible].to_vec(), rows.kv_slots.clone()),
            &rows.covered[..layers],
            chained,
            false,
        )
    }

    fn new(
        (tokens, slots): (Vec<TokenId>, Vec<KvSlot>),
        covered: &[usize],
        chained: bool,
        drafts: bool,
    ) -> Self {
        let known = tokens.len();
        let last = known.saturating_sub(2);
        let ready = covered.iter().enumerate().map(|(layer, covered)| covered.saturating_sub(lead(layer)));
        // The row of the last known token is always computed again: its state is not kept.
        let mut from: Vec<_> = ready.map(|ready| if drafts { ready.min(last) } else { ready }).collect();
        if chained {
            // A layer's rows need those of the layer before.
            for layer in (1..from.len()).rev() {
                from[layer - 1] = from[layer - 1].min(from[layer]);
            }
        }
        Self { tokens, slots, known, from, drafts }
    }

    fn layers(&self) -> usize {
        self.from.len()
    }

    /// Rows of a layer up to here.
    fn end(&self, layer: usize) -> usize {
        match self.drafts {
            true => self.known - 1,
            false => self.known.saturating_sub(lead(layer)),
        }
    }

    fn rows(&self, layer: usize) -> usize {
        if layer < self.layers() { self.end(layer).saturating_sub(self.from[layer]) } else { 0 }
    }

    fn row(&self, layer: usize) -> Option<ForwardRow<'_>> {
        let lead = lead(layer);
        (self.rows(layer) > 0).then(|| ForwardRow {
            tokens: &self.tokens[self.from[layer] + lead..self.end(layer) + lead],
            context_len: self.from[layer],
            kv_slots: &self.slots[lead..],
            parents: None,
            logits: LogitRows::None,
        })
    }
}

impl MultiLayerDrafter {
    /// Runs one layer over all jobs that have rows for it, in their order. `before` is what the layer before left.
    fn run(
        &mut self,
        layer: usize,
        jobs: &[Job],
        before: Option<&Tensor>,
    ) -> Result<Option<Tensor>, EngineError> {
        let rows: Vec<_> = jobs.iter().filter_map(|job| job.row(layer)).collect();
        if rows.is_empty() {
            return Ok(None);
        }
        let states = match before.filter(|_| self.chained && layer > 0) {
            Some(before) => Some(before.index_select(0, &same_rows(layer, jobs, before.device()))),
            None => {
                let with_rows = jobs.iter().filter(|job| job.rows(layer) > 0);
                self.backlog.features(with_rows.flat_map(|job| &job.slots[job.from[layer]..job.end(layer)]))
            }
        };
        self.layers[layer].forward(&rows, states.as_ref().map(Inherited::Target)).map(Some)
    }

    /// Computes rows of final tokens in every layer.
    fn settle<'a>(&mut self, requests: impl Iterator<Item = &'a RequestRows>) -> Result<(), EngineError> {
        let layers = self.layers.len();
        let jobs: Vec<_> = requests.map(|rows| Job::settling(rows, layers, self.chained)).collect();
        let mut before = None;
        for layer in 0..layers {
            before = self.run(layer, &jobs, before.as_ref())?;
        }
        Ok(())
    }

    fn settle_left(&mut self) -> Result<(), EngineError> {
        // One by one: a slot may have had several owners.
        for rows in self.backlog.take_left() {
            self.settle(std::iter::once(&rows))?;
        }
        Ok(())
    }

    fn draft_group(&mut self, inputs: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError> {
        let mut jobs = inputs
            .iter()
            .enumerate()
            .map(|(at, input)| self.job(at, input))
            .collect::<Result<Vec<_>, _>>()?;
        let mut chains: Vec<_> = inputs.iter().map(|input| Chain::new(path(input), input.draw)).collect();
        let mut before = None;
        for layer in 0..self.layers.len() {
            let start = Instant::now();
            let Some(states) = self.run(layer, &jobs, before.as_ref())? else { break };
            if layer == 0 {
                self.caught_up += start.elapsed();
            }
            self.grow(layer, &mut jobs, &mut chains, inputs, &states)?;
            before = Some(states);
        }
        Ok(chains.into_iter().zip(inputs).map(|(chain, input)| chain.finish(input.limit)).collect())
    }

    /// A request with the layers that it may use.
    fn job(&mut self, at: usize, input: &DraftInput<'_>) -> Result<Job, EngineError> {
        let steps = self.layers.len();
        let depth = input.limit.depth.min(input.limit.nodes).clamp(1, steps);
        let scratch = self.first_scratch + (at * (steps - 1)) as KvSlot;
        let slots = input.kv_slots[..input.tokens.len()].iter().copied().chain(scratch..);
        let slots = slots.take(input.tokens.len() + steps - 1).collect();
        let known = input.tokens.len();
        if known < 2 {
            let reason = "a request of one token has nothing to draft from".into();
            return Err(EngineError::Step { stage: "draft", reason });
        }
        let rows = self.backlog.get_mut(input.slot)?;
        Ok(Job::new((input.tokens.to_vec(), slots), &rows.covered[..depth], self.chained, true))
    }

    /// Adds the layer's token to every chain. A chain that ends leaves the layers after it for later.
    fn grow(
        &mut self,
        layer: usize,
        jobs: &mut [Job],
        chains: &mut [Chain<'_>],
        inputs: &[DraftInput<'_>],
        states: &Tensor,
    ) -> Result<(), EngineError> {
        let mut end = 0;
        let mut last = Vec::new();
        for job in jobs.iter().filter(|job| job.rows(layer) > 0) {
            end += job.rows(layer) as i64;
            last.push(end - 1);
        }
        let model = &self.layers[layer];
        let logits = model.logits(&select(states, &last))?;
        let grown = jobs.iter_mut().zip(chains).zip(inputs).filter(|((job, _), _)| job.rows(layer) > 0);
        for (at, ((job, chain), input)) in grown.enumerate() {
            self.backlog.get_mut(input.slot)?.covered[layer] = job.known;
            match chain.grow(&mut self.chooser, logits.row(at), model.vocabulary()) {
                Some(leaf) => job.tokens.push(leaf.token),
                // Layers after this one see no row without its token.
                None => job.from.truncate(layer + 1),
            }
        }
        Ok(())
    }
}

/// Ends at the root.
fn path<'a>(input: &DraftInput<'a>) -> Path<'a> {
    Path::new(input.params, input.tokens, input.prompt_len)
}

/// Where in the rows of the layer before those of `layer` are.
fn same_rows(layer: usize, jobs: &[Job], device: tch::Device) -> Tensor {
    let mut rows = Vec::new();
    let mut first = 0;
    for job in jobs {
        if job.rows(layer) > 0 {
            let skipped = job.from[layer] - job.from[layer - 1];
            rows.extend((first + skipped..).take(job.rows(layer)).map(|row| row as i64));
        }
        first += job.rows(layer - 1);
    }
    Tensor::from_slice(&rows).to_device(device)
}

impl Drafter<Option<Tensor>> for MultiLayerDrafter {
    fn draft(&mut self, inputs: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError> {
        let _inference = InferenceMode::enter();
        self.settle_left()?;
        let mut trees = Vec::with_capacity(inputs.len());
        for group in inputs.chunks(self.group) {
            trees.extend(self.draft_group(group)?);
        }
        Ok(trees)
    }

    fn commit(&mut self, commits: &[Commit<'_>], hidden: Option<&Option<Tensor>>) -> Result<(), EngineError> {
        let _inference = InferenceMode::enter();
        self.settle_left()?;
        self.backlog.learn(commits, hidden.and_then(Option::as_ref));
        let sharing = commits.iter().filter(|commit| commit.shares).map(|commit| commit.slot);
        let taken = self.backlog.take(sharing);
        self.settle(taken.iter().map(|(_, rows)| rows))?;
        self.backlog.put_back(taken);
        Ok(())
    }

    fn release(&mut self, slot: EngineSlot) {
        self.backlog.release(slot);
    }

    fn flush(&mut self) {
        self.backlog.flush();
    }

    fn status(&self) -> DraftStatus {
        let steps = self.layers.len();
        DraftStatus { num_steps: steps, num_draft_tokens: steps + 1 }
    }

    fn caught_up(&self) -> Duration {
        self.caught_up
    }
}
