//! Drafthorse beside other servers: the same weights, the same prompts, the same two cores, in turns. Prints what each
//! reaches and the ratio of Drafthorse to the best of the others.
//!
//! usage: cargo bench -p tests --bench peers -- PEERS_DIR [PART OF A ROW'S NAME]
//!
//! PEERS_DIR is what scripts/peers.sh installed; see `make bench-peers`.
//!
//! Everything goes through the OpenAI routes, which all of them have. All servers run at once, idle while another is
//! measured; a row's ratio is that of medians over rounds in which each had its turn.

mod peer;
#[allow(dead_code, reason = "prompts of tokens are another benchmark's")]
mod prompts;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tests::{ServerOptions, Stream};

use crate::peer::{Contender, Installed};

const THREADS: usize = 2;
const ROUNDS: usize = 3;
const NEW_TOKENS: u64 = 128;

/// What a row asks.
#[derive(Clone, Copy)]
enum Load {
    /// So many chats at once: all tokens over the time from the first to the last.
    Chat(usize),
    /// Answers that copy their prompt, one at a time.
    Copy,
    /// Prompt tokens per second of a long prompt that no cache has seen.
    Prefill,
    /// Seconds from a short prompt to its first token, inverted: more is better, as everywhere.
    FirstToken,
}

/// One row of the table: which contenders take part, ours first.
struct Row {
    name: &'static str,
    load: Load,
    ours: &'static str,
    others: &'static [&'static str],
}

const ROWS: [Row; 9] = [
    Row {
        name: "decode, 1 chat, 4-bit weights",
        load: Load::Chat(1),
        ours: "drafthorse 4-bit",
        others: &["llama.cpp Q4_1"],
    },
    Row {
        name: "decode, 1 chat, bfloat16",
        load: Load::Chat(1),
        ours: "drafthorse bf16",
        others: &["llama.cpp bf16"],
    },
    Row {
        name: "decode, 1 chat, best draft",
        load: Load::Chat(1),
        ours: "drafthorse as run",
        others: &["llama.cpp Q4_1", "llama.cpp bf16", "llama.cpp bf16 n-gram"],
    },
    Row {
        name: "decode, copy-heavy, n-gram",
        load: Load::Copy,
        ours: "drafthorse NGRAM",
        others: &["llama.cpp bf16 n-gram", "llama.cpp Q4_1"],
    },
    Row {
        name: "8 chats",
        load: Load::Chat(8),
        ours: "drafthorse adaptive",
        others: &["llama.cpp Q4_1", "llama.cpp bf16"],
    },
    Row {
        name: "32 chats",
        load: Load::Chat(32),
        ours: "drafthorse adaptive",
        others: &["llama.cpp Q4_1", "llama.cpp bf16"],
    },
    Row {
        name: "prefill, 1024 tokens",
        load: Load::Prefill,
        ours: "drafthorse 4-bit",
        others: &["llama.cpp Q4_1", "llama.cpp bf16"],
    },
    Row {
        name: "first tokens per second, idle server, 30-token prompt",
        load: Load::FirstToken,
        ours: "drafthorse 4-bit",
        others: &["llama.cpp Q4_1", "llama.cpp bf16"],
    },
    Row {
        name: "the same with a draft",
        load: Load::FirstToken,
        ours: "drafthorse as run",
        others: &["llama.cpp Q4_1", "llama.cpp bf16"],
    },
];

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    let dir = PathBuf::from(arguments.next().unwrap_or_else(|| ".cache/peers".into()));
    let wanted = arguments.next().unwrap_or_default();
    let installed = Installed::find(&tests::repository().join(dir));
    let contenders = start(&installed);
    println!("| server | ready after, s | peak memory at start, MiB |\n|---|---|---|");
    for contender in &contenders {
        println!(
            "| {} | {:.1} | {} |",
            contender.name(),
            contender.ready_after().as_secs_f64(),
            contender.peak_mib()
        );
    }
    println!("\n| load | server | median (least – most) | ours / best other |\n|---|---|---|---|");
    ROWS.iter().filter(|row| row.name.contains(&wanted)).for_each(|row| measure(row, &contenders));
    println!("\n| server | peak memory after all loads, MiB |\n|---|---|");
    contenders.iter().for_each(|contender| println!("| {} | {} |", contender.name(), contender.peak_mib()));
}

fn start(installed: &Installed) -> Vec<Contender> {
    let ours = |name, options: ServerOptions| Contender::ours(name, options.threads(THREADS));
    let mut all = vec![
        ours("drafthorse 4-bit", ServerOptions::plain()),
        ours("drafthorse bf16", ServerOptions::plain_bfloat16()),
        ours("drafthorse as run", ServerOptions::as_run()),
        ours("drafthorse NGRAM", ServerOptions::ngram()),
        ours("drafthorse adaptive", ServerOptions::as_run().with(&["--speculative-adaptive"])),
    ];
    all.extend(installed.start(THREADS));
    all
}

