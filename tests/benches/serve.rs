//! Speed of the default model through HTTP, with and without n-gram speculation, as ratios taken side by side.
//!
//! Both servers run at once and are measured in turns, so that a noisy moment hits both; an idle server costs
//! nothing. The floor of a decode step is the bytes it must read (weights once, keys and values once per request)
//! over the memory's bandwidth, measured here with the same number of threads.

mod bandwidth;
mod load;
mod prompts;
mod stats;

use std::time::Instant;

use serde_json::json;
use tests::{Server, ServerOptions};

use crate::load::{NEW_TOKENS, decode};
use crate::stats::{Sample, median};

const ROUNDS: usize = 5;
/// Bytes of keys and values per token: 30 layers, 3 heads, 64 numbers, 2 of them, 2 bytes each.
const KV_BYTES_PER_TOKEN: f64 = 30.0 * 3.0 * 64.0 * 2.0 * 2.0;

/// The default model's embedding table in bfloat16.
const EMBEDDING_BYTES: f64 = 49_152.0 * 576.0 * 2.0;

/// One kind of load, measured on both servers.
struct Row {
    name: &'static str,
    prompts: Vec<String>,
}

fn main() {
    let rows = [
        Row { name: "decode, 1 request, chat", prompts: prompts::chat(1) },
        Row { name: "decode, 8 requests, chat", prompts: prompts::chat(8) },
        Row { name: "decode, 1 request, copy-heavy", prompts: prompts::copy(1) },
        Row { name: "decode, 8 requests, copy-heavy", prompts: prompts::copy(8) },
    ];
    let bandwidth = bandwidth::measure();
    println!("memory bandwidth, 2 threads: {:.1} GB/s", bandwidth / 1e9);
    let start = |options: ServerOptions| Server::start(options.threads(bandwidth::THREADS));
    let (plain, ngram) = (start(ServerOptions::plain()), start(ServerOptions::ngram()));
    let weights = weight_bytes(&plain);
    println!(
        "weights read per step: {:.0} MB; {ROUNDS} rounds, {NEW_TOKENS} new tokens each\n",
        weights / 1e6
    );

    println!("{:32} {:>10} {:>10} {:>12} {:>12}", "", "tokens/s", "n-gram", "n-gram/plain", "accept len");
    for row in &rows {
        let (mut off, mut on) = (Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            let samples = (decode(&plain, &row.prompts, 0.0), decode(&ngram, &row.prompts, 0.0));
            // The first round warms both up.
            if round > 0 {
                off.push(samples.0);
                on.push(samples.1);
            }
        }
        report(row, &off, &on, weights / bandwidth, bandwidth);
    }
    prefill(&plain);
}

fn report(row: &Row, off: &[Sample], on: &[Sample], weight_seconds: f64, bandwidth: f64) {
    let ratio = median(off.iter().zip(on).map(|(off, on)| on.rate() / off.rate()));
    let (plain, ngram) = (median(off.iter().map(Sample::rate)), median(on.iter().map(Sample::rate)));
    let length = median(on.iter().filter_map(Sample::accept_length));
    println!("{:32} {plain:10.1} {ngram:10.1} {ratio:12.2} {length:12.2}", row.name);
    let step = off[0].requests as f64 / plain;
    let kv = off[0].requests as f64 * off[0].mean_context * KV_BYTES_PER_TOKEN / bandwidth;
    let floor = weight_seconds + kv;
    println!(
        "{:32} plain step {:.1} ms, floor {:.1} ms: {:.0} % of the floor's speed",
        "",
        step * 1e3,
        floor * 1e3,
        100.0 * floor / step
    );
}

/// Prompt tokens per second of a prompt that no cache has seen.
fn prefill(server: &Server) {
    let rates = (0..ROUNDS).map(|round| {
        let body = json!({
            "input_ids": prompts::tokens(round, 1024),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        });
        let start = Instant::now();
        let reply = server.generate(&body);
        assert_eq!(reply["meta_info"]["cached_tokens"], 0, "the prompt was cached: {reply}");
        1024.0 / start.elapsed().as_secs_f64()
    });
    println!("{:32} {:10.1}", "prefill, 1024 tokens", median(rates));
}

/// Bytes of weights that a step reads: all but the embedding table, of which it gathers a few rows. (The table is
/// tied to the head and lies in memory a second time, packed for multiplication.)
fn weight_bytes(server: &Server) -> f64 {
    let state = server.internal_state();
    let weights = state["memory_usage"]["weight"].as_f64();
    weights.unwrap_or_else(|| panic!("no memory_usage.weight in {state}")) - EMBEDDING_BYTES
}
