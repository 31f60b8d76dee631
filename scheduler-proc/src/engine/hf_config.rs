//! Owns the reading of a model's `config.json`, in the published key style and in the one transformers 5 writes.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::EngineError;
use super::layers::rope::RopeScaling;
use super::shim::Activation;

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
    pub activation: Activation,
    pub experts: Option<ExpertsConfig>,
    /// Keys that only Gemma has.
    pub gemma: GemmaConfig,
}

/// A mixture of experts in the place of some layers' feed-forward blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertsConfig {
    pub count: usize,
    pub per_token: usize,
    pub intermediate_size: usize,
    pub normalised: bool,
    /// Every so many layers have one,
    pub every: usize,
    /// except these.
    pub not_in: Vec<usize>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct GemmaConfig {
    /// Queries are divided by its root.
    pub query_scalar: Option<f64>,
    /// Rotation of layers with a window.
    pub local_rope_theta: Option<f64>,
    /// Every so many layers have no window, where layers are not named one by one.
    pub window_pattern: Option<usize>,
    /// Logits are squeezed between this and its negative.
    pub logit_softcap: Option<f64>,
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
    tie_word_embeddings: Option<bool>,
    hidden_act: Option<String>,
    hidden_activation: Option<String>,
    num_experts: Option<usize>,
    /// The same in the style of transformers 5.
    num_local_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    #[serde(default)]
    norm_topk_prob: bool,
    decoder_sparse_step: Option<usize>,
    #[serde(default)]
    mlp_only_layers: Vec<usize>,
    query_pre_attn_scalar: Option<f64>,
    rope_local_base_freq: Option<f64>,
    sliding_window_pattern: Option<usize>,
    /// The same as transformers 5 writes it.
    #[serde(rename = "_sliding_window_pattern")]
    own_sliding_window_pattern: Option<usize>,
    attn_logit_softcapping: Option<f64>,
    final_logit_softcapping: Option<f64>,
    use_bidirectional_attention: Option<bool>,
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
    /// Of layers without and with a window, where they differ.
    full_attention: Option<Box<RawRope>>,
    sliding_attention: Option<Box<RawRope>>,
}

/// What a family's configs may leave out.
struct Defaults {
    rope_theta: f64,
    tied: bool,
    head_dim: Option<usize>,
    activation: Activation,
}

const DEFAULTS: Defaults =
    Defaults { rope_theta: 10_000.0, tied: false, head_dim: None, activation: Activation::Silu };
const GEMMA_DEFAULTS: Defaults =
    Defaults { rope_theta: 1_000_000.0, tied: true, head_dim: Some(256), activation: Activation::GeluTanh };

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
        raw.check_supported()?;
        let (activation, experts) = (raw.activation()?, raw.experts()?);
        let defaults = raw.defaults();
        let mut rope = raw.rope_parameters.or(raw.rope_scaling);
        let local = rope.as_mut().and_then(|rope| rope.sliding_attention.take());
        if let Some(full) = rope.as_mut().and_then(|rope| rope.full_attention.take()) {
            rope = Some(*full);
        }
        let gemma = GemmaConfig {
            query_scalar: raw.query_pre_attn_scalar,
            local_rope_theta: raw.rope_local_base_freq.or(local.and_then(|rope| rope.rope_theta)),
            window_pattern: raw.sliding_window_pattern.or(raw.own_sliding_window_pattern),
            logit_softcap: raw.final_logit_softcapping,
        };
        Self {
            architecture: raw.architectures.into_iter().next().ok_or("architectures is missing")?,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            layers: raw.num_hidden_layers,
            heads: raw.num_attention_heads,
            kv_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
            head_dim: match raw.head_dim.or(defaults.head_dim) {
                Some(dim) => dim,
                None => raw.hidden_size.checked_div(raw.num_attention_heads).unwrap_or(0),
            },
            vocab_size: raw.vocab_size,
            max_positions: raw.max_position_embeddings,
            norm_eps: raw.rms_norm_eps,
            rope_theta: raw
                .rope_theta
                .or(rope.as_ref().and_then(|rope| rope.rope_theta))
                .unwrap_or(defaults.rope_theta),
            rope_scaling: rope.map_or(Ok(RopeScaling::Default), RopeScaling::try_from)?,
            sliding_window: raw.sliding_window,
            use_sliding_window: raw.use_sliding_window.unwrap_or(false),
            max_window_layers: raw.max_window_layers.unwrap_or(raw.num_hidden_layers),
            sliding_layers: raw
                .layer_types
                .map(|types| types.iter().map(|kind| kind == "sliding_attention").collect()),
            attention_bias: raw.attention_bias,
            mlp_bias: raw.mlp_bias,
            tied: raw.tie_word_embeddings.unwrap_or(defaults.tied),
            activation,
            experts,
            gemma,
        }
        .check()
    }
}

impl RawConfig {
    fn defaults(&self) -> Defaults {
        match self.architectures.first() {
            Some(name) if name.starts_with("Gemma") => GEMMA_DEFAULTS,
            _ => DEFAULTS,
        }
    }

    /// Refuses what would change a model's results and is not computed.
    fn check_supported(&self) -> Result<(), String> {
        let refused = [
            (self.attn_logit_softcapping.is_some(), "attn_logit_softcapping is not supported"),
            (self.use_bidirectional_attention == Some(true), "use_bidirectional_attention is not supported"),
            (
                self.quantization_config.is_some(),
                "quantized safetensors are not supported; use the full weights or a GGUF file",
            ),
            (
                self.partial_rotary_factor.is_some_and(|factor| factor != 1.0),
                "partial_rotary_factor is not supported",
            ),
        ];
        match refused.into_iter().find(|(sets, _)| *sets) {
            None => Ok(()),
            Some((_, reason)) => Err(reason.into()),
        }
    }

    fn activation(&self) -> Result<Activation, String> {
        match self.hidden_act.as_deref().or(self.hidden_activation.as_deref()) {
            None => Ok(self.defaults().activation),
            Some("silu") => Ok(Activation::Silu),
            Some("gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
            Some(other) => Err(format!(
                "hidden_act {other:?} is not supported; known are \"silu\" and \"gelu_pytorch_tanh\""
            )),
        }
    }

    fn experts(&self) -> Result<Option<ExpertsConfig>, String> {
        let Some(count) = self.num_experts.or(self.num_local_experts).filter(|&count| count > 0) else {
            return Ok(None);
        };
        let need = |value: Option<usize>, name: &str| value.ok_or(format!("{count} experts need {name}"));
        let per_token = need(self.num_experts_per_tok, "num_experts_per_tok")?;
        if per_token == 0 || per_token > count {
            return Err(format!(
                "num_experts_per_tok {per_token} must be 1 to {count}, the number of experts"
            ));
        }
        Ok(Some(ExpertsConfig {
            count,
            per_token,
            intermediate_size: need(self.moe_intermediate_size, "moe_intermediate_size")?,
            normalised: self.norm_topk_prob,
            every: self.decoder_sparse_step.unwrap_or(1).max(1),
            not_in: self.mlp_only_layers.clone(),
        }))
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
