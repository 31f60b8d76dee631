//! Owns the seam between the one model-based draft worker and the networks it can draft with.

use tch::Tensor;

use crate::engine::EngineError;
use crate::engine::target::{ForwardRow, Logits};
use proto::TokenId;

/// The hidden states that come with a pass's tokens, one row per token.
#[derive(Debug, Clone, Copy)]
pub enum Inherited<'a> {
    /// The target's own.
    Target(&'a Tensor),
    /// What the draft model itself left for each token's predecessor.
    Own(&'a Tensor),
}

/// A network that drafts, with its own KV pool. Implementers: [`super::eagle_head::EagleHead`],
/// [`super::eagle3_head::Eagle3Head`], [`super::mtp_head::MtpHead`] and
/// [`crate::engine::spec::standalone::StandaloneModel`].
///
/// Its row `i` takes token `i + lead()`, and sits at position `i`. The pool has the target's slots, then scratch.
pub trait DraftModel {
    /// 1 where a row joins a position's hidden state with the token after it, 0 where it takes just a token.
    fn lead(&self) -> usize;

    /// Width of the target's hidden states it takes; 0 for none.
    fn feature_width(&self) -> usize;

    /// What it leaves for each token: the next level's [`Inherited::Own`], and what [`Self::logits`] reads.
    fn forward(
        &mut self,
        rows: &[ForwardRow<'_>],
        inherited: Option<Inherited<'_>>,
    ) -> Result<Tensor, EngineError>;

    /// Logits over the draft's vocabulary.
    fn logits(&self, states: &Tensor) -> Result<Logits, EngineError>;

    /// The target's token for each of the draft's; `None` where they are the same.
    fn vocabulary(&self) -> Option<&[TokenId]>;
}
