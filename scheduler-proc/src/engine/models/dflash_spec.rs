//! Owns what of a DFLASH draft model is known before anything is loaded: its layers, what of the target it takes, and
//! whether it goes with that target.

use proto::TokenId;

use super::draft::values;
use super::draft_block::{BlockSpec, MLP_NORM};
use super::draft_config::{DflashKeys, DraftFiles, HeadKind};
use super::eagle_head::check_target;
use super::qwen2::upper_windows;
use crate::engine::EngineError;
use crate::engine::hf_config::HfConfig;
use crate::engine::model::Features;
use crate::engine::weights::{self, Parameter};

pub(super) const JOIN: &str = "fc.weight";
pub(super) const FEATURE_NORM: &str = "hidden_norm.weight";
pub(super) const OUTPUT_NORM: &str = "norm.weight";
const INPUT_NORM: &str = "input_layernorm.weight";
const ATTENTION: [&str; 4] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];

/// Keys of variants that are other networks.
const OTHER_NETWORKS: [&str; 9] = [
    "projector_type",
    "selector_rank",
    "selector_top_k",
    "conv_kernel_size",
    "attention_sink_bias",
    "attention_value_scale",
    "final_logit_softcapping",
    "output_multiplier",
    "shift_label",
];

#[derive(Debug, Clone, PartialEq)]
pub struct DflashSpec {
    pub(super) layers: Vec<DflashLayerSpec>,
    /// Layers of the target whose inputs it takes.
    captured: Vec<usize>,
    pub(super) mask: TokenId,
    /// The tokens it may draft, where not all.
    pub(super) hot: Option<Vec<TokenId>>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct DflashLayerSpec {
    pub(super) block: BlockSpec,
    pub(super) sight: Sight,
}

/// What the tokens of a block see in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sight {
    pub(super) window: Option<usize>,
    /// Only what comes before them, not the whole block.
    pub(super) causal: bool,
}

impl DflashSpec {
    /// Refuses what is no DFLASH draft model, or none for this target, and tensors that it does not know. `named` is
    /// the mask where the model's config has no more than its name; `hot` are the tokens it may draft, where not all.
    pub fn read(
        files: &DraftFiles,
        target: &HfConfig,
        named: Option<TokenId>,
        hot: Option<&[TokenId]>,
    ) -> Result<Self, EngineError> {
        let failed = |reason: String| EngineError::Load { what: files.source.describe(), reason };
        check_kind(files).map_err(failed)?;
        check_target(files, target)?;
        let keys = files.config.dflash();
        check_keys(&keys, target).map_err(failed)?;
        let mask = mask(&keys, target, named).map_err(failed)?;
        let shape = &files.shape;
        let outputs = keys.target_layer_ids.unwrap_or_else(|| default_layers(shape.layers, target.layers));
        if outputs.is_empty() || outputs.iter().any(|&layer| layer >= target.layers) {
            return Err(failed(format!(
                "takes the outputs of layers {outputs:?} (target_layer_ids), but the model given by --model has \
                 layers 0 to {}",
                target.layers - 1
            )));
        }
        let spec = Self {
            layers: layers(shape, keys.is_causal).map_err(failed)?,
            captured: outputs.iter().map(|layer| layer + 1).collect(),
            mask,
            hot: hot.map(<[TokenId]>::to_vec),
        };
        weights::check(files.source.as_ref(), &spec.parameters())?;
        spec.check_names(files).map_err(failed)?;
        Ok(spec)
    }

    /// A new draft model of this shape, which sees whole blocks and takes what goes into the layers `captured`.
    pub fn new(shape: &HfConfig, captured: Vec<usize>, mask: TokenId) -> Result<Self, EngineError> {
        let layers = layers(shape, None);
        let layers =
            layers.map_err(|reason| EngineError::Load { what: "a new draft model".into(), reason })?;
        Ok(Self { layers, captured, mask, hot: None })
    }

    pub fn shape(&self) -> &HfConfig {
        &self.layers[0].block.shape
    }

    pub fn captured(&self) -> &[usize] {
        &self.captured
    }

    pub fn mask(&self) -> TokenId {
        self.mask
    }

    pub fn features(&self) -> Features {
        Features::Layers(self.captured.clone())
    }

    /// Numbers it keeps per slot, over all layers.
    pub fn slot_values(&self) -> usize {
        self.layers.iter().map(|layer| layer.block.slot_values()).sum()
    }

    pub fn weight_values(&self) -> usize {
        let hot = self.hot.as_ref().map_or(0, Vec::len);
        values(&self.parameters()) + hot * self.hidden_size()
    }

    pub fn parameters(&self) -> Vec<Parameter> {
        let hidden = self.hidden_size();
        let mut all = vec![
            Parameter { name: JOIN.into(), shape: vec![hidden, self.captured.len() * hidden] },
            Parameter { name: FEATURE_NORM.into(), shape: vec![hidden] },
            Parameter { name: OUTPUT_NORM.into(), shape: vec![hidden] },
        ];
        for layer in &self.layers {
            all.extend(layer.block.parameters());
            all.push(Parameter { name: layer.input_norm(), shape: vec![hidden] });
        }
        all
    }

