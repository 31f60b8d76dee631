//! Owns `/server_info`'s view of the flags: every resolved value under SGLang's name.

use proto::{
    AcceptanceRule, DeviceKind, DraftTier, Dtype, NgramConfig, NgramMatchType, Quantization, SchedulePolicy,
    ServeConfig, SpecAlgorithm, Weights,
};
use serde_json::{Map, Value, json};

use crate::args::{Args, LoadFormat};

pub(super) fn of(config: &ServeConfig, args: &Args) -> Map<String, Value> {
    let mut all = Map::new();
    let parts = [
        model(config),
        server(config),
        schedule(config, args),
        spec(config),
        variants(config),
        acceptance(config),
        adaptive(config, args),
    ];
    for part in parts {
        let Value::Object(part) = part else { continue };
        all.extend(part);
    }
    all.insert("tokenizer_worker_num".into(), json!(config.topology.tokenizer_worker_num));
    all.insert("detokenizer_worker_num".into(), json!(config.topology.detokenizer_worker_num));
    all.insert("heartbeat_timeout".into(), json!(args.processes.heartbeat_timeout));
    all.insert("restart_limit".into(), json!(args.processes.restart_limit));
    all.insert("metrics_port".into(), json!(args.logs.metrics_port));
    all.insert("sample_chat".into(), json!(args.logs.sample_chat));
    all.insert("load_format".into(), json!(load_format(args.model.load_format, &config.model.weights)));
    let draft_format = config.spec.as_ref().and_then(|spec| spec.algorithm.draft_model());
    let draft_format = draft_format.map(|draft| load_format(LoadFormat::Auto, &draft.weights));
    all.insert("speculative_draft_load_format".into(), json!(draft_format));
    all
}

fn model(config: &ServeConfig) -> Value {
    let model = &config.model;
    // A tokenizer rebuilt from a GGUF file lives and dies with the run; clients are told of the file.
    let tokenizer = model.tokenizer_dir.as_ref().map(|dir| {
        if dir.starts_with(&config.run_dir) { model.model_path.clone() } else { dir.display().to_string() }
    });
    json!({
        "model_path": model.model_path,
        "tokenizer_path": tokenizer.unwrap_or_else(|| model.model_path.clone()),
        "skip_tokenizer_init": config.server.skip_tokenizer_init,
        "quantization": match (&model.weights, model.quantization) {
            (Weights::Gguf(_), Quantization::Gguf) => Some("gguf"),
            _ => None,
        },
        "dtype": dtype_name(model.dtype),
        "device": match model.device { DeviceKind::Cpu => "cpu", DeviceKind::Cuda => "cuda" },
        "context_length": model.context_length,
        "num_threads": config.schedule.num_threads,
        "random_seed": config.schedule.random_seed,
    })
}

fn server(config: &ServeConfig) -> Value {
    let server = &config.server;
    json!({
        "host": server.host,
        "port": server.port,
        "served_model_name": server.served_model_name,
        "api_key": server.api_key.as_ref().map(|_| "<set>"),
        "stream_interval": server.stream_interval,
        "incremental_streaming_output": server.incremental_streaming_output,
        "enable_cache_report": server.enable_cache_report,
        "max_queued_requests": server.max_queued_requests,
        "log_level": server.log_level,
        "enable_metrics": server.enable_metrics,
    })
}

fn schedule(config: &ServeConfig, args: &Args) -> Value {
    let schedule = &config.schedule;
    json!({
        "max_running_requests": schedule.max_running_requests,
        "max_total_tokens": schedule.max_total_tokens,
        "mem_fraction_static": schedule.mem_fraction_static,
        "page_size": schedule.page_size,
        "chunked_prefill_size": args.schedule.chunked_prefill_size,
        "max_prefill_tokens": schedule.max_prefill_tokens,
        "schedule_policy": match schedule.policy { SchedulePolicy::Fcfs => "fcfs", SchedulePolicy::Lpm => "lpm" },
        "disable_radix_cache": schedule.disable_radix_cache,
        "watchdog_timeout": schedule.watchdog_timeout_s,
        "decode_log_interval": schedule.decode_log_interval,
        "dp_size": 1,
        "tp_size": 1,
    })
}

