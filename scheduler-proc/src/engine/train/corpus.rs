//! Owns the corpus on disk: conversations of the target with the hidden states of all their tokens. Append-only, so
//! that a kill loses at most what was not written yet, and a trainer may read while more is generated.
//!
//! A folder has `corpus.json` (what it was made from), `sequences.jsonl` (one conversation per line) and one file per
//! [`Feature`] with the hidden states in bfloat16, one row per token but a conversation's last, in the order of the
//! lines. A line is written after its rows: a line that is whole has its rows.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use proto::TokenId;
use serde::{Deserialize, Serialize};

use super::prompts::Split;

const HEADER: &str = "corpus.json";
const SEQUENCES: &str = "sequences.jsonl";
const VALUE_BYTES: u64 = 2;

/// Which hidden states; each has a file of its own, so that training on one does not read the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Feature {
    /// What EAGLE takes: after the final norm.
    Final,
    /// What EAGLE3 takes: what goes into some layers, side by side.
    Layers,
}

/// What a corpus was made from. Another target's corpus is refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct CorpusHeader {
    pub version: u32,
    pub model: String,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub layers: Vec<usize>,
    /// Draws of temperatures and follow-ups depend on it.
    pub seed: u64,
}

impl CorpusHeader {
    pub(super) const VERSION: u32 = 1;

    fn width(&self, feature: Feature) -> usize {
        match feature {
            Feature::Final => self.hidden_size,
            Feature::Layers => self.hidden_size * self.layers.len(),
        }
    }

    fn row_bytes(&self, feature: Feature) -> u64 {
        self.width(feature) as u64 * VALUE_BYTES
    }
}

/// One conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Sequence {
    /// Which of the generator's jobs made it.
    pub job: u64,
    pub prompt: String,
    pub split: Split,
    /// Begin and end of every answer in `tokens`, its end token included.
    pub answers: Vec<(usize, usize)>,
    pub temperatures: Vec<f64>,
    pub tokens: Vec<TokenId>,
}

impl Sequence {
    /// Tokens that have hidden states: the last was never run.
    pub(super) fn rows(&self) -> usize {
        self.tokens.len().saturating_sub(1)
    }

    pub(super) fn answer_tokens(&self) -> u64 {
        self.answers.iter().map(|(from, to)| (to - from) as u64).sum()
    }
}

/// Hidden states of one conversation, as bytes of bfloat16.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct HiddenBytes {
    pub layers: Vec<u8>,
    pub last: Vec<u8>,
}

/// The one process that adds to a corpus.
pub(super) struct CorpusWriter {
    header: CorpusHeader,
    sequences: Vec<Sequence>,
    lines: File,
    features: [(Feature, File); 2],
    rows: u64,
}

impl CorpusWriter {
    /// Opens or makes a corpus, and cuts off what a kill left half written.
    pub(super) fn open(dir: &Path, header: &CorpusHeader) -> Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        if dir.join(HEADER).is_file() {
            let found = read_header(dir)?;
            if found != *header {
                bail!("{} was made from {found:?}, not from {header:?}", dir.display());
            }
        } else {
            std::fs::write(dir.join(HEADER), serde_json::to_vec_pretty(header)?)?;
        }
        let Contents { sequences, bytes, rows } = Contents::read(dir, header)?;
        let open = |name: &str, len: u64| -> Result<File> {
            let path = dir.join(name);
            let file = OpenOptions::new().create(true).append(true).open(&path);
            let file = file.with_context(|| format!("cannot open {}", path.display()))?;
            file.set_len(len)?;
            Ok(file)
        };
        let feature = |feature| -> Result<(Feature, File)> {
            Ok((feature, open(file_name(feature), rows * header.row_bytes(feature))?))
        };
        Ok(Self {
            header: header.clone(),
            sequences,
            lines: open(SEQUENCES, bytes)?,
            features: [feature(Feature::Final)?, feature(Feature::Layers)?],
            rows,
        })
    }

    pub(super) fn sequences(&self) -> &[Sequence] {
        &self.sequences
    }

    pub(super) fn push(&mut self, sequence: Sequence, hidden: &HiddenBytes) -> Result<()> {
        let rows = sequence.rows() as u64;
        for (feature, file) in &mut self.features {
            let bytes = match feature {
                Feature::Final => &hidden.last,
                Feature::Layers => &hidden.layers,
            };
            if bytes.len() as u64 != rows * self.header.row_bytes(*feature) {
                bail!("{} bytes of hidden states for {rows} tokens", bytes.len());
            }
            file.write_all(bytes).context("writing hidden states")?;
        }
        let mut line = serde_json::to_vec(&sequence)?;
        line.push(b'\n');
        self.lines.write_all(&line).context("writing a conversation")?;
        self.rows += rows;
        self.sequences.push(sequence);
        Ok(())
    }
}

