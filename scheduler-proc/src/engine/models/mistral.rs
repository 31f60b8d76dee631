//! Mistral: the plain stack with a sliding window in every layer, unless the config has none.

use super::decoder::DecoderSpec;
use crate::engine::hf_config::HfConfig;

pub(super) fn describe(config: &HfConfig) -> DecoderSpec {
    DecoderSpec { windows: vec![config.sliding_window; config.layers], ..DecoderSpec::plain(config) }
}
