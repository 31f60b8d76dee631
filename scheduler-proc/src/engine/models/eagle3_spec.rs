//! Owns what of an EAGLE3 head is known before anything is loaded: which variant it is, and whether it goes with a
//! target.

use super::draft_block::{self, BlockSpec};
use super::draft_config::{DraftFiles, HeadKind};
use crate::engine::EngineError;
use crate::engine::hf_config::HfConfig;
use crate::engine::weights::Parameter;

pub(super) const EMBEDDING: &str = "embed_tokens.weight";
pub(super) const HEAD: &str = "lm_head.weight";
pub(super) const VOCABULARY: &str = "d2t";
pub(super) const JOIN: &str = "fc.weight";
pub(super) const JOIN_BIAS: &str = "fc.bias";
pub(super) const EMBEDDING_NORM: &str = "layers.0.input_layernorm.weight";
pub(super) const HIDDEN_NORM: &str = "layers.0.hidden_norm.weight";
pub(super) const OUTPUT_NORM: &str = "norm.weight";
pub(super) const FEATURE_NORM: &str = "input_norm.weight";
/// Another spelling of the norms over three captured layers.
const AUX_NORMS: [&str; 3] = ["aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"];

#[derive(Debug, Clone, PartialEq)]
pub struct Eagle3Spec {
    pub(super) block: BlockSpec,
    /// Layers of the target whose inputs the head takes; `None` for the final hidden state.
    captured: Option<Vec<usize>>,
    pub(super) target_hidden: usize,
    pub(super) draft_vocab: usize,
    pub(super) head: HeadFrom,
    pub(super) own_embedding: bool,
    /// The draft's vocabulary is mapped to the target's.
    pub(super) mapped: bool,
    /// How the target's features become as wide as the head; `None` where they are.
    pub(super) join: Option<JoinSpec>,
    pub(super) norm_before_residual: bool,
    pub(super) norm_output: bool,
}

/// The projection of the captured features, with the norms before it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct JoinSpec {
    pub(super) bias: bool,
    /// Over all features together.
    pub(super) feature_norm: bool,
    /// Names of the norms over each captured layer.
    pub(super) part_norms: Vec<String>,
}

/// Where the logits' matrix comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeadFrom {
    File,
    /// The table the head embeds with.
    Embedding,
    Target,
}

impl Eagle3Spec {
    /// Refuses what is no EAGLE3 head, or none for this target.
    pub fn read(files: &DraftFiles, target: &HfConfig) -> Result<Self, EngineError> {
        let failed = |reason: String| EngineError::Load { what: files.source.describe(), reason };
        check_kind(files).map_err(failed)?;
        let has = |name: &str| files.source.shape(name).is_some();
        let (shape, config, source) = (&files.shape, &files.config, files.source.as_ref());
        let captured = config.captured_layers(target.layers);
        let parts = captured.as_ref().map_or(1, Vec::len);
        let own_embedding = has(EMBEDDING);
        let head = match () {
            () if has(HEAD) => HeadFrom::File,
            () if shape.tied && (own_embedding || !target.tied) => HeadFrom::Embedding,
            () => HeadFrom::Target,
        };
        let spec = Self {
            block: BlockSpec::new(shape, draft_block::PREFIX, 2 * shape.hidden_size, source),
            target_hidden: target.hidden_size,
            draft_vocab: config.draft_vocab_size.unwrap_or(shape.vocab_size),
            head,
            own_embedding,
            mapped: has(VOCABULARY),
            join: (parts * target.hidden_size != shape.hidden_size).then(|| JoinSpec::read(files, parts)),
            norm_before_residual: config.norm_before_residual,
            norm_output: config.norm_output,
            captured,
        };
        spec.check_shape(files, target.vocab_size).map_err(failed)?;
        spec.check_captured(files, target.layers).map_err(failed)?;
        Ok(spec)
    }

    fn check_shape(&self, files: &DraftFiles, target_vocab: usize) -> Result<(), String> {
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
        if !self.mapped && self.draft_vocab != target_vocab {
            return Err(format!(
                "has {} draft tokens for a vocabulary of {target_vocab} and no d2t that maps them",
                self.draft_vocab
            ));
        }
        if !self.own_embedding && hidden != self.target_hidden {
            return Err(format!(
                "has no embed_tokens.weight, and the target's is {} wide, not {hidden}",
                self.target_hidden
            ));
        }
        let (found, width) = match self.head {
            HeadFrom::File => return Ok(()),
            HeadFrom::Embedding => (target_vocab, hidden),
            HeadFrom::Target => (target_vocab, self.target_hidden),
        };
        if (found, width) != (self.draft_vocab, hidden) {
            return Err(format!(
                "has no lm_head.weight, and the target's ({found} x {width}) does not fit {} draft tokens of width \
                 {hidden}",
                self.draft_vocab
            ));
        }
        Ok(())
    }

