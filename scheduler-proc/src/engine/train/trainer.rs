//! Stage 2. Owns the training loop: batches through the unrolled head, one optimizer step each, the state and the
//! record on disk.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use tch::{Device, Kind, Reduction, Tensor};

use super::batches::{self, BatchShape, TrainBatch};
use super::corpus::Corpus;
use super::generate::hash;
use super::history::{Entry, History};
use super::loss::{HeadLoss, LossRows, head_loss};
use super::net::{HeadNet, Passed};
use super::params::{Params, TABLE};
use super::prompts::Split;
use super::random;
use super::schedule;
use super::state::TrainState;
use super::tables::TrainTables;
use super::vocabulary::Vocabulary;

/// A kill loses no more than this.
const SAVE_INTERVAL: Duration = Duration::from_secs(180);
/// Steps per entry of the record.
const RECORD_STEPS: u64 = 20;
/// Steps between two looks at what is not trained on.
const HELDOUT_STEPS: u64 = 200;
/// How much less each further draft step counts.
const STEP_DECAY: f64 = 0.85;
/// Weight of the distance between a head's hidden state and the target's.
const DISTANCE_WEIGHT: f64 = 0.1;
/// Noise on the target's hidden states, relative to a row's root mean square: the head will run on its own, which
/// are never quite right.
const NOISE: f64 = 0.05;

/// A training that can be stopped after any step.
pub(super) struct Trainer<'a> {
    pub net: &'a HeadNet,
    pub corpus: &'a Corpus,
    pub tables: &'a TrainTables,
    pub vocabulary: &'a Vocabulary,
    pub state: TrainState,
    pub history: History,
    /// Where the state goes.
    pub state_path: PathBuf,
    pub kind: Kind,
}

/// What one pass of a batch showed, summed over its rows.
#[derive(Debug, Clone, Default)]
struct Seen {
    cross_entropy: Vec<f64>,
    agreement: Vec<f64>,
    weight: Vec<f64>,
    distance: f64,
    gradient: f64,
    batches: f64,
}

