//! Qwen2: biases on queries, keys and values; a sliding window in the upper layers if switched on.

use super::decoder::{Biases, DecoderSpec};
use crate::engine::hf_config::HfConfig;

pub(super) fn describe(config: &HfConfig) -> DecoderSpec {
    let biases = Biases { qkv: true, ..Biases::default() };
    DecoderSpec { biases, windows: upper_windows(config), ..DecoderSpec::plain(config) }
}

/// Layers from `max_window_layers` on have the window.
pub(super) fn upper_windows(config: &HfConfig) -> Vec<Option<usize>> {
    let window = config.sliding_window.filter(|_| config.use_sliding_window);
    (0..config.layers).map(|layer| window.filter(|_| layer >= config.max_window_layers)).collect()
}
