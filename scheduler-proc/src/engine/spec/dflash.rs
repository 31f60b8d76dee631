//! Owns the DFLASH draft worker: it denoises a block of mask tokens behind the last committed token in one pass, and
//! drafts the likeliest token of each.
//!
//! Its pool lies under the slot numbers of the target's and keeps the context only: what a position stores comes from
//! the target's hidden state of that position alone, so whatever the prefix cache shares of the target's pool it
//! shares of this one too. Blocks live in scratch slots and are gone after the step.

use tch::Tensor;

use super::growth::Chain;
use super::plan::{BoxedDrafter, DraftMemory, WorkerPlan};
use super::tree::DraftTree;
use super::{Commit, DraftDraw, DraftInput, Drafter};
use crate::batch::{EngineSlot, KvSlot};
use crate::engine::model::{Features, TargetModel};
use crate::engine::models::dflash_head::DflashHead;
use crate::engine::models::dflash_spec::DflashSpec;
use crate::engine::models::draft::Head;
use crate::engine::sample::{Chooser, Path};
use crate::engine::shim::InferenceMode;
use crate::engine::target::{ForwardRow, LogitRows};
use crate::engine::{DraftStatus, EngineError};
use proto::TokenId;

/// Rows of logits that are made at once at most: they are wide.
const LOGIT_ROWS: usize = 256;

/// How long blocks are, and how many are denoised at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockShape {
    /// Tokens of a block, the anchor included.
    pub block: usize,
    /// A block is denoised whole also where a request may draft less.
    pub fixed: bool,
    /// Requests that run at once at most.
    pub rows: usize,
}

impl BlockShape {
    /// Blocks that are denoised at once; more take turns.
    fn group(&self) -> usize {
        self.rows.clamp(1, (LOGIT_ROWS / self.block).max(1))
    }

    /// Tokens of a block for a request that may draft `drafts`.
    fn block_of(&self, drafts: usize) -> usize {
        if self.fixed { self.block } else { self.block.min(drafts + 1) }
    }
}

/// The worker before it is loaded.
pub struct DflashPlan {
    head: Head<DflashSpec>,
    shape: BlockShape,
}

impl DflashPlan {
    pub fn new(head: Head<DflashSpec>, shape: BlockShape) -> Self {
        Self { head, shape }
    }
}

impl WorkerPlan for DflashPlan {
    fn features(&self) -> Features {
        self.head.spec.features()
    }

    fn memory(&self) -> DraftMemory {
        DraftMemory {
            weights: self.head.spec.weight_values(),
            per_slot: self.head.spec.slot_values(),
            scratch_slots: self.shape.group() * self.shape.block,
        }
    }

    fn load(
        self: Box<Self>,
        target: &TargetModel,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<BoxedDrafter, EngineError> {
        let scratch = self.memory().scratch_slots;
        let Self { head, shape } = *self;
        let limits = target.limits();
        let room = (limits.kv_slots + scratch, limits.context_len + shape.block);
        let head = DflashHead::load(head, target, room, progress)?;
        let first_scratch = limits.kv_slots as KvSlot;
        Ok(Box::new(BlockDrafter { head, shape, first_scratch, chooser: Chooser::default() }))
    }
}

/// Drafts by denoising blocks. It keeps nothing of a request beside what lies in the request's slots.
struct BlockDrafter {
    head: DflashHead,
    shape: BlockShape,
    first_scratch: KvSlot,
    chooser: Chooser,
}

/// One request's block.
struct Block<'a> {
    input: &'a DraftInput<'a>,
    tokens: Vec<TokenId>,
    slots: Vec<KvSlot>,
    drafts: usize,
}

