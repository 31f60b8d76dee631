//! Owns the STANDALONE draft: any supported smaller model with the target's vocabulary.

use proto::{ServeConfig, TokenId, Weights};
use tch::Tensor;

use crate::engine::EngineError;
use crate::engine::model::{Features, TargetModel};
use crate::engine::models::decoder::DecoderSpec;
use crate::engine::models::draft::{DraftModel, DraftSpec, Inherited, values};
use crate::engine::target::{ForwardRow, Logits};

/// A whole model, before it is loaded.
pub struct StandaloneSpec {
    /// Of the target.
    pub config: ServeConfig,
    pub weights: Weights,
    pub model: DecoderSpec,
}

impl DraftSpec for StandaloneSpec {
    fn features(&self) -> Features {
        Features::None
    }

    fn slot_values(&self) -> usize {
        let kv = self.model.kv_shape();
        2 * kv.layers * kv.kv_heads * kv.head_dim
    }

    fn weight_values(&self) -> usize {
        values(&self.model.parameters())
    }

    fn load(
        self,
        _: &TargetModel,
        room: (usize, usize),
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn DraftModel>, EngineError> {
        Ok(Box::new(StandaloneModel::load(&self.config, &self.weights, room, progress)?))
    }
}

/// A whole model as a draft.
pub struct StandaloneModel {
    model: TargetModel,
}

impl StandaloneModel {
    /// `slots` and `positions` are what the draft's pool and tables must hold; all else is as the target has it.
    pub fn load(
        config: &ServeConfig,
        weights: &Weights,
        (slots, positions): (usize, usize),
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, EngineError> {
        let mut config = config.clone();
        config.model.weights = weights.clone();
        config.model.context_length = positions as u32;
        config.schedule.max_total_tokens = Some(slots as u64);
        config.schedule.page_size = 1;
        Ok(Self { model: TargetModel::load(&config, progress)? })
    }
}

impl DraftModel for StandaloneModel {
    fn lead(&self) -> usize {
        0
    }

    fn feature_width(&self) -> usize {
        0
    }

    fn forward(&mut self, rows: &[ForwardRow<'_>], _: Option<Inherited<'_>>) -> Result<Tensor, EngineError> {
        Ok(self.model.forward_hidden(rows, &[])?.hidden)
    }

    fn logits(&self, states: &Tensor) -> Result<Logits, EngineError> {
        let rows: Vec<usize> = (0..states.size()[0] as usize).collect();
        self.model.logits(states, &rows)
    }

    fn vocabulary(&self) -> Option<&[TokenId]> {
        None
    }
}