fn measure(row: &Row, contenders: &[Contender]) {
    let named = |name: &&str| contenders.iter().find(|contender| contender.name() == *name);
    let Some(ours) = named(&row.ours) else { return };
    let others: Vec<_> = row.others.iter().filter_map(named).collect();
    let mut results: Vec<(&Contender, Vec<f64>)> =
        std::iter::once(ours).chain(others).map(|contender| (contender, Vec::new())).collect();
    for round in 0..=ROUNDS {
        for (contender, values) in &mut results {
            let value = run(contender, row.load, round);
            // The first round warms up.
            if round > 0 {
                values.push(value);
            }
        }
    }
    let best = results[1..].iter().map(|(_, values)| median(values)).fold(f64::NAN, f64::max);
    for (index, (contender, values)) in results.iter().enumerate() {
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(0.0, f64::max);
        let ratio = if index == 0 { format!("{:.2}", median(values) / best) } else { String::new() };
        let name = if index == 0 { row.name } else { "" };
        println!(
            "| {name} | {} | {:.1} ({least:.1} – {most:.1}) | {ratio} |",
            contender.name(),
            median(values)
        );
    }
}

fn run(contender: &Contender, load: Load, round: usize) -> f64 {
    contender.forget();
    match load {
        Load::Chat(count) => rate(contender, &prompts::questions(count)),
        Load::Copy => {
            let tasks = prompts::copies(4);
            let one = |task| {
                contender.forget();
                rate(contender, std::slice::from_ref(task))
            };
            let rates: Vec<f64> = tasks.iter().map(one).collect();
            rates.len() as f64 / rates.iter().map(|rate| 1.0 / rate).sum::<f64>()
        }
        Load::Prefill => {
            let start = Instant::now();
            let (_, usage) = completion(contender, &prompts::long(round));
            usage["prompt_tokens"].as_f64().expect("usage was asked for") / start.elapsed().as_secs_f64()
        }
        Load::FirstToken => {
            let prompt = format!("Round {round}: {}", prompts::questions(1)[0]);
            1.0 / chat(contender, &prompt).first.as_secs_f64()
        }
    }
}

/// One answer.
struct Answer {
    first: Duration,
    start: Instant,
    end: Instant,
    tokens: u64,
}

/// Tokens per second between the first and the last token of all answers.
fn rate(contender: &Contender, questions: &[String]) -> f64 {
    let answers: Vec<Answer> = std::thread::scope(|scope| {
        let asked: Vec<_> =
            questions.iter().map(|question| scope.spawn(move || chat(contender, question))).collect();
        asked.into_iter().map(|answer| answer.join().expect("no request failed")).collect()
    });
    let start = answers.iter().map(|answer| answer.start).min().expect("a row has a question");
    let end = answers.iter().map(|answer| answer.end).max().expect("a row has a question");
    let tokens: u64 = answers.iter().map(|answer| answer.tokens - 1).sum();
    tokens as f64 / (end - start).as_secs_f64()
}

fn chat(contender: &Contender, question: &str) -> Answer {
    let body = json!({
        "model": contender.model(), "messages": [{"role": "user", "content": question}], "temperature": 0,
        "max_tokens": NEW_TOKENS, "ignore_eos": true, "stream": true, "cache_prompt": false,
        "stream_options": {"include_usage": true},
    });
    let sent = Instant::now();
    let mut stream = contender.stream("/v1/chat/completions", &body);
    let mut times: Option<(Instant, Instant)> = None;
    let mut tokens = 0;
    while let Some(event) = next(&mut stream) {
        if event["choices"][0]["delta"]["content"].as_str().is_some_and(|text| !text.is_empty()) {
            let now = Instant::now();
            times = Some((times.map_or(now, |(first, _)| first), now));
        }
        tokens = event["usage"]["completion_tokens"].as_u64().unwrap_or(tokens);
    }
    let (start, end) = times.expect("an answer has a token");
    Answer { first: start - sent, start, end, tokens }
}

/// One token behind a long prompt.
fn completion(contender: &Contender, prompt: &str) -> (String, Value) {
    let body = json!({
        "model": contender.model(), "prompt": prompt, "temperature": 0, "max_tokens": 1, "cache_prompt": false,
    });
    let reply = contender.post("/v1/completions", &body);
    (reply["choices"][0]["text"].to_string(), reply["usage"].clone())
}

fn next(stream: &mut Stream) -> Option<Value> {
    let event = stream.next();
    assert_eq!(stream.status, 200, "{event:?}");
    event
}

/// The middle of the values; NaN when there is none.
fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
