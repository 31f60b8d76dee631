//! Times the decode steps of every draft worker on the tiny golden models, split into draft, extend (the worker's own
//! rows of accepted tokens), verify (the target's pass) and host (all the rest: scheduling, choosing, counting, rows
//! for the wire). Then what the short path of a chain saves on a vocabulary of full size.
//!
//! usage: cargo bench -p scheduler-proc --bench workers

mod common;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use proto::link::{Backlog, LinkEvent, SendError};
use proto::{
    AcceptanceRule, DraftModelConfig, Dtype, FlushCacheReqInput, Front, Lane, NgramConfig, NgramMatchType,
    SamplingParams, ServeConfig, SpecAlgorithm, SpecConfig, SpecCounters, ToDetokenizer, ToScheduler,
    ToTokenizer, TokenId, TokenizedGenerateReqInput, Weights,
};
use scheduler_proc::batch::{Batch, EngineSlot, RowKind, RowParams, StepOutput, StepTiming};
use scheduler_proc::engine::sample::{Chooser, Path as TokenPath};
use scheduler_proc::engine::{DraftStatus, Engine, EngineError, EngineLimits, build};
use scheduler_proc::metrics::SchedulerMetrics;
use scheduler_proc::outbox::Peers;
use scheduler_proc::scheduler::{Event, Scheduler};

use crate::common::best;

const ROUNDS: usize = 30;
const NEW_TOKENS: u32 = 48;
/// The default model's.
const VOCABULARY: usize = 49_152;

/// A draft worker with its target, and the file whose prompts it knows.
struct Worker {
    name: &'static str,
    target: &'static str,
    case: &'static str,
    spec: Option<SpecConfig>,
}

/// What decode steps took, one by one, and what they made.
#[derive(Debug, Default)]
struct Steps {
    parts: Vec<StepTiming>,
    /// Seconds of the scheduler's whole turn around the step.
    walls: Vec<f64>,
    tokens: usize,
    spec: SpecCounters,
}

/// Notes the steps of an engine in which every row decodes.
struct Noted {
    inner: Box<dyn Engine>,
    steps: Rc<RefCell<Steps>>,
}

/// Neighbours that take everything, as bytes.
#[derive(Default)]
struct Sink {
    bytes: usize,
    messages: u64,
}

fn main() {
    println!(
        "{:24} {:>5} {:>7} | per decode step, us: {:>7} {:>7} {:>7} {:>7} {:>7} | {:>9}",
        "tiny models, float32", "batch", "accept", "draft", "extend", "verify", "host", "all", "us/token"
    );
    for worker in workers() {
        for batch in [1, 4] {
            report(&worker, batch, &measure(&worker, batch));
        }
    }
    short_path();
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/golden")
}

fn workers() -> Vec<Worker> {
    let model = |draft: &str| DraftModelConfig {
        path: draft.to_owned(),
        weights: Weights::Safetensors(fixtures().join(draft)),
        token_map: None,
    };
    let shape = |algorithm, (num_steps, eagle_topk, num_draft_tokens)| {
        Some(SpecConfig {
            algorithm,
            num_steps,
            eagle_topk,
            num_draft_tokens,
            acceptance: AcceptanceRule::default(),
            adaptive: None,
            ngram_first: None,
        })
    };
    let (chain, tree) = ((4, 1, 5), (4, 4, 13));
    let eagle = || SpecAlgorithm::Eagle(model("eagle1-tiny/draft"));
    let eagle3 = || SpecAlgorithm::Eagle3(model("eagle3-tiny/draft"));
    let standalone = || SpecAlgorithm::Standalone(model("standalone-tiny/draft"));
    let ngram = SpecAlgorithm::Ngram(NgramConfig {
        min_bfs_breadth: 1,
        max_bfs_breadth: 10,
        match_type: NgramMatchType::Bfs,
        max_trie_depth: 18,
        capacity: 1 << 20,
    });
    let row = |name, target, case, spec| Worker { name, target, case, spec };
    vec![
        row("plain", "llama-tiny", "eagle1-tiny", None),
        row("NGRAM 12", "llama-tiny", "eagle1-tiny", shape(ngram, (1, 10, 12))),
        row("EAGLE chain 4", "llama-tiny", "eagle1-tiny", shape(eagle(), chain)),
        row("EAGLE tree 4x4, 12", "llama-tiny", "eagle1-tiny", shape(eagle(), tree)),
        row("STANDALONE chain 4", "llama-tiny", "standalone-tiny", shape(standalone(), chain)),
        row("STANDALONE tree 4x4, 12", "llama-tiny", "standalone-tiny", shape(standalone(), tree)),
        row("plain, 8 layers", "eagle3-tiny", "eagle3-tiny", None),
        row("EAGLE3 chain 4", "eagle3-tiny", "eagle3-tiny", shape(eagle3(), chain)),
        row("EAGLE3 tree 4x4, 12", "eagle3-tiny", "eagle3-tiny", shape(eagle3(), tree)),
    ]
}

