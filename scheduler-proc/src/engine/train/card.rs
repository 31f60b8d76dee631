//! Owns what lies beside a checkpoint for people: the card and the plots.

use std::path::Path;

use anyhow::Result;

use super::args::{Algorithm, Args};
use super::corpus::Corpus;
use super::evaluate::{Measured, table};
use super::history::{Entry, History};
use super::plot::{Chart, Line};
use super::state::TrainState;

/// What a card tells of.
pub(super) struct Card<'a> {
    pub args: &'a Args,
    pub corpus: &'a Corpus,
    pub state: &'a TrainState,
    pub history: &'a History,
    pub measured: &'a [Measured],
}

impl Card<'_> {
    pub(super) fn write(&self, dir: &Path) -> Result<()> {
        let loss = chart("Cross-entropy to the target, per draft step", "nats", self.history, |entry| {
            &entry.cross_entropy
        });
        std::fs::write(dir.join("loss.svg"), loss.svg())?;
        let agreement =
            chart("First choices that are the target's, per draft step", "share", self.history, |entry| {
                &entry.agreement
            });
        std::fs::write(dir.join("agreement.svg"), agreement.svg())?;
        std::fs::write(dir.join("acceptance.svg"), acceptance(self.measured).svg())?;
        std::fs::write(dir.join("README.md"), self.text())?;
        Ok(())
    }

    fn text(&self) -> String {
        let recipe = &self.state.recipe;
        let header = self.corpus.header();
        let used = &self.corpus.sequences()[..recipe.sequences.min(self.corpus.sequences().len())];
        let answers: u64 = used.iter().map(|sequence| sequence.answer_tokens()).sum();
        let greedy = used.iter().flat_map(|sequence| {
            sequence.answers.iter().zip(&sequence.temperatures).map(|((from, to), t)| (to - from, *t == 0.0))
        });
        let greedy: usize = greedy.filter(|(_, greedy)| *greedy).map(|(tokens, _)| tokens).sum();
        let seconds = self.history.seconds();
        let last = |heldout| self.history.of(heldout).last().map_or("–".to_owned(), numbers);
        format!(
            "# {} draft head for {}\n\n\
             Made by `train-draft`; serve it with `{} --speculative-draft-model-path` and this folder{}. config.json and model.safetensors (bfloat16) are in the published format.\n\n\
             ## Acceptance on held-out prompts\n\n\
             Real speculative decoding; accept length is tokens per verify step, the bonus included.\n\n{}\n\
             ![acceptance](acceptance.svg)\n\n\
             ## Training\n\n\
             - Data: {} conversations, {answers} answer tokens of the target itself, {:.0} % of them greedy, the rest \
             at temperature 0.7 or 1.\n\
             - {} steps of {} sequences, {} passes, {} draft steps unrolled, learning rate {:e}, seed {}: {:.1} hours.\n\
             - Loss and share of first choices that are the target's, per draft step, at the end: trained on {}; held \
             out {}.\n\n\
             ![loss](loss.svg)\n![agreement](agreement.svg)\n\n\
             Command:\n\n```\n{}\n```\n",
            recipe.algorithm,
            header.model,
            flags(self.args.algorithm),
            match self.args.algorithm.has_token_map() {
                true =>
                    ", and with `--speculative-token-map` and its token_map.json, which makes drafting cheaper",
                false => "",
            },
            table(self.measured),
            used.len(),
            100.0 * greedy as f64 / answers.max(1) as f64,
            self.state.steps,
            recipe.batch_size,
            recipe.epochs,
            recipe.unroll,
            recipe.lr,
            recipe.seed,
            seconds / 3600.0,
            last(false),
            last(true),
            command(self.args),
        )
    }
}

fn flags(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::Eagle => "--speculative-algorithm EAGLE",
        Algorithm::Eagle3 => "--speculative-algorithm EAGLE3",
        Algorithm::MultiLayerEagle => "--speculative-algorithm EAGLE --enable-multi-layer-eagle",
        Algorithm::Dflash => "--speculative-algorithm DFLASH",
    }
}

fn numbers(entry: &Entry) -> String {
    let join =
        |values: &[f64]| values.iter().map(|value| format!("{value:.3}")).collect::<Vec<_>>().join(" ");
    format!("{} ({})", join(&entry.cross_entropy), join(&entry.agreement))
}

/// As typed, without the folders of this machine.
fn command(args: &Args) -> String {
    let name =
        |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    format!(
        "train-draft --model {} --algorithm {} --prompts {} --out {} --tokens {} --epochs {} --batch-size {} \
         --seq-len {} --lr {} --unroll {}{} --draft-vocab-size {} --seed {}",
        name(&args.model),
        args.algorithm.name().to_lowercase(),
        name(&args.prompts),
        name(&args.out),
        args.tokens,
        args.epochs,
        args.batch_size,
        args.seq_len,
        args.lr,
        args.unroll,
        match args.algorithm {
            Algorithm::Dflash => format!(" --draft-layers {}", args.draft_layers),
            _ => String::new(),
        },
        args.draft_vocab_size,
        args.seed
    )
}

fn chart(title: &str, unit: &str, history: &History, values: impl Fn(&Entry) -> &Vec<f64>) -> Chart {
    let steps = history.of(false).next().map_or(0, |entry| values(entry).len());
    let line = |step: usize, heldout: bool| Line {
        name: format!("{} {}", if heldout { "held out" } else { "train" }, step + 1),
        points: history
            .of(heldout)
            .filter_map(|entry| Some((entry.step as f64, *values(entry).get(step)?)))
            .collect(),
        dashed: heldout,
    };
    let lines = [false, true].into_iter().flat_map(|heldout| (0..steps).map(move |step| (step, heldout)));
    Chart {
        title: title.to_owned(),
        x: "step".to_owned(),
        y: unit.to_owned(),
        lines: lines.map(|(step, heldout)| line(step, heldout)).collect(),
    }
}

fn acceptance(measured: &[Measured]) -> Chart {
    let line = |measured: &Measured| Line {
        name: format!("{}, {}", measured.set, measured.shape),
        points: (1..).map(f64::from).zip(measured.accepted_at.iter().copied()).collect(),
        dashed: measured.shape.starts_with("chain"),
    };
    Chart {
        title: "Verify steps that accepted at least so many drafts".to_owned(),
        x: "drafts".to_owned(),
        y: "share".to_owned(),
        lines: measured.iter().map(line).collect(),
    }
}
