//! Owns how a change of depth is told: its reason, the log line with the numbers behind it, and the state as JSON.

use std::fmt;

use serde_json::{Value, json};

use super::outlook::Outlook;

/// Why the depth changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The batch moved to another slot, whose depth is another.
    BatchSize,
    /// Acceptance rose above its threshold.
    AcceptanceUp,
    /// Acceptance fell below its threshold.
    AcceptanceDown,
    /// From plain decoding, to see what would be accepted.
    Probe,
    /// Not measured, but could be faster than what is.
    Promise,
    /// Another depth is measured to be faster.
    Faster,
    /// Plain decoding is measured to be faster.
    PlainFaster,
}

impl Reason {
    pub const ALL: [Self; 7] = [
        Self::BatchSize,
        Self::AcceptanceUp,
        Self::AcceptanceDown,
        Self::Probe,
        Self::Promise,
        Self::Faster,
        Self::PlainFaster,
    ];

    /// As a label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::BatchSize => "batch_size",
            Self::AcceptanceUp => "acceptance_up",
            Self::AcceptanceDown => "acceptance_down",
            Self::Probe => "probe",
            Self::Promise => "promise",
            Self::Faster => "faster",
            Self::PlainFaster => "plain_faster",
        }
    }
}

/// A change of depth, with what it was decided on. Its text is the log line.
#[derive(Debug, Clone, PartialEq)]
pub struct Switch {
    pub from: u32,
    pub to: u32,
    pub reason: Reason,
    /// Rows that decode.
    pub batch: usize,
    /// Mean of accepted drafts over recent steps, at the depth that is left.
    pub ema: f64,
    pub(super) outlooks: Vec<Outlook>,
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, reason, batch, ema, .. } = self;
        write!(
            f,
            "Adaptive spec params updated: steps {from} -> {to} (ema_accept_len={ema:.2}), reason: {}, batch size: \
             {batch}, token/s by steps:",
            reason.as_str()
        )?;
        for (index, outlook) in self.outlooks.iter().enumerate() {
            write!(f, "{} {outlook}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// `3: 512.0 (1.85 token x 8 / 28.9 ms)`
impl fmt::Display for Outlook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.steps)?;
        match (self.rate, self.promise) {
            (Some(rate), _) => write!(f, "{:.1}", rate.mean)?,
            (None, Some(promise)) => write!(f, "at most {promise:.1}")?,
            (None, None) => write!(f, "not measured")?,
        }
        if let Some(accepted) = self.accepted.filter(|_| self.steps > 0) {
            write!(f, " {:.2}±{:.2} accepted", accepted.mean, accepted.error)?;
        }
        if let Some(seconds) = self.seconds {
            write!(f, " {:.2} ms", seconds * 1e3)?;
        }
        match self.waits {
            0 => Ok(()),
            waits => write!(f, " not for {waits} steps"),
        }
    }
}

impl Outlook {
    pub(super) fn to_json(self) -> Value {
        json!({
            "num_steps": self.steps,
            "accepted_drafts": self.accepted.map(|accepted| accepted.mean),
            "accepted_drafts_error": self.accepted.map(|accepted| accepted.error),
            "step_seconds": self.seconds,
            "tokens_per_second": self.rate.map(|rate| rate.mean),
            "tokens_per_second_at_best": self.promise,
            "retry_in_steps": self.waits,
        })
    }
}
