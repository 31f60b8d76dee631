//! Owns the reading of a draft head's `config.json` and the names of its tensors, as published.

use std::path::Path;

use proto::TokenId;
use serde::Deserialize;
use tch::Tensor;

use super::mtp_layout::MtpPlace;
use crate::engine::EngineError;
use crate::engine::hf_config::HfConfig;
use crate::engine::weights::{SafetensorFiles, WeightSource};

/// A draft head's folder: its shape, what its config adds to that, and its tensors.
pub struct DraftFiles {
    pub shape: HfConfig,
    pub config: HeadConfig,
    pub source: Box<dyn WeightSource>,
}

/// What a folder's tensors say it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadKind {
    Eagle,
    Eagle3,
    Dflash,
    /// A checkpoint that brings multi-token-prediction layers along.
    Mtp,
    /// No head: a whole model, or nothing known.
    None,
}

impl HeadKind {
    /// The algorithm that drafts with it.
    pub const fn algorithm(self) -> Option<&'static str> {
        match self {
            Self::Eagle => Some("EAGLE"),
            Self::Eagle3 => Some("EAGLE3"),
            Self::Dflash => Some("DFLASH"),
            Self::Mtp => Some("NEXTN"),
            Self::None => None,
        }
    }
}

/// Keys that only heads have. What a key leaves open the tensors tell.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct HeadConfig {
    pub draft_vocab_size: Option<usize>,
    pub target_hidden_size: Option<usize>,
    /// How many layers it captures, for heads that do not name them.
    pub num_aux_hidden_states: Option<usize>,
    /// What the head passes on went through its last norm.
    #[serde(default)]
    pub norm_output: bool,
    /// The residual stream begins behind the norm of the hidden state, not before.
    #[serde(default)]
    pub norm_before_residual: bool,
    norm_before_fc: Option<bool>,
    fc_norm: Option<bool>,
    use_aux_norm: Option<bool>,
    eagle_config: Option<EagleConfig>,
    #[serde(flatten)]
    dflash: DflashKeys,
    dflash_config: Option<DflashKeys>,
}

/// What a DFLASH config says of its blocks, in `dflash_config` or beside it.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct DflashKeys {
    pub block_size: Option<usize>,
    pub mask_token_id: Option<TokenId>,
    /// Layers of the target whose outputs it takes.
    pub target_layer_ids: Option<Vec<usize>>,
    pub num_target_layers: Option<usize>,
    /// For all layers; without it the sliding ones are and the others are not.
    pub is_causal: Option<bool>,
    /// Everything else.
    #[serde(flatten)]
    other: serde_json::Map<String, serde_json::Value>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
struct EagleConfig {
    eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
    use_aux_hidden_state: Option<bool>,
    norm_before_fc: Option<bool>,
}

/// Where a head's config names no layers.
pub fn default_captured_layers(target_layers: usize) -> [usize; 3] {
    [2, target_layers / 2, target_layers.saturating_sub(3)]
}

impl HeadConfig {
    /// The layers of the target whose inputs the head takes. The config counts outputs, one lower.
    pub fn captured_layers(&self, target_layers: usize) -> Option<Vec<usize>> {
        let config = self.eagle_config.as_ref();
        if config.is_some_and(|config| config.use_aux_hidden_state == Some(false)) {
            return None;
        }
        let ids = config.and_then(|config| config.eagle_aux_hidden_state_layer_ids.as_deref());
        Some(match ids {
            Some(ids) => ids.iter().map(|id| id + 1).collect(),
            None => default_captured_layers(target_layers).to_vec(),
        })
    }

    /// The DFLASH keys, those of `dflash_config` first.
    pub fn dflash(&self) -> DflashKeys {
        let (outer, inner) = (&self.dflash, self.dflash_config.clone().unwrap_or_default());
        let mut other = outer.other.clone();
        other.extend(inner.other);
        DflashKeys {
            block_size: inner.block_size.or(outer.block_size),
            mask_token_id: inner.mask_token_id.or(outer.mask_token_id),
            target_layer_ids: inner.target_layer_ids.or_else(|| outer.target_layer_ids.clone()),
            num_target_layers: inner.num_target_layers.or(outer.num_target_layers),
            is_causal: inner.is_causal.or(outer.is_causal),
            other,
        }
    }

    /// Whether one norm goes over all captured features together.
    pub fn norms_features(&self) -> Option<bool> {
        let inner = self.eagle_config.as_ref().and_then(|config| config.norm_before_fc);
        inner.or(self.norm_before_fc)
    }

