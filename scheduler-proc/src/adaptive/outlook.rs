//! Owns what can be said of every candidate at one moment: its tokens per second where they were measured, and where
//! not, what they could be at best.

use super::accepted::Estimate;
use super::costs::Cost;

/// One candidate, as seen from the depth in force.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Outlook {
    pub steps: u32,
    /// Measured at this depth, and not too long ago.
    pub accepted: Option<Estimate>,
    /// Of a step at this batch size.
    pub seconds: Option<f64>,
    /// Tokens per second, from both.
    pub rate: Option<Rate>,
    /// Tokens per second at best, where one of the two is missing.
    pub promise: Option<f64>,
    /// Steps during which it is not tried again.
    pub waits: u64,
}

/// Tokens per second, one standard error around the mean.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rate {
    pub low: f64,
    pub mean: f64,
    pub high: f64,
}

/// The batch that a rate is for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    pub batch: usize,
    /// Share of rows that speculate.
    pub speculating: f64,
}

impl Rows {
    /// batch · (1 + share · accepted) / seconds: a token of the target's own per row, and the drafts.
    pub(super) fn rate(self, accepted: f64, seconds: f64) -> f64 {
        self.batch as f64 * (1.0 + self.speculating * accepted.max(0.0)) / seconds.max(1e-9)
    }

    pub(super) fn measured(self, accepted: Estimate, cost: Cost) -> Rate {
        let (Estimate { mean, error }, Cost { seconds, error: doubt }) = (accepted, cost);
        Rate {
            low: self.rate(mean - error, seconds * (1.0 + doubt)),
            mean: self.rate(mean, seconds),
            high: self.rate(mean + error, seconds * (1.0 - doubt)),
        }
    }
}

impl Estimate {
    /// Of plain decoding, which drafts nothing.
    pub(super) const NOTHING: Self = Self { mean: 0.0, error: 0.0 };
}
