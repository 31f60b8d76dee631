//! Owns the arithmetic on samples.

use std::time::Instant;

/// Tokens made by one request, or by several that ran at once.
pub(crate) struct Sample {
    pub(crate) start: Instant,
    pub(crate) end: Instant,
    pub(crate) tokens: u64,
    pub(crate) mean_context: f64,
    pub(crate) requests: usize,
    pub(crate) verify_steps: u64,
    pub(crate) accepted: u64,
    /// Verify steps that accepted exactly so many drafts.
    pub(crate) histogram: Vec<u64>,
}

impl Sample {
    /// Tokens per second, over all requests.
    pub(crate) fn rate(&self) -> f64 {
        self.tokens as f64 / (self.end - self.start).as_secs_f64()
    }

    /// Tokens per verify step, bonus included.
    pub(crate) fn accept_length(&self) -> Option<f64> {
        (self.verify_steps > 0).then(|| (self.accepted + self.verify_steps) as f64 / self.verify_steps as f64)
    }
}

impl FromIterator<Sample> for Sample {
    fn from_iter<I: IntoIterator<Item = Self>>(samples: I) -> Self {
        samples
            .into_iter()
            .reduce(|a, b| Self {
                start: a.start.min(b.start),
                end: a.end.max(b.end),
                tokens: a.tokens + b.tokens,
                mean_context: (a.mean_context * a.requests as f64 + b.mean_context * b.requests as f64)
                    / (a.requests + b.requests) as f64,
                requests: a.requests + b.requests,
                verify_steps: a.verify_steps + b.verify_steps,
                accepted: a.accepted + b.accepted,
                histogram: sum(a.histogram, &b.histogram),
            })
            .expect("a row has a prompt")
    }
}

fn sum(mut a: Vec<u64>, b: &[u64]) -> Vec<u64> {
    a.resize(a.len().max(b.len()), 0);
    a.iter_mut().zip(b).for_each(|(sum, &value)| *sum += value);
    a
}

/// The middle of the values; NaN when there is none.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
