//! Owns the checkpoint as published: `config.json` and `model.safetensors` in bfloat16, which SGLang's loaders take as
//! well as ours, and for heads that say the target's own tokens a token map beside them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use proto::TokenId;
use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};

use super::net::HeadSpec;
use super::params::Params;
use super::state::write_tensors;
use super::vocabulary::Vocabulary;
use crate::engine::hf_config::HfConfig;
use crate::engine::layers::rope::RopeScaling;

/// A head and the folder it goes to.
pub(super) struct Checkpoint<'a> {
    pub spec: &'a HeadSpec,
    /// Drafts it is made for.
    pub drafts: usize,
    pub target_layers: usize,
    pub params: &'a Params,
    pub vocabulary: &'a Vocabulary,
    pub eos_token_ids: &'a [TokenId],
}

impl Checkpoint<'_> {
    pub(super) fn write(&self, dir: &Path) -> Result<()> {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let config = serde_json::to_string_pretty(&self.config()?)? + "\n";
        std::fs::write(dir.join("config.json"), config)?;
        let params = self.params.cast(Kind::BFloat16);
        let mut tensors: Vec<(String, &Tensor)> =
            params.iter().map(|(name, tensor)| (self.published(name), tensor)).collect();
        let (offsets, known) = (self.offsets(), self.known());
        match self.spec {
            HeadSpec::Eagle(_) | HeadSpec::MultiLayer(_) | HeadSpec::Dflash(_) => {
                std::fs::write(token_map(dir), serde_json::to_vec(self.vocabulary.ids())?)?;
            }
            HeadSpec::Eagle3(_) => {
                tensors.push(("d2t".into(), &offsets));
                tensors.push(("t2d".into(), &known));
            }
        }
        write_tensors(&dir.join("model.safetensors"), tensors, None)
    }

    fn published(&self, name: &str) -> String {
        match (self.spec, name.strip_prefix("layers.0.")) {
            (HeadSpec::Eagle3(_), Some(rest)) => format!("midlayer.{rest}"),
            _ => name.to_owned(),
        }
    }

    /// `d2t`: what to add to a draft token to get the target's.
    fn offsets(&self) -> Tensor {
        let ids = (0i64..).zip(self.vocabulary.ids());
        Tensor::from_slice(&ids.map(|(draft, &id)| i64::from(id) - draft).collect::<Vec<_>>())
    }

    /// `t2d`: which of the target's tokens the draft can say.
    fn known(&self) -> Tensor {
        let ids: Vec<i64> = self.vocabulary.ids().iter().map(|&id| i64::from(id)).collect();
        let size = self.spec.shape().vocab_size as i64;
        Tensor::zeros([size], (Kind::Bool, Device::Cpu)).index_fill(0, &Tensor::from_slice(&ids), 1)
    }

    fn config(&self) -> Result<Value> {
        let shape = self.spec.shape();
        let mut config = json!({
            "architectures": [shape.architecture],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "vocab_size": shape.vocab_size,
            "max_position_embeddings": shape.max_positions,
            "rms_norm_eps": shape.norm_eps,
            "rope_theta": shape.rope_theta,
            "rope_scaling": rope_scaling(&shape.rope_scaling)?,
            "attention_bias": false,
            "mlp_bias": false,
            "tie_word_embeddings": false,
            "torch_dtype": "bfloat16",
            "eos_token_id": self.eos_token_ids.first(),
        });
        let outputs =
            |inputs: &[usize]| -> Vec<usize> { inputs.iter().map(|layer| layer.saturating_sub(1)).collect() };
        let more = match self.spec {
            HeadSpec::Eagle(_) => json!({"bias": true}),
            HeadSpec::MultiLayer(specs) => json!({"num_nextn_predict_layers": specs.len()}),
            HeadSpec::Dflash(spec) => json!({
                "model_type": "qwen3",
                "block_size": self.drafts + 1,
                "num_target_layers": self.target_layers,
                "dflash_config": {
                    "mask_token_id": spec.mask(),
                    "target_layer_ids": outputs(spec.captured()),
                },
            }),
            HeadSpec::Eagle3(spec) => {
                json!({
                    "draft_vocab_size": self.vocabulary.ids().len(),
                    "target_hidden_size": shape.hidden_size,
                    "eagle_config": {
                        "eagle_aux_hidden_state_layer_ids": outputs(spec.captured().unwrap_or_default()),
                        "use_aux_hidden_state": true,
                    },
                })
            }
        };
        if let (Value::Object(config), Value::Object(more)) = (&mut config, more) {
            config.extend::<Map<String, Value>>(more);
        }
        Ok(config)
    }
}

fn rope_scaling(scaling: &RopeScaling) -> Result<Value> {
    Ok(match *scaling {
        RopeScaling::Default => Value::Null,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position,
        }),
        RopeScaling::Factors(_) => {
            bail!("the target's rope factors are only known to GGUF files; train from its safetensors")
        }
    })
}

/// Where a checkpoint has the tokens it was taught about, as `--speculative-token-map` takes them.
pub(super) fn token_map(dir: &Path) -> PathBuf {
    dir.join("token_map.json")
}

/// The shape of a head for a target: one layer like the target's own.
pub(super) fn head_shape(target: &HfConfig, architecture: &str) -> HfConfig {
    HfConfig {
        architecture: architecture.to_owned(),
        layers: 1,
        sliding_window: None,
        use_sliding_window: false,
        attention_bias: false,
        mlp_bias: false,
        tied: false,
        ..target.clone()
    }
}
