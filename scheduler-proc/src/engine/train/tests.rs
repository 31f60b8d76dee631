//! Whole trainings of tiny heads: the loss falls, a seed decides everything, a resumed training is an uninterrupted
//! one, and the checkpoint serves.

use std::path::Path;

use clap::Parser;
use proto::{
    DflashConfig, DraftModelConfig, Dtype, SamplingParams, SpecAlgorithm, SpecConfig, TokenId, Weights,
};

use super::batcher::{Batcher, Conversation, Job, Listener, NextTurn};
use super::corpus::{CorpusHeader, Sequence};
use super::harvest::Shelf;
use super::history::Entry;
use super::prompts::Split;
use super::*;
use crate::batch::RowParams;
use crate::engine::model::tests::{config, fixtures};

const ANSWER: u32 = 40;
const END: TokenId = 2;

fn target() -> ServeConfig {
    let weights = Weights::Safetensors(fixtures().join("llama-tiny/target"));
    let mut config = config(weights, Dtype::Float32);
    config.schedule.num_threads = 1;
    config
}

fn prompt(number: u64) -> Vec<TokenId> {
    (0..6).map(|at| (3 + generate::hash(number, [at]) % 500) as TokenId).collect()
}

fn jobs(numbers: std::ops::Range<u64>) -> impl Iterator<Item = Result<Job>> {
    numbers.map(|number| {
        let sampling =
            SamplingParams { max_new_tokens: ANSWER, temperature: 0.0, ..SamplingParams::default() };
        let params = RowParams { sampling, terminators: vec![END], logprobs: None };
        Ok(Job { number, prompt: prompt(number), params })
    })
}

/// Puts conversations into a corpus; the first two are held out.
struct Keep {
    corpus: CorpusWriter,
    shelf: Shelf,
}

impl Listener for Keep {
    fn answered(&mut self, _: &Conversation) -> Result<Option<NextTurn>> {
        Ok(None)
    }

    fn ended(&mut self, conversation: Conversation) -> Result<bool> {
        let hidden = self.shelf.take(conversation.slot);
        let sequence = Sequence {
            job: conversation.job,
            prompt: String::new(),
            split: if conversation.job < 2 { Split::Heldout } else { Split::Train },
            answers: conversation.answers.iter().map(|answer| (answer.start, answer.end)).collect(),
            temperatures: conversation.temperatures,
            tokens: conversation.tokens,
        };
        self.corpus.push(sequence, &hidden)?;
        Ok(true)
    }
}

fn args(dir: &Path, algorithm: &str) -> Args {
    let model = fixtures().join("llama-tiny/target").display().to_string();
    let (out, corpus) = (dir.join("head").display().to_string(), dir.join("corpus").display().to_string());
    let fixed = [
        "train-draft",
        "--model",
        &model,
        "--algorithm",
        algorithm,
        "--prompts",
        "none",
        "--out",
        &out,
        "--corpus",
        &corpus,
        "--epochs",
        "10",
        "--batch-size",
        "4",
        "--seq-len",
        "64",
        "--lr",
        "3e-3",
        "--unroll",
        "3",
        "--draft-layers",
        "2",
        "--draft-vocab-size",
        "256",
        "--num-threads",
        "1",
    ];
    Args::parse_from(fixed)
}

/// A corpus of greedy answers to random prompts.
fn make_corpus(dir: &Path) {
    let (engine, shelf) = generate::engine(&target()).unwrap();
    let header: CorpusHeader = shelf.header(&args(dir, "eagle"), &target());
    let corpus = CorpusWriter::open(&dir.join("corpus"), &header).unwrap();
    let mut keep = Keep { corpus, shelf };
    Batcher::new(engine, 4, 64).unwrap().run(&mut jobs(0..22), &mut keep).unwrap();
    assert_eq!(keep.corpus.sequences().len(), 22);
}

fn weights(training: &Training<'_>) -> Vec<(String, Tensor)> {
    let params = training.state().unwrap().params.iter();
    params.map(|(name, tensor)| (name.clone(), tensor.detach().copy())).collect()
}

fn assert_equal(a: &[(String, Tensor)], b: &[(String, Tensor)]) {
    assert_eq!(a.len(), b.len());
    for ((name, a), (_, b)) in a.iter().zip(b) {
        assert!(a.equal(b), "{name} differs");
    }
}

fn trained<'a>(args: &'a Args, until: Option<u64>) -> Training<'a> {
    let mut training = Training::open(args, &target()).unwrap();
    training.run(until).unwrap();
    training
}

