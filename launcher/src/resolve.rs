//! Owns the one step from flags to configuration: defaults, what depends on the model and on the machine, and
//! the refusal of combinations that cannot work. Nothing after it looks at a flag again.

mod acceptance;
mod adaptive;
mod dflash;
mod draft_model;
mod machine;
mod model;
mod same_tokens;
mod schedule;
mod server_args;
mod spec;

#[cfg(test)]
pub(crate) mod tests;

use std::path::Path;

use anyhow::{Context, Result, bail};
use proto::text::gguf_tokenizer;
use proto::{DeviceKind, Dtype, ModelConfig, Quantization, ServeConfig, ServerConfig, Topology, Weights};

pub use machine::Machine;

use crate::args::{Args, DeviceArg, DtypeArg};
use crate::unsupported::QUANTIZATION;
use model::{ModelFacts, ModelFiles};

/// A configuration, and what the operator should know of how it came about.
#[derive(Debug)]
pub struct Resolved {
    pub config: ServeConfig,
    pub notes: Vec<String>,
}

/// Resolves the flags. `run_dir` exists, `port` is the one really bound. A GGUF's tokenizer is written to
/// `run_dir/tokenizer`.
pub fn resolve(args: &Args, run_dir: &Path, port: u16, machine: &Machine) -> Result<Resolved> {
    let random_seed = args.model.random_seed.unwrap_or_else(random_seed);
    let files = ModelFiles::find(&args.model.model_path, args.model.load_format)?;
    let facts = ModelFacts::read(&files, args.model.tokenizer_path.as_deref())
        .with_context(|| format!("--model-path {}", args.model.model_path.display()))?;
    let model = model_config(args, &files, &facts, run_dir, random_seed, machine)?;
    let (spec, spec_notes) = spec::resolve(&args.spec, &model)?;
    let (schedule, note) = schedule::resolve(args, &model, &facts, random_seed, machine)?;
    let server = server_config(args, &model, schedule.max_running_requests, port)?;
    let notes = std::iter::once(summary(&model, spec.as_ref())).chain(note).chain(spec_notes).collect();
    let mut config = ServeConfig {
        run_dir: run_dir.to_owned(),
        topology: Topology {
            tokenizer_worker_num: args.processes.tokenizer_worker_num,
            detokenizer_worker_num: args.processes.detokenizer_worker_num,
        },
        server,
        model,
        schedule,
        spec,
        server_args: serde_json::Map::new(),
    };
    config.server_args = server_args::of(&config, args);
    Ok(Resolved { config, notes })
}

fn model_config(
    args: &Args,
    files: &ModelFiles,
    facts: &ModelFacts,
    run_dir: &Path,
    seed: u64,
    machine: &Machine,
) -> Result<ModelConfig> {
    let device = match args.model.device {
        DeviceArg::Cpu => DeviceKind::Cpu,
        DeviceArg::Cuda => DeviceKind::Cuda,
    };
    Ok(ModelConfig {
        model_path: args.model.model_path.display().to_string(),
        weights: match files {
            ModelFiles::Folder(dir) => Weights::Safetensors(dir.clone()),
            ModelFiles::Gguf(file) => Weights::Gguf(file.clone()),
            ModelFiles::Shape(dir) => Weights::Dummy { dir: dir.clone(), seed },
        },
        tokenizer_dir: tokenizer_dir(args, files, run_dir)?,
        architectures: facts.architectures.clone(),
        model_type: facts.model_type.clone(),
        vocab_size: facts.vocab_size,
        context_length: context_length(args.model.context_length, facts)?,
        eos_token_ids: facts.eos_token_ids.clone(),
        bos_token_id: facts.bos_token_id,
        dtype: dtype(args.model.dtype, device, machine),
        quantization: quantization(args.model.quantization.as_deref(), files)?,
        device,
        generation_defaults: facts.generation_defaults.clone(),
    })
}

fn quantization(wanted: Option<&str>, files: &ModelFiles) -> Result<Quantization> {
    match (wanted, files) {
        (None, _) | (Some("gguf"), ModelFiles::Gguf(_)) => Ok(Quantization::Gguf),
        (Some("none"), _) => Ok(Quantization::None),
        (Some("gguf"), _) => bail!("--quantization gguf needs a .gguf file as --model-path"),
        (Some(other), _) => bail!("--quantization {other} is not supported: {QUANTIZATION}"),
    }
}

fn context_length(wanted: Option<u32>, facts: &ModelFacts) -> Result<u32> {
    match wanted {
        Some(0) => bail!("--context-length must be at least 1"),
        Some(wanted) if wanted > facts.context_length => bail!(
            "--context-length {wanted} must be at most {}, the positions the model was made for ({})",
            facts.context_length,
            facts.context_source
        ),
        Some(wanted) => Ok(wanted),
        None => Ok(facts.context_length),
    }
}