    /// Whether each captured layer has a norm of its own.
    pub fn norms_parts(&self) -> Option<bool> {
        self.fc_norm.or(self.use_aux_norm)
    }
}

impl DflashKeys {
    /// Whether another key is set to something that is not off.
    pub fn sets(&self, key: &str) -> bool {
        use serde_json::Value;
        match self.other.get(key) {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Number(number)) => number.as_f64() != Some(0.0),
            Some(_) => true,
        }
    }
}

impl DraftFiles {
    pub fn open(dir: &Path) -> Result<Self, EngineError> {
        let shape = HfConfig::read(dir)?;
        let path = dir.join("config.json");
        let failed = |reason: String| EngineError::Load { what: path.display().to_string(), reason };
        let text = std::fs::read(&path).map_err(|error| failed(error.to_string()))?;
        let config = serde_json::from_slice(&text).map_err(|error| failed(error.to_string()))?;
        let source = Box::new(HeadTensors { files: SafetensorFiles::open(dir)? });
        Ok(Self { shape, config, source })
    }

    pub fn kind(&self) -> HeadKind {
        let has = |name: &str| self.source.shape(name).is_some();
        let joins = has("fc.weight");
        match () {
            () if self.shape.architecture.starts_with("DFlash") => HeadKind::Dflash,
            () if joins && self.shape.architecture.ends_with("Eagle3") => HeadKind::Eagle3,
            () if has("d2t") || has("layers.0.hidden_norm.weight") => HeadKind::Eagle3,
            () if joins && has("hidden_norm.weight") => HeadKind::Dflash,
            () if joins => HeadKind::Eagle,
            () if MtpPlace::find(self.source.as_ref(), self.shape.layers, 0).is_some() => HeadKind::Mtp,
            () => HeadKind::None,
        }
    }
}

/// Tensors of a head under one set of names: without `model.`, and by the first of these names.
struct HeadTensors {
    files: SafetensorFiles,
}

const OTHER_NAMES: [(&str, &str); 3] = [
    ("layers.0.", "midlayer."),
    ("fc.weight", "encoder.fc.weight"),
    ("hidden_norm.weight", "encoder.output_norm_enc.weight"),
];

impl HeadTensors {
    fn stored_name(&self, name: &str) -> Option<String> {
        let other = |(first, other): (&str, &str)| Some(format!("{other}{}", name.strip_prefix(first)?));
        let others = OTHER_NAMES.into_iter().filter_map(other);
        std::iter::once(name.to_owned())
            .chain(others)
            .flat_map(|name| [format!("model.{name}"), name])
            .find(|name| self.files.shape(name).is_some())
    }
}

impl WeightSource for HeadTensors {
    fn describe(&self) -> String {
        self.files.describe()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.files.shape(&self.stored_name(name)?)
    }

    fn names(&self) -> Vec<String> {
        let canonical = |name: String| {
            let name = name.strip_prefix("model.").map_or(name.clone(), str::to_owned);
            let first = |(first, other): (&str, &str)| Some(format!("{first}{}", name.strip_prefix(other)?));
            OTHER_NAMES.into_iter().find_map(first).unwrap_or(name)
        };
        self.files.names().into_iter().map(canonical).collect()
    }

    fn bytes(&self, name: &str) -> u64 {
        self.stored_name(name).map_or(0, |name| self.files.bytes(&name))
    }

    fn read(&mut self, name: &str) -> Result<Tensor, EngineError> {
        let stored = self.stored_name(name);
        self.files.read(stored.as_deref().unwrap_or(name))
    }

    fn read_integers(&mut self, name: &str) -> Result<Vec<i64>, EngineError> {
        let stored = self.stored_name(name);
        self.files.read_integers(stored.as_deref().unwrap_or(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn captured_layers_count_inputs() {
        let parse = |text: &str| serde_json::from_str::<HeadConfig>(text).unwrap();
        let check = |text: &str, layers, expect: Option<&[usize]>| {
            assert_eq!(parse(text).captured_layers(layers).as_deref(), expect, "{text}");
        };
        check("{}", 8, Some(&[2, 4, 5]));
        check("{}", 30, Some(&[2, 15, 27]));
        check(
            r#"{"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 33]}}"#,
            36,
            Some(&[2, 18, 34]),
        );
        check(r#"{"eagle_config": {"use_aux_hidden_state": false}}"#, 36, None);
    }
}
