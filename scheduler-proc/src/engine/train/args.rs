//! Owns the command line of `train-draft`.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

/// Trains a draft head for a target model: generates the target's own answers to your prompts, trains a head on
/// them, measures it by real speculative decoding, and writes a checkpoint that `--speculative-draft-model-path`
/// takes.
#[derive(Debug, Clone, Parser)]
#[command(name = "train-draft", version)]
pub struct Args {
    /// The target: a folder with config.json and safetensors, or a GGUF file (or a folder with just one).
    #[arg(long)]
    pub model: PathBuf,
    /// What kind of head to train.
    #[arg(long, value_enum, ignore_case = true)]
    pub algorithm: Algorithm,
    /// One JSON object per line: id, messages, and optionally split ("train" or "heldout") and task.
    #[arg(long)]
    pub prompts: PathBuf,
    /// The checkpoint's folder.
    #[arg(long)]
    pub out: PathBuf,
    /// Where answers and hidden states are kept; all algorithms can train on the same. Default: OUT/corpus.
    #[arg(long)]
    pub corpus: Option<PathBuf>,
    /// What to do, in this order.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "generate,train,evaluate")]
    pub stages: Vec<Stage>,
    /// Answer tokens to generate.
    #[arg(long, default_value_t = 1_000_000)]
    pub tokens: u64,
    /// Longest answer, in tokens.
    #[arg(long, default_value_t = 192)]
    pub answer_len: usize,
    /// Requests that are answered at once.
    #[arg(long, default_value_t = 64)]
    pub generate_rows: usize,
    /// Passes over the corpus.
    #[arg(long, default_value_t = 2)]
    pub epochs: usize,
    /// Sequences per optimizer step.
    #[arg(long, default_value_t = 12)]
    pub batch_size: usize,
    /// Tokens of a sequence; longer ones are cut.
    #[arg(long, default_value_t = 512)]
    pub seq_len: usize,
    /// Highest learning rate.
    #[arg(long, default_value_t = 1e-3)]
    pub lr: f64,
    /// Draft steps: those an EAGLE head is trained to take on its own states, the layers of a multi-layer EAGLE head,
    /// or the drafts of a DFLASH block.
    #[arg(long, default_value_t = 3)]
    pub unroll: usize,
    /// Layers of a DFLASH draft model.
    #[arg(long, default_value_t = 2)]
    pub draft_layers: usize,
    /// Tokens the loss looks at, and those the draft can say: the most frequent of the corpus.
    #[arg(long, default_value_t = 8192)]
    pub draft_vocab_size: usize,
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Goes on from OUT's last training state. Generation always goes on from what the corpus has.
    #[arg(long)]
    pub resume: bool,
    /// Threads of tensor operations.
    #[arg(long, default_value_t = 2)]
    pub num_threads: u32,
    /// Serves the target in this type while answers are made and heads are measured.
    #[arg(long, value_enum, default_value = "bfloat16")]
    pub dtype: DtypeArg,
    #[arg(long, default_value = "warning")]
    pub log_level: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Algorithm {
    Eagle,
    Eagle3,
    /// A multi-token-prediction layer per draft step.
    MultiLayerEagle,
    Dflash,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Stage {
    Generate,
    Train,
    Evaluate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DtypeArg {
    Float32,
    Bfloat16,
}

impl Algorithm {
    pub fn name(self) -> &'static str {
        match self {
            Self::Eagle => "EAGLE",
            Self::Eagle3 => "EAGLE3",
            Self::MultiLayerEagle => "MULTI-LAYER-EAGLE",
            Self::Dflash => "DFLASH",
        }
    }

    /// Whether the tokens that the head was taught about lie beside it, for `--speculative-token-map`.
    pub fn has_token_map(self) -> bool {
        self != Self::Eagle3
    }
}

impl Args {
    pub fn does(&self, stage: Stage) -> bool {
        self.stages.contains(&stage)
    }

    pub fn corpus_dir(&self) -> PathBuf {
        self.corpus.clone().unwrap_or_else(|| self.out.join("corpus"))
    }

    /// Tokens of the longest conversation that is generated: a prompt and two answers.
    pub fn conversation_len(&self) -> usize {
        self.seq_len.max(2 * self.answer_len)
    }
}