impl BlockDrafter {
    fn block<'a>(&self, at: usize, input: &'a DraftInput<'a>) -> Block<'a> {
        let drafts = input.limit.depth.min(input.limit.nodes).min(self.shape.block - 1);
        let length = self.shape.block_of(drafts);
        let (&anchor, before) = input.tokens.split_last().expect("a request that decodes has a token");
        let mut tokens = vec![self.head.mask(); length];
        tokens[0] = anchor;
        let scratch = self.first_scratch + (at * self.shape.block) as KvSlot;
        let slots =
            input.kv_slots[..before.len()].iter().copied().chain(scratch..).take(before.len() + length);
        Block { input, tokens, slots: slots.collect(), drafts }
    }

    fn draft_group(&mut self, inputs: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError> {
        let blocks: Vec<_> = inputs.iter().enumerate().map(|(at, input)| self.block(at, input)).collect();
        let rows: Vec<_> = blocks.iter().map(Block::row).collect();
        let states = self.head.denoise(&rows)?;
        let mut wanted = Vec::new();
        let mut first = 0;
        for block in &blocks {
            // The anchor's own row says nothing.
            wanted.extend((first + 1..).take(block.drafts).map(|row| row as i64));
            first += block.tokens.len();
        }
        let wanted = Tensor::from_slice(&wanted).to_device(states.device());
        let logits = self.head.logits(&states.index_select(0, &wanted))?;
        let mut first = 0;
        let mut trees = Vec::with_capacity(blocks.len());
        for block in &blocks {
            let DraftInput { params, tokens, prompt_len, .. } = block.input;
            // Tokens of a block are guessed side by side: drawing each by itself would fit them together by luck.
            let mut chain = Chain::new(Path::new(params, tokens, *prompt_len), DraftDraw::Likeliest);
            for row in first..first + block.drafts {
                if chain.grow(&mut self.chooser, logits.row(row), self.head.vocabulary()).is_none() {
                    break;
                }
            }
            first += block.drafts;
            trees.push(chain.finish(block.input.limit));
        }
        Ok(trees)
    }
}

impl Block<'_> {
    fn row(&self) -> ForwardRow<'_> {
        ForwardRow {
            tokens: &self.tokens,
            context_len: self.slots.len() - self.tokens.len(),
            kv_slots: &self.slots,
            parents: None,
            logits: LogitRows::None,
        }
    }
}

impl Drafter<Option<Tensor>> for BlockDrafter {
    fn draft(&mut self, inputs: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError> {
        let _inference = InferenceMode::enter();
        let mut trees = Vec::with_capacity(inputs.len());
        for group in inputs.chunks(self.shape.group()) {
            trees.extend(self.draft_group(group)?);
        }
        Ok(trees)
    }

    fn commit(&mut self, commits: &[Commit<'_>], hidden: Option<&Option<Tensor>>) -> Result<(), EngineError> {
        let Some(hidden) = hidden.and_then(Option::as_ref) else { return Ok(()) };
        let _inference = InferenceMode::enter();
        let rows: Vec<_> = commits.iter().filter_map(context_row).collect();
        if rows.is_empty() {
            return Ok(());
        }
        let wanted = commits.iter().flat_map(|commit| &commit.hidden_rows);
        let wanted: Vec<i64> = wanted.map(|&row| row as i64).collect();
        let wanted = Tensor::from_slice(&wanted).to_device(hidden.device());
        self.head.store(&rows, &hidden.index_select(0, &wanted))
    }

    fn release(&mut self, _: EngineSlot) {}

    fn flush(&mut self) {}

    /// A block is one step, as in SGLang.
    fn status(&self) -> DraftStatus {
        DraftStatus { num_steps: 1, num_draft_tokens: self.shape.block }
    }
}

/// The positions that the target computed in this step.
fn context_row<'a>(commit: &'a Commit<'_>) -> Option<ForwardRow<'a>> {
    let computed = commit.computed.clone();
    (!computed.is_empty()).then(|| ForwardRow {
        tokens: &commit.tokens[computed.clone()],
        context_len: computed.start,
        kv_slots: commit.kv_slots,
        parents: None,
        logits: LogitRows::None,
    })
}
