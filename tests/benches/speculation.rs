//! Every algorithm with the heads that ship, on held-out prompts of the default model, one request at a time: tokens
//! per verify step, drafts accepted by position, and speed against plain decoding of the same prompts on the same
//! machine in the same minute. Prints the table of docs/speculation.md.
//!
//! usage: cargo bench -p tests --bench speculation [-- PROMPTS]

#[allow(dead_code, reason = "many prompts at once are another benchmark's")]
mod load;
#[allow(dead_code, reason = "rounds are another benchmark's")]
mod stats;

use serde_json::Value;
use tests::{Server, ServerOptions};

use crate::load::decode_one;
use crate::stats::Sample;

const THREADS: usize = 2;
const PROMPTS: usize = 12;

/// Prompts of one kind, and how they are answered.
struct Set {
    name: &'static str,
    temperature: f64,
    prompts: Vec<String>,
}

/// Sums over a set's answers.
#[derive(Default)]
struct Tally {
    seconds: f64,
    tokens: u64,
    verify_steps: u64,
    accepted: u64,
    /// Verify steps that accepted exactly so many drafts.
    histogram: Vec<u64>,
}

fn main() {
    let wanted = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(PROMPTS);
    let sets = sets(wanted);
    let start = |options: ServerOptions| Server::start(options.threads(THREADS));
    let plain = start(ServerOptions::plain());
    let ways = ways().map(|(name, options)| (name, start(options)));
    println!(
        "| draft | set | accept length | accepted at 1, 2, … | speed, of plain |\n|---|---|---|---|---|"
    );
    let mut rows: Vec<Vec<String>> = ways.iter().map(|_| Vec::new()).collect();
    for set in &sets {
        let mut off = Tally::default();
        let mut on: Vec<Tally> = ways.iter().map(|_| Tally::default()).collect();
        decode_one(&plain, &set.prompts[0], 0, set.temperature);
        for (seed, prompt) in set.prompts.iter().enumerate() {
            off.add(&decode_one(&plain, prompt, seed, set.temperature));
            for ((_, server), tally) in ways.iter().zip(&mut on) {
                tally.add(&decode_one(server, prompt, seed, set.temperature));
            }
        }
        for (((name, _), tally), rows) in ways.iter().zip(&on).zip(&mut rows) {
            rows.push(format!("| {name} | {} | {}", set.name, tally.row(&off)));
        }
    }
    rows.concat().iter().for_each(|row| println!("{row}"));
}

fn ways() -> [(&'static str, ServerOptions); 11] {
    let shape = |options: ServerOptions, steps: &str, topk: &str, tokens: &str| {
        options.with(&[
            "--speculative-num-steps",
            steps,
            "--speculative-eagle-topk",
            topk,
            "--speculative-num-draft-tokens",
            tokens,
        ])
    };
    let chain = |options| shape(options, "3", "1", "4");
    let tree = |options| shape(options, "3", "4", "8");
    [
        ("NGRAM", ServerOptions::ngram()),
        ("EAGLE, chain of 3", chain(ServerOptions::eagle())),
        ("EAGLE, tree of 8", tree(ServerOptions::eagle())),
        ("EAGLE, tree of 8, adaptive", tree(ServerOptions::eagle()).with(&["--speculative-adaptive"])),
        ("EAGLE+NGRAM, tree of 8", tree(ServerOptions::eagle_and_ngram())),
        ("EAGLE3, chain of 3", chain(ServerOptions::eagle3())),
        ("EAGLE3, tree of 8", tree(ServerOptions::eagle3())),
        ("multi-layer EAGLE, 3 layers", chain(ServerOptions::multi_layer_eagle())),
        ("the first of them, tree of 8", tree(ServerOptions::nextn())),
        ("DFLASH", ServerOptions::dflash()),
        ("STANDALONE, the target itself, chain of 3", chain(ServerOptions::standalone())),
    ]
}

fn sets(count: usize) -> Vec<Set> {
    let heldout = heldout();
    let pick = |code: bool| -> Vec<String> {
        let wanted = heldout.iter().filter(|(task, _)| task.contains("code") == code);
        // Neighbours in the file are alike.
        let every = (wanted.clone().count() / count).max(1);
        wanted.step_by(every).take(count).map(|(_, prompt)| prompt.clone()).collect()
    };
    vec![
        Set { name: "chat, greedy", temperature: 0.0, prompts: pick(false) },
        Set { name: "chat at 0.8", temperature: 0.8, prompts: pick(false) },
        Set { name: "code, greedy", temperature: 0.0, prompts: pick(true) },
    ]
}

/// Task and first message of the prompts that no head was trained on.
fn heldout() -> Vec<(String, String)> {
    let path = tests::repository().join("models/prompts.jsonl");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("a prompt per line"));
    let heldout = lines.filter(|prompt| prompt["split"] == "heldout");
    let first = |prompt: Value| {
        let content = prompt["messages"][0]["content"].as_str().expect("a prompt says something").to_owned();
        let text = format!("<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n");
        (prompt["task"].as_str().unwrap_or_default().to_owned(), text)
    };
    heldout.map(first).collect()
}

impl Tally {
    fn add(&mut self, sample: &Sample) {
        self.seconds += (sample.end - sample.start).as_secs_f64();
        self.tokens += sample.tokens;
        self.verify_steps += sample.verify_steps;
        self.accepted += sample.accepted;
        self.histogram.resize(self.histogram.len().max(sample.histogram.len()), 0);
        self.histogram.iter_mut().zip(&sample.histogram).for_each(|(sum, &steps)| *sum += steps);
    }

    /// Beside plain decoding of the same prompts.
    fn row(&self, plain: &Self) -> String {
        let steps = self.verify_steps.max(1) as f64;
        let at_least = |depth: usize| self.histogram.iter().skip(depth).sum::<u64>() as f64 / steps;
        let positions: Vec<_> =
            (1..self.histogram.len()).map(|depth| format!("{:.2}", at_least(depth))).collect();
        let rate = |tally: &Self| tally.tokens as f64 / tally.seconds;
        format!(
            "{:.2} | {} | {:.2} |",
            (self.accepted as f64 + steps) / steps,
            positions.join(" "),
            rate(self) / rate(plain)
        )
    }
}