fn spec(config: &ServeConfig) -> Value {
    let Some(spec) = &config.spec else {
        return json!({
            "speculative_algorithm": null,
            "speculative_draft_model_path": null,
            "speculative_token_map": null,
            "speculative_num_steps": null,
            "speculative_eagle_topk": null,
            "speculative_num_draft_tokens": null,
        });
    };
    // Where depth is adaptive, what it starts with; what is in force now is the scheduler's to say.
    let shape = DraftTier { num_steps: spec.num_steps, num_draft_tokens: spec.num_draft_tokens };
    let shape = spec.adaptive.as_ref().map_or(shape, |adaptive| adaptive.initial);
    let mut all = json!({
        "speculative_algorithm": spec.name(),
        "speculative_num_steps": shape.num_steps,
        "speculative_eagle_topk": spec.eagle_topk,
        "speculative_num_draft_tokens": shape.num_draft_tokens,
    });
    let own = match &spec.algorithm {
        SpecAlgorithm::Ngram(_) => json!({
            "speculative_draft_model_path": null,
            "speculative_token_map": null,
        }),
        SpecAlgorithm::Dflash(dflash) => json!({
            "speculative_draft_model_path": dflash.model.path,
            "speculative_token_map": dflash.model.token_map,
        }),
        SpecAlgorithm::Eagle(draft)
        | SpecAlgorithm::MultiLayerEagle(draft)
        | SpecAlgorithm::Eagle3(draft)
        | SpecAlgorithm::Standalone(draft) => {
            json!({ "speculative_draft_model_path": draft.path, "speculative_token_map": draft.token_map })
        }
    };
    let trie = match (&spec.algorithm, &spec.ngram_first) {
        (SpecAlgorithm::Ngram(ngram), _) => trie(ngram, None),
        (_, Some(first)) => trie(&first.ngram, Some(first.min_match)),
        (_, None) => Value::Null,
    };
    for part in [own, trie] {
        if let (Value::Object(all), Value::Object(part)) = (&mut all, part) {
            all.extend(part);
        }
    }
    all
}

fn trie(ngram: &NgramConfig, min_match: Option<u32>) -> Value {
    json!({
        "speculative_ngram_min_bfs_breadth": ngram.min_bfs_breadth,
        "speculative_ngram_max_bfs_breadth": ngram.max_bfs_breadth,
        "speculative_ngram_match_type":
            match ngram.match_type { NgramMatchType::Bfs => "BFS", NgramMatchType::Prob => "PROB" },
        "speculative_ngram_max_trie_depth": ngram.max_trie_depth,
        "speculative_ngram_capacity": ngram.capacity,
        "speculative_ngram_min_match": min_match,
    })
}

fn adaptive(config: &ServeConfig, args: &Args) -> Value {
    json!({
        "speculative_adaptive": config.spec.as_ref().is_some_and(|spec| spec.adaptive.is_some()),
        "speculative_adaptive_config": args.spec.speculative_adaptive_config,
    })
}

/// What only one algorithm has.
fn variants(config: &ServeConfig) -> Value {
    let dflash = config.spec.as_ref().and_then(|spec| match &spec.algorithm {
        SpecAlgorithm::Dflash(dflash) => Some((spec.num_draft_tokens, dflash.fixed_block)),
        _ => None,
    });
    let layers = config.spec.as_ref().map(|spec| &spec.algorithm);
    json!({
        "enable_multi_layer_eagle": matches!(layers, Some(SpecAlgorithm::MultiLayerEagle(_))),
        "speculative_dflash_block_size": dflash.map(|(block, _)| block),
        "speculative_dflash_fixed_block": dflash.is_some_and(|(_, fixed)| fixed),
    })
}

fn acceptance(config: &ServeConfig) -> Value {
    let rule = config.spec.as_ref().map(|spec| spec.acceptance).unwrap_or_default();
    let (single, acc) = match rule {
        AcceptanceRule::Thresholds { single, acc } => (single, acc),
        AcceptanceRule::Equality | AcceptanceRule::Rejection => (1.0, 1.0),
    };
    json!({
        "speculative_use_rejection_sampling": rule == AcceptanceRule::Rejection,
        "speculative_accept_threshold_single": single,
        "speculative_accept_threshold_acc": acc,
    })
}

pub(super) const fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Float32 => "float32",
        Dtype::Bfloat16 => "bfloat16",
        Dtype::Float16 => "float16",
    }
}

pub(super) const fn dtype_bytes(dtype: Dtype) -> u64 {
    match dtype {
        Dtype::Float32 => 4,
        Dtype::Bfloat16 | Dtype::Float16 => 2,
    }
}

const fn load_format(wanted: LoadFormat, weights: &Weights) -> &'static str {
    match (wanted, weights) {
        (LoadFormat::Dummy, _) | (_, Weights::Dummy { .. }) => "dummy",
        (_, Weights::Gguf(_)) => "gguf",
        (_, Weights::Safetensors(_)) => "safetensors",
    }
}
