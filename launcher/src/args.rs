//! Owns the command line: plain data with SGLang's flag names. What a value means is decided in `resolve`.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, ValueEnum};

const COMMANDS: &str = "On a server that runs (each with --help):\n  launcher ps              its processes\n  launcher \
    restart <ROLE>  replace its processes, one after the other\n  launcher drain           finish what runs, then end\n  launcher logs <ROLE>     \
    what a process wrote last";

/// Serves a language model over SGLang's HTTP API, with speculative decoding.
#[derive(Debug, Clone, Parser)]
#[command(name = "launcher", version, args_override_self = true, max_term_width = 110, after_help = COMMANDS)]
pub struct Args {
    #[command(flatten, next_help_heading = "Model")]
    pub model: ModelArgs,
    #[command(flatten, next_help_heading = "HTTP server")]
    pub http: HttpArgs,
    #[command(flatten, next_help_heading = "Memory and scheduling")]
    pub schedule: ScheduleArgs,
    #[command(flatten, next_help_heading = "Speculative decoding")]
    pub spec: SpecArgs,
    #[command(flatten, next_help_heading = "Processes")]
    pub processes: ProcessArgs,
    #[command(flatten, next_help_heading = "Logs and metrics")]
    pub logs: LogArgs,
}

#[derive(Debug, Clone, ClapArgs)]
pub struct ModelArgs {
    /// Hugging Face folder, GGUF file, or folder with a single GGUF file
    #[arg(long = "model-path", visible_alias = "model", value_name = "PATH")]
    pub model_path: PathBuf,
    /// Folder with tokenizer.json [default: the model's]
    #[arg(long, value_name = "DIR")]
    pub tokenizer_path: Option<PathBuf>,
    /// Take and return token ids only
    #[arg(long)]
    pub skip_tokenizer_init: bool,
    /// Format of the weights; dummy makes random ones in the shape of config.json
    #[arg(long, value_enum, default_value_t = LoadFormat::Auto, value_name = "FORMAT")]
    pub load_format: LoadFormat,
    /// What becomes of a GGUF's blocks: they stay quantised in memory where the type is bfloat16 and the device a CPU (gguf), or are decoded while loading (none) [default: gguf]
    #[arg(long, value_name = "METHOD")]
    pub quantization: Option<String>,
    /// Precision of weights and KV; auto is bfloat16 where the CPU computes in it, else float32
    #[arg(long, value_enum, default_value_t = DtypeArg::Auto, value_name = "DTYPE")]
    pub dtype: DtypeArg,
    /// Where the model runs
    #[arg(long, value_enum, default_value_t = DeviceArg::Cpu, value_name = "DEVICE")]
    pub device: DeviceArg,
    /// Prompt and answer together, in tokens [default: what the model was made for]
    #[arg(long, value_name = "TOKENS")]
    pub context_length: Option<u32>,
    /// Threads of the model's arithmetic [default: the CPUs of this machine]
    #[arg(long, value_name = "N")]
    pub num_threads: Option<u32>,
    /// Seed for requests that bring none, and for dummy weights [default: random]
    #[arg(long, value_name = "SEED")]
    pub random_seed: Option<u64>,
}

#[derive(Debug, Clone, ClapArgs)]
pub struct HttpArgs {
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    pub host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 30000, value_name = "PORT")]
    pub port: u16,
    /// Name in /v1/models and in the metrics [default: the model path]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Key that clients must send as a bearer token
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Tokens per streamed chunk
    #[arg(long, default_value_t = 1, value_name = "TOKENS")]
    pub stream_interval: u32,
    /// Chunks of a streamed /generate carry the new text only, not all of it
    #[arg(long)]
    pub incremental_streaming_output: bool,
    /// Report cached prompt tokens in the usage of the OpenAI routes
    #[arg(long)]
    pub enable_cache_report: bool,
    /// Requests that may wait; more are answered 503 [default: 4 x --max-running-requests, at least 256]
    #[arg(long, value_name = "N")]
    pub max_queued_requests: Option<u32>,
}

