//! Owns the seam between the one model-based draft worker and the networks it can draft with.

use tch::Tensor;

use super::draft_config::DraftFiles;
use crate::engine::EngineError;
use crate::engine::model::{Features, TargetModel};
use crate::engine::target::{ForwardRow, Logits};
use crate::engine::weights::Parameter;
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

/// A [`DraftModel`] before it is loaded.
pub trait DraftSpec {
    fn features(&self) -> Features;

    /// Numbers it keeps per slot: keys, values and the target's hidden state.
    fn slot_values(&self) -> usize;

    fn weight_values(&self) -> usize;

    /// `room` is slots and positions that its pool and tables must have.
    fn load(
        self,
        target: &TargetModel,
        room: (usize, usize),
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn DraftModel>, EngineError>;
}

/// A head that is known, and the folder it lies in.
pub struct Head<S> {
    pub spec: S,
    pub files: DraftFiles,
}

/// Numbers in these parameters.
pub fn values(parameters: &[Parameter]) -> usize {
    parameters.iter().map(|parameter| parameter.shape.iter().product::<usize>()).sum()
}
