//! Llama: the plain stack. Biases where the config says so.

use super::decoder::{Biases, DecoderSpec};
use crate::engine::hf_config::HfConfig;

pub(super) fn describe(config: &HfConfig) -> DecoderSpec {
    let biases = Biases { qkv: config.attention_bias, output: config.attention_bias, mlp: config.mlp_bias };
    DecoderSpec { biases, ..DecoderSpec::plain(config) }
}
