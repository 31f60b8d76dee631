//! Owns the draft worker that drafts with a network: EAGLE heads and whole smaller models alike.
//!
//! Its keys and values lie in a pool of its own, under the slot numbers of the target's (see [`super::backlog`]).
//! Rows of accepted tokens are computed from the target's hidden states, never from the draft's own: those live in
//! scratch slots and are gone after the step.

use std::time::{Duration, Instant};

use proto::TokenId;
use tch::{Device, Kind, Tensor};

use super::backlog::{Backlog, RequestRows};
use super::growth::{Chain, Growth, Leaf, Tree};
use super::plan::{BoxedDrafter, DraftMemory, WorkerPlan};
use super::tree::DraftTree;
use super::{Commit, DraftInput, Drafter};
use crate::batch::{EngineSlot, KvSlot};
use crate::engine::model::{Features, TargetModel};
use crate::engine::models::draft::{DraftModel, DraftSpec, Inherited};
use crate::engine::sample::{Chooser, Path};
use crate::engine::shim::InferenceMode;
use crate::engine::target::{ForwardRow, LogitRows};
use crate::engine::{DraftStatus, EngineError};

/// Rows that draft together at most; more take turns.
pub(super) const DRAFT_ROWS: usize = 64;

/// How far and how wide to draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftShape {
    pub steps: usize,
    pub topk: usize,
    /// Width of a verify step, the root included.
    pub draft_tokens: usize,
    /// Requests that run at once at most.
    pub rows: usize,
}

impl DraftShape {
    /// Slots that the levels of all rows need beside the target's.
    pub fn scratch_slots(&self) -> usize {
        self.group() * self.row_slots()
    }

    fn row_slots(&self) -> usize {
        self.topk * self.steps.saturating_sub(1)
    }

    fn group(&self) -> usize {
        self.rows.clamp(1, DRAFT_ROWS)
    }
}

/// A [`ModelDrafter`] before its model is loaded.
pub struct ModelPlan<S> {
    pub model: S,
    pub shape: DraftShape,
}

impl<S: DraftSpec> WorkerPlan for ModelPlan<S> {
    fn features(&self) -> Features {
        self.model.features()
    }

    fn memory(&self) -> DraftMemory {
        DraftMemory {
            weights: self.model.weight_values(),
            per_slot: self.model.slot_values(),
            scratch_slots: self.shape.scratch_slots(),
        }
    }

    fn load(
        self: Box<Self>,
        target: &TargetModel,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<BoxedDrafter, EngineError> {
        let Self { model, shape } = *self;
        let limits = target.limits();
        let room = (limits.kv_slots + shape.scratch_slots(), limits.context_len + shape.steps);
        let model = model.load(target, room, progress)?;
        Ok(Box::new(ModelDrafter::new(model, shape, limits.kv_slots, target.placement())))
    }
}

/// Drafts by running a model ahead of the target.
pub struct ModelDrafter {
    model: Box<dyn DraftModel>,
    shape: DraftShape,
    backlog: Backlog,
    first_scratch: KvSlot,
    chooser: Chooser,
    /// See [`Drafter::caught_up`].
    caught_up: Duration,
}

/// Rows to compute from the target's hidden states.
struct Missing<'a> {
    tokens: &'a [TokenId],
    kv_slots: &'a [KvSlot],
    from: usize,
    to: usize,
}

impl<'a> Missing<'a> {
    /// Rows of tokens that are final.
    fn settling(rows: &'a RequestRows, lead: usize) -> Self {
        let from = rows.covered[0].saturating_sub(lead);
        let to = rows.possible.saturating_sub(lead);
        Missing { tokens: &rows.tokens, kv_slots: &rows.kv_slots, from, to }
    }
}

/// One row while it is drafted for.
struct Growing<'a> {
    growth: Growth<'a>,
    /// Slots of the rows before the first drafted token.
    context: &'a [KvSlot],
    depth: usize,
    branches: Vec<Branch>,
}

/// A token to go on from, with the scratch slots from the root to it.
#[derive(Debug, Clone)]
struct Branch {
    token: [TokenId; 1],
    slots: Vec<KvSlot>,
}

