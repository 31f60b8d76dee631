//! Owns the resolved configuration: one tree, written once by the launcher, read by every child, never changed
//! afterwards. Defaults and cross-checks live in the launcher; here are only facts.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::adaptive::AdaptiveConfig;
use crate::ids::TokenId;
use crate::topology::Topology;

/// Everything a process needs to know.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServeConfig {
    /// Sockets, metric snapshots and the tokenizer rebuilt from a GGUF file live here, mode 0700.
    pub run_dir: PathBuf,
    #[serde(default)]
    pub topology: Topology,
    pub server: ServerConfig,
    pub model: ModelConfig,
    pub schedule: ScheduleConfig,
    /// `None` means plain decoding.
    pub spec: Option<SpecConfig>,
    /// Every resolved flag by its SGLang name, for `/server_info`.
    pub server_args: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServerConfig {
    pub host: String,
    /// The port really bound.
    pub port: u16,
    pub served_model_name: String,
    pub api_key: Option<String>,
    pub enable_metrics: bool,
    pub enable_cache_report: bool,
    /// Tokens per streamed chunk.
    pub stream_interval: u32,
    /// Stream chunks of `/generate` carry deltas instead of the text so far.
    pub incremental_streaming_output: bool,
    pub skip_tokenizer_init: bool,
    /// Requests that may wait in the tokenizer process and scheduler together; more get 503.
    pub max_queued_requests: u32,
    pub log_level: String,
}

/// Where the weights come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Weights {
    /// A folder with `config.json` and one or more `.safetensors` files.
    Safetensors(PathBuf),
    Gguf(PathBuf),
    /// Random weights in the shape of the folder's `config.json`, drawn from the seed.
    Dummy {
        dir: PathBuf,
        seed: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    Float32,
    Bfloat16,
    Float16,
}

impl Dtype {
    /// Whether this processor multiplies the type in hardware; otherwise every product is emulated.
    pub fn is_computed_by_this_cpu(self) -> bool {
        match self {
            Self::Float32 => true,
            #[cfg(target_arch = "x86_64")]
            Self::Bfloat16 => std::is_x86_feature_detected!("avx512bf16"),
            _ => false,
        }
    }
}

/// What becomes of the blocks of a GGUF's quantised weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Quantization {
    /// They stay as they are wherever a kernel decodes them: on a CPU, to bfloat16.
    #[default]
    Gguf,
    /// They are decoded once, while loading.
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    Cpu,
    Cuda,
}

/// The target model, as far as processes other than the engine need it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// As given by the user.
    pub model_path: String,
    pub weights: Weights,
    /// Folder with `tokenizer.json` and `tokenizer_config.json`; `None` with `--skip-tokenizer-init`.
    pub tokenizer_dir: Option<PathBuf>,
    pub architectures: Vec<String>,
    pub model_type: String,
    pub vocab_size: u32,
    /// Prompt and answer together.
    pub context_length: u32,
    /// Union of config, generation config and tokenizer.
    pub eos_token_ids: Vec<TokenId>,
    pub bos_token_id: Option<TokenId>,
    pub dtype: Dtype,
    #[serde(default)]
    pub quantization: Quantization,
    pub device: DeviceKind,
    /// Sampling defaults of `generation_config.json`, for the chat route.
    pub generation_defaults: Map<String, Value>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SchedulePolicy {
    /// First come, first served.
    Fcfs,
    /// Longest prefix match first.
    Lpm,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScheduleConfig {
    pub max_running_requests: u32,
    /// KV slots; `None` lets the scheduler size the pool from memory.
    pub max_total_tokens: Option<u64>,
    /// Share of free memory the pool may take when sized from memory.
    pub mem_fraction_static: f64,
    pub page_size: u32,
    /// Prompt tokens per step, over all requests.
    pub chunked_prefill_size: u32,
    /// Prompt tokens admitted per step, over all requests.
    pub max_prefill_tokens: u32,
    pub policy: SchedulePolicy,
    pub disable_radix_cache: bool,
    pub decode_log_interval: u32,
    pub random_seed: u64,
    /// Threads of the engine's tensor operations.
    pub num_threads: u32,
    pub watchdog_timeout_s: f64,
}

/// The speculative algorithm, with its draft's settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SpecConfig {
    pub algorithm: SpecAlgorithm,
    pub num_steps: u32,
    pub eagle_topk: u32,
    /// Width of a verify step, the root included.
    pub num_draft_tokens: u32,
    #[serde(default)]
    pub acceptance: AcceptanceRule,
    /// Depth follows acceptance and load; `num_steps` and `num_draft_tokens` are then those of the deepest candidate,
    /// so that whoever sizes a buffer by them sizes it for all.
    #[serde(default)]
    pub adaptive: Option<AdaptiveConfig>,
    /// N-grams that draft before the model of `algorithm` is asked.
    #[serde(default)]
    pub ngram_first: Option<NgramFirst>,
}