    fn hidden_size(&self) -> usize {
        self.shape().hidden_size
    }

    /// A tensor that is left over says that the file is another network than this one.
    fn check_names(&self, files: &DraftFiles) -> Result<(), String> {
        let known = self.parameters();
        let is_known = |name: &String| known.iter().any(|parameter| parameter.name == *name);
        let surplus: Vec<_> = files.source.names().into_iter().filter(|name| !is_known(name)).collect();
        match surplus.is_empty() {
            true => Ok(()),
            false => Err(format!("has tensors that no DFLASH draft model has: {}", surplus.join(", "))),
        }
    }
}

impl DflashLayerSpec {
    pub(super) fn input_norm(&self) -> String {
        format!("{}{INPUT_NORM}", self.block.prefix)
    }
}

fn check_kind(files: &DraftFiles) -> Result<(), String> {
    match files.kind() {
        HeadKind::Dflash if files.shape.architecture == "DFlashDraftModel" => Ok(()),
        HeadKind::Dflash => Err(format!(
            "architecture {:?} is no DFLASH draft model; known is DFlashDraftModel",
            files.shape.architecture
        )),
        kind => Err(match kind.algorithm() {
            Some(algorithm) => format!("is no DFLASH draft model; use --speculative-algorithm {algorithm}"),
            None => "has no fc.weight, so it is no DFLASH draft model; for a whole smaller model use \
                     --speculative-algorithm STANDALONE"
                .into(),
        }),
    }
}

fn check_keys(keys: &DflashKeys, target: &HfConfig) -> Result<(), String> {
    if let Some(key) = OTHER_NETWORKS.into_iter().find(|key| keys.sets(key)) {
        return Err(format!(
            "sets {key} in its config.json, which is not supported; use --speculative-algorithm EAGLE3"
        ));
    }
    match keys.num_target_layers.filter(|&layers| layers != target.layers) {
        None => Ok(()),
        Some(layers) => Err(format!(
            "was made for a target of {layers} layers (num_target_layers); the model given by --model has {}",
            target.layers
        )),
    }
}

fn mask(keys: &DflashKeys, target: &HfConfig, named: Option<TokenId>) -> Result<TokenId, String> {
    let mask = keys.mask_token_id.or(named).ok_or(
        "has no mask_token_id in its config.json, and there is no tokenizer to look its mask_token up in",
    )?;
    match target.vocab_size > mask as usize {
        true => Ok(mask),
        false => Err(format!("has mask_token_id {mask}, outside a vocabulary of {}", target.vocab_size)),
    }
}

fn layers(shape: &HfConfig, is_causal: Option<bool>) -> Result<Vec<DflashLayerSpec>, String> {
    let windows = windows(shape)?;
    let biased = if shape.attention_bias { ATTENTION.to_vec() } else { Vec::new() };
    let layer = |(index, window): (usize, Option<usize>)| DflashLayerSpec {
        block: BlockSpec {
            shape: shape.clone(),
            prefix: format!("layers.{index}."),
            input: shape.hidden_size,
            biased: biased.clone(),
            qk_norm: true,
            mlp_norm: MLP_NORM,
            norms_from_one: false,
        },
        sight: Sight { window, causal: is_causal.unwrap_or(window.is_some()) },
    };
    Ok(windows.into_iter().enumerate().map(layer).collect())
}

/// The window of every layer that has one.
fn windows(shape: &HfConfig) -> Result<Vec<Option<usize>>, String> {
    let Some(sliding) = &shape.sliding_layers else { return Ok(upper_windows(shape)) };
    if sliding.len() != shape.layers {
        return Err(format!("has {} layer_types for {} layers", sliding.len(), shape.layers));
    }
    if sliding.contains(&true) && shape.sliding_window.is_none() {
        return Err("has sliding layers in layer_types and no sliding_window".into());
    }
    Ok(sliding.iter().map(|&slides| shape.sliding_window.filter(|_| slides)).collect())
}

/// Outputs spread over the target, where a config names none: the middle layer for one draft layer, else from the
/// second layer to the third last.
fn default_layers(draft_layers: usize, target_layers: usize) -> Vec<usize> {
    if draft_layers == 1 {
        return vec![target_layers / 2];
    }
    let step = target_layers.saturating_sub(4) as f64 / (draft_layers - 1) as f64;
    (0..draft_layers).map(|index| (1.0 + index as f64 * step).round_ties_even() as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_spread_over_the_target_where_none_are_named() {
        assert_eq!(default_layers(1, 6), [3]);
        assert_eq!(default_layers(2, 6), [1, 3]);
        assert_eq!(default_layers(5, 36), [1, 9, 17, 25, 33]);
        // What SpecForge names for Qwen3-32B.
        assert_eq!(default_layers(10, 64), [1, 8, 14, 21, 28, 34, 41, 48, 54, 61]);
    }
}
