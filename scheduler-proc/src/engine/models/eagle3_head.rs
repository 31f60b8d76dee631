//! Owns the EAGLE3 draft head: one layer over hidden states captured inside the target, with its own vocabulary.

use std::rc::Rc;

use proto::TokenId;
use tch::Tensor;

use super::draft::{DraftModel, Inherited};
use super::draft_block::{BlockSpec, DraftBlock};
use super::draft_config::DraftFiles;
use super::eagle_head::{host_logits, load_embedding, no_hidden};
use crate::engine::EngineError;
use crate::engine::attention::AttentionBackend;
use crate::engine::attention::plan::AttentionPlan;
use crate::engine::hf_config::HfConfig;
use crate::engine::kv::KvPool;
use crate::engine::layers::embedding::Embedding;
use crate::engine::layers::linear::Linear;
use crate::engine::layers::norm::RmsNorm;
use crate::engine::model::{TargetModel, attention_for};
use crate::engine::shim::InferenceMode;
use crate::engine::target::{ForwardRow, Logits};
use crate::engine::weights::{Loader, Parameter};

const EMBEDDING: &str = "embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
const VOCABULARY: &str = "d2t";
const EMBEDDING_NORM: &str = "layers.0.input_layernorm.weight";
const HIDDEN_NORM: &str = "layers.0.hidden_norm.weight";
const FEATURE_NORM: &str = "input_norm.weight";
/// Norms over each captured layer, in both spellings.
const PART_NORMS: [[&str; 3]; 2] = [
    ["fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"],
    ["aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"],
];

/// What of a head is known before anything is loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct Eagle3Spec {
    block: BlockSpec,
    /// Layers of the target whose inputs the head takes; `None` for the final hidden state.
    captured: Option<Vec<usize>>,
    target_hidden: usize,
    draft_vocab: usize,
    bias: bool,
    own_embedding: bool,
    own_head: bool,
    reduced: bool,
    feature_norm: bool,
    part_norms: Option<[&'static str; 3]>,
    norm_output: bool,
}

impl Eagle3Spec {
    /// Refuses what is no EAGLE3 head, or none for this target.
    pub fn read(files: &DraftFiles, target: &HfConfig) -> Result<Self, EngineError> {
        let (target_layers, target_hidden) = (target.layers, target.hidden_size);
        let failed = |reason: String| EngineError::Load { what: files.source.describe(), reason };
        check_kind(files).map_err(failed)?;
        let has = |name: &str| files.source.shape(name).is_some();
        let captured = files.config.captured_layers(target_layers);
        let draft_vocab = files.config.draft_vocab_size.unwrap_or(files.shape.vocab_size);
        let spec = Self {
            block: BlockSpec::new(&files.shape, 2 * files.shape.hidden_size, files.source.as_ref()),
            target_hidden,
            draft_vocab,
            bias: has("fc.bias"),
            own_embedding: has(EMBEDDING),
            own_head: has(HEAD),
            reduced: has(VOCABULARY),
            feature_norm: has(FEATURE_NORM),
            part_norms: PART_NORMS.into_iter().find(|names| has(names[0])),
            norm_output: files.config.norm_output,
            captured,
        };
        spec.check(files, target.vocab_size).map_err(failed)?;
        match spec.captured.iter().flatten().find(|&&layer| layer > target_layers) {
            None => Ok(spec),
            Some(layer) => Err(failed(format!(
                "wants the output of layer {}, but the target has {target_layers} layers",
                layer - 1
            ))),
        }
    }

