//! Owns the EAGLE3 draft head: one layer over hidden states captured inside the target, with its own vocabulary.

use std::rc::Rc;

use proto::TokenId;
use tch::Tensor;

use super::draft::{DraftModel, DraftSpec, Head, Inherited, values};
use super::draft_block::DraftBlock;
use super::draft_config::DraftFiles;
use super::draft_output::DraftOutput;
use super::eagle_head::{load_embedding, no_hidden};
pub use super::eagle3_spec::Eagle3Spec;
use super::eagle3_spec::{
    EMBEDDING, EMBEDDING_NORM, FEATURE_NORM, HEAD, HIDDEN_NORM, HeadFrom, JOIN, JOIN_BIAS, JoinSpec,
    OUTPUT_NORM, VOCABULARY,
};
use crate::engine::EngineError;
use crate::engine::attention::plan::AttentionPlan;
use crate::engine::layers::embedding::Embedding;
use crate::engine::layers::linear::Linear;
use crate::engine::layers::norm::RmsNorm;
use crate::engine::model::{Features, TargetModel};
use crate::engine::shim::InferenceMode;
use crate::engine::target::{ForwardRow, Logits};
use crate::engine::weights::Loader;

impl DraftSpec for Head<Eagle3Spec> {
    fn features(&self) -> Features {
        self.spec.captured().map_or(Features::Final, |layers| Features::Layers(layers.to_vec()))
    }

    fn slot_values(&self) -> usize {
        self.spec.block.slot_values() + self.spec.feature_width()
    }

    fn weight_values(&self) -> usize {
        values(&self.spec.parameters())
    }

    fn load(
        self,
        target: &TargetModel,
        room: (usize, usize),
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn DraftModel>, EngineError> {
        Ok(Box::new(Eagle3Head::load(&self.spec, self.files, target, room, progress)?))
    }
}

/// The head, and what it shares with the target.
pub struct Eagle3Head {
    embedding: Rc<Embedding>,
    join: Option<Join>,
    embedding_norm: RmsNorm,
    hidden_norm: RmsNorm,
    block: DraftBlock,
    output_norm: RmsNorm,
    norm_before_residual: bool,
    norm_output: bool,
    output: DraftOutput,
    width: usize,
}

/// Makes the target's features as wide as the head.
struct Join {
    feature_norm: Option<RmsNorm>,
    part_norms: Vec<RmsNorm>,
    projection: Linear,
}

impl Eagle3Head {
    /// `slots` and `positions` are what the layer must have.
    pub fn load(
        spec: &Eagle3Spec,
        files: DraftFiles,
        target: &TargetModel,
        (slots, positions): (usize, usize),
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, EngineError> {
        let _inference = InferenceMode::enter();
        let what = files.source.describe();
        let mut loader = Loader::new(files.source, &spec.parameters(), target.placement(), progress)?;
        let vocabulary = match spec.mapped {
            false => None,
            true => {
                let offsets = loader.load_integers(VOCABULARY)?;
                let ids = target_ids(&offsets, target.vocab_size());
                Some(ids.map_err(|reason| EngineError::Load { what, reason })?)
            }
        };
        let eps = spec.block.shape.norm_eps;
        let tables = spec.block.rope_tables(positions, loader.device());
        let embedding = load_embedding(spec.own_embedding.then_some(EMBEDDING), target, &mut loader)?;
        let head = match spec.head {
            HeadFrom::File => Rc::new(Linear::new(&loader.load(HEAD)?, None)?),
            HeadFrom::Embedding => Rc::new(embedding.head()?),
            HeadFrom::Target => target.head(),
        };
        let join = spec.join.as_ref().map(|join| Join::load(join, eps, &mut loader)).transpose()?;
        let mut norm = |name: &str| RmsNorm::load(name, eps, &mut loader);
        Ok(Self {
            embedding,
            join,
            embedding_norm: norm(EMBEDDING_NORM)?,
            hidden_norm: norm(HIDDEN_NORM)?,
            output_norm: norm(OUTPUT_NORM)?,
            block: DraftBlock::load(&spec.block, slots, &tables, &mut loader)?,
            norm_before_residual: spec.norm_before_residual,
            norm_output: spec.norm_output,
            output: DraftOutput::new(head, spec.draft_vocab, vocabulary),
            width: spec.feature_width(),
        })
    }
}

impl Join {
    fn load(spec: &JoinSpec, eps: f32, loader: &mut Loader<'_>) -> Result<Self, EngineError> {
        let bias = spec.bias.then(|| loader.load(JOIN_BIAS)).transpose()?;
        let projection = Linear::new(&loader.load(JOIN)?, bias)?;
        let mut norm = |name: &str| RmsNorm::load(name, eps, loader);
        Ok(Self {
            feature_norm: spec.feature_norm.then(|| norm(FEATURE_NORM)).transpose()?,
            part_norms: spec.part_norms.iter().map(|name| norm(name)).collect::<Result<_, _>>()?,
            projection,
        })
    }