impl Trainer<'_> {
    /// Trains until `until` steps are done, or all of them.
    pub(super) fn run(&mut self, until: Option<u64>) -> Result<()> {
        let recipe = self.state.recipe.clone();
        let train = batches::usable(self.corpus, recipe.seq_len, Split::Train);
        let per_pass = train.len().div_ceil(recipe.batch_size) as u64;
        let steps = per_pass * recipe.epochs as u64;
        if steps == 0 {
            bail!("the corpus has no conversation to train on");
        }
        let end = until.unwrap_or(steps).min(steps);
        let bar = bar(steps, self.state.steps);
        let (started, before) = (Instant::now(), self.history.seconds());
        let (mut saved, mut seen) = (Instant::now(), Seen::default());
        let mut planned = (u64::MAX, Vec::new());
        while self.state.steps < end {
            let (pass, at) = (self.state.steps / per_pass, (self.state.steps % per_pass) as usize);
            if planned.0 != pass {
                planned = (pass, batches::plan(&train, recipe.batch_size, recipe.seed, pass));
            }
            let rate = schedule::rate(recipe.lr, self.state.steps, steps);
            seen.add(&self.step(&planned.1[at], rate)?);
            self.state.steps += 1;
            bar.set_position(self.state.steps);
            let seconds = before + started.elapsed().as_secs_f64();
            if self.state.steps.is_multiple_of(RECORD_STEPS) || self.state.steps == steps {
                let entry = std::mem::take(&mut seen).entry(self.state.steps, false, rate, seconds);
                announce(&bar, &entry);
                self.history.add(entry)?;
            }
            if self.state.steps.is_multiple_of(HELDOUT_STEPS) || self.state.steps == steps {
                let entry = self.look_at_heldout()?.entry(self.state.steps, true, rate, seconds);
                announce(&bar, &entry);
                self.history.add(entry)?;
            }
            if saved.elapsed() > SAVE_INTERVAL {
                self.state.save(&self.state_path)?;
                saved = Instant::now();
            }
        }
        self.state.save(&self.state_path)?;
        bar.finish();
        Ok(())
    }

    fn batch(&self, indices: &[usize], seed: u64) -> Result<TrainBatch> {
        let feature = self.net.spec().feature();
        let recipe = &self.state.recipe;
        let shape = BatchShape {
            feature,
            seq_len: recipe.seq_len,
            steps: recipe.unroll,
            kind: self.kind,
            rows: self.net.spec().blocks(),
            seed,
        };
        TrainBatch::load(self.corpus, indices, &shape)
    }

    fn step(&mut self, indices: &[usize], rate: f64) -> Result<Seen> {
        let step_seed = hash(self.state.recipe.seed, [20, self.state.steps]);
        let mut batch = self.batch(indices, step_seed)?;
        batch.features = tch::no_grad(|| with_noise(&batch.features, step_seed));
        let params = self.state.params.cast(self.kind);
        let (mut seen, total) = self.loss(&params, &batch, step_seed);
        total.backward();
        seen.gradient = self.state.optimizer.step(&self.state.params, rate);
        Ok(seen)
    }

    fn look_at_heldout(&self) -> Result<Seen> {
        let recipe = &self.state.recipe;
        let heldout = batches::usable(self.corpus, recipe.seq_len, Split::Heldout);
        let params = self.state.params.cast(self.kind);
        let mut seen = Seen::default();
        for indices in batches::plan(&heldout, recipe.batch_size, recipe.seed, 0) {
            let batch = self.batch(&indices, 0)?;
            seen.add(&tch::no_grad(|| self.loss(&params, &batch, 0).0));
        }
        Ok(seen)
    }

    /// What a batch shows, and a tensor whose gradients are those of the loss.
    fn loss(&self, params: &Params, batch: &TrainBatch, seed: u64) -> (Seen, Tensor) {
        let steps = self.state.recipe.unroll;
        let size = batch.next_tokens.size();
        let embedded = self.tables.embedding.index_select(0, &batch.next_tokens.view([-1]));
        let embedded = embedded.to_kind(self.kind).view([size[0], size[1], -1]);
        let passed = Passed { embedded: &embedded, features: &batch.features, rows: &batch.rows };
        let drafts = self.net.drafts(params, passed, steps);

        let closed = params.find(TABLE).is_some();
        let look = self.vocabulary.look(&batch.labels, closed, seed);
        let counts = &batch.counts * look.known.unsqueeze(0);
        let weight = counts.sum_dim_intlist(1, true, Kind::Float).clamp_min(1.0);
        let decay: Vec<f32> = (0..steps).map(|step| STEP_DECAY.powi(step as i32) as f32).collect();
        let shares = &counts / weight;
        let head = tch::no_grad(|| {
            let table = self.tables.head.index_select(0, &look.ids).to_kind(self.kind);
            let weights = &shares * Tensor::from_slice(&decay).unsqueeze(1);
            let drafts: Vec<Tensor> = drafts.iter().map(Tensor::detach).collect();
            head_loss(&table, &LossRows { target: &batch.targets, drafts: &drafts, weights: &weights })
        });
        let distance = distance(&drafts, batch, &shares);
        let total = surrogate(&head, &drafts) + &distance * DISTANCE_WEIGHT;
        let rows: Vec<f64> = (0..steps).map(|step| f64::from(decay[step])).collect();
        let per_row = |sums: &[f64]| sums.iter().zip(&rows).map(|(sum, decay)| sum / decay).collect();
        let seen = Seen {
            cross_entropy: per_row(&head.cross_entropy),
            agreement: per_row(&head.agreement),
            weight: vec![1.0; steps],
            distance: distance.double_value(&[]),
            gradient: 0.0,
            batches: 1.0,
        };
        (seen, total)
    }
}