impl Worker {
    fn config(&self) -> ServeConfig {
        let target = fixtures().join(self.target).join("target");
        let mut config = common::config(Weights::Safetensors(target), Dtype::Float32);
        config.model.vocab_size = 512;
        config.model.context_length = 512;
        config.spec = self.spec.clone();
        config
    }

    fn prompts(&self) -> Vec<Vec<TokenId>> {
        let text = std::fs::read(fixtures().join(self.case).join("golden.json"))
            .expect("the case has a golden file");
        let golden: serde_json::Value = serde_json::from_slice(&text).expect("golden files are JSON");
        let prompts = golden["prompts"].as_array().expect("a list of prompts");
        prompts
            .iter()
            .map(|prompt| serde_json::from_value(prompt["ids"].clone()).expect("a prompt is a list of ids"))
            .collect()
    }
}

/// Single steps over many rounds: their medians hold on a machine that others use, too.
fn measure(worker: &Worker, batch: usize) -> Steps {
    let config = Arc::new(worker.config());
    let steps = Rc::new(RefCell::new(Steps::default()));
    let inner = build(&config, None, &mut |_, _| {}).expect("the tiny models load");
    let engine = Noted { inner, steps: Rc::clone(&steps) };
    let metrics =
        SchedulerMetrics::new(&config, None).expect("without --enable-metrics nothing is registered");
    let mut scheduler = Scheduler::new(Arc::clone(&config), engine, Sink::default(), None, metrics);
    let prompts = worker.prompts();
    for round in 0..=ROUNDS {
        // Prompts of all lengths, one after the other or all at once.
        for (index, prompts) in prompts.chunks(batch).enumerate() {
            for (at, prompt) in prompts.iter().enumerate() {
                let rid = format!("{round}-{index}-{at}");
                tell(&mut scheduler, ToScheduler::Generate(Box::new(request(&rid, prompt.clone()))));
            }
            run(&mut scheduler, &steps);
        }
        // What this round left in caches and tries would make the next one another.
        tell(&mut scheduler, ToScheduler::FlushCache(FlushCacheReqInput { id: 0, timeout_s: 0.0 }));
        // The first warms up.
        if round == 0 {
            *steps.borrow_mut() = Steps::default();
        }
    }
    steps.take()
}

fn tell(scheduler: &mut Scheduler<Noted, Sink>, message: ToScheduler) {
    scheduler.handle(Event::Tokenizer(Front(0), LinkEvent::Message { seq: 0, message }));
}

fn run(scheduler: &mut Scheduler<Noted, Sink>, steps: &RefCell<Steps>) {
    loop {
        let before = steps.borrow().parts.len();
        let start = Instant::now();
        let worked = scheduler.step().expect("the engine does not break");
        let wall = start.elapsed().as_secs_f64();
        let mut steps = steps.borrow_mut();
        if steps.parts.len() > before {
            steps.walls.push(wall);
        }
        if !worked {
            return;
        }
    }
}

fn request(rid: &str, input_ids: Vec<TokenId>) -> TokenizedGenerateReqInput {
    TokenizedGenerateReqInput {
        rid: rid.into(),
        input_ids,
        output_ids: Vec::new(),
        spec: SpecCounters::default(),
        sampling_params: SamplingParams {
            max_new_tokens: NEW_TOKENS,
            ignore_eos: true,
            temperature: 0.0,
            ..SamplingParams::default()
        },
        stream: true,
        return_logprob: false,
        logprob_start_len: None,
        top_logprobs_num: 0,
        token_ids_logprob: Vec::new(),
        extra_key: None,
        log_metrics: true,
        attempt: 1,
    }
}