/// What a corpus held when it was opened.
pub(super) struct Corpus {
    header: CorpusHeader,
    sequences: Vec<Sequence>,
    /// First row of every conversation.
    offsets: Vec<u64>,
    files: [(Feature, File); 2],
}

impl Corpus {
    pub(super) fn open(dir: &Path) -> Result<Self> {
        let header = read_header(dir)?;
        let Contents { sequences, .. } = Contents::read(dir, &header)?;
        let offsets = sequences.iter().scan(0, |next, sequence| {
            let first = *next;
            *next += sequence.rows() as u64;
            Some(first)
        });
        let open = |feature| -> Result<(Feature, File)> {
            let path = dir.join(file_name(feature));
            Ok((feature, File::open(&path).with_context(|| format!("cannot open {}", path.display()))?))
        };
        Ok(Self {
            offsets: offsets.collect(),
            files: [open(Feature::Final)?, open(Feature::Layers)?],
            sequences,
            header,
        })
    }

    /// Forgets all but the first: a resumed training sees what it saw before.
    pub(super) fn truncate(&mut self, sequences: usize) {
        self.sequences.truncate(sequences);
        self.offsets.truncate(sequences);
    }

    pub(super) fn header(&self) -> &CorpusHeader {
        &self.header
    }

    pub(super) fn sequences(&self) -> &[Sequence] {
        &self.sequences
    }

    pub(super) fn width(&self, feature: Feature) -> usize {
        self.header.width(feature)
    }

    /// The first `rows` hidden states of a conversation, as bytes of bfloat16.
    pub(super) fn hidden(&self, index: usize, rows: usize, feature: Feature) -> Result<Vec<u8>> {
        let row_bytes = self.header.row_bytes(feature);
        let (_, file) = &self.files[self.files.iter().position(|(kind, _)| *kind == feature).unwrap_or(0)];
        let mut bytes = vec![0; rows * row_bytes as usize];
        file.read_exact_at(&mut bytes, self.offsets[index] * row_bytes).context("reading hidden states")?;
        Ok(bytes)
    }
}

/// The whole lines of a corpus whose rows are all there.
struct Contents {
    sequences: Vec<Sequence>,
    /// Of their lines.
    bytes: u64,
    rows: u64,
}

impl Contents {
    fn read(dir: &Path, header: &CorpusHeader) -> Result<Self> {
        let text = match std::fs::read(dir.join(SEQUENCES)) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error).context(SEQUENCES),
        };
        let stored = |feature| {
            let bytes = std::fs::metadata(dir.join(file_name(feature))).map_or(0, |file| file.len());
            bytes / header.row_bytes(feature)
        };
        let stored = stored(Feature::Final).min(stored(Feature::Layers));
        let mut contents = Self { sequences: Vec::new(), bytes: 0, rows: 0 };
        for line in text.split_inclusive(|&byte| byte == b'\n') {
            let Ok(sequence) = serde_json::from_slice::<Sequence>(line) else { break };
            let rows = contents.rows + sequence.rows() as u64;
            if line.last() != Some(&b'\n') || rows > stored {
                break;
            }
            contents.rows = rows;
            contents.bytes += line.len() as u64;
            contents.sequences.push(sequence);
        }
        Ok(contents)
    }
}

fn read_header(dir: &Path) -> Result<CorpusHeader> {
    let path: PathBuf = dir.join(HEADER);
    let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{} is no corpus header", path.display()))
}

fn file_name(feature: Feature) -> &'static str {
    match feature {
        Feature::Final => "final.bf16",
        Feature::Layers => "layers.bf16",
    }
}

#[cfg(test)]
mod tests;
