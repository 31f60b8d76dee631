//! Adaptive depth of n-grams on the default model, against plain decoding and a fixed width: batches of 1 to 64, on
//! prompts that are copied and on answers nobody can foresee. Says how fast, at which depth it ended, and how often it
//! changed.
//!
//! usage: cargo bench -p tests --bench adaptive [-- BATCH...]

#[allow(dead_code, reason = "one prompt alone is another benchmark's")]
mod load;
#[allow(dead_code, reason = "prompts of tokens are another benchmark's")]
mod prompts;
mod stats;

use tests::{Server, ServerOptions};

use crate::load::decode;
use crate::stats::{Sample, median};

const ROUNDS: usize = 3;
const THREADS: usize = 2;
const BATCHES: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];

struct Kind {
    name: &'static str,
    prompts: fn(usize) -> Vec<String>,
    temperature: f64,
}

const KINDS: [Kind; 3] = [
    Kind { name: "chat, temperature 1", prompts: prompts::chat, temperature: 1.0 },
    Kind { name: "chat, greedy", prompts: prompts::chat, temperature: 0.0 },
    Kind { name: "copy-heavy", prompts: prompts::copy, temperature: 0.0 },
];

fn main() {
    let wanted: Vec<usize> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let batches = if wanted.is_empty() { BATCHES.to_vec() } else { wanted };
    let start = |options: ServerOptions| Server::start(options.threads(THREADS));
    let plain = start(ServerOptions::plain());
    let fixed = start(ServerOptions::ngram());
    let adaptive = start(ServerOptions::ngram().with(&["--speculative-adaptive"]));
    println!(
        "{:20} {:>5} {:>9} {:>12} {:>15} {:>10} {:>6} {:>9}",
        "", "batch", "plain", "fixed/plain", "adaptive/plain", "accept len", "steps", "switches"
    );
    for batch in batches {
        for kind in &KINDS {
            let prompts = (kind.prompts)(batch);
            let before = switches(&adaptive);
            let mut samples: [Vec<Sample>; 3] = Default::default();
            for round in 0..=ROUNDS {
                for (server, samples) in [&plain, &fixed, &adaptive].into_iter().zip(&mut samples) {
                    let sample = decode(server, &prompts, kind.temperature);
                    // The first round warms up.
                    if round > 0 {
                        samples.push(sample);
                    }
                }
            }
            let [plain, fixed, on] = &samples;
            let ratio =
                |of: &[Sample]| median(plain.iter().zip(of).map(|(plain, of)| of.rate() / plain.rate()));
            println!(
                "{:20} {batch:5} {:9.1} {:12.2} {:15.2} {:10.2} {:6} {:9}",
                kind.name,
                median(plain.iter().map(Sample::rate)),
                ratio(fixed),
                ratio(on),
                median(on.iter().filter_map(Sample::accept_length)),
                adaptive.internal_state()["speculative_num_steps"],
                switches(&adaptive) - before,
            );
        }
    }
}

/// Changes of depth so far that were decided, not those of a batch that fills and drains.
fn switches(server: &Server) -> f64 {
    let by_reason = server.metrics().by_label("sglang:spec_depth_switches_total", "reason");
    by_reason.iter().filter(|(reason, _)| *reason != "batch_size").map(|(_, count)| count).sum()
}
