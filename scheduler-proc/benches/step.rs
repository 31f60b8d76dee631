//! Times a plain step of the default model against the floor that memory bandwidth sets.
//!
//! usage: cargo bench -p scheduler-proc --bench step [-- GGUF [THREADS [float32 | bfloat16]]]
//!
//! Named types are what a GGUF's blocks are decoded to while loading; otherwise they stay as they are.

mod common;

use std::path::PathBuf;

use proto::{Dtype, Quantization, ServeConfig, Weights};
use scheduler_proc::engine::model::TargetModel;
use scheduler_proc::engine::target::{ForwardRow, LogitRows};
use tch::{Device, Kind, Tensor};

use crate::common::best;

const CONTEXT: usize = 500;
const PREFILL: usize = 512;

struct Options {
    gguf: PathBuf,
    threads: u32,
    dtype: Dtype,
    quantization: Quantization,
}

fn main() {
    let options = options();
    let config = config(&options);
    let mut model = TargetModel::load(&config, &mut |_, _| {}).expect("the model loads");
    let bandwidth = bandwidth();
    println!(
        "threads {}, {:?}, weights {:?}, {:.1} GB/s read by a sum",
        options.threads,
        options.dtype,
        model.limits().weight_types,
        bandwidth / 1e9
    );
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
        quantization: if args.get(2).is_some() { Quantization::None } else { Quantization::Gguf },
    }
}

fn config(options: &Options) -> ServeConfig {
    let mut config = common::config(Weights::Gguf(options.gguf.clone()), options.dtype);
    config.schedule.max_total_tokens = Some(32 * (CONTEXT as u64 + 8));
    config.schedule.num_threads = options.threads;
    config.model.quantization = options.quantization;
    config
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
    let floor = ((limits.weight_bytes - limits.gathered_bytes) as f64 + kv) / bandwidth;
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
