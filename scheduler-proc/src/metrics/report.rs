//! Owns the plain facts of one step, as the scheduler tells them to its metrics.

use proto::SpecCounters;

use crate::accounting::Origin;
use crate::adaptive::Switch;
use crate::admission::Retracted;
use crate::batch::{DraftSource, StepTiming, VerifyCount};
use crate::cache::Usage;
use crate::engine::DraftStatus;

/// What happened in one step.
#[derive(Debug, Clone, Default)]
pub struct StepReport {
    pub prefill: PrefillReport,
    pub decode: DecodeReport,
    pub retracted: Retracted,
    pub timing: StepTiming,
    pub load: Load,
    /// Draft steps of rows that were free to make them; `None` where depth is fixed.
    pub depth: Option<usize>,
    /// Changes of the depth in force.
    pub switches: Vec<Switch>,
}

/// Prompts that started or went on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PrefillReport {
    /// Requests seated in this step.
    pub new_seqs: usize,
    /// Tokens run.
    pub new_tokens: usize,
    /// Tokens that the seated requests found in the cache.
    pub cached_tokens: usize,
    /// The same for requests seated for the first time.
    pub first_cached_tokens: usize,
    /// Seconds that those seated for the first time had waited.
    pub queue_times: Vec<f64>,
}

/// Rows that decoded.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DecodeReport {
    pub rows: usize,
    /// One per row, and every accepted draft.
    pub tokens: usize,
    /// What this step adds to the counters.
    pub spec: SpecCounters,
    /// Rows that proposed a draft at this depth, index 0 for the first draft.
    pub proposed_at: Vec<u64>,
    /// Rows that accepted one there.
    pub accepted_at: Vec<u64>,
    pub by_source: SourceCounts,
}

/// Drafts by who made them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SourceCounts([Drafts; DraftSource::ALL.len()]);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Drafts {
    pub proposed: u64,
    pub accepted: u64,
}

impl SourceCounts {
    pub fn of(&self, source: DraftSource) -> Drafts {
        self.0[source as usize]
    }

    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            mine.proposed += theirs.proposed;
            mine.accepted += theirs.accepted;
        }
    }

    fn record(&mut self, verify: &VerifyCount) {
        let drafts = &mut self.0[verify.source as usize];
        drafts.proposed += verify.proposed() as u64;
        drafts.accepted += verify.accepted as u64;
    }
}

/// How things stand after the step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Load {
    pub running: usize,
    pub waiting: usize,
    /// Σ sequence lengths of decoding requests.
    pub decode_tokens: usize,
    /// Tokens that prompts still have to run.
    pub pending_tokens: usize,
    pub usage: Usage,
    pub draft: DraftStatus,
}

impl StepReport {
    /// One row of the step. Health probes take part but are not counted.
    pub fn row(&mut self, counted: bool, origin: Origin<'_>, extend_len: usize, made: usize) {
        if !counted {
            return;
        }
        match origin {
            Origin::Prefill => self.prefill.new_tokens += extend_len,
            Origin::Plain => {
                self.decode.rows += 1;
                self.decode.tokens += made;
            }
            Origin::Verify(verify) => {
                self.decode.rows += 1;
                self.decode.tokens += 1 + verify.accepted;
                self.decode.verify(verify);
            }
        }
    }

    /// The kind of step; `None` when nothing that counts ran.
    pub fn category(&self) -> Option<&'static str> {
        match (self.prefill.new_tokens > 0, self.decode.rows > 0) {
            (true, true) => Some("mixed"),
            (true, false) => Some("extend"),
            (false, true) => Some("decode"),
            (false, false) => None,
        }
    }

    /// Drafts of the row reported last that reached the answer.
    pub fn delivered(&mut self, counted: bool, drafts: usize) {
        if counted {
            self.decode.spec.delivered_drafts += drafts as u64;
        }
    }
}

impl DecodeReport {
    fn verify(&mut self, verify: &VerifyCount) {
        // Delivered drafts are known only once the stops have looked at the block.
        self.spec.record(verify.proposed(), verify.accepted, 0);
        self.by_source.record(verify);
        let depth = verify.proposed_at.len().max(verify.accepted);
        if self.proposed_at.len() < depth {
            self.proposed_at.resize(depth, 0);
            self.accepted_at.resize(depth, 0);
        }
        for (total, &nodes) in self.proposed_at.iter_mut().zip(&verify.proposed_at) {
            *total += u64::from(nodes > 0);
        }
        self.accepted_at.iter_mut().take(verify.accepted).for_each(|total| *total += 1);
    }
}