    fn check_captured(&self, files: &DraftFiles, target_layers: usize) -> Result<(), String> {
        let captured = self.captured.as_deref().unwrap_or_default();
        if let Some(layer) = captured.iter().find(|&&layer| layer > target_layers) {
            return Err(format!(
                "wants the output of layer {} (eagle_aux_hidden_state_layer_ids), but the model given by --model has \
                 layers 0 to {}",
                layer - 1,
                target_layers - 1
            ));
        }
        let named = files.config.num_aux_hidden_states.filter(|_| self.captured.is_some());
        match named.filter(|&count| count != captured.len()) {
            Some(count) => Err(format!(
                "says num_aux_hidden_states {count}, but captures {} layers; name them in \
                 eagle_aux_hidden_state_layer_ids",
                captured.len()
            )),
            None => Ok(()),
        }
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
            head: HeadFrom::File,
            own_embedding: false,
            mapped: true,
            join: Some(JoinSpec { bias: false, feature_norm: false, part_norms: Vec::new() }),
            norm_before_residual: false,
            norm_output: false,
        }
    }

    pub fn block(&self) -> &BlockSpec {
        &self.block
    }

    pub fn captured(&self) -> Option<&[usize]> {
        self.captured.as_deref()
    }

    pub fn feature_width(&self) -> usize {
        self.captured.as_ref().map_or(1, Vec::len) * self.target_hidden
    }

    pub fn parameters(&self) -> Vec<Parameter> {
        let hidden = self.block.shape.hidden_size;
        let mut all = self.block.parameters();
        let mut add = |name: &str, shape: Vec<usize>| all.push(Parameter { name: name.into(), shape });
        for norm in [EMBEDDING_NORM, HIDDEN_NORM, OUTPUT_NORM] {
            add(norm, vec![hidden]);
        }
        let optional = [
            (EMBEDDING, self.own_embedding, vec![self.block.shape.vocab_size, hidden]),
            (HEAD, self.head == HeadFrom::File, vec![self.draft_vocab, hidden]),
            (VOCABULARY, self.mapped, vec![self.draft_vocab]),
        ];
        for (name, present, shape) in optional {
            if present {
                add(name, shape);
            }
        }
        let Some(join) = &self.join else { return all };
        add(JOIN, vec![hidden, self.feature_width()]);
        if join.bias {
            add(JOIN_BIAS, vec![hidden]);
        }
        if join.feature_norm {
            add(FEATURE_NORM, vec![self.feature_width()]);
        }
        for name in &join.part_norms {
            add(name, vec![self.target_hidden]);
        }
        all
    }
}

impl JoinSpec {
    /// The config decides which norms there are; where it says nothing, the file does.
    fn read(files: &DraftFiles, parts: usize) -> Self {
        let has = |name: &str| files.source.shape(name).is_some();
        let part_norms: Vec<String> = match parts == AUX_NORMS.len() && has(AUX_NORMS[0]) {
            true => AUX_NORMS.map(str::to_owned).to_vec(),
            false => (0..parts).map(|part| format!("fc_norm.{part}.weight")).collect(),
        };
        let normed = files.config.norms_parts().unwrap_or_else(|| has(&part_norms[0]));
        Self {
            bias: has(JOIN_BIAS),
            feature_norm: files.config.norms_features().unwrap_or_else(|| has(FEATURE_NORM)),
            part_norms: if normed { part_norms } else { Vec::new() },
        }
    }
}

fn check_kind(files: &DraftFiles) -> Result<(), String> {
    match files.kind() {
        HeadKind::Eagle3 => {}
        HeadKind::Eagle => {
            return Err(
                "has no hidden_norm, so it is an EAGLE-1/2 head; use --speculative-algorithm EAGLE".into()
            );
        }
        HeadKind::Dflash => {
            return Err("is a DFLASH draft model; use --speculative-algorithm DFLASH".into());
        }
        HeadKind::Mtp => {
            return Err(
                "brings a multi-token-prediction layer along; use --speculative-algorithm NEXTN".into()
            );
        }
        HeadKind::None => {
            return Err("has no fc.weight, so it is no EAGLE3 head; for a whole smaller model use \
                        --speculative-algorithm STANDALONE"
                .into());
        }
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
