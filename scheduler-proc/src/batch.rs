//! Owns the plain data between the scheduling half and the engine. No tensor crosses this file, so that all
//! scheduling is testable without libtorch.

use proto::{SamplingParams, TokenId, TopLogprobs};

/// A place for one token's keys and values, in every layer.
pub type KvSlot = u32;

/// A request's number inside the engine, from its first step until `Engine::release`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineSlot(pub u32);

/// What never changes about a request while it runs.
#[derive(Debug, Clone, PartialEq)]
pub struct RowParams {
    pub sampling: SamplingParams,
    /// Tokens masked while fewer than `min_new_tokens` are made: the model's end tokens and the request's.
    pub terminators: Vec<TokenId>,
    pub logprobs: Option<LogprobParams>,
}

/// Which log-probabilities a request wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogprobParams {
    /// First prompt position wanted; `None` for output tokens only.
    pub start_len: Option<usize>,
    pub top_num: usize,
    pub token_ids: Vec<TokenId>,
}

/// What a row does in this step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowKind {
    /// Runs tokens whose keys and values are missing (a prompt, or a retracted request coming back). Chooses a
    /// token only when it reaches the end of `tokens`. Never speculates.
    Extend,
    /// Runs the last committed token, with drafts behind it.
    Decode { draft: DraftLimit },
}

/// How much a row may draft in this step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftLimit {
    /// `false` when the request opted out: the row decodes plainly and is no verify step.
    pub enabled: bool,
    /// Draft nodes at most, the root not counted.
    pub nodes: usize,
    /// Draft depth at most, so that accepted drafts and the bonus fit the request's budget.
    pub depth: usize,
}

impl DraftLimit {
    pub const OFF: Self = Self { enabled: false, nodes: 0, depth: 0 };

    /// So many nodes in whatever shape; off for none.
    pub const fn nodes(nodes: usize) -> Self {
        Self { enabled: nodes > 0, nodes, depth: nodes }
    }
}

/// One request's part in a step. `computed_len + extend_len <= tokens.len()`, and `kv_slots` reaches at least
/// `computed_len + extend_len + draft nodes`.
#[derive(Debug, Clone)]
pub struct BatchRow<'a> {
    pub slot: EngineSlot,
    pub kind: RowKind,
    pub params: &'a RowParams,
    /// Prompt, then the answer so far.
    pub tokens: &'a [TokenId],
    pub prompt_len: usize,
    /// Tokens whose keys and values are in the pool.
    pub computed_len: usize,
    /// Tokens to run now; 1 for `Decode`.
    pub extend_len: usize,
    /// The slot of every position.
    pub kv_slots: &'a [KvSlot],
}

impl BatchRow<'_> {
    /// Whether this step chooses a token for the row.
    pub fn samples(&self) -> bool {
        self.computed_len + self.extend_len == self.tokens.len()
    }
}

/// The rows of one step: every row is independent of its mates.
#[derive(Debug, Clone, Default)]
pub struct Batch<'a> {
    pub rows: Vec<BatchRow<'a>>,
}

/// What a step made, one entry per row of the batch, in its order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepOutput {
    pub rows: Vec<RowOutput>,
    pub timing: StepTiming,
}

/// Seconds spent in a step, by part. The parts do not overlap.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepTiming {
    /// Making drafts.
    pub draft: f64,
    /// The draft worker's learning of what was accepted: its own rows of those tokens, or its memory of them.
    pub extend: f64,
    /// The target's pass over prompts, roots and drafts.
    pub forward: f64,
    pub choose: f64,
}

impl StepTiming {
    pub fn total(&self) -> f64 {
        self.draft + self.extend + self.forward + self.choose
    }
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct RowOutput {
    /// Accepted drafts, then the target's own token. Empty when the row did not sample.
    pub tokens: Vec<ChosenToken>,
    /// Present when the row took part in a verify step.
    pub verify: Option<VerifyCount>,
    /// For the prompt positions run in this step that the request wants, in order: position `i` holds the
    /// log-probability of token `i` given the tokens before it; position 0 holds `None`.
    pub input_logprobs: Vec<Option<TokenLogprobs>>,
    /// The row could not be computed (logits that are not finite); the request is failed alone.
    pub error: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ChosenToken {
    pub id: TokenId,
    /// Present when the request wants log-probabilities.
    pub logprobs: Option<TokenLogprobs>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    pub logprob: f32,
    pub top: TopLogprobs,
    pub token_ids: TopLogprobs,
}

/// Who made a draft.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DraftSource {
    #[default]
    Model,
    Ngram,
}

impl DraftSource {
    pub const ALL: [Self; 2] = [Self::Model, Self::Ngram];

    /// As metrics have it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Ngram => "ngram",
        }
    }
}

/// What one verify step of one row submitted and accepted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VerifyCount {
    /// Draft nodes by depth, index 0 for depth 1. Their sum is what was proposed.
    pub proposed_at: Vec<u32>,
    pub accepted: usize,
    pub source: DraftSource,
}

impl VerifyCount {
    pub fn proposed(&self) -> usize {
        self.proposed_at.iter().map(|&nodes| nodes as usize).sum()
    }
}
