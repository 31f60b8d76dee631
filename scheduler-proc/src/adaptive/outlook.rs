//! Owns what can be said of every candidate at one moment: its tokens per second where they were measured, and where
//! not, what they could be at best.

use super::accepted::Estimate;

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

    pub(super) fn measured(self, accepted: Estimate, seconds: f64) -> Rate {
        let Estimate { mean, error } = accepted;
        Rate {
            low: self.rate(mean - error, seconds),
            mean: self.rate(mean, seconds),
            high: self.rate(mean + error, seconds),
        }
    }
}

impl Estimate {
    /// Of plain decoding, which drafts nothing.
    pub(super) const NOTHING: Self = Self { mean: 0.0, error: 0.0 };
}