impl ModelDrafter {
    /// `slots` is the size of the target's pool.
    pub fn new(
        model: Box<dyn DraftModel>,
        shape: DraftShape,
        slots: usize,
        (kind, device): (Kind, Device),
    ) -> Self {
        let _inference = InferenceMode::enter();
        Self {
            backlog: Backlog::new(1, model.feature_width(), slots, (kind, device)),
            model,
            shape,
            first_scratch: slots as KvSlot,
            chooser: Chooser::default(),
            caught_up: Duration::ZERO,
        }
    }

    /// Computes rows from the target's hidden states; what the model leaves for all of them, in order.
    fn extend(&mut self, missing: &[Missing<'_>]) -> Result<Option<Tensor>, EngineError> {
        let lead = self.model.lead();
        let rows: Vec<_> = missing
            .iter()
            .filter(|missing| missing.from < missing.to)
            .map(|missing| ForwardRow {
                tokens: &missing.tokens[missing.from + lead..missing.to + lead],
                context_len: missing.from,
                kv_slots: &missing.kv_slots[lead..],
                parents: None,
                logits: LogitRows::None,
            })
            .collect();
        if rows.is_empty() {
            return Ok(None);
        }
        let missing = missing.iter().filter(|missing| missing.from < missing.to);
        let slots = missing.flat_map(|missing| &missing.kv_slots[missing.from..missing.to]);
        let features = self.backlog.features(slots);
        self.model.forward(&rows, features.as_ref().map(Inherited::Target)).map(Some)
    }

    /// Computes what requests left undone that are gone.
    fn settle_left(&mut self) -> Result<(), EngineError> {
        // One by one: a slot may have had several owners.
        for rows in self.backlog.take_left() {
            self.extend(&[Missing::settling(&rows, self.model.lead())])?;
        }
        Ok(())
    }

    /// Computes all rows of these requests that others may go on from.
    fn settle(&mut self, slots: impl Iterator<Item = EngineSlot>) -> Result<(), EngineError> {
        let taken = self.backlog.take(slots);
        let lead = self.model.lead();
        let missing: Vec<_> = taken.iter().map(|(_, rows)| Missing::settling(rows, lead)).collect();
        self.extend(&missing)?;
        self.backlog.put_back(taken);
        Ok(())
    }

    /// Brings the inputs' rows up to their roots; what the model leaves for each root.
    fn catch_up(&mut self, inputs: &[DraftInput<'_>]) -> Result<Tensor, EngineError> {
        let lead = self.model.lead();
        let mut missing = Vec::with_capacity(inputs.len());
        let mut last = Vec::with_capacity(inputs.len());
        let mut end = 0;
        for input in inputs {
            let covered = &mut self.backlog.get_mut(input.slot)?.covered[0];
            let to = input.tokens.len().saturating_sub(lead);
            // The root's own row is always computed again: its state is not kept.
            let from = covered.saturating_sub(lead).min(to.saturating_sub(1));
            end += to - from;
            last.push(end as i64 - 1);
            *covered = input.tokens.len();
            missing.push(Missing { tokens: input.tokens, kv_slots: input.kv_slots, from, to });
        }
        let states = self.extend(&missing)?.ok_or_else(|| EngineError::Step {
            stage: "draft",
            reason: "a request of one token has nothing to draft from".into(),
        })?;
        Ok(select(&states, &last))
    }

    fn draft_group(&mut self, inputs: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError> {
        let start = Instant::now();
        let mut states = self.catch_up(inputs)?;
        self.caught_up += start.elapsed();
        let mut growing: Vec<_> = inputs.iter().map(|input| self.sprout(input)).collect();
        for level in 0..self.shape.steps {
            let parents = self.grow(&mut growing, level, &states)?;
            if parents.is_empty() {
                break;
            }
            states = self.run_branches(&growing, &select(&states, &parents))?;
        }
        let nodes = self.status().max_nodes();
        let finish = |(growing, input): (Growing<'_>, &DraftInput<'_>)| {
            let mut limit = input.limit;
            limit.nodes = limit.nodes.min(nodes);
            growing.growth.finish(limit)
        };
        Ok(growing.into_iter().zip(inputs).map(finish).collect())
    }

    fn sprout<'a>(&self, input: &DraftInput<'a>) -> Growing<'a> {
        let growth = match self.shape.topk {
            1 => {
                let path = Path::new(input.params, input.tokens, input.prompt_len);
                Growth::Chain(Chain::new(path, input.draw))
            }
            topk => Growth::Tree(Tree::new(topk)),
        };
        let root = Branch { token: [0], slots: Vec::new() };
        let context = &input.kv_slots[self.model.lead()..input.tokens.len()];
        let depth = match self.shape.topk {
            // A chain of n tokens is n deep.
            1 => input.limit.depth.min(input.limit.nodes),
            _ => input.limit.depth,
        };
        Growing { growth, context, depth: depth.min(self.shape.steps), branches: vec![root] }
    }

    /// Adds a level everywhere. Gives the row of `states` that each new branch continues.
    fn grow(
        &mut self,
        growing: &mut [Growing<'_>],
        level: usize,
        states: &Tensor,
    ) -> Result<Vec<i64>, EngineError> {
        let logits = self.model.logits(states)?;
        let (group, topk) = (self.shape.row_slots(), self.shape.topk);
        let mut parents = Vec::new();
        let mut first = 0;
        for (at, row) in growing.iter_mut().enumerate() {
            let count = row.branches.len();
            if count == 0 {
                continue;
            }
            let rows: Vec<&[f32]> = (first..first + count).map(|index| logits.row(index)).collect();
            let leaves = row.growth.grow(&mut self.chooser, &rows, self.model.vocabulary());
            let scratch = self.first_scratch + (at * group + level * topk) as KvSlot;
            let goes_on = level + 1 < row.depth;
            let grown: Vec<_> = leaves.iter().filter(|_| goes_on).zip(scratch..).collect();
            parents.extend(grown.iter().map(|(leaf, _)| (first + leaf.parent) as i64));
            row.branches =
                grown.iter().map(|&(leaf, slot)| row.branches[leaf.parent].child(leaf, slot)).collect();
            first += count;
        }
        Ok(parents)
    }

    /// Runs the branches of all rows, each behind its own path.
    fn run_branches(&mut self, growing: &[Growing<'_>], inherited: &Tensor) -> Result<Tensor, EngineError> {
        let branches: Vec<_> =
            growing.iter().flat_map(|row| row.branches.iter().map(|branch| (row.context, branch))).collect();
        let slots: Vec<Vec<KvSlot>> =
            branches.iter().map(|(context, branch)| [context, branch.slots.as_slice()].concat()).collect();
        let rows: Vec<_> = branches
            .iter()
            .zip(&slots)
            .map(|((_, branch), slots)| ForwardRow {
                tokens: &branch.token,
                context_len: slots.len() - 1,
                kv_slots: slots,
                parents: None,
                logits: LogitRows::None,
            })
            .collect();
        self.model.forward(&rows, Some(Inherited::Own(inherited)))
    }
}

impl Branch {
    fn child(&self, leaf: &Leaf, slot: KvSlot) -> Self {
        let mut slots = self.slots.clone();
        slots.push(slot);
        Self { token: [leaf.token], slots }
    }
}

pub(super) fn select(rows: &Tensor, indices: &[i64]) -> Tensor {
    let all = indices.len() as i64 == rows.size()[0] && (0..).zip(indices).all(|(at, &index)| at == index);
    match all {
        true => rows.shallow_clone(),
        false => rows.index_select(0, &Tensor::from_slice(indices).to_device(rows.device())),
    }
}

impl Drafter<Option<Tensor>> for ModelDrafter {
    fn draft(&mut self, inputs: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError> {
        let _inference = InferenceMode::enter();
        self.settle_left()?;
        let mut trees = Vec::with_capacity(inputs.len());
        for group in inputs.chunks(self.shape.group()) {
            trees.extend(self.draft_group(group)?);
        }
        Ok(trees)
    }

    fn commit(&mut self, commits: &[Commit<'_>], hidden: Option<&Option<Tensor>>) -> Result<(), EngineError> {
        let _inference = InferenceMode::enter();
        self.settle_left()?;
        self.backlog.learn(commits, hidden.and_then(Option::as_ref));
        self.settle(commits.iter().filter(|commit| commit.shares).map(|commit| commit.slot))
    }

    fn release(&mut self, slot: EngineSlot) {
        self.backlog.release(slot);
    }

    fn flush(&mut self) {
        self.backlog.flush();
    }

    fn status(&self) -> DraftStatus {
        DraftStatus { num_steps: self.shape.steps, num_draft_tokens: self.shape.draft_tokens }
    }

    fn caught_up(&self) -> Duration {
        self.caught_up
    }
}