impl SpecConfig {
    /// The algorithm by SGLang's name, with what drafts before it.
    pub fn name(&self) -> String {
        let name = self.algorithm.as_str();
        if self.ngram_first.is_some() { format!("{name}+NGRAM") } else { name.to_owned() }
    }
}

/// N-grams beside a draft model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NgramFirst {
    pub ngram: NgramConfig,
    /// Tokens before a draft that must have been seen before, one after the other.
    pub min_match: u32,
}

/// When the target accepts a draft of a sampled request. Greedy ones accept what is the argmax, by any rule.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub enum AcceptanceRule {
    /// When it is what the target chooses itself, with noise that only the request and the position decide. Output
    /// does not depend on the draft.
    #[default]
    Equality,
    /// By the ratio of both models' probabilities: rejection sampling, as SGLang's. Output has the target's law, and
    /// depends on the draft.
    Rejection,
    /// By the target's probability of it against thresholds, as SGLang's. Below 1 they bias the output towards the
    /// draft.
    Thresholds { single: f64, acc: f64 },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum SpecAlgorithm {
    Ngram(NgramConfig),
    /// EAGLE-1 and -2: a one-layer head on the target's final hidden states.
    Eagle(DraftModelConfig),
    /// The target's multi-token-prediction layers, each for one step.
    MultiLayerEagle(DraftModelConfig),
    /// A one-layer head on hidden states captured inside the target.
    Eagle3(DraftModelConfig),
    /// A whole smaller model with the same vocabulary.
    Standalone(DraftModelConfig),
    /// A model that denoises a block of mask tokens in one pass.
    Dflash(DflashConfig),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DflashConfig {
    pub model: DraftModelConfig,
    /// A block is denoised whole also where a request may draft less.
    #[serde(default)]
    pub fixed_block: bool,
    /// What stands for a token to be drafted, where the draft model's config says its name instead of its id.
    #[serde(default)]
    pub mask_token: Option<TokenId>,
}

/// The model that drafts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftModelConfig {
    /// As given by the user.
    pub path: String,
    pub weights: Weights,
    /// File of the only tokens it may draft, where it may not draft all.
    #[serde(default)]
    pub token_map: Option<PathBuf>,
}

impl SpecAlgorithm {
    /// The model that drafts, where one does.
    pub const fn draft_model(&self) -> Option<&DraftModelConfig> {
        match self {
            Self::Ngram(_) => None,
            Self::Eagle(draft)
            | Self::MultiLayerEagle(draft)
            | Self::Eagle3(draft)
            | Self::Standalone(draft) => Some(draft),
            Self::Dflash(dflash) => Some(&dflash.model),
        }
    }

    /// SGLang's name.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Ngram(_) => "NGRAM",
            Self::Eagle(_) | Self::MultiLayerEagle(_) => "EAGLE",
            Self::Eagle3(_) => "EAGLE3",
            Self::Standalone(_) => "STANDALONE",
            Self::Dflash(_) => "DFLASH",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NgramMatchType {
    /// Most recent continuation first.
    Bfs,
    /// Most frequent continuation first.
    Prob,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NgramConfig {
    pub min_bfs_breadth: u32,
    pub max_bfs_breadth: u32,
    pub match_type: NgramMatchType,
    pub max_trie_depth: u32,
    /// Trie nodes.
    pub capacity: u64,
}

/// Why a configuration could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read or write {path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{path} is not a configuration of this version: {source}")]
    Format { path: PathBuf, source: serde_json::Error },
}

impl ServeConfig {
    /// The file children are pointed at.
    pub fn path(&self) -> PathBuf {
        self.run_dir.join("config.json")
    }

    pub fn store(&self) -> Result<(), ConfigError> {
        let path = self.path();
        let text = serde_json::to_vec_pretty(self)
            .map_err(|source| ConfigError::Format { path: path.clone(), source })?;
        std::fs::write(&path, text).map_err(|source| ConfigError::Io { path, source })
    }

    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read(path).map_err(|source| ConfigError::Io { path: path.to_owned(), source })?;
        serde_json::from_slice(&text).map_err(|source| ConfigError::Format { path: path.to_owned(), source })
    }

    /// Folder of the metric snapshots.
    pub fn metrics_dir(&self) -> PathBuf {
        self.run_dir.join("metrics")
    }
}