fn report(worker: &Worker, batch: usize, steps: &Steps) {
    let part = |of: fn(&StepTiming) -> f64| median(steps.parts.iter().map(of)) * 1e6;
    let engine = |parts: &StepTiming| parts.draft + parts.extend + parts.forward;
    let host = median(steps.walls.iter().zip(&steps.parts).map(|(wall, parts)| wall - engine(parts))) * 1e6;
    let [draft, extend, verify] =
        [part(|parts| parts.draft), part(|parts| parts.extend), part(|parts| parts.forward)];
    // Not the median of whole turns: one that is interrupted anywhere is a slow one.
    let all = draft + extend + verify + host;
    println!(
        "{:24} {batch:5} {:7.2} | {:20} {draft:7.0} {extend:7.0} {verify:7.0} {host:7.0} {all:7.0} | {:9.1}",
        worker.name,
        steps.spec.accept_length().unwrap_or(1.0),
        "",
        all * steps.walls.len() as f64 / steps.tokens as f64,
    );
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A chain takes the argmax; a tree needs probabilities and the best of them, also where it is one wide.
fn short_path() {
    let mut state = 1u32;
    let mut draw = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32
    };
    // Sums of uniform draws: bell-shaped, as logits are.
    let logits: Vec<f32> = (0..VOCABULARY).map(|_| (0..6).map(|_| draw() * 4.0).sum()).collect();
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let params = RowParams { sampling, terminators: Vec::new(), logprobs: None };
    let path = TokenPath::new(&params, &[1, 2, 3], 1);
    let mut chooser = Chooser::default();
    let argmax = best(|| {
        chooser.guess(&logits, &path).expect("the logits are finite");
    });
    println!("\none draft token from {VOCABULARY} logits, us:");
    println!("  topk 1: argmax                   {:7.1}", argmax * 1e6);
    for topk in [1, 4] {
        let general = best(|| {
            chooser.best(&logits, topk).expect("the logits are finite");
        });
        println!(
            "  topk {topk}: softmax and the best {topk}    {:7.1} ({:.1}x)",
            general * 1e6,
            general / argmax
        );
    }
}

impl Engine for Noted {
    fn limits(&self) -> &EngineLimits {
        self.inner.limits()
    }

    fn draft_status(&self) -> DraftStatus {
        self.inner.draft_status()
    }

    fn step(&mut self, batch: &Batch<'_>) -> Result<StepOutput, EngineError> {
        let output = self.inner.step(batch)?;
        if !batch.rows.iter().any(|row| row.kind == RowKind::Extend) {
            let mut steps = self.steps.borrow_mut();
            steps.tokens += output.rows.iter().map(|row| row.tokens.len()).sum::<usize>();
            steps.parts.push(output.timing);
            for verify in output.rows.iter().filter_map(|row| row.verify.as_ref()) {
                steps.spec.record(verify.proposed(), verify.accepted, verify.accepted);
            }
        }
        Ok(output)
    }

    fn release(&mut self, slot: EngineSlot) {
        self.inner.release(slot);
    }

    fn flush(&mut self) {
        self.inner.flush();
    }
}

impl Peers for Sink {
    fn to_detokenizer(&mut self, _lane: Lane, message: &ToDetokenizer) -> Result<u64, SendError> {
        self.take(&proto::wire::encode(message).expect("rows can be written"))
    }

    fn to_tokenizer(&mut self, _front: Front, message: &ToTokenizer) -> Result<u64, SendError> {
        self.take(&proto::wire::encode(message).expect("replies can be written"))
    }

    fn detokenizer_backlog(&self, _lane: Lane) -> Backlog {
        Backlog::default()
    }
}

impl Sink {
    fn take(&mut self, bytes: &[u8]) -> Result<u64, SendError> {
        self.bytes += bytes.len();
        self.messages += 1;
        Ok(self.messages)
    }
}
