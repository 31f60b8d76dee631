//! Owns SGLang's rule: the depth that the mean of accepted drafts asks for, whatever drafts cost.

use proto::AdaptiveSlot;

/// The candidate to go to from candidate `at`, by the mean of drafts accepted there.
pub(super) fn wish(slot: &AdaptiveSlot, at: usize, mean: f64) -> usize {
    let steps = |candidate: usize| f64::from(slot.tiers[candidate].num_steps);
    let last = slot.tiers.len() - 1;
    if slot.tiers[at].num_steps == 0 {
        // Nothing is accepted where nothing is drafted: only a try can tell.
        return last.min(at + 1);
    }
    let mut to = at;
    while to > 0 {
        let lower = steps(to - 1);
        let threshold = if lower == 0.0 { 0.5 } else { lower - 0.5 };
        if mean > threshold + slot.down_hysteresis {
            break;
        }
        to -= 1;
    }
    if to == at {
        while to < last && mean > steps(to) - 0.5 + slot.up_hysteresis {
            to += 1;
        }
    }
    if to <= at && slot.ceiling_coeff > 0.0 {
        let ceiling = (mean * slot.ceiling_coeff).ceil().max(1.0);
        while to > 0 && steps(to) > ceiling {
            to -= 1;
        }
    }
    to
}
