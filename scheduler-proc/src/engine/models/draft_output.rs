//! Owns what a draft makes its logits with: the target's head or one of its own, over the whole vocabulary or over a
//! part of it.

use std::rc::Rc;

use proto::TokenId;
use tch::Tensor;

use crate::engine::EngineError;
use crate::engine::layers::linear::Linear;
use crate::engine::model::TargetModel;
use crate::engine::shim::{self, InferenceMode};
use crate::engine::target::Logits;

/// A head with the target's token for each of its rows.
pub(super) struct DraftOutput {
    head: Rc<Linear>,
    size: usize,
    vocabulary: Option<Vec<TokenId>>,
}

impl DraftOutput {
    /// A head whose rows are the target's tokens that `vocabulary` names, or all of them.
    pub(super) fn new(head: Rc<Linear>, size: usize, vocabulary: Option<Vec<TokenId>>) -> Self {
        Self { head, size, vocabulary }
    }

    /// `table` over the target's vocabulary, or the target's own head, cut down to the `hot` tokens where some are
    /// named. A table that is the target's is not kept twice.
    pub(super) fn over_target(
        table: Option<Tensor>,
        hot: Option<&[TokenId]>,
        target: &TargetModel,
    ) -> Result<Self, EngineError> {
        let size = target.vocab_size();
        let own = match table {
            Some(table) if !target.head_holds(&table)? => Some(table),
            _ => None,
        };
        let Some(hot) = hot else {
            let head = match own {
                Some(table) => Rc::new(Linear::new(&table, None)?),
                None => target.head(),
            };
            return Ok(Self::new(head, size, None));
        };
        let ids: Vec<i64> = hot.iter().map(|&id| i64::from(id)).collect();
        let rows = match own {
            Some(table) => table.index_select(0, &Tensor::from_slice(&ids).to_device(table.device())),
            None => target.head_rows(&ids)?,
        };
        Ok(Self::new(Rc::new(Linear::new(&rows, None)?), hot.len(), Some(hot.to_vec())))
    }

    pub(super) fn logits(&self, states: &Tensor) -> Result<Logits, EngineError> {
        let _inference = InferenceMode::enter();
        let logits = self.head.forward_wide(states)?;
        Ok(Logits { vocab_size: self.size, values: shim::to_host(&logits)? })
    }

    pub(super) fn vocabulary(&self) -> Option<&[TokenId]> {
        self.vocabulary.as_deref()
    }
}
