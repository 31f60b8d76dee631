//! Owns the reading of a model's `config.json`, in the published key style and in the one transformers 5 writes.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::EngineError;
use super::layers::rope::RopeScaling;

/// A decoder's shape, with every default filled in.
#[derive(Debug, Clone, PartialEq)]
pub struct HfConfig {
    pub architecture: String,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab_size: usize,
    pub max_positions: usize,
    pub norm_eps: f32,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    /// As the file says; families differ in when they use it.
    pub sliding_window: Option<usize>,
    pub use_sliding_window: bool,
    pub max_window_layers: usize,
    /// Per layer whether it has the sliding window, where the file says so.
    pub sliding_layers: Option<Vec<bool>>,
    pub attention_bias: bool,
    pub mlp_bias: bool,
    pub tied: bool,
}

/// The keys as they lie in the file.
#[derive(Deserialize)]
struct RawConfig {
    #[serde(default)]
    architectures: Vec<String>,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    vocab_size: usize,
    max_position_embeddings: usize,
    #[serde(default = "default_eps")]
    rms_norm_eps: f32,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    rope_parameters: Option<RawRope>,
    partial_rotary_factor: Option<f64>,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    tie_word_embeddings: bool,
    hidden_act: Option<String>,
    quantization_config: Option<Value>,
}

#[derive(Deserialize)]
struct RawRope {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

const DEFAULT_THETA: f64 = 10_000.0;

fn default_eps() -> f32 {
    1e-6
}

impl HfConfig {
    /// Reads `config.json` in `dir`.
    pub fn read(dir: &Path) -> Result<Self, EngineError> {
        let path = dir.join("config.json");
        let failed = |reason: String| EngineError::Load { what: path.display().to_string(), reason };
        let text = std::fs::read(&path).map_err(|error| failed(error.to_string()))?;
        Self::parse(&text).map_err(failed)
    }

    /// Parses the text of a `config.json`.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let raw: RawConfig = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        Self::try_from(raw)
    }

    /// Refuses shapes that no decoder can have.
    pub(super) fn check(self) -> Result<Self, String> {
        let sizes = [
            self.hidden_size,
            self.intermediate_size,
            self.layers,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.vocab_size,
            self.max_positions,
        ];
        if sizes.contains(&0) {
            return Err("a size is 0".into());
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(format!(
                "num_attention_heads {} is no multiple of num_key_value_heads {}",
                self.heads, self.kv_heads
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("head_dim {} is odd", self.head_dim));
        }
        Ok(self)
    }
}

impl TryFrom<RawConfig> for HfConfig {
    type Error = String;

    fn try_from(raw: RawConfig) -> Result<Self, String> {
        if let Some(act) = raw.hidden_act.as_deref().filter(|&act| act != "silu") {
            return Err(format!("hidden_act {act:?} is not supported, only \"silu\""));
        }
        if raw.quantization_config.is_some() {
            return Err("quantized safetensors are not supported; use the full weights or a GGUF file".into());
        }
        if raw.partial_rotary_factor.is_some_and(|factor| factor != 1.0) {
            return Err("partial_rotary_factor is not supported".into());
        }
        let rope = raw.rope_parameters.or(raw.rope_scaling);
        Self {
            architecture: raw.architectures.into_iter().next().ok_or("architectures is missing")?,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            layers: raw.num_hidden_layers,
            heads: raw.num_attention_heads,
            kv_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
            head_dim: match raw.head_dim {
                Some(dim) => dim,
                None => raw.hidden_size.checked_div(raw.num_attention_heads).unwrap_or(0),
            },
            vocab_size: raw.vocab_size,
            max_positions: raw.max_position_embeddings,
            norm_eps: raw.rms_norm_eps,
            rope_theta: raw
                .rope_theta
                .or(rope.as_ref().and_then(|rope| rope.rope_theta))
                .unwrap_or(DEFAULT_THETA),
            rope_scaling: rope.map_or(Ok(RopeScaling::Default), RopeScaling::try_from)?,
            sliding_window: raw.sliding_window,
            use_sliding_window: raw.use_sliding_window.unwrap_or(false),
            max_window_layers: raw.max_window_layers.unwrap_or(raw.num_hidden_layers),
            sliding_layers: raw
                .layer_types
                .map(|types| types.iter().map(|kind| kind == "sliding_attention").collect()),
            attention_bias: raw.attention_bias,
            mlp_bias: raw.mlp_bias,
            tied: raw.tie_word_embeddings,
        }
        .check()
    }
}

impl TryFrom<RawRope> for RopeScaling {
    type Error = String;

    fn try_from(raw: RawRope) -> Result<Self, String> {
        let kind = raw.rope_type.as_deref().unwrap_or("default");
        let need = |value: Option<f64>, name: &str| value.ok_or(format!("rope type {kind:?} needs {name}"));
        match kind {
            "default" => Ok(Self::Default),
            "linear" => Ok(Self::Linear { factor: need(raw.factor, "factor")? }),
            "llama3" => Ok(Self::Llama3 {
                factor: need(raw.factor, "factor")?,
                low_freq_factor: need(raw.low_freq_factor, "low_freq_factor")?,
                high_freq_factor: need(raw.high_freq_factor, "high_freq_factor")?,
                original_max_position: need(
                    raw.original_max_position_embeddings,
                    "original_max_position_embeddings",
                )?,
            }),
            other => {
                Err(format!("rope type {other:?} is not supported; known are default, linear and llama3"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = r#""hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 512"#;

    fn parse(extra: &str) -> Result<HfConfig, String> {
        HfConfig::parse(format!(r#"{{"architectures": ["LlamaForCausalLM"], {BASE}{extra}}}"#).as_bytes())
    }

    #[test]
    fn defaults_are_filled_in() {
        let config = parse("").unwrap();
        assert_eq!((config.kv_heads, config.head_dim, config.tied), (4, 16, false));
        assert_eq!((config.rope_theta, config.rope_scaling), (10_000.0, RopeScaling::Default));
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        let check = |extra: &str, part: &str| {
            let error = parse(extra).unwrap_err();
            assert!(error.contains(part), "{error}");
        };
        check(r#", "hidden_act": "gelu""#, "gelu");
        check(r#", "rope_scaling": {"type": "yarn", "factor": 4.0}"#, "yarn");
        check(r#", "rope_scaling": {"rope_type": "linear"}"#, "factor");
        check(r#", "quantization_config": {}"#, "quantized");
        check(r#", "partial_rotary_factor": 0.5"#, "partial_rotary_factor");
        check(r#", "num_key_value_heads": 3"#, "no multiple");
        check(r#", "head_dim": 15"#, "odd");
    }
}
