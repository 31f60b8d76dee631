//! The only place that knows tensors. `Engine` is the seam to the scheduling half: plain data in, plain data out.

pub mod attention;
mod build;
pub mod gguf;
pub mod hf_config;
pub mod kv;
pub mod layers;
pub mod matrix;
pub mod model;
pub mod models;
pub mod rng;
pub mod sample;
pub mod scripted;
pub mod shim;
pub mod spec;
pub mod target;
pub mod train;
pub mod weights;

use std::collections::BTreeMap;

pub use self::build::build;
use crate::batch::{Batch, EngineSlot, StepOutput};

/// What an engine can hold.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineLimits {
    /// Slots of the KV pool.
    pub kv_slots: usize,
    /// Longest sequence, prompt and answer together.
    pub context_len: usize,
    pub vocab_size: usize,
    /// Bytes, for `/server_info` and the start-up table; those of the weights also by the type they are kept in.
    pub weight_bytes: u64,
    pub weight_types: BTreeMap<&'static str, u64>,
    /// Of the weights, those a step does not read as a whole: the embedding table, where it is not the head's.
    pub gathered_bytes: u64,
    pub kv_bytes: u64,
}

/// The draft worker's values in force now; all zero without one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DraftStatus {
    pub num_steps: usize,
    /// Width of a verify step, the root included.
    pub num_draft_tokens: usize,
}

impl DraftStatus {
    /// Draft nodes of one verify step at most: what a request must keep KV slots for.
    pub fn max_nodes(&self) -> usize {
        self.num_draft_tokens.saturating_sub(1)
    }
}

/// Runs steps. Implementers: [`scripted::ScriptedEngine`] and [`spec::SpecEngine`].
pub trait Engine {
    fn limits(&self) -> &EngineLimits;

    fn draft_status(&self) -> DraftStatus;

    /// Runs one batch. An error means the engine is broken, not that a row is.
    fn step(&mut self, batch: &Batch<'_>) -> Result<StepOutput, EngineError>;

    /// Forgets what is kept for a request. KV slots belong to the scheduler.
    fn release(&mut self, slot: EngineSlot);

    /// Forgets everything learned from past requests.
    fn flush(&mut self);
}

/// Why an engine cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("loading {what}: {reason}")]
    Load { what: String, reason: String },
    #[error("{stage} failed: {reason}")]
    Step { stage: &'static str, reason: String },
}

impl<E: Engine + ?Sized> Engine for Box<E> {
    fn limits(&self) -> &EngineLimits {
        (**self).limits()
    }

    fn draft_status(&self) -> DraftStatus {
        (**self).draft_status()
    }

    fn step(&mut self, batch: &Batch<'_>) -> Result<StepOutput, EngineError> {
        (**self).step(batch)
    }

    fn release(&mut self, slot: EngineSlot) {
        (**self).release(slot);
    }

    fn flush(&mut self) {
        (**self).flush();
    }
}
