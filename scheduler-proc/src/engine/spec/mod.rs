//! Draft → verify → accept → commit, once, for every algorithm. A draft worker only drafts and learns.

mod engine;
mod input_logprobs;
pub mod ngram;
pub mod tree;
pub mod verify;

#[cfg(test)]
mod tests;

use proto::TokenId;

pub use self::engine::SpecEngine;
use self::tree::DraftTree;
use super::{DraftStatus, EngineError};
use crate::batch::{DraftLimit, EngineSlot, RowParams};

/// One row a draft worker may draft for.
#[derive(Debug, Clone)]
pub struct DraftInput<'a> {
    pub slot: EngineSlot,
    /// Prompt and answer so far; the last is the root.
    pub tokens: &'a [TokenId],
    pub params: &'a RowParams,
    pub limit: DraftLimit,
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
}

/// A draft worker. It never verifies, never touches the target's KV and never counts.
pub trait Drafter {
    /// One tree per input, in order, each inside its input's limit. An empty tree is fine.
    fn draft(&mut self, inputs: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError>;

    fn commit(&mut self, commits: &[Commit<'_>]) -> Result<(), EngineError>;

    fn release(&mut self, slot: EngineSlot);

    /// Forgets everything learned from past requests.
    fn flush(&mut self);

    /// The values in force now.
    fn status(&self) -> DraftStatus;
}
