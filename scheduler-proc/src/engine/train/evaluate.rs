//! Stage 3. Owns the measuring of a head: real speculative decoding of held-out prompts, by the engine that serves.

use std::path::Path;

use anyhow::{Context, Result};
use indicatif::ProgressBar;
use proto::{
    AcceptanceRule, DflashConfig, DraftModelConfig, SamplingParams, ServeConfig, SpecAlgorithm, SpecConfig,
    SpecCounters, Weights,
};
use serde::{Deserialize, Serialize};

use super::args::{Algorithm, Args};
use super::batcher::{Batcher, Conversation, Job, Listener, NextTurn};
use super::checkpoint::token_map;
use super::generate::hash;
use super::prompts::{ChatCodec, Prompt, PromptFile, Split};
use crate::batch::RowParams;
use crate::engine;

/// Prompts of each set at most.
const PROMPTS: usize = 32;
const ANSWER_TOKENS: u32 = 128;
/// Conversations at once: each is drafted for as if it were alone.
const ROWS: usize = 16;

/// A way to draft with a head.
struct Shape {
    name: String,
    algorithm: fn(DraftModelConfig) -> SpecAlgorithm,
    steps: u32,
    topk: u32,
    width: u32,
}

/// A set of prompts and how they are answered.
struct Trial<'a> {
    name: &'static str,
    temperature: f64,
    prompts: Vec<&'a Prompt>,
}

/// What a head reached on one set with one way to draft.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Measured {
    pub set: String,
    pub shape: String,
    pub prompts: usize,
    pub tokens: u64,
    pub verify_steps: u64,
    /// Tokens per verify step, the bonus included.
    pub accept_length: f64,
    /// Share of verify steps that accepted at least 1, 2, … drafts.
    pub accepted_at: Vec<f64>,
}

/// Measures the head in `dir` on all sets with all shapes.
pub(super) fn run(
    args: &Args,
    config: &ServeConfig,
    codec: &ChatCodec,
    prompts: &PromptFile,
    dir: &Path,
) -> Result<Vec<Measured>> {
    let trials = trials(args, prompts);
    let shapes = shapes(args);
    let bar = ProgressBar::new((trials.len() * shapes.len()) as u64);
    let mut all = Vec::new();
    for shape in shapes {
        let spec = SpecConfig {
            algorithm: (shape.algorithm)(draft(args, dir)),
            num_steps: shape.steps,
            eagle_topk: shape.topk,
            num_draft_tokens: shape.width,
            acceptance: AcceptanceRule::Equality,
            adaptive: None,
            ngram_first: None,
        };
        let config = with_head(args, config, spec);
        let engine = engine::build(&config, None, &mut |_, _| {}).context("serving the head")?;
        let mut batcher = Batcher::new(engine, ROWS, config.model.context_length as usize)?;
        for trial in trials.iter().filter(|trial| !trial.prompts.is_empty()) {
            let mut tally = Tally::default();
            batcher.run(&mut trial.jobs(args, codec), &mut tally)?;
            let measured = tally.measured(trial, &shape.name);
            announce(&bar, &measured);
            all.push(measured);
        }
    }
    bar.finish_and_clear();
    Ok(all)
}

fn draft(args: &Args, dir: &Path) -> DraftModelConfig {
    DraftModelConfig {
        path: dir.display().to_string(),
        weights: Weights::Safetensors(dir.to_owned()),
        token_map: args.algorithm.has_token_map().then(|| token_map(dir)),
    }
}

/// What a head can do: chains, and trees where it drafts step by step with one layer.
fn shapes(args: &Args) -> Vec<Shape> {
    let drafts = args.unroll as u32;
    let chain = |algorithm, steps: u32| Shape {
        name: format!("chain of {steps}"),
        algorithm,
        steps,
        topk: 1,
        width: steps + 1,
    };
    let tree = |algorithm, prefix: &str| Shape {
        name: format!("{prefix}tree 4 x 4, 12 tokens"),
        algorithm,
        steps: 4,
        topk: 4,
        width: 12,
    };
    match args.algorithm {
        Algorithm::Eagle => {
            let eagle = SpecAlgorithm::Eagle;
            vec![chain(eagle, 3), chain(eagle, 5), tree(eagle, "")]
        }
        Algorithm::Eagle3 => {
            let eagle3 = SpecAlgorithm::Eagle3;
            vec![chain(eagle3, 3), chain(eagle3, 5), tree(eagle3, "")]
        }
        Algorithm::MultiLayerEagle => {
            vec![
                chain(SpecAlgorithm::MultiLayerEagle, drafts),
                tree(SpecAlgorithm::Eagle, "first layer alone, "),
            ]
        }
        Algorithm::Dflash => {
            let algorithm =
                |model| SpecAlgorithm::Dflash(DflashConfig { model, mask_token: None, fixed_block: false });
            vec![Shape { name: format!("block of {}", drafts + 1), steps: 1, ..chain(algorithm, drafts) }]
        }
    }
}

