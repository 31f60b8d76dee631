//! Owns the arithmetic of record for speculative decoding: what is counted, and the two ratios made of it.
//!
//! In one verify step a request submits a root (its last committed token) and `p` draft tokens; the target
//! accepts `a` of them and adds one token of its own, the bonus. A draft is never a bonus and a bonus never a
//! draft. Everything here counts drafts; only [`SpecCounters::accept_length`] includes the bonus.

use serde::{Deserialize, Serialize};

/// Cumulative acceptance counts of one request, or of a whole process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecCounters {
    /// Verify steps taken part in.
    pub verify_ct: u64,
    /// Σ p, recorded at each step.
    pub proposed_drafts: u64,
    /// Σ a, as the verifier decided, before a stop or limit trims the block.
    pub accepted_drafts: u64,
    /// Accepted drafts that reached the answer.
    pub delivered_drafts: u64,
    /// `acceptance_histogram[j]` is the number of verify steps with a = j. Grows to the largest j seen.
    pub acceptance_histogram: Vec<u64>,
}

impl SpecCounters {
    /// Counts one verify step: `proposed` drafts went in, `accepted` of them were the target's choice, and
    /// `delivered` of those reached the answer.
    pub fn record(&mut self, proposed: usize, accepted: usize, delivered: usize) {
        assert!(
            delivered <= accepted && accepted <= proposed,
            "delivered {delivered} <= accepted {accepted} <= proposed {proposed}"
        );
        self.verify_ct += 1;
        self.proposed_drafts += proposed as u64;
        self.accepted_drafts += accepted as u64;
        self.delivered_drafts += delivered as u64;
        if self.acceptance_histogram.len() <= accepted {
            self.acceptance_histogram.resize(accepted + 1, 0);
        }
        self.acceptance_histogram[accepted] += 1;
    }

    /// Adds another's counts, as when finished requests are summed.
    pub fn add(&mut self, other: &Self) {
        self.verify_ct += other.verify_ct;
        self.proposed_drafts += other.proposed_drafts;
        self.accepted_drafts += other.accepted_drafts;
        self.delivered_drafts += other.delivered_drafts;
        if self.acceptance_histogram.len() < other.acceptance_histogram.len() {
            self.acceptance_histogram.resize(other.acceptance_histogram.len(), 0);
        }
        for (mine, theirs) in self.acceptance_histogram.iter_mut().zip(&other.acceptance_histogram) {
            *mine += theirs;
        }
    }

    /// accepted / proposed; `None` when nothing was proposed.
    pub fn accept_rate(&self) -> Option<f64> {
        (self.proposed_drafts > 0).then(|| self.accepted_drafts as f64 / self.proposed_drafts as f64)
    }

    /// Tokens per verify step, bonus included: (accepted + verify steps) / verify steps.
    pub fn accept_length(&self) -> Option<f64> {
        (self.verify_ct > 0).then(|| (self.accepted_drafts + self.verify_ct) as f64 / self.verify_ct as f64)
    }

    /// Checks what must hold at every moment; the error names the identity that does not.
    pub fn check(&self) -> Result<(), String> {
        let steps: u64 = self.acceptance_histogram.iter().sum();
        let drafts: u64 = (0u64..).zip(&self.acceptance_histogram).map(|(j, count)| j * count).sum();
        if steps != self.verify_ct {
            return Err(format!("sum of histogram {steps} != verify_ct {}", self.verify_ct));
        }
        if drafts != self.accepted_drafts {
            return Err(format!("weighted histogram {drafts} != accepted_drafts {}", self.accepted_drafts));
        }
        if self.delivered_drafts > self.accepted_drafts || self.accepted_drafts > self.proposed_drafts {
            return Err(format!(
                "delivered {} <= accepted {} <= proposed {} does not hold",
                self.delivered_drafts, self.accepted_drafts, self.proposed_drafts
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_absent_until_something_is_measured() {
        let counters = SpecCounters::default();
        assert_eq!((counters.accept_rate(), counters.accept_length()), (None, None));
    }

    #[test]
    fn all_accepted_is_a_rate_of_exactly_one() {
        let mut counters = SpecCounters::default();
        (0..7).for_each(|_| counters.record(3, 3, 3));
        assert_eq!(counters.accept_rate(), Some(1.0));
        assert_eq!(counters.accept_length(), Some(4.0));
    }

    #[test]
    fn identities_hold_and_sums_add() {
        let (mut one, mut two) = (SpecCounters::default(), SpecCounters::default());
        one.record(5, 2, 1);
        one.record(0, 0, 0);
        two.record(3, 3, 3);
        one.add(&two);
        assert_eq!(one.check(), Ok(()));
        assert_eq!(one.acceptance_histogram, [1, 0, 1, 1]);
        assert_eq!(
            (one.verify_ct, one.proposed_drafts, one.accepted_drafts, one.delivered_drafts),
            (3, 8, 5, 4)
        );
        one.accepted_drafts += 1;
        assert!(one.check().is_err());
    }
}
