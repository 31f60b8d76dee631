//! Owns the worker that drafts nothing and keeps every hidden state the target computes, as the engine computes them.

use std::cell::RefCell;
use std::rc::Rc;

use proto::ServeConfig;
use rustc_hash::FxHashMap;
use tch::{Kind, Tensor};

use super::args::Args;
use super::corpus::{CorpusHeader, HiddenBytes};
use crate::batch::EngineSlot;
use crate::engine::spec::tree::DraftTree;
use crate::engine::spec::{Commit, DraftInput, Drafter};
use crate::engine::{DraftStatus, EngineError};

/// Hidden states of running requests, shared between the worker inside the engine and whoever wants them.
#[derive(Clone)]
pub(super) struct Shelf {
    requests: Rc<RefCell<FxHashMap<EngineSlot, HiddenBytes>>>,
    hidden_size: usize,
    /// Whose inputs are kept beside the final hidden state.
    layers: Vec<usize>,
}

impl Shelf {
    pub(super) fn new(hidden_size: usize, layers: Vec<usize>) -> Self {
        Self { requests: Rc::default(), hidden_size, layers }
    }

    /// What is kept of a request; forgotten here.
    pub(super) fn take(&self, slot: EngineSlot) -> HiddenBytes {
        self.requests.borrow_mut().remove(&slot).unwrap_or_default()
    }

    /// What a corpus of these hidden states says it was made from.
    pub(super) fn header(&self, args: &Args, config: &ServeConfig) -> CorpusHeader {
        let name = args.model.file_name().map(|name| name.to_string_lossy().into_owned());
        CorpusHeader {
            version: CorpusHeader::VERSION,
            model: name.unwrap_or_else(|| config.model.model_path.clone()),
            vocab_size: config.model.vocab_size as usize,
            hidden_size: self.hidden_size,
            layers: self.layers.clone(),
            seed: args.seed,
        }
    }
}

/// The worker inside the engine.
pub(super) struct Harvester {
    shelf: Shelf,
}

impl Harvester {
    pub(super) fn new(shelf: Shelf) -> Self {
        Self { shelf }
    }
}

/// Bytes of rows in bfloat16.
fn bytes(rows: &Tensor) -> Vec<u8> {
    let rows = rows.to_kind(Kind::BFloat16).contiguous().view_dtype(Kind::Uint8);
    let mut bytes = vec![0u8; rows.numel()];
    rows.copy_data(&mut bytes, rows.numel());
    bytes
}

impl Drafter<Option<Tensor>> for Harvester {
    fn draft(&mut self, inputs: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError> {
        Ok(vec![DraftTree::new(); inputs.len()])
    }

    fn commit(&mut self, commits: &[Commit<'_>], hidden: Option<&Option<Tensor>>) -> Result<(), EngineError> {
        let Some(hidden) = hidden.and_then(Option::as_ref) else { return Ok(()) };
        let layers_width = (self.shelf.hidden_size * self.shelf.layers.len()) as i64;
        let last_width = self.shelf.hidden_size as i64;
        let layers = bytes(&hidden.narrow(1, 0, layers_width));
        let last = bytes(&hidden.narrow(1, layers_width, last_width));
        let (layers_bytes, last_bytes) = (2 * layers_width as usize, 2 * last_width as usize);
        let mut requests = self.shelf.requests.borrow_mut();
        for commit in commits {
            let kept = requests.entry(commit.slot).or_default();
            for &row in &commit.hidden_rows {
                kept.layers.extend_from_slice(&layers[row * layers_bytes..][..layers_bytes]);
                kept.last.extend_from_slice(&last[row * last_bytes..][..last_bytes]);
            }
        }
        Ok(())
    }

    fn release(&mut self, slot: EngineSlot) {
        self.shelf.requests.borrow_mut().remove(&slot);
    }

    fn flush(&mut self) {}

    fn status(&self) -> DraftStatus {
        DraftStatus::default()
    }
}
