//! Qwen3: a norm over each head of queries and keys; windows as in Qwen2.

use super::decoder::{Biases, DecoderSpec};
use super::qwen2::upper_windows;
use crate::engine::hf_config::HfConfig;

pub(super) fn describe(config: &HfConfig) -> DecoderSpec {
    let biases = Biases { qkv: config.attention_bias, output: config.attention_bias, mlp: false };
    DecoderSpec { biases, qk_norm: true, windows: upper_windows(config), ..DecoderSpec::plain(config) }
}