    fn forward(&self, features: &Tensor) -> Result<Tensor, EngineError> {
        let mut features = features.shallow_clone();
        if let Some(norm) = &self.feature_norm {
            features = norm.forward(&features)?;
        }
        if !self.part_norms.is_empty() {
            let parts = features.chunk(self.part_norms.len() as i64, 1);
            let normed: Vec<_> = parts
                .iter()
                .zip(&self.part_norms)
                .map(|(part, norm)| norm.forward(&part.contiguous()))
                .collect::<Result<_, _>>()?;
            features = Tensor::cat(&normed, 1);
        }
        self.projection.forward(&features)
    }
}

/// Target ids from offsets, which must lead into the target's vocabulary.
fn target_ids(offsets: &[i64], vocab_size: usize) -> Result<Vec<TokenId>, String> {
    let id = |(draft, &offset): (i64, &i64)| match draft + offset {
        id if (0..vocab_size as i64).contains(&id) => Ok(id as TokenId),
        id => Err(format!("d2t maps draft token {draft} to {id}, outside a vocabulary of {vocab_size}")),
    };
    (0..).zip(offsets).map(id).collect()
}

impl DraftModel for Eagle3Head {
    fn lead(&self) -> usize {
        1
    }

    fn feature_width(&self) -> usize {
        self.width
    }

    fn forward(
        &mut self,
        rows: &[ForwardRow<'_>],
        inherited: Option<Inherited<'_>>,
    ) -> Result<Tensor, EngineError> {
        let _inference = InferenceMode::enter();
        let hidden = match (inherited.ok_or_else(no_hidden)?, &self.join) {
            (Inherited::Target(features), Some(join)) => join.forward(features)?,
            (Inherited::Target(states) | Inherited::Own(states), _) => states.copy(),
        };
        let plan = AttentionPlan::new(rows);
        let embedded = self.embedding.forward(rows.iter().flat_map(|row| row.tokens))?;
        let normed = self.hidden_norm.forward(&hidden)?;
        let x = Tensor::cat(&[&self.embedding_norm.forward(&embedded)?, &normed], 1);
        let mut residual = if self.norm_before_residual { normed } else { hidden };
        self.block.forward(&x, &mut residual, &plan)?;
        if self.norm_output { self.output_norm.forward(&residual) } else { Ok(residual) }
    }

    fn logits(&self, states: &Tensor) -> Result<Logits, EngineError> {
        let _inference = InferenceMode::enter();
        match self.norm_output {
            true => self.output.logits(states),
            false => self.output.logits(&self.output_norm.forward(states)?),
        }
    }

    fn vocabulary(&self) -> Option<&[TokenId]> {
        self.output.vocabulary()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_must_lead_into_the_vocabulary() {
        assert_eq!(target_ids(&[0, 4, 5], 8), Ok(vec![0, 5, 7]));
        assert!(target_ids(&[0, 7], 8).unwrap_err().contains("draft token 1 to 8"));
        assert!(target_ids(&[-1], 8).unwrap_err().contains("to -1"));
    }
}
