//! Owns the seam between the speculative engine and a model that can verify: rows in, logits out.

use proto::TokenId;

use super::EngineError;
use crate::batch::KvSlot;

/// Which of a row's tokens need logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    None,
    Last,
    /// Tokens from this index on.
    From(usize),
}

/// Tokens of one request to run through the model.
#[derive(Debug, Clone)]
pub struct ForwardRow<'a> {
    pub tokens: &'a [TokenId],
    /// Positions `0..context_len` are in the pool.
    pub context_len: usize,
    /// Token `i` is stored at `kv_slots[context_len + i]`, whatever its depth.
    pub kv_slots: &'a [KvSlot],
    /// `None` for a chain. For a tree: `parents[i]` is the index of token `i`'s parent, smaller than `i`;
    /// token 0 is the root and its entry is ignored. A token at depth `d` sits at position `context_len + d`
    /// and sees the context and its ancestors.
    pub parents: Option<&'a [usize]>,
    pub logits: LogitRows,
}

/// Logits of the wanted tokens of all rows, in order, as f32 on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    pub vocab_size: usize,
    pub values: Vec<f32>,
}

impl Logits {
    pub fn row(&self, index: usize) -> &[f32] {
        &self.values[index * self.vocab_size..][..self.vocab_size]
    }
}

/// A model with its KV pool. A row's logits depend on that row alone, bit for bit, whoever shares the batch and
/// whether its tokens come as a chain, as a tree or one by one.
pub trait Target {
    /// What a pass leaves behind for draft workers, one row per token; `()` where they need nothing.
    type Hidden;

    /// Logits of the wanted tokens, and the hidden states of all of them.
    fn run(&mut self, rows: &[ForwardRow<'_>]) -> Result<(Logits, Self::Hidden), EngineError>;

    /// Copies keys and values between slots, in order.
    fn move_kv(&mut self, moves: &[(KvSlot, KvSlot)]);
}
