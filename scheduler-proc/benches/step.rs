//! Times a plain step of the default model against the floor that memory bandwidth sets.
//!
//! usage: cargo bench -p scheduler-proc --bench step [-- GGUF [THREADS [float32]]]

use std::path::PathBuf;
use std::time::Instant;

use proto::{Dtype, ServeConfig};
use scheduler_proc::engine::model::TargetModel;
use scheduler_proc::engine::target::{ForwardRow, LogitRows};
use tch::{Device, Kind, Tensor};

const CONTEXT: usize = 500;
const PREFILL: usize = 512;
const SECONDS: f64 = 3.0;

struct Options {
    gguf: PathBuf,
    threads: u32,
    dtype: Dtype,
}

fn main() {
    let options = options();
    let config = config(&options);
    let mut model = TargetModel::load(&config, &mut |_, _| {}).expect("the model loads");
    let bandwidth = bandwidth();
    println!("threads {}, {:?}, {:.1} GB/s read by a sum", options.threads, options.dtype, bandwidth / 1e9);
    for batch in [1, 8, 32] {
        decode(&mut model, batch, bandwidth);
    }
    prefill(&mut model);
}

fn options() -> Options {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let default = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
    );
    Options {
        gguf: args.first().map_or(default.into(), PathBuf::from),
        threads: args.get(1).map_or(2, |text| text.parse().expect("THREADS is a number")),
        dtype: if args.get(2).is_some_and(|arg| arg == "float32") { Dtype::Float32 } else { Dtype::Bfloat16 },
    }
}

fn config(options: &Options) -> ServeConfig {
    let dtype = if options.dtype == Dtype::Float32 { "float32" } else { "bfloat16" };
    serde_json::from_value(serde_json::json!({
        "run_dir": "",
        "server": {
            "host": "", "port": 0, "served_model_name": "", "api_key": null, "enable_metrics": false,
            "enable_cache_report": false, "stream_interval": 1, "incremental_streaming_output": false,
            "skip_tokenizer_init": true, "max_queued_requests": 1, "log_level": "info"
        },
        "model": {
            "model_path": "", "weights": { "Gguf": options.gguf }, "tokenizer_dir": null, "architectures": [],
            "model_type": "", "vocab_size": 0, "context_length": 2048, "eos_token_ids": [],
            "bos_token_id": null, "dtype": dtype, "device": "cpu", "generation_defaults": {}
        },
        "schedule": {
            "max_running_requests": 32, "max_total_tokens": 32 * (CONTEXT + 8), "mem_fraction_static": 0.5,
            "page_size": 1, "chunked_prefill_size": 512, "max_prefill_tokens": 512, "policy": "fcfs",
            "disable_radix_cache": false, "decode_log_interval": 40, "random_seed": 0,
            "num_threads": options.threads, "watchdog_timeout_s": 300.0
        },
        "spec": null,
        "server_args": {}
    }))
    .expect("the configuration is complete")
}

/// Bytes per second of reading memory with torch's own threads.
fn bandwidth() -> f64 {
    let data = Tensor::ones([1 << 26], (Kind::Float, Device::Cpu));
    let bytes = (4 << 26) as f64;
    bytes / best(|| drop(data.sum(Kind::Float)))
}

fn decode(model: &mut TargetModel, batch: usize, bandwidth: f64) {
    let slots: Vec<Vec<u32>> = (0..batch)
        .map(|row| (row * (CONTEXT + 8)..(row + 1) * (CONTEXT + 8)).map(|slot| slot as u32).collect())
        .collect();
    let prompt: Vec<u32> = (0..CONTEXT as u32).map(|index| (index * 613 + 40) % 40_000).collect();
    for slots in &slots {
        let row = ForwardRow {
            tokens: &prompt,
            context_len: 0,
            kv_slots: slots,
            parents: None,
            logits: LogitRows::None,
        };
        model.forward(&[row]).expect("prefill runs");
    }
    let rows: Vec<ForwardRow<'_>> = slots
        .iter()
        .map(|slots| ForwardRow {
            tokens: &prompt[..1],
            context_len: CONTEXT,
            kv_slots: slots,
            parents: None,
            logits: LogitRows::Last,
        })
        .collect();
    let seconds = best(|| drop(model.forward(&rows).expect("a step runs")));
    let limits = model.limits();
    let kv = limits.kv_bytes as f64 / limits.kv_slots as f64 * (CONTEXT * batch) as f64;
    let floor = ((limits.weight_bytes - model.gathered_bytes()) as f64 + kv) / bandwidth;
    println!(
        "decode  batch {batch:2}: {:7.2} ms/step {:7.1} tok/s, floor {:6.2} ms, {:4.2}x floor",
        seconds * 1e3,
        batch as f64 / seconds,
        floor * 1e3,
        seconds / floor
    );
}

fn prefill(model: &mut TargetModel) {
    let slots: Vec<u32> = (0..PREFILL as u32).collect();
    let prompt: Vec<u32> = (0..PREFILL as u32).map(|index| (index * 613 + 40) % 40_000).collect();
    let row = ForwardRow {
        tokens: &prompt,
        context_len: 0,
        kv_slots: &slots,
        parents: None,
        logits: LogitRows::Last,
    };
    let seconds = best(|| drop(model.forward(std::slice::from_ref(&row)).expect("prefill runs")));
    println!("prefill {PREFILL} tokens: {:.1} ms, {:.0} tok/s", seconds * 1e3, PREFILL as f64 / seconds);
}

/// The shortest of many runs: others use this machine too.
fn best(mut run: impl FnMut()) -> f64 {
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
