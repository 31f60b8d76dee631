//! Qwen3-MoE: Qwen3 with a mixture of experts in most layers.

use super::decoder::{DecoderSpec, ExpertsSpec};
use super::qwen3;
use crate::engine::hf_config::HfConfig;

pub(super) fn describe(config: &HfConfig) -> DecoderSpec {
    let Some(experts) = &config.experts else { return qwen3::describe(config) };
    let spec = ExpertsSpec {
        count: experts.count,
        per_token: experts.per_token,
        intermediate_size: experts.intermediate_size,
        normalised: experts.normalised,
    };
    let has = |layer: usize| !experts.not_in.contains(&layer) && (layer + 1).is_multiple_of(experts.every);
    let experts = (0..config.layers).map(|layer| has(layer).then_some(spec)).collect();
    DecoderSpec { experts, ..qwen3::describe(config) }
}