#[derive(Debug, Clone, ClapArgs)]
pub struct ScheduleArgs {
    /// Requests decoded together [default: from memory and context length]
    #[arg(long, value_name = "N")]
    pub max_running_requests: Option<u32>,
    /// Tokens in the KV pool [default: from memory]
    #[arg(long, value_name = "TOKENS")]
    pub max_total_tokens: Option<u64>,
    /// Share of the free memory that the KV pool takes [default: 0.3 on cpu, 0.85 on cuda]
    #[arg(long, value_name = "SHARE")]
    pub mem_fraction_static: Option<f64>,
    /// Tokens per page of the KV pool
    #[arg(long, default_value_t = 1, value_name = "TOKENS")]
    pub page_size: u32,
    /// Prompt tokens computed per step; -1 computes every prompt whole
    #[arg(long, default_value_t = 2048, allow_negative_numbers = true, value_name = "TOKENS")]
    pub chunked_prefill_size: i64,
    /// Prompt tokens admitted per step
    #[arg(long, default_value_t = 16384, value_name = "TOKENS")]
    pub max_prefill_tokens: u32,
    /// Order of the queue: first come or longest prefix match first
    #[arg(long, value_enum, default_value_t = PolicyArg::Fcfs, value_name = "POLICY")]
    pub schedule_policy: PolicyArg,
    /// Do not share the KV of common prompt prefixes
    #[arg(long)]
    pub disable_radix_cache: bool,
    /// Seconds without progress after which a busy scheduler counts as hung
    #[arg(long, default_value_t = 300.0, value_name = "SECONDS")]
    pub watchdog_timeout: f64,
}

#[derive(Debug, Clone, ClapArgs)]
pub struct SpecArgs {
    /// Algorithm: DFLASH, EAGLE, EAGLE3, NEXTN, STANDALONE or NGRAM, or one of the others with n-grams tried first, as in EAGLE+NGRAM; plain decoding without
    #[arg(long, value_name = "NAME")]
    pub speculative_algorithm: Option<String>,
    /// One multi-token-prediction layer per draft step, with EAGLE or NEXTN and a model or draft model that has several
    #[arg(long)]
    pub enable_multi_layer_eagle: bool,
    /// Draft model: its folder for DFLASH, a head's for EAGLE and EAGLE3, a smaller model's folder or .gguf file for STANDALONE; NEXTN
    /// takes the model's own layer without
    #[arg(long, visible_alias = "speculative-draft-model", value_name = "PATH")]
    pub speculative_draft_model_path: Option<PathBuf>,
    /// Form of the draft model's weights [default: seen from its files]
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub speculative_draft_load_format: Option<LoadFormat>,
    /// The only tokens an EAGLE or DFLASH head drafts: a .pt, .safetensors or .json file with one list of ids [default: all]
    #[arg(long, value_name = "PATH")]
    pub speculative_token_map: Option<PathBuf>,
    /// Depth of a draft [default: Llama with EAGLE or EAGLE3 5, other draft models and several layers 3, NGRAM num-draft-tokens / eagle-topk]
    #[arg(long, value_name = "N")]
    pub speculative_num_steps: Option<u32>,
    /// Branches of a draft tree [default: Llama with EAGLE or EAGLE3 4, other draft models 1, NGRAM max-bfs-breadth]
    #[arg(long, value_name = "N")]
    pub speculative_eagle_topk: Option<u32>,
    /// Tokens verified per step, the last committed one included [default: Llama with EAGLE or EAGLE3 8, other draft models 4, NGRAM 12, DFLASH its block]
    #[arg(long, value_name = "N")]
    pub speculative_num_draft_tokens: Option<u32>,
    /// Let the depth of drafts follow acceptance, load and measured step times
    #[arg(long)]
    pub speculative_adaptive: bool,
    /// JSON file of the depths to choose from by batch size, as SGLang's [default: 0 to 7, NGRAM 0 to 11; fewer in larger batches]
    #[arg(long, value_name = "PATH")]
    pub speculative_adaptive_config: Option<PathBuf>,
    /// Accept a sampled draft by the ratio of both models' probabilities (EAGLE and EAGLE3 with eagle-topk 1); output then depends on the draft
    #[arg(long)]
    pub speculative_use_rejection_sampling: bool,
    /// Accept a sampled draft that the target gives at least this probability; below 1 the output leans towards the draft
    #[arg(long, default_value_t = 1.0, value_name = "P")]
    pub speculative_accept_threshold_single: f64,
    /// Accept a sampled draft with its probability over this; below 1 the output leans towards the draft
    #[arg(long, default_value_t = 1.0, value_name = "P")]
    pub speculative_accept_threshold_acc: f64,
    /// Tokens of a DFLASH block, the last committed one included [default: what the draft model was made for, else 16]
    #[arg(long, value_name = "N")]
    pub speculative_dflash_block_size: Option<u32>,
    /// Denoise whole DFLASH blocks also where a request may draft less, as SGLang does
    #[arg(long)]
    pub speculative_dflash_fixed_block: bool,
    /// Continuations followed after the longest n-gram match [default: 1]
    #[arg(long, value_name = "N")]
    pub speculative_ngram_min_bfs_breadth: Option<u32>,
    /// Continuations followed after the shortest n-gram match [default: 10]
    #[arg(long, value_name = "N")]
    pub speculative_ngram_max_bfs_breadth: Option<u32>,
    /// Which continuations come first: the latest (BFS) or the most frequent (PROB) [default: BFS]
    #[arg(long, value_enum, ignore_case = true, value_name = "TYPE")]
    pub speculative_ngram_match_type: Option<MatchTypeArg>,
    /// Longest n-gram remembered [default: 18]
    #[arg(long, value_name = "TOKENS")]
    pub speculative_ngram_max_trie_depth: Option<u32>,
    /// With EAGLE+NGRAM and the like: tokens before a draft that must have been seen before for n-grams to draft it [default: 2]
    #[arg(long, value_name = "TOKENS")]
    pub speculative_ngram_min_match: Option<u32>,
    /// Nodes of the n-gram trie [default: 10000000]
    #[arg(long, value_name = "NODES")]
    pub speculative_ngram_capacity: Option<u64>,
}

