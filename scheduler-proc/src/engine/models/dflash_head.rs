//! Owns the DFLASH draft model: a few layers that denoise a block of mask tokens in one pass. Their keys and values of
//! the context come straight from the target's hidden states.

use std::rc::Rc;

use proto::TokenId;
use tch::Tensor;

use super::dflash_spec::{DflashLayerSpec, DflashSpec, FEATURE_NORM, JOIN, OUTPUT_NORM, Sight};
use super::draft::Head;
use super::draft_block::DraftBlock;
use super::draft_output::DraftOutput;
use crate::engine::EngineError;
use crate::engine::attention::plan::AttentionPlan;
use crate::engine::layers::embedding::Embedding;
use crate::engine::layers::linear::Linear;
use crate::engine::layers::norm::RmsNorm;
use crate::engine::layers::rope::RopeTables;
use crate::engine::model::TargetModel;
use crate::engine::shim::InferenceMode;
use crate::engine::target::{ForwardRow, Logits};
use crate::engine::weights::Loader;

/// The draft model, and what it shares with the target: embedding and head.
pub struct DflashHead {
    embedding: Rc<Embedding>,
    join: Linear,
    feature_norm: RmsNorm,
    layers: Vec<DflashLayer>,
    output_norm: RmsNorm,
    output: DraftOutput,
    mask: TokenId,
}

struct DflashLayer {
    input_norm: RmsNorm,
    block: DraftBlock,
    sight: Sight,
}

impl DflashHead {
    /// `slots` and `positions` are what its pool and tables must have.
    pub fn load(
        head: Head<DflashSpec>,
        target: &TargetModel,
        (slots, positions): (usize, usize),
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, EngineError> {
        let _inference = InferenceMode::enter();
        let Head { spec, files } = head;
        let eps = files.shape.norm_eps;
        let mut loader = Loader::new(files.source, &spec.parameters(), target.placement(), progress)?;
        let tables = spec.layers[0].block.rope_tables(positions, loader.device());
        let layers = spec.layers.iter().map(|layer| DflashLayer::load(layer, slots, &tables, &mut loader));
        Ok(Self {
            embedding: target.embedding(),
            layers: layers.collect::<Result<_, _>>()?,
            join: Linear::new(&loader.load(JOIN)?, None)?,
            feature_norm: RmsNorm::load(FEATURE_NORM, eps, &mut loader)?,
            output_norm: RmsNorm::load(OUTPUT_NORM, eps, &mut loader)?,
            output: DraftOutput::over_target(None, spec.hot.as_deref(), target)?,
            mask: spec.mask,
        })
    }

    /// What stands in a block for a token that is not known yet.
    pub fn mask(&self) -> TokenId {
        self.mask
    }

    /// Stores keys and values of context tokens, one row of the target's hidden states each.
    pub fn store(&self, rows: &[ForwardRow<'_>], features: &Tensor) -> Result<(), EngineError> {
        let _inference = InferenceMode::enter();
        let x = self.feature_norm.forward(&self.join.forward(features)?)?;
        let plan = AttentionPlan::new(rows);
        self.layers.iter().try_for_each(|layer| layer.block.store(&x, &plan))
    }

    /// What each token of the blocks becomes, behind a context that is stored.
    pub fn denoise(&self, blocks: &[ForwardRow<'_>]) -> Result<Tensor, EngineError> {
        let _inference = InferenceMode::enter();
        let mut residual = self.embedding.forward(blocks.iter().flat_map(|row| row.tokens))?;
        let mut plans: Vec<(Sight, AttentionPlan)> = Vec::new();
        for DflashLayer { sight, .. } in &self.layers {
            if plans.iter().all(|(planned, _)| planned != sight) {
                plans.push((*sight, sight.plan(blocks)));
            }
        }
        for layer in &self.layers {
            let (_, plan) =
                plans.iter().find(|(sight, _)| *sight == layer.sight).expect("every sight was planned for");
            let x = layer.input_norm.forward(&residual)?;
            layer.block.forward_within(&x, &mut residual, plan, layer.sight.window_beside_plan())?;
        }
        self.output_norm.forward(&residual)
    }

    pub fn logits(&self, states: &Tensor) -> Result<Logits, EngineError> {
        self.output.logits(states)
    }

    /// The target's token for each of the draft's; `None` where they are the same.
    pub fn vocabulary(&self) -> Option<&[TokenId]> {
        self.output.vocabulary()
    }
}

impl DflashLayer {
    fn load(
        spec: &DflashLayerSpec,
        slots: usize,
        tables: &Rc<RopeTables>,
        loader: &mut Loader<'_>,
    ) -> Result<Self, EngineError> {
        Ok(Self {
            input_norm: RmsNorm::load(&spec.input_norm(), spec.block.shape.norm_eps, loader)?,
            block: DraftBlock::load_storing(&spec.block, slots, tables, loader)?,
            sight: spec.sight,
        })
    }
}

impl Sight {
    fn plan(self, blocks: &[ForwardRow<'_>]) -> AttentionPlan {
        match self.causal {
            true => AttentionPlan::new(blocks),
            false => AttentionPlan::of_blocks(blocks, self.window),
        }
    }

    /// A plan of blocks has the window in it.
    fn window_beside_plan(self) -> Option<usize> {
        self.window.filter(|_| self.causal)
    }
}
