//! Owns the record of a training, one JSON object per line, for the plots and the card.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Means over some steps, or over the held-out conversations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Entry {
    pub step: u64,
    pub heldout: bool,
    pub rate: f64,
    /// Per draft step.
    pub cross_entropy: Vec<f64>,
    /// Per draft step: how often the first choice is the target's.
    pub agreement: Vec<f64>,
    /// Distance of the states from the target's, for heads that are trained to be near.
    pub distance: f64,
    pub gradient: f64,
    /// Seconds of training so far.
    pub seconds: f64,
}

#[derive(Debug)]
pub(super) struct History {
    path: PathBuf,
    entries: Vec<Entry>,
}

impl History {
    /// Goes on behind what was recorded up to `step`; from the start for 0.
    pub(super) fn open(path: &Path, step: u64) -> Result<Self> {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let parsed = text.lines().filter_map(|line| serde_json::from_str::<Entry>(line).ok());
        let entries: Vec<Entry> = parsed.filter(|entry| entry.step <= step && step > 0).collect();
        let kept: Vec<String> = entries.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
        let text: String = kept.iter().flat_map(|line| [line.as_str(), "\n"]).collect();
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { path: path.to_owned(), entries })
    }

    pub(super) fn add(&mut self, entry: Entry) -> Result<()> {
        let mut file = std::fs::OpenOptions::new().append(true).create(true).open(&self.path)?;
        file.write_all((serde_json::to_string(&entry)? + "\n").as_bytes())?;
        self.entries.push(entry);
        Ok(())
    }

    pub(super) fn of(&self, heldout: bool) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(move |entry| entry.heldout == heldout)
    }

    pub(super) fn seconds(&self) -> f64 {
        self.entries.last().map_or(0.0, |entry| entry.seconds)
    }
}