#[derive(Debug, Clone, ClapArgs)]
pub struct ProcessArgs {
    /// Tokenizer processes, which share the connections
    #[arg(long, default_value_t = 1, value_parser = workers(), value_name = "N")]
    pub tokenizer_worker_num: u8,
    /// Detokenizers, which share the requests
    #[arg(long, default_value_t = 1, value_parser = workers(), value_name = "N")]
    pub detokenizer_worker_num: u8,
    /// Seconds without a sign of life after which a process is killed and started again
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS")]
    pub heartbeat_timeout: f64,
    /// Deaths of one process within 60 s that end the server
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub restart_limit: u32,
}

/// Enough for any machine, and few enough that every pair can have links of its own.
fn workers() -> clap::builder::RangedI64ValueParser<u8> {
    clap::value_parser!(u8).range(1..=64)
}

#[derive(Debug, Clone, ClapArgs)]
pub struct LogArgs {
    /// error, warn, info, debug or trace
    #[arg(long, default_value = "info", value_name = "LEVEL")]
    pub log_level: String,
    /// Serve Prometheus metrics on /metrics
    #[arg(long)]
    pub enable_metrics: bool,
    /// Port on which the launcher itself serves the same metrics; 0 takes a free one [default: none]
    #[arg(long, value_name = "PORT")]
    pub metrics_port: Option<u16>,
    /// Once ready, answer a sample chat with and without speculation and show tokens/s and acceptance
    #[arg(long)]
    pub sample_chat: bool,
    /// Decode steps between log lines and gauge updates
    #[arg(long, default_value_t = 40, value_name = "STEPS")]
    pub decode_log_interval: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LoadFormat {
    Auto,
    Safetensors,
    Gguf,
    Dummy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DtypeArg {
    Auto,
    #[value(alias = "float")]
    Float32,
    Bfloat16,
    #[value(alias = "half")]
    Float16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    Cpu,
    Cuda,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PolicyArg {
    Fcfs,
    Lpm,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MatchTypeArg {
    #[value(name = "BFS")]
    Bfs,
    #[value(name = "PROB")]
    Prob,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn both_names_of_the_model_and_repeated_flags_are_understood() {
        let parse = |line: &str| Args::try_parse_from(line.split(' ')).unwrap();
        assert_eq!(parse("launcher --model-path a").model.model_path, PathBuf::from("a"));
        let args = parse("launcher --model a --port 1 --model b --port 2 --chunked-prefill-size -1");
        assert_eq!((args.model.model_path, args.http.port), (PathBuf::from("b"), 2));
        assert_eq!(args.schedule.chunked_prefill_size, -1);
    }
}