fn dtype(wanted: DtypeArg, device: DeviceKind, machine: &Machine) -> Dtype {
    match wanted {
        DtypeArg::Float32 => Dtype::Float32,
        DtypeArg::Bfloat16 => Dtype::Bfloat16,
        DtypeArg::Float16 => Dtype::Float16,
        // Without the instructions every product is emulated, and bfloat16 is slower than float32.
        DtypeArg::Auto if device == DeviceKind::Cuda || machine.computes_bfloat16 => Dtype::Bfloat16,
        DtypeArg::Auto => Dtype::Float32,
    }
}

fn tokenizer_dir(args: &Args, files: &ModelFiles, run_dir: &Path) -> Result<Option<std::path::PathBuf>> {
    if args.model.skip_tokenizer_init {
        return Ok(None);
    }
    let dir = match (&args.model.tokenizer_path, files) {
        // A GGUF file may be named as the tokenizer, too.
        (Some(path), _) if path.is_file() && path.extension().is_some_and(|ext| ext == "json") => {
            path.parent().unwrap_or(Path::new(".")).to_owned()
        }
        (Some(path), _) if path.is_dir() => path.clone(),
        (Some(path), _) if path.is_file() => return rebuilt_tokenizer(path, run_dir).map(Some),
        (Some(path), _) => bail!("--tokenizer-path {} does not exist", path.display()),
        (None, ModelFiles::Gguf(file)) => return rebuilt_tokenizer(file, run_dir).map(Some),
        (None, ModelFiles::Folder(dir) | ModelFiles::Shape(dir)) => dir.clone(),
    };
    if !dir.join("tokenizer.json").is_file() {
        bail!(
            "{} has no tokenizer.json: name a folder that has one with --tokenizer-path, or serve token ids \
             with --skip-tokenizer-init",
            dir.display()
        );
    }
    Ok(Some(std::path::absolute(dir)?))
}

fn rebuilt_tokenizer(gguf: &Path, run_dir: &Path) -> Result<std::path::PathBuf> {
    let dir = run_dir.join("tokenizer");
    gguf_tokenizer::write_tokenizer(gguf, &dir)
        .with_context(|| format!("cannot rebuild the tokenizer from {}", gguf.display()))?;
    Ok(dir)
}

fn server_config(args: &Args, model: &ModelConfig, max_running: u32, port: u16) -> Result<ServerConfig> {
    if args.http.stream_interval == 0 {
        bail!("--stream-interval must be at least 1");
    }
    if args.http.max_queued_requests == Some(0) {
        bail!("--max-queued-requests must be at least 1");
    }
    const LEVELS: [&str; 5] = ["error", "warn", "info", "debug", "trace"];
    let log_level = match args.logs.log_level.to_lowercase() {
        level if level == "warning" => "warn".to_owned(),
        level => level,
    };
    // Anything with `=` or `,` is a filter by module, for those who know the modules.
    if !LEVELS.contains(&log_level.as_str()) && !log_level.contains(['=', ',']) {
        bail!("--log-level {} is none of {}", args.logs.log_level, LEVELS.join(", "));
    }
    Ok(ServerConfig {
        host: args.http.host.clone(),
        port,
        served_model_name: args.http.served_model_name.clone().unwrap_or_else(|| model.model_path.clone()),
        api_key: args.http.api_key.clone(),
        enable_metrics: args.logs.enable_metrics,
        enable_cache_report: args.http.enable_cache_report,
        stream_interval: args.http.stream_interval,
        incremental_streaming_output: args.http.incremental_streaming_output,
        skip_tokenizer_init: args.model.skip_tokenizer_init,
        max_queued_requests: args
            .http
            .max_queued_requests
            .unwrap_or_else(|| max_running.saturating_mul(4).max(256)),
        log_level,
    })
}

fn summary(model: &ModelConfig, spec: Option<&proto::SpecConfig>) -> String {
    let speculation = spec.map_or("plain decoding".to_owned(), |spec| {
        let most = if spec.adaptive.is_some() { "at most " } else { "" };
        format!("{} speculation, {most}{} tokens verified per step", spec.name(), spec.num_draft_tokens)
    });
    format!(
        "{} ({}), {}, context {}, {speculation}",
        model.model_path,
        model.architectures.join(", "),
        server_args::dtype_name(model.dtype),
        model.context_length
    )
}

/// A seed nobody chose, from the process's hash keys.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    // SGLang's seeds fit 30 bits; clients that parse them as 32-bit integers keep working.
    RandomState::new().hash_one(std::process::id()) & 0x3fff_ffff
}