/// Mean distance of what all steps say from what the target does, both before the table of logits.
fn distance(drafts: &[Tensor], batch: &TrainBatch, shares: &Tensor) -> Tensor {
    let target = batch.targets.to_kind(Kind::Float);
    let of_step = |(step, draft): (usize, &Tensor)| {
        let distance = draft.to_kind(Kind::Float).smooth_l1_loss(&target, Reduction::None, 1.0);
        (distance.mean_dim(-1, false, Kind::Float) * shares.get(step as i64)).sum(Kind::Float)
    };
    let sum: Tensor = drafts.iter().enumerate().map(of_step).sum();
    sum / drafts.len() as f64
}

/// Dot products with the gradients that were computed directly.
fn surrogate(head: &HeadLoss, drafts: &[Tensor]) -> Tensor {
    let mut total = Tensor::zeros([], (Kind::Float, Device::Cpu));
    for (draft, gradient) in drafts.iter().zip(&head.gradients) {
        total += (draft.to_kind(Kind::Float) * gradient.to_kind(Kind::Float)).sum(Kind::Float);
    }
    total
}

fn with_noise(features: &Tensor, seed: u64) -> Tensor {
    let spread = features.to_kind(Kind::Float).square().mean_dim(-1, true, Kind::Float).sqrt();
    let noise = random::even(&features.size(), seed, 0) * spread * NOISE;
    features + noise.to_kind(features.kind())
}

impl Seen {
    fn add(&mut self, other: &Self) {
        let sum = |mine: &mut Vec<f64>, theirs: &[f64]| {
            mine.resize(theirs.len().max(mine.len()), 0.0);
            mine.iter_mut().zip(theirs).for_each(|(mine, theirs)| *mine += theirs);
        };
        sum(&mut self.cross_entropy, &other.cross_entropy);
        sum(&mut self.agreement, &other.agreement);
        sum(&mut self.weight, &other.weight);
        self.distance += other.distance;
        self.gradient += other.gradient;
        self.batches += other.batches;
    }

    fn entry(&self, step: u64, heldout: bool, rate: f64, seconds: f64) -> Entry {
        let mean = |sums: &[f64]| sums.iter().zip(&self.weight).map(|(sum, weight)| sum / weight).collect();
        Entry {
            step,
            heldout,
            rate,
            cross_entropy: mean(&self.cross_entropy),
            agreement: mean(&self.agreement),
            distance: self.distance / self.batches.max(1.0),
            gradient: self.gradient / self.batches.max(1.0),
            seconds,
        }
    }
}

fn bar(steps: u64, done: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("train {bar:30} {pos}/{len} steps, {per_sec}, ETA {eta} {msg}");
    let bar = ProgressBar::new(steps).with_position(done);
    bar.set_style(style.expect("the template is valid"));
    bar.reset_eta();
    bar
}

fn announce(bar: &ProgressBar, entry: &Entry) {
    let numbers =
        |values: &[f64]| values.iter().map(|value| format!("{value:.3}")).collect::<Vec<_>>().join(" ");
    let set = if entry.heldout { "held out" } else { "train" };
    let message =
        format!("{set}: loss {}, agreement {}", numbers(&entry.cross_entropy), numbers(&entry.agreement));
    bar.set_message(message.clone());
    if bar.is_hidden() {
        tracing::warn!(step = entry.step, seconds = entry.seconds as u64, "{message}");
    }
}

/// Reads the state to go on from, which must be of the same training.
pub(super) fn resumed(path: &std::path::Path, recipe: &super::state::Recipe) -> Result<TrainState> {
    let state = TrainState::load(path, HeadNet::compute_kind()).context("resuming")?;
    let same = super::state::Recipe { sequences: state.recipe.sequences, ..recipe.clone() };
    if state.recipe != same {
        bail!("{} is of another training: {:?}, not {same:?}", path.display(), state.recipe);
    }
    Ok(state)
}