    fn check(&self, files: &DraftFiles, target_vocab: usize) -> Result<(), String> {
        let hidden = self.block.shape.hidden_size;
        if let Some(wanted) = files.config.target_hidden_size.filter(|&size| size != self.target_hidden) {
            return Err(format!(
                "was made for a target of hidden size {wanted}; the model given by --model has {}",
                self.target_hidden
            ));
        }
        if files.shape.vocab_size != target_vocab {
            return Err(format!(
                "has a vocabulary of {}; the model given by --model has {target_vocab}",
                files.shape.vocab_size
            ));
        }
        if !self.reduced && self.draft_vocab != target_vocab {
            return Err(format!(
                "has {} draft tokens for a vocabulary of {target_vocab} and no d2t that maps them",
                self.draft_vocab
            ));
        }
        if !self.own_head && (self.draft_vocab != target_vocab || hidden != self.target_hidden) {
            return Err(format!(
                "has no lm_head.weight, and the target's ({target_vocab} x {}) does not fit {} draft tokens of \
                 width {hidden}",
                self.target_hidden, self.draft_vocab
            ));
        }
        if !self.own_embedding && hidden != self.target_hidden {
            return Err(format!(
                "has no embed_tokens.weight, and the target's is {} wide, not {hidden}",
                self.target_hidden
            ));
        }
        Ok(())
    }

    /// A new head of this shape with a vocabulary of its own, which takes the target's embedding and the inputs of
    /// the `captured` layers.
    pub fn new(shape: HfConfig, captured: Vec<usize>, draft_vocab: usize) -> Self {
        let hidden = shape.hidden_size;
        Self {
            block: BlockSpec::plain(shape, 2 * hidden),
            captured: Some(captured),
            target_hidden: hidden,
            draft_vocab,
            bias: false,
            own_embedding: false,
            own_head: true,
            reduced: true,
            feature_norm: false,
            part_norms: None,
            norm_output: false,
        }
    }

    pub fn block(&self) -> &BlockSpec {
        &self.block
    }

    pub fn captured(&self) -> Option<&[usize]> {
        self.captured.as_deref()
    }

    fn parts(&self) -> usize {
        self.captured.as_ref().map_or(1, Vec::len)
    }

    pub fn feature_width(&self) -> usize {
        self.parts() * self.target_hidden
    }

    pub fn parameters(&self) -> Vec<Parameter> {
        let hidden = self.block.shape.hidden_size;
        let mut all = self.block.parameters();
        let mut add = |name: &str, shape: Vec<usize>| all.push(Parameter { name: name.into(), shape });
        add("fc.weight", vec![hidden, self.feature_width()]);
        for norm in [EMBEDDING_NORM, HIDDEN_NORM, "norm.weight"] {
            add(norm, vec![hidden]);
        }
        let optional = [
            ("fc.bias", self.bias, vec![hidden]),
            (EMBEDDING, self.own_embedding, vec![self.block.shape.vocab_size, hidden]),
            (HEAD, self.own_head, vec![self.draft_vocab, hidden]),
            (VOCABULARY, self.reduced, vec![self.draft_vocab]),
            (FEATURE_NORM, self.feature_norm, vec![self.feature_width()]),
        ];
        for (name, present, shape) in optional {
            if present {
                add(name, shape);
            }
        }
        for name in self.part_norms.into_iter().flatten().take(self.parts()) {
            add(name, vec![self.target_hidden]);
        }
        all
    }
}

fn check_kind(files: &DraftFiles) -> Result<(), String> {
    let has = |name: &str| files.source.shape(name).is_some();
    if !has("fc.weight") {
        return Err("has no fc.weight, so it is no EAGLE3 head; for a whole smaller model use \
                    --speculative-algorithm STANDALONE"
            .into());
    }
    if !has(HIDDEN_NORM) {
        return Err(
            "has no hidden_norm, so it is an EAGLE-1/2 head; use --speculative-algorithm EAGLE".into()
        );
    }
    if files.shape.architecture != "LlamaForCausalLMEagle3" {
        return Err(format!(
            "architecture {:?} is no EAGLE3 head; known is LlamaForCausalLMEagle3",
            files.shape.architecture
        ));
    }
    if files.shape.layers != 1 {
        return Err(format!("has {} layers; only heads of 1 are supported", files.shape.layers));
    }
    Ok(())
}

