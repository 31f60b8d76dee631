//! Tests of whole models against the golden files, of every way a token can come, and of refusals.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use proto::{ModelConfig, SchedulePolicy, ServerConfig};
use serde::Deserialize;

use super::*;
use crate::engine::attention::torch::TorchAttention;

mod gemma3_270m;
mod golden;
mod invariance;
mod refusals;
mod smollm2;

pub(in crate::engine) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/golden")
}

pub(in crate::engine) fn config(weights: Weights, dtype: Dtype) -> ServeConfig {
    ServeConfig {
        run_dir: PathBuf::new(),
        topology: proto::Topology::default(),
        server: ServerConfig {
            host: String::new(),
            port: 0,
            served_model_name: String::new(),
            api_key: None,
            enable_metrics: false,
            enable_cache_report: false,
            stream_interval: 1,
            incremental_streaming_output: false,
            skip_tokenizer_init: true,
            max_queued_requests: 1,
            log_level: "info".into(),
        },
        model: ModelConfig {
            model_path: String::new(),
            weights,
            tokenizer_dir: None,
            architectures: Vec::new(),
            model_type: String::new(),
            vocab_size: 512,
            context_length: 512,
            eos_token_ids: Vec::new(),
            bos_token_id: None,
            dtype,
            device: DeviceKind::Cpu,
            quantization: proto::Quantization::default(),
            generation_defaults: serde_json::Map::new(),
        },
        schedule: ScheduleConfig {
            max_running_requests: 4,
            max_total_tokens: Some(2048),
            mem_fraction_static: 0.5,
            page_size: 1,
            chunked_prefill_size: 512,
            max_prefill_tokens: 512,
            policy: SchedulePolicy::Fcfs,
            disable_radix_cache: false,
            decode_log_interval: 40,
            random_seed: 0,
            // Tests run side by side; two threads each would only wait for one another.
            num_threads: 1,
            watchdog_timeout_s: 300.0,
        },
        spec: None,
        server_args: serde_json::Map::new(),
    }
}

fn tiny(case: &str, dtype: Dtype) -> TargetModel {
    let config = config(Weights::Safetensors(fixtures().join(case).join("target")), dtype);
    TargetModel::load(&config, &mut |_, _| {}).unwrap()
}

fn argmax(logits: &[f32]) -> TokenId {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
    best as TokenId
}

/// Slots that are neither in order nor neighbours.
fn scattered_slots(count: usize, salt: usize) -> Vec<KvSlot> {
    (0..count).map(|position| ((position * 7 + salt * 577) % 2048) as KvSlot).collect()
}

fn chain<'a>(tokens: &'a [TokenId], context_len: usize, kv_slots: &'a [KvSlot]) -> ForwardRow<'a> {
    ForwardRow { tokens, context_len, kv_slots, parents: None, logits: LogitRows::From(0) }
}

/// Runs `tokens` in chunks of `size` and returns the logits of all of them.
fn run_chunks(model: &mut TargetModel, tokens: &[TokenId], slots: &[KvSlot], size: usize) -> Vec<f32> {
    let mut values = Vec::new();
    for (index, part) in tokens.chunks(size).enumerate() {
        values.extend(model.forward(&[chain(part, index * size, slots)]).unwrap().values);
    }
    values
}

fn greedy(model: &mut TargetModel, prompt: &[TokenId], count: usize, slots: &[KvSlot]) -> Vec<TokenId> {
    let mut logits = model.forward(&[chain(prompt, 0, slots)]).unwrap();
    let mut context_len = prompt.len();
    let mut tokens = vec![argmax(logits.row(prompt.len() - 1))];
    while tokens.len() < count {
        let last = *tokens.last().unwrap();
        logits = model.forward(&[chain(&[last], context_len, slots)]).unwrap();
        context_len += 1;
        tokens.push(argmax(logits.row(0)));
    }
    tokens
}
