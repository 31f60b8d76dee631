//! Speed of the default model through HTTP, plain and with every draft it has, as ratios taken side by side.
//!
//! All servers run at once and are measured in turns, so that a noisy moment hits all; an idle server costs nothing.
//! The floor of a decode step is the bytes it must read (weights once, keys and values once per request) over the
//! memory's bandwidth, measured here with the same number of threads.

mod bandwidth;
#[allow(dead_code, reason = "one prompt alone is another benchmark's")]
mod load;
#[allow(dead_code, reason = "texts without a chat format are another benchmark's")]
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
    let plain = start(ServerOptions::plain());
    let drafts = [
        ("n-gram", ServerOptions::ngram()),
        ("EAGLE", ServerOptions::eagle()),
        ("EAGLE3", ServerOptions::eagle3()),
    ];
    let drafts = drafts.map(|(name, options)| (name, start(options)));
    let weights = weight_bytes(&plain);
    println!(
        "weights read per step: {:.0} MB; {ROUNDS} rounds, {NEW_TOKENS} new tokens each\n",
        weights / 1e6
    );

    println!("{:32} {:>8} {:>10} {:>12} {:>12}", "", "", "tokens/s", "of plain", "accept len");
    for row in &rows {
        let mut off = Vec::new();
        let mut on = drafts.each_ref().map(|_| Vec::new());
        for round in 0..=ROUNDS {
            let plain = decode(&plain, &row.prompts, 0.0);
            let drafted = drafts.each_ref().map(|(_, server)| decode(server, &row.prompts, 0.0));
            // The first round warms all up.
            if round > 0 {
                off.push(plain);
                on.iter_mut().zip(drafted).for_each(|(samples, sample)| samples.push(sample));
            }
        }
        report_plain(row, &off, weights / bandwidth, bandwidth);
        for ((name, _), samples) in drafts.iter().zip(&on) {
            report_drafted(name, &off, samples);
        }
    }
    prefill(&plain);
}

fn report_plain(row: &Row, samples: &[Sample], weight_seconds: f64, bandwidth: f64) {
    let rate = median(samples.iter().map(Sample::rate));
    let requests = samples[0].requests as f64;
    let step = requests / rate;
    let kv = requests * samples[0].mean_context * KV_BYTES_PER_TOKEN / bandwidth;
    let floor = weight_seconds + kv;
    println!(
        "{:32} {:>8} {rate:10.1}   (step {:.1} ms, floor {:.1} ms: {:.0} % of the floor's speed)",
        row.name,
        "plain",
        step * 1e3,
        floor * 1e3,
        100.0 * floor / step
    );
}

fn report_drafted(name: &str, plain: &[Sample], samples: &[Sample]) {
    let rate = median(samples.iter().map(Sample::rate));
    let ratio = median(plain.iter().zip(samples).map(|(off, on)| on.rate() / off.rate()));
    let length = median(samples.iter().filter_map(Sample::accept_length));
    println!("{:32} {name:>8} {rate:10.1} {ratio:12.2} {length:12.2}", "");
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

/// Bytes of weights that a step reads: all but an embedding table that is not the head's, of which it gathers a few
/// rows.
fn weight_bytes(server: &Server) -> f64 {
    let state = server.internal_state();
    let bytes = |name: &str| {
        let bytes = state["memory_usage"][name].as_f64();
        bytes.unwrap_or_else(|| panic!("no memory_usage.{name} in {state}"))
    };
    bytes("weight") - bytes("weight_gathered")
}