/// The head, its KV pool, and what it shares with the target.
pub struct Eagle3Head {
    embedding: Rc<Embedding>,
    feature_norm: Option<RmsNorm>,
    part_norms: Vec<RmsNorm>,
    join: Linear,
    embedding_norm: RmsNorm,
    hidden_norm: RmsNorm,
    block: DraftBlock,
    norm: RmsNorm,
    norm_output: bool,
    head: Rc<Linear>,
    vocabulary: Option<Vec<TokenId>>,
    vocab_size: usize,
    width: usize,
    kv: KvPool,
    attention: Box<dyn AttentionBackend>,
}

impl Eagle3Head {
    /// `slots` and `positions` are what the head's pool and tables must hold.
    pub fn load(
        spec: &Eagle3Spec,
        files: DraftFiles,
        target: &TargetModel,
        (slots, positions): (usize, usize),
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, EngineError> {
        let _inference = InferenceMode::enter();
        let (kind, device) = target.placement();
        let what = files.source.describe();
        let mut loader = Loader::new(files.source, &spec.parameters(), (kind, device), progress)?;
        let vocabulary = match spec.reduced {
            false => None,
            true => {
                let offsets = loader.load_integers(VOCABULARY)?;
                Some(
                    target_ids(&offsets, target.vocab_size())
                        .map_err(|reason| EngineError::Load { what, reason })?,
                )
            }
        };
        let eps = spec.block.shape.norm_eps;
        let mut norm = |name: &str| Ok::<_, EngineError>(RmsNorm::new(loader.load(name)?, eps));
        let parts = spec.part_norms.into_iter().flatten().take(spec.parts());
        let part_norms = parts.map(&mut norm).collect::<Result<_, _>>()?;
        let feature_norm = spec.feature_norm.then(|| norm(FEATURE_NORM)).transpose()?;
        let (embedding_norm, hidden_norm) = (norm(EMBEDDING_NORM)?, norm(HIDDEN_NORM)?);
        let last_norm = norm("norm.weight")?;
        let embedding = load_embedding(spec.own_embedding, target, &mut loader)?;
        let bias = spec.bias.then(|| loader.load("fc.bias")).transpose()?;
        let head = match spec.own_head {
            true => Rc::new(Linear::new(&loader.load(HEAD)?, None)?),
            false => target.head(),
        };
        Ok(Self {
            embedding,
            feature_norm,
            part_norms,
            join: Linear::new(&loader.load("fc.weight")?, bias)?,
            embedding_norm,
            hidden_norm,
            block: DraftBlock::load(&spec.block, positions, &mut loader)?,
            norm: last_norm,
            norm_output: spec.norm_output,
            head,
            vocabulary,
            vocab_size: spec.draft_vocab,
            width: spec.feature_width(),
            kv: KvPool::new(spec.block.kv_shape(), slots, kind, device)?,
            attention: attention_for(device),
        })
    }

    /// The target's features as wide as the head.
    fn joined(&self, features: &Tensor) -> Result<Tensor, EngineError> {
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
        self.join.forward(&features)
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
        let mut residual = match inherited.ok_or_else(no_hidden)? {
            Inherited::Target(features) => self.joined(features)?,
            Inherited::Own(states) => states.copy(),
        };
        let plan = AttentionPlan::new(rows);
        let embedded = self.embedding.forward(rows.iter().flat_map(|row| row.tokens));
        let normed = [self.embedding_norm.forward(&embedded)?, self.hidden_norm.forward(&residual)?];
        let x = Tensor::cat(&normed, 1);
        let delta = self.block.forward(&x, &residual, &plan, &self.kv, self.attention.as_ref())?;
        let _ = residual.g_add_(&delta);
        if self.norm_output { self.norm.forward(&residual) } else { Ok(residual) }
    }

    fn logits(&self, states: &Tensor) -> Result<Logits, EngineError> {
        let _inference = InferenceMode::enter();
        match self.norm_output {
            true => host_logits(&self.head, states, self.vocab_size),
            false => host_logits(&self.head, &self.norm.forward(states)?, self.vocab_size),
        }
    }

    fn vocabulary(&self) -> Option<&[TokenId]> {
        self.vocabulary.as_deref()
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