fn entries(args: &Args) -> Vec<Entry> {
    let history = History::open(&training_dir(args).join("history.jsonl"), u64::MAX).unwrap();
    history.of(false).cloned().collect()
}

/// Tokens per verify step on the training prompts, and the answers.
fn served(args: &Args, algorithm: fn(DraftModelConfig) -> SpecAlgorithm) -> (f64, Vec<Vec<TokenId>>) {
    struct Answers {
        spec: proto::SpecCounters,
        tokens: Vec<(u64, Vec<TokenId>)>,
    }
    impl Listener for Answers {
        fn answered(&mut self, _: &Conversation) -> Result<Option<NextTurn>> {
            Ok(None)
        }

        fn ended(&mut self, conversation: Conversation) -> Result<bool> {
            self.spec.add(&conversation.spec);
            self.tokens.push((conversation.job, conversation.tokens));
            Ok(true)
        }
    }
    let mut config = target();
    let draft = DraftModelConfig {
        path: String::new(),
        weights: Weights::Safetensors(args.out.clone()),
        token_map: None,
    };
    config.spec = Some(SpecConfig {
        algorithm: algorithm(draft),
        num_steps: 3,
        eagle_topk: 1,
        num_draft_tokens: 4,
        acceptance: proto::AcceptanceRule::Equality,
        adaptive: None,
        ngram_first: None,
    });
    let engine = crate::engine::build(&config, None, &mut |_, _| {}).unwrap();
    let mut answers = Answers { spec: proto::SpecCounters::default(), tokens: Vec::new() };
    Batcher::new(engine, 4, 64).unwrap().run(&mut jobs(2..22), &mut answers).unwrap();
    answers.spec.check().unwrap();
    answers.tokens.sort();
    (answers.spec.accept_length().unwrap(), answers.tokens.into_iter().map(|(_, tokens)| tokens).collect())
}

fn check(algorithm: &str, served_as: fn(DraftModelConfig) -> SpecAlgorithm) {
    let dir = tempfile::tempdir().unwrap();
    make_corpus(dir.path());
    let args = args(dir.path(), algorithm);

    let untrained = Training::begin(&args, &target()).unwrap();
    untrained.checkpoint(&target()).unwrap();
    let (before, plain) = served(&args, served_as);

    let whole = trained(&args, None);
    let losses: Vec<f64> = entries(&args).iter().map(|entry| entry.cross_entropy.iter().sum()).collect();
    assert!(losses.last().unwrap() < &(losses[0] * 0.9), "{losses:?}");
    whole.checkpoint(&target()).unwrap();
    whole.card(&[]).unwrap();
    assert!(args.out.join("loss.svg").is_file() && args.out.join("README.md").is_file());
    let (after, answers) = served(&args, served_as);
    assert!(after > before, "{before} tokens per step untrained, {after} trained");

    // Another draft, the same answers: those of the corpus, which no draft took part in.
    assert_eq!(answers, plain);
    let mut corpus: Vec<_> = whole.corpus.sequences().iter().filter(|s| s.split == Split::Train).collect();
    corpus.sort_by_key(|sequence| sequence.job);
    assert!(corpus.iter().map(|sequence| &sequence.tokens).eq(&answers));

    assert_equal(&weights(&trained(&args, None)), &weights(&whole));
    trained(&args, Some(17));
    let resuming = Args { resume: true, ..args.clone() };
    assert_equal(&weights(&trained(&resuming, None)), &weights(&whole));
    let other = Args { seed: 1, ..args.clone() };
    assert!(!weights(&trained(&other, None))[0].1.equal(&weights(&whole)[0].1));
}

#[test]
fn eagle_learns_and_serves() {
    check("eagle", SpecAlgorithm::Eagle);
}

#[test]
fn eagle3_learns_and_serves() {
    check("eagle3", SpecAlgorithm::Eagle3);
}

#[test]
fn multi_layer_eagle_learns_and_serves() {
    check("multi-layer-eagle", SpecAlgorithm::MultiLayerEagle);
}

#[test]
fn dflash_learns_and_serves() {
    check("dflash", |model| {
        SpecAlgorithm::Dflash(DflashConfig { model, mask_token: None, fixed_block: false })
    });
}

#[test]
fn a_state_of_another_training_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    make_corpus(dir.path());
    let first = args(dir.path(), "eagle");
    trained(&first, Some(2));
    let other = Args { resume: true, unroll: 2, ..first.clone() };
    assert!(Training::open(&other, &target()).is_err());
}
