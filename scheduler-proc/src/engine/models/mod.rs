//! Owns the table of model families, each a description of the one decoder stack, and the draft heads.

pub mod decoder;
pub mod dflash_head;
pub mod dflash_spec;
pub mod draft;
pub mod draft_block;
pub mod draft_config;
mod draft_output;
pub mod eagle3_head;
mod eagle3_spec;
pub mod eagle_head;
mod gemma3;
mod llama;
mod mistral;
pub mod mtp_head;
mod mtp_layout;
mod qwen2;
mod qwen3;
mod qwen3_moe;
pub mod token_map;

use self::decoder::DecoderSpec;
use super::EngineError;
use super::hf_config::HfConfig;

type Describe = fn(&HfConfig) -> DecoderSpec;

/// Hugging Face architecture and its description.
const FAMILIES: [(&str, Describe); 7] = [
    ("Gemma3ForCausalLM", gemma3::describe),
    ("LlamaForCausalLM", llama::describe),
    // MiMo-7B is Qwen2 with multi-token-prediction layers behind it.
    ("MiMoForCausalLM", qwen2::describe),
    ("MistralForCausalLM", mistral::describe),
    ("Qwen2ForCausalLM", qwen2::describe),
    ("Qwen3ForCausalLM", qwen3::describe),
    ("Qwen3MoeForCausalLM", qwen3_moe::describe),
];

/// The description of a config's model.
pub fn describe(config: &HfConfig) -> Result<DecoderSpec, EngineError> {
    let family = FAMILIES.iter().find(|(name, _)| *name == config.architecture);
    let (_, describe) = family.ok_or_else(|| {
        let known: Vec<&str> = FAMILIES.iter().map(|(name, _)| *name).collect();
        EngineError::Load {
            what: format!("architecture {:?}", config.architecture),
            reason: format!("unknown; known are {}", known.join(", ")),
        }
    })?;
    Ok(describe(config))
}

#[cfg(test)]
pub(super) mod tests;
