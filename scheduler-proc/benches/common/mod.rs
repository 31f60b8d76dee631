//! Owns what the benchmarks share: a configuration without a server around it, and how a time is taken.

use std::time::Instant;

use proto::{Dtype, ServeConfig, Weights};

const SECONDS: f64 = 3.0;

/// One thread, and nothing but the model.
pub(crate) fn config(weights: Weights, dtype: Dtype) -> ServeConfig {
    serde_json::from_value(serde_json::json!({
        "run_dir": "",
        "server": {
            "host": "", "port": 0, "served_model_name": "", "api_key": null, "enable_metrics": false,
            "enable_cache_report": false, "stream_interval": 1, "incremental_streaming_output": false,
            "skip_tokenizer_init": true, "max_queued_requests": 64, "log_level": "info"
        },
        "model": {
            "model_path": "", "weights": weights, "tokenizer_dir": null, "architectures": [], "model_type": "",
            "vocab_size": 0, "context_length": 2048, "eos_token_ids": [], "bos_token_id": null, "dtype": dtype,
            "device": "cpu", "generation_defaults": {}
        },
        "schedule": {
            "max_running_requests": 32, "max_total_tokens": 16384, "mem_fraction_static": 0.5, "page_size": 1,
            "chunked_prefill_size": 512, "max_prefill_tokens": 512, "policy": "fcfs",
            "disable_radix_cache": false, "decode_log_interval": 40, "random_seed": 0, "num_threads": 1,
            "watchdog_timeout_s": 300.0
        },
        "spec": null,
        "server_args": {}
    }))
    .expect("the configuration is complete")
}

/// The shortest of many runs: others use this machine too.
pub(crate) fn best(mut run: impl FnMut()) -> f64 {
    let start = Instant::now();
    let mut best = f64::INFINITY;
    let mut runs = 0;
    while runs < 5 || start.elapsed().as_secs_f64() < SECONDS {
        let start = Instant::now();
        run();
        best = best.min(start.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}
