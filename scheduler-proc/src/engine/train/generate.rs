//! Stage 1. Owns which conversations are made, in which order and at which temperature, and puts them into the corpus.

use std::collections::{HashMap, HashSet};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use proto::{SamplingParams, ServeConfig};
use serde_json::Value;

use super::args::Args;
use super::batcher::{Batcher, Conversation, Job, Listener, NextTurn};
use super::corpus::{CorpusWriter, Sequence};
use super::harvest::{Harvester, Shelf};
use super::prompts::{ChatCodec, Prompt, PromptFile, Split};
use crate::batch::RowParams;
use crate::engine::model::{Features, TargetModel};
use crate::engine::models::draft_config::default_captured_layers;
use crate::engine::spec::SpecEngine;
use crate::engine::{Engine, model};

/// Held-out prompts that are answered as well, to see the loss on what is not trained on.
const VALIDATION_PROMPTS: usize = 64;

/// Of 100 answers: greedy ones, then those at temperature 0.7; the rest are at 1.
const MIX: (u64, u64) = (55, 85);
/// The same for a prompt's first answer once it has a greedy one, which no second would differ from.
const LATER_MIX: (u64, u64) = (0, 67);

/// What a user says next, whatever the answer was.
const FOLLOW_UPS: [&str; 16] = [
    "Can you say that in one short sentence?",
    "Please give me an example.",
    "Why is that?",
    "Explain that to a child.",
    "Write it as a list of short points.",
    "What should I do first?",
    "Can you go into more detail?",
    "What are the risks or drawbacks?",
    "Rewrite that in a more formal way.",
    "Now continue from where you stopped.",
    "Is there another way to look at it?",
    "Summarize our conversation so far.",
    "Give me three questions about this topic, with answers.",
    "Show me the steps one by one.",
    "How would you check that this is right?",
    "Thanks! What else should I know?",
];

/// The target with a worker that keeps its hidden states.
pub(super) fn engine(config: &ServeConfig) -> Result<(Box<dyn Engine>, Shelf)> {
    let shape = model::shape_of(&config.model.weights)?;
    let layers = default_layers(shape.layers);
    let shelf = Shelf::new(shape.hidden_size, layers.clone());
    let mut target = TargetModel::load(config, &mut |_, _| {}).context("loading the target")?;
    target.leave(Features::LayersAndFinal(layers));
    let limits = target.limits().clone();
    let harvester = Box::new(Harvester::new(shelf.clone()));
    Ok((Box::new(SpecEngine::new(target, limits, Some(harvester))), shelf))
}

/// The layers whose inputs EAGLE3 takes where its config names none: configs count outputs, so the first has none.
fn default_layers(layers: usize) -> Vec<usize> {
    let mut chosen = default_captured_layers(layers).map(|layer| layer.clamp(1, layers.max(1)));
    chosen.sort_unstable();
    chosen.to_vec()
}

/// Answers prompts until the corpus has the tokens asked for.
pub(super) fn run(
    args: &Args,
    engine: Box<dyn Engine>,
    shelf: Shelf,
    codec: &ChatCodec,
    prompts: &PromptFile,
    corpus: CorpusWriter,
) -> Result<()> {
    let order = JobOrder::new(args, codec, prompts);
    let done: HashSet<u64> = corpus.sequences().iter().map(|sequence| sequence.job).collect();
    let tokens: u64 = corpus.sequences().iter().map(Sequence::answer_tokens).sum();
    let mut stage = Stage { order: &order, shelf, corpus, talks: HashMap::new(), bar: bar(args, tokens) };
    if tokens >= args.tokens {
        stage.bar.finish();
        return Ok(());
    }
    let mut batcher = Batcher::new(engine, args.generate_rows, args.conversation_len())?;
    let mut jobs = order.jobs().filter(|number| !done.contains(number)).map(|number| order.job(number));
    batcher.run(&mut jobs, &mut stage)?;
    stage.bar.finish();
    Ok(())
}

fn bar(args: &Args, done: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(
        "generate {bar:30} {human_pos}/{human_len} answer tokens, {per_sec}, ETA {eta} {msg}",
    );
    let bar = ProgressBar::new(args.tokens).with_position(done);
    bar.set_style(style.expect("the template is valid"));
    bar.reset_eta();
    bar
}

/// Jobs by number: passes over the training prompts, each pass in an order of its own; before them a few held-out
/// ones. The number alone decides everything about a job, so that a killed run goes on where it stopped.
struct JobOrder<'a> {
    args: &'a Args,
    codec: &'a ChatCodec,
    train: Vec<&'a Prompt>,
    heldout: Vec<&'a Prompt>,
}

/// A conversation so far, as messages.
struct Talk {
    messages: Vec<Value>,
}

impl<'a> JobOrder<'a> {
    fn new(args: &'a Args, codec: &'a ChatCodec, prompts: &'a PromptFile) -> Self {
        let mut heldout: Vec<_> = prompts.of(Split::Heldout).collect();
        // Neighbours in a prompts file tend to be alike.
        heldout.sort_by_key(|prompt| hash(args.seed, prompt.id.bytes().map(u64::from)));
        heldout.truncate(VALIDATION_PROMPTS);
        Self { args, codec, train: prompts.of(Split::Train).collect(), heldout }
    }

    fn jobs(&self) -> impl Iterator<Item = u64> + use<> {
        let last = if self.train.is_empty() { self.heldout.len() as u64 } else { u64::MAX };
        0..last
    }

