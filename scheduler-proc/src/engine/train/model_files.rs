//! Owns the way from `--model` to the configuration an engine is loaded by.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use proto::text::gguf_tokenizer;
use proto::{
    DeviceKind, Dtype, ModelConfig, ScheduleConfig, SchedulePolicy, ServeConfig, ServerConfig, TokenId,
    Weights,
};

use super::args::{Args, DtypeArg};
use crate::engine::model;

/// The target's files.
pub(super) struct TargetFiles {
    weights: Weights,
    tokenizer_dir: PathBuf,
}

impl TargetFiles {
    /// A tokenizer that lies inside a GGUF file is rebuilt beside the corpus.
    pub(super) fn find(args: &Args) -> Result<Self> {
        let path = std::path::absolute(&args.model)?;
        if path.join("config.json").is_file() {
            return Ok(Self { weights: Weights::Safetensors(path.clone()), tokenizer_dir: path });
        }
        let gguf = gguf_at(&path)?;
        let tokenizer_dir = args.corpus_dir().join("tokenizer");
        gguf_tokenizer::write_tokenizer(&gguf, &tokenizer_dir)
            .with_context(|| format!("the tokenizer of {}", gguf.display()))?;
        Ok(Self { weights: Weights::Gguf(gguf), tokenizer_dir })
    }

    pub(super) fn tokenizer_dir(&self) -> &Path {
        &self.tokenizer_dir
    }

    /// The target served plainly, with room for the conversations that are generated.
    pub(super) fn serve_config(&self, args: &Args, eos_token_ids: Vec<TokenId>) -> Result<ServeConfig> {
        let shape = model::shape_of(&self.weights).context("reading the target's shape")?;
        let context_length = args.conversation_len().min(shape.max_positions) as u32;
        Ok(ServeConfig {
            run_dir: PathBuf::new(),
            topology: proto::Topology::default(),
            server: no_server(),
            model: ModelConfig {
                model_path: args.model.display().to_string(),
                weights: self.weights.clone(),
                tokenizer_dir: Some(self.tokenizer_dir.clone()),
                architectures: vec![shape.architecture],
                model_type: String::new(),
                vocab_size: shape.vocab_size as u32,
                context_length,
                eos_token_ids,
                bos_token_id: None,
                dtype: match args.dtype {
                    DtypeArg::Float32 => Dtype::Float32,
                    DtypeArg::Bfloat16 => Dtype::Bfloat16,
                },
                device: DeviceKind::Cpu,
                quantization: proto::Quantization::default(),
                generation_defaults: serde_json::Map::new(),
            },
            schedule: schedule(args, u64::from(context_length)),
            spec: None,
            server_args: serde_json::Map::new(),
        })
    }
}

fn gguf_at(path: &Path) -> Result<PathBuf> {
    if path.is_file() {
        return Ok(path.to_owned());
    }
    let entries = std::fs::read_dir(path).with_context(|| format!("cannot list {}", path.display()))?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let mut files = paths.into_iter().filter(|path| path.extension().is_some_and(|end| end == "gguf"));
    match (files.next(), files.next()) {
        (Some(file), None) => Ok(file),
        _ => bail!("--model {} holds neither config.json nor a single .gguf file", path.display()),
    }
}

/// Nothing listens while a head is trained.
fn no_server() -> ServerConfig {
    ServerConfig {
        host: String::new(),
        port: 0,
        served_model_name: String::new(),
        api_key: None,
        enable_metrics: false,
        enable_cache_report: false,
        stream_interval: 1,
        incremental_streaming_output: false,
        skip_tokenizer_init: false,
        max_queued_requests: 0,
        log_level: String::new(),
    }
}

fn schedule(args: &Args, context_length: u64) -> ScheduleConfig {
    ScheduleConfig {
        max_running_requests: args.generate_rows as u32,
        max_total_tokens: Some(args.generate_rows as u64 * context_length),
        mem_fraction_static: 0.5,
        page_size: 1,
        chunked_prefill_size: 0,
        max_prefill_tokens: 0,
        policy: SchedulePolicy::Fcfs,
        disable_radix_cache: true,
        decode_log_interval: 0,
        random_seed: args.seed,
        num_threads: args.num_threads,
        watchdog_timeout_s: 0.0,
    }
}
