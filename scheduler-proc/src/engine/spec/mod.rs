//! Draft → verify → accept → commit, once, for every algorithm. A draft worker only drafts and learns.

mod backlog;
pub mod dflash;
pub mod draft_model;
mod engine;
mod growth;
mod input_logprobs;
pub mod mixed;
pub mod multi_layer;
pub mod ngram;
pub mod plan;
mod rule;
pub mod standalone;
pub mod tree;
pub mod verify;

#[cfg(test)]
mod tests;

use std::ops::Range;
use std::time::Duration;

use proto::TokenId;

pub use self::engine::SpecEngine;
use self::tree::DraftTree;
use super::{DraftStatus, EngineError};
use crate::batch::{DraftLimit, EngineSlot, KvSlot, RowParams};

/// How a draft worker takes one token from its own distribution: what the rule of acceptance needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftDraw {
    /// As the request would, with the noise of the target's choice: similar distributions then choose alike.
    Shared,
    /// As the request would, but with noise of its own, and the law drawn from is handed along.
    Own,
    /// The likeliest one.
    Likeliest,
}

/// One row a draft worker may draft for.
#[derive(Debug, Clone)]
pub struct DraftInput<'a> {
    pub slot: EngineSlot,
    /// Prompt and answer so far; the last is the root.
    pub tokens: &'a [TokenId],
    pub prompt_len: usize,
    pub params: &'a RowParams,
    /// The target's slot of every position up to the root's at least.
    pub kv_slots: &'a [KvSlot],
    pub limit: DraftLimit,
    /// For workers that draw; those that are sure of what they try need not look.
    pub draw: DraftDraw,
}

/// Tokens that became final for a request, prompt tokens included.
#[derive(Debug, Clone)]
pub struct Commit<'a> {
    pub slot: EngineSlot,
    /// Prompt and answer, up to and including the new tokens.
    pub tokens: &'a [TokenId],
    /// How many of them are new to the draft worker. A prompt's first commit also covers what a prefix cache
    /// spared the target.
    pub new_len: usize,
    /// The target's slot of every position in `computed` and before.
    pub kv_slots: &'a [KvSlot],
    /// Positions whose keys and values the target made in this step; all before them are in its pool already.
    pub computed: Range<usize>,
    /// Where in the step's hidden states those positions are, one row each.
    pub hidden_rows: Vec<usize>,
    /// Other requests may use the slots from now on, not only once this one is released.
    pub shares: bool,
}

/// A draft worker. It never verifies, never touches the target's KV and never counts. `H` is what the target leaves
/// behind for it.
pub trait Drafter<H = ()> {
    /// One tree per input, in order, each inside its input's limit. An empty tree is fine.
    fn draft(&mut self, inputs: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError>;

    /// `hidden` is what the step's pass left behind; `None` where the tokens became final before it.
    fn commit(&mut self, commits: &[Commit<'_>], hidden: Option<&H>) -> Result<(), EngineError>;

    fn release(&mut self, slot: EngineSlot);

    /// Forgets everything learned from past requests.
    fn flush(&mut self);

    /// The values in force now.
    fn status(&self) -> DraftStatus;

    /// Time that drafting has spent so far on rows of accepted tokens, which a worker may leave until it drafts.
    fn caught_up(&self) -> Duration {
        Duration::ZERO
    }
}
