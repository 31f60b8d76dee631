//! Gemma 3, text only: scaled embeddings, norms from 1 before and behind every block, norms over heads, and most layers
//! with a window and a rotation of their own.

use super::decoder::{Biases, DecoderSpec, Style};
use crate::engine::hf_config::HfConfig;

/// Every so many layers see everything, where the config does not say.
const PATTERN: usize = 6;
/// Rotation of layers with a window, where the config does not say.
const LOCAL_THETA: f64 = 10_000.0;
/// What queries are scaled by the root of, where the config does not say.
const QUERY_SCALAR: f64 = 256.0;

pub(super) fn describe(config: &HfConfig) -> DecoderSpec {
    let head_dim = config.head_dim as f64;
    let style = Style {
        norms_from_one: true,
        norms_behind: true,
        embedding_scale: Some((config.hidden_size as f64).sqrt()),
        query_scale: (head_dim / config.gemma.query_scalar.unwrap_or(QUERY_SCALAR)).sqrt(),
        local_rope_theta: Some(config.gemma.local_rope_theta.unwrap_or(LOCAL_THETA)),
        logit_softcap: config.gemma.logit_softcap.map(|cap| cap as f32),
    };
    let biases = Biases { qkv: config.attention_bias, output: config.attention_bias, mlp: false };
    DecoderSpec { biases, qk_norm: true, windows: windows(config), style, ..DecoderSpec::plain(config) }
}

fn windows(config: &HfConfig) -> Vec<Option<usize>> {
    let pattern = config.gemma.window_pattern.unwrap_or(PATTERN).max(1);
    let slides = |layer: usize| match &config.sliding_layers {
        Some(layers) => layers.get(layer).copied().unwrap_or(false),
        None => !(layer + 1).is_multiple_of(pattern),
    };
    (0..config.layers).map(|layer| config.sliding_window.filter(|_| slides(layer))).collect()
}