fn with_head(args: &Args, config: &ServeConfig, spec: SpecConfig) -> ServeConfig {
    let mut config = config.clone();
    let nodes = u64::from(spec.num_draft_tokens);
    config.schedule.max_running_requests = ROWS as u32;
    config.schedule.max_total_tokens = Some(ROWS as u64 * (args.conversation_len() as u64 + nodes));
    config.spec = Some(spec);
    config
}

fn trials<'a>(args: &Args, prompts: &'a PromptFile) -> Vec<Trial<'a>> {
    let pick = |code: bool| {
        let mut chosen: Vec<_> =
            prompts.of(Split::Heldout).filter(|prompt| prompt.task.contains("code") == code).collect();
        chosen
            .sort_by_key(|prompt| hash(args.seed, [40].into_iter().chain(prompt.id.bytes().map(u64::from))));
        chosen.truncate(PROMPTS);
        chosen
    };
    vec![
        Trial { name: "greedy chat", temperature: 0.0, prompts: pick(false) },
        Trial { name: "greedy code", temperature: 0.0, prompts: pick(true) },
        Trial { name: "chat at temperature 0.8", temperature: 0.8, prompts: pick(false) },
    ]
}

impl Trial<'_> {
    fn jobs<'j>(&'j self, args: &'j Args, codec: &'j ChatCodec) -> impl Iterator<Item = Result<Job>> + 'j {
        let job = |(number, prompt): (u64, &&Prompt)| {
            let sampling = SamplingParams {
                max_new_tokens: ANSWER_TOKENS.min(args.answer_len as u32),
                temperature: self.temperature,
                sampling_seed: hash(args.seed, [41, number]),
                ..SamplingParams::default()
            };
            let params = RowParams { sampling, terminators: codec.end_ids(), logprobs: None };
            Ok(Job { number, prompt: codec.encode(&prompt.messages)?, params })
        };
        (0..).zip(&self.prompts).map(job)
    }
}

/// Adds up what conversations were accepted.
#[derive(Debug, Default)]
struct Tally {
    spec: SpecCounters,
    tokens: u64,
    prompts: usize,
}

impl Tally {
    fn measured(&self, trial: &Trial<'_>, shape: &str) -> Measured {
        let steps = self.spec.verify_ct.max(1) as f64;
        let at_least =
            |depth: usize| self.spec.acceptance_histogram.iter().skip(depth).sum::<u64>() as f64 / steps;
        Measured {
            set: trial.name.to_owned(),
            shape: shape.to_owned(),
            prompts: self.prompts,
            tokens: self.tokens,
            verify_steps: self.spec.verify_ct,
            accept_length: self.spec.accept_length().unwrap_or(1.0),
            accepted_at: (1..self.spec.acceptance_histogram.len()).map(at_least).collect(),
        }
    }
}

impl Listener for Tally {
    fn answered(&mut self, _conversation: &Conversation) -> Result<Option<NextTurn>> {
        Ok(None)
    }

    fn ended(&mut self, conversation: Conversation) -> Result<bool> {
        self.spec.add(&conversation.spec);
        self.tokens += conversation.answers.iter().map(|answer| answer.len() as u64).sum::<u64>();
        self.prompts += 1;
        Ok(true)
    }
}

fn announce(bar: &ProgressBar, measured: &Measured) {
    bar.inc(1);
    if bar.is_hidden() {
        let Measured { set, shape, accept_length, .. } = measured;
        tracing::warn!(set, shape, accept_length, "measured");
    }
}

/// The measurements as a table in Markdown.
pub(super) fn table(all: &[Measured]) -> String {
    let mut text = String::from(
        "| set | draft | prompts | tokens | verify steps | accept length | accepted at 1, 2, … |\n\
         |---|---|---|---|---|---|---|\n",
    );
    for measured in all {
        let at: Vec<String> = measured.accepted_at.iter().map(|share| format!("{share:.3}")).collect();
        text += &format!(
            "| {} | {} | {} | {} | {} | {:.2} | {} |\n",
            measured.set,
            measured.shape,
            measured.prompts,
            measured.tokens,
            measured.verify_steps,
            measured.accept_length,
            at.join(" ")
        );
    }
    text
}
