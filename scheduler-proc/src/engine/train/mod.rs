//! Trains draft heads for a target, on the target's own answers. The binary `train-draft` is its only user.
//!
//! Layers, bottom up: `args` (what was typed), `model_files` (the target as a configuration), `prompts` (messages to
//! ids), `batcher` (many conversations through one engine); `harvest` and `corpus` (hidden states, as they are made
//! and on disk), `generate` (stage 1); `random`, `tables`, `vocabulary`, `params`,
//! `least_squares`, `init` (what is trained and against what), `dense`, `layered`, `denoise`, `net` (the differentiable
//! forward), `batches`,
//! `loss`, `optimizer`, `schedule` (a step), `state`, `history`, `trainer` (stage 2); `checkpoint`; `evaluate` (stage 3), `plot`, `card`.

mod args;
mod batcher;
mod batches;
mod card;
mod checkpoint;
mod corpus;
mod denoise;
mod dense;
mod evaluate;
mod generate;
mod harvest;
mod history;
mod init;
mod layered;
mod least_squares;
mod loss;
mod model_files;
mod net;
mod optimizer;
mod params;
mod plot;
mod prompts;
mod random;
mod schedule;
mod state;
mod tables;
#[cfg(test)]
mod tests;
mod trainer;
mod vocabulary;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use proto::ServeConfig;
use tch::Tensor;

pub use self::args::{Algorithm, Args, DtypeArg, Stage};
use self::card::Card;
use self::checkpoint::{Checkpoint, head_shape};
use self::corpus::{Corpus, CorpusWriter};
use self::evaluate::Measured;
use self::history::History;
use self::init::Start;
use self::model_files::TargetFiles;
use self::net::{HeadNet, HeadSpec};
use self::optimizer::Optimizer;
use self::prompts::{ChatCodec, PromptFile};
use self::state::{Recipe, TrainState};
use self::tables::TrainTables;
use self::trainer::Trainer;
use self::vocabulary::Vocabulary;
use super::hf_config::HfConfig;
use super::model;
use super::models::dflash_spec::DflashSpec;
use super::models::eagle_head::EagleSpec;
use super::models::eagle3_head::Eagle3Spec;
use super::models::mtp_head::MtpSpec;

/// Runs the stages asked for, one after the other.
pub fn run(args: &Args) -> Result<()> {
    let files = TargetFiles::find(args)?;
    let codec = ChatCodec::load(files.tokenizer_dir())?;
    let config = files.serve_config(args, codec.end_ids())?;
    let prompts = PromptFile::read(&args.prompts)?;
    if args.does(Stage::Generate) {
        let (engine, shelf) = generate::engine(&config)?;
        let header = shelf.header(args, &config);
        let corpus = CorpusWriter::open(&args.corpus_dir(), &header).context("opening the corpus")?;
        generate::run(args, engine, shelf, &codec, &prompts, corpus)?;
    }
    if args.does(Stage::Train) {
        let mut training = Training::open(args, &config)?;
        training.run(None)?;
        training.checkpoint(&config)?;
        training.card(&[])?;
    }
    if args.does(Stage::Evaluate) {
        let measured = evaluate::run(args, &config, &codec, &prompts, &args.out)?;
        println!("{}", evaluate::table(&measured));
        Training::resume(args, &config)?.card(&measured)?;
    }
    Ok(())
}

/// A training with all it needs, new or gone on with.
struct Training<'a> {
    args: &'a Args,
    corpus: Corpus,
    tables: TrainTables,
    vocabulary: Vocabulary,
    net: HeadNet,
    state: Option<TrainState>,
}

impl<'a> Training<'a> {
    fn open(args: &'a Args, config: &ServeConfig) -> Result<Self> {
        match args.resume && state_path(args).is_file() {
            true => Self::resume(args, config),
            false => Self::begin(args, config),
        }
    }

    fn begin(args: &'a Args, config: &ServeConfig) -> Result<Self> {
        std::fs::create_dir_all(training_dir(args))?;
        let mut training = Self::assemble(args, config, None)?;
        let ids: Vec<i64> = training.vocabulary.ids().iter().map(|&id| i64::from(id)).collect();
        let start = Start {
            spec: training.net.spec(),
            drafts: args.unroll,
            target: &training.tables,
            vocabulary: &Tensor::from_slice(&ids),
            seed: args.seed,
        };
        let (params, whiteners) = start.params(&training.corpus)?;
        let optimizer = Optimizer::new(&params, whiteners, HeadNet::compute_kind());
        let recipe = recipe(args, training.corpus.sequences().len());
        training.state = Some(TrainState { recipe, steps: 0, params, optimizer });
        Ok(training)
    }