    /// The prompt of a job, and which pass over all of them it belongs to.
    fn prompt(&self, number: u64) -> (&'a Prompt, u64) {
        if let Some(prompt) = self.heldout.get(number as usize) {
            return (prompt, 0);
        }
        let number = number - self.heldout.len() as u64;
        let count = self.train.len() as u64;
        let (pass, at) = (number / count, number % count);
        (self.train[shuffled(at, count, hash(self.args.seed, [pass])) as usize], pass)
    }

    fn job(&self, number: u64) -> Result<Job> {
        let (prompt, pass) = self.prompt(number);
        let encoded = self.codec.encode(&prompt.messages);
        let tokens = encoded.with_context(|| format!("prompt {:?}", prompt.id))?;
        let temperature = match pass {
            0 => 0.0,
            _ => self.draw_temperature(number, 0, LATER_MIX),
        };
        Ok(Job { number, prompt: tokens, params: self.params(number, 0, temperature) })
    }

    fn draw_temperature(&self, number: u64, turn: u64, (greedy, warm): (u64, u64)) -> f64 {
        match hash(self.args.seed, [1, number, turn]) % 100 {
            draw if draw < greedy => 0.0,
            draw if draw < warm => 0.7,
            _ => 1.0,
        }
    }

    fn params(&self, number: u64, turn: u64, temperature: f64) -> RowParams {
        let sampling = SamplingParams {
            max_new_tokens: self.args.answer_len as u32,
            temperature,
            sampling_seed: hash(self.args.seed, [2, number, turn]),
            ..SamplingParams::default()
        };
        RowParams { sampling, terminators: self.codec.end_ids(), logprobs: None }
    }

    fn follow_up(&self, number: u64) -> &'static str {
        FOLLOW_UPS[(hash(self.args.seed, [3, number]) % FOLLOW_UPS.len() as u64) as usize]
    }
}

/// Where a conversation of the run goes when its answers end.
struct Stage<'a> {
    order: &'a JobOrder<'a>,
    shelf: Shelf,
    corpus: CorpusWriter,
    /// Messages of the conversations in their second turn.
    talks: HashMap<u64, Talk>,
    bar: ProgressBar,
}

impl Stage<'_> {
    fn messages(&self, job: u64) -> Vec<Value> {
        match self.talks.get(&job) {
            Some(talk) => talk.messages.clone(),
            None => self.order.prompt(job).0.messages.clone(),
        }
    }
}

impl Listener for Stage<'_> {
    fn answered(&mut self, conversation: &Conversation) -> Result<Option<NextTurn>> {
        let Conversation { job, tokens, answers, .. } = conversation;
        let (Some(answer), true) = (answers.last(), self.order.prompt(*job).0.split == Split::Train) else {
            return Ok(None);
        };
        let ended = tokens.last().is_some_and(|last| self.order.codec.end_ids().contains(last));
        if answers.len() > 1 || !ended {
            return Ok(None);
        }
        let text = self.order.codec.decode(&tokens[answer.clone()]);
        let turn = self.order.codec.turn(&self.messages(*job), &text, self.order.follow_up(*job))?;
        let Some((messages, mut next)) = turn else { return Ok(None) };
        // The template's own end of the answer, which the target has said already.
        if next.first() == tokens.last() {
            next.remove(0);
        }
        self.talks.insert(*job, Talk { messages });
        let temperature = self.order.draw_temperature(*job, 1, MIX);
        Ok(Some(NextTurn { tokens: next, params: self.order.params(*job, 1, temperature) }))
    }

    fn ended(&mut self, conversation: Conversation) -> Result<bool> {
        self.talks.remove(&conversation.job);
        let hidden = self.shelf.take(conversation.slot);
        let (prompt, _) = self.order.prompt(conversation.job);
        let sequence = Sequence {
            job: conversation.job,
            prompt: prompt.id.clone(),
            split: prompt.split,
            answers: conversation.answers.iter().map(|answer| (answer.start, answer.end)).collect(),
            temperatures: conversation.temperatures,
            tokens: conversation.tokens,
        };
        self.bar.inc(sequence.answer_tokens());
        self.corpus.push(sequence, &hidden)?;
        if self.bar.is_hidden() && self.corpus.sequences().len().is_multiple_of(256) {
            let tokens = self.bar.position();
            let per_second = self.bar.per_sec() as u64;
            tracing::warn!(conversations = self.corpus.sequences().len(), tokens, per_second, "generating");
        }
        Ok(self.bar.position() < self.order.args.tokens)
    }
}

/// A number that depends on all of these (splitmix64).
pub(super) fn hash(seed: u64, parts: impl IntoIterator<Item = u64>) -> u64 {
    let mix = |state: u64, part: u64| {
        let mut z = (state ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    parts.into_iter().fold(mix(seed, 0), mix)
}

/// Where `at` goes in a random order of `0..count`: a bijection of the next power of four, walked until inside.
fn shuffled(at: u64, count: u64, seed: u64) -> u64 {
    let half = (64 - (count - 1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << half) - 1;
    let mut value = at;
    loop {
        let (mut left, mut right) = (value >> half, value & mask);
        for round in 0..4 {
            (left, right) = (right, left ^ (hash(seed, [round, right]) & mask));
        }
        value = left << half | right;
        if value < count {
            return value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_is_a_permutation_that_depends_on_the_seed() {
        for count in [1, 2, 5, 64, 1000] {
            let order = |seed| (0..count).map(|at| shuffled(at, count, seed)).collect::<Vec<_>>();
            let mut sorted = order(3);
            sorted.sort_unstable();
            assert_eq!(sorted, (0..count).collect::<Vec<_>>());
            assert!(count < 64 || order(3) != order(4));
        }
    }
}
