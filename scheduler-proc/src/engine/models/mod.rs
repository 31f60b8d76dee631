//! Owns the table of model families, each a description of the one decoder stack, and the draft heads.

pub mod decoder;
pub mod draft;
mod draft_block;
pub mod draft_config;
pub mod eagle3_head;
pub mod eagle_head;
mod llama;
mod mistral;
mod qwen2;
mod qwen3;

use self::decoder::DecoderSpec;
use super::EngineError;
use super::hf_config::HfConfig;

type Describe = fn(&HfConfig) -> DecoderSpec;

/// Hugging Face architecture and its description.
const FAMILIES: [(&str, Describe); 4] = [
    ("LlamaForCausalLM", llama::describe),
    ("MistralForCausalLM", mistral::describe),
    ("Qwen2ForCausalLM", qwen2::describe),
    ("Qwen3ForCausalLM", qwen3::describe),
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