    fn resume(args: &'a Args, config: &ServeConfig) -> Result<Self> {
        let state = trainer::resumed(&state_path(args), &recipe(args, 0))?;
        let mut training = Self::assemble(args, config, Some(state.recipe.sequences))?;
        training.state = Some(state);
        Ok(training)
    }

    fn assemble(args: &'a Args, config: &ServeConfig, sequences: Option<usize>) -> Result<Self> {
        let mut corpus = Corpus::open(&args.corpus_dir())?;
        if let Some(sequences) = sequences {
            corpus.truncate(sequences);
        }
        let target = model::shape_of(&config.model.weights)?;
        let header = corpus.header();
        if (header.hidden_size, header.vocab_size) != (target.hidden_size, target.vocab_size) {
            bail!("the corpus is of {}, not of {}", header.model, config.model.model_path);
        }
        let vocabulary = Vocabulary::of(corpus.sequences(), args.draft_vocab_size, target.vocab_size);
        let spec = match args.algorithm {
            Algorithm::Eagle => HeadSpec::Eagle(EagleSpec::new(head_shape(&target, "LlamaForCausalLMEagle"))),
            Algorithm::Eagle3 => {
                let shape = head_shape(&target, "LlamaForCausalLMEagle3");
                HeadSpec::Eagle3(Eagle3Spec::new(shape, header.layers.clone(), vocabulary.ids().len()))
            }
            Algorithm::MultiLayerEagle => {
                let shape =
                    HfConfig { layers: target.layers, ..head_shape(&target, "LlamaForCausalLMNextN") };
                let layer = |index| MtpSpec::new(shape.clone(), index);
                HeadSpec::MultiLayer((0..args.unroll.max(1)).map(layer).collect())
            }
            Algorithm::Dflash => {
                // All that it knows of the context passes through its keys and values.
                let shape = HfConfig {
                    layers: args.draft_layers.max(1),
                    kv_heads: target.heads,
                    ..head_shape(&target, "DFlashDraftModel")
                };
                let mask = Vocabulary::rarest(corpus.sequences(), target.vocab_size);
                HeadSpec::Dflash(DflashSpec::new(&shape, header.layers.clone(), mask)?)
            }
        };
        tch::set_num_threads(args.num_threads.max(1) as i32);
        let tables = TrainTables::read(&config.model.weights, HeadNet::compute_kind())?;
        Ok(Self {
            args,
            vocabulary,
            net: HeadNet::new(spec, args.seq_len, &tables),
            tables,
            corpus,
            state: None,
        })
    }

    /// Up to `until` steps, or all.
    fn run(&mut self, until: Option<u64>) -> Result<()> {
        let state = self.state.take().context("a training has a state until it runs")?;
        let history = History::open(&training_dir(self.args).join("history.jsonl"), state.steps)?;
        let mut trainer = Trainer {
            net: &self.net,
            corpus: &self.corpus,
            tables: &self.tables,
            vocabulary: &self.vocabulary,
            state,
            history,
            state_path: state_path(self.args),
            kind: HeadNet::compute_kind(),
        };
        trainer.run(until)?;
        self.state = Some(trainer.state);
        Ok(())
    }

    fn state(&self) -> Result<&TrainState> {
        self.state.as_ref().context("the training failed")
    }

    fn checkpoint(&self, config: &ServeConfig) -> Result<()> {
        let checkpoint = Checkpoint {
            spec: self.net.spec(),
            drafts: self.args.unroll,
            target_layers: model::shape_of(&config.model.weights)?.layers,
            params: &self.state()?.params,
            vocabulary: &self.vocabulary,
            eos_token_ids: &config.model.eos_token_ids,
        };
        checkpoint.write(&self.args.out)
    }

    fn card(&self, measured: &[Measured]) -> Result<()> {
        let state = self.state()?;
        let history = History::open(&training_dir(self.args).join("history.jsonl"), state.steps)?;
        Card { args: self.args, corpus: &self.corpus, state, history: &history, measured }
            .write(&self.args.out)
    }
}

fn recipe(args: &Args, sequences: usize) -> Recipe {
    Recipe {
        algorithm: args.algorithm.name().to_owned(),
        seed: args.seed,
        epochs: args.epochs,
        batch_size: args.batch_size,
        seq_len: args.seq_len,
        lr: args.lr,
        unroll: args.unroll,
        draft_layers: if args.algorithm == Algorithm::Dflash { args.draft_layers } else { 1 },
        draft_vocab_size: args.draft_vocab_size,
        sequences,
    }
}

/// Where a training keeps what it needs to go on.
fn training_dir(args: &Args) -> PathBuf {
    args.out.join("training")
}

fn state_path(args: &Args) -> PathBuf {
    training_dir(args).join("state.safetensors")
}
