//! Owns what steps took: by batch size and depth, the median of the last few.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

/// Steps remembered of each kind, and how many are enough.
const REMEMBERED: usize = 15;
const ENOUGH: usize = 3;

/// Batch sizes that cost about the same, and the depth.
type Kind = (usize, u32);

#[derive(Debug, Default)]
pub(super) struct Costs {
    kinds: FxHashMap<Kind, Times>,
    /// Steps recorded so far.
    clock: u64,
}

#[derive(Debug, Default)]
struct Times {
    last: VecDeque<f64>,
    recorded: u64,
}

impl Costs {
    pub(super) fn record(&mut self, batch: usize, depth: u32, seconds: f64) {
        self.clock += 1;
        let times = self.kinds.entry((bucket(batch), depth)).or_default();
        if times.last.len() == REMEMBERED {
            times.last.pop_front();
        }
        times.last.push_back(seconds);
        times.recorded = self.clock;
    }

    /// `None` while too few were seen.
    pub(super) fn seconds(&self, batch: usize, depth: u32) -> Option<f64> {
        let times = self.kinds.get(&(bucket(batch), depth))?;
        (times.last.len() >= ENOUGH).then(|| {
            let mut sorted: Vec<f64> = times.last.iter().copied().collect();
            sorted.sort_by(f64::total_cmp);
            sorted[sorted.len() / 2]
        })
    }

    /// Steps recorded since the last of this kind.
    pub(super) fn age(&self, batch: usize, depth: u32) -> u64 {
        self.kinds.get(&(bucket(batch), depth)).map_or(u64::MAX, |times| self.clock - times.recorded)
    }
}

/// The largest of 1, 2, 3, 4, 6, 8, 12, 16, 24, … that is not above: steps of a third more rows cost about the same.
fn bucket(batch: usize) -> usize {
    let power = 1 << batch.max(1).ilog2();
    let between = power + power / 2;
    if batch >= between { between } else { power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_of_about_one_size_share_their_times() {
        let buckets = [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 15, 16, 23, 24, 31, 32, 63, 64].map(bucket);
        assert_eq!(buckets, [1, 2, 3, 4, 4, 6, 6, 8, 8, 12, 12, 16, 16, 24, 24, 32, 48, 64]);
    }

    #[test]
    fn a_median_of_the_last_ones_and_its_age() {
        let mut costs = Costs::default();
        costs.record(8, 0, 1.0);
        costs.record(9, 0, 9.0);
        assert_eq!((costs.seconds(8, 0), costs.age(8, 0), costs.age(8, 1)), (None, 0, u64::MAX));
        costs.record(8, 0, 2.0);
        costs.record(8, 3, 7.0);
        assert_eq!((costs.seconds(10, 0), costs.age(8, 0)), (Some(2.0), 1));
        assert_eq!((costs.seconds(12, 0), costs.seconds(8, 3)), (None, None));
        (0..REMEMBERED).for_each(|_| costs.record(8, 0, 4.0));
        assert_eq!(costs.seconds(8, 0), Some(4.0), "the first ones are forgotten");
    }
}
