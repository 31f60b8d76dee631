//! Owns what steps took: by batch size and depth, as multiples of plain steps that ran at the same time. A machine that
//! others use is slower at one time than at another; what a depth costs beside plain decoding is not.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

/// Comparisons remembered of each kind, and how many are enough.
const REMEMBERED: usize = 15;
const ENOUGH: usize = 2;
/// Steps right before a plain one that it is compared with.
const NEIGHBOURS: usize = 5;
/// Relative error of a single comparison, at least.
const DOUBT: f64 = 0.03;

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
    /// Seconds of the last steps.
    last: VecDeque<f64>,
    recorded: u64,
    /// Seconds over those of a plain step close by.
    ratios: VecDeque<f64>,
    /// When the last of them was taken.
    compared: u64,
}

/// What a step takes, and the relative error of that beside plain decoding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Cost {
    pub seconds: f64,
    pub error: f64,
}

impl Costs {
    pub(super) fn record(&mut self, batch: usize, depth: u32, seconds: f64) {
        self.clock += 1;
        let (clock, bucket) = (self.clock, bucket(batch));
        let times = self.kinds.entry((bucket, depth)).or_default();
        keep(&mut times.last, NEIGHBOURS, seconds);
        times.recorded = clock;
        if depth > 0 || seconds <= 0.0 {
            return;
        }
        let before =
            |kind: &Kind, times: &Times| kind.0 == bucket && kind.1 > 0 && clock - times.recorded == 1;
        for (_, times) in self.kinds.iter_mut().filter(|(kind, times)| before(kind, times)) {
            keep(&mut times.ratios, REMEMBERED, median(&times.last) / seconds);
            times.compared = clock;
        }
    }

    /// What a step takes now; `None` while it was not compared often enough.
    pub(super) fn of(&self, batch: usize, depth: u32) -> Option<Cost> {
        let bucket = bucket(batch);
        let plain = self.kinds.get(&(bucket, 0)).map(|times| median(&times.last))?;
        if depth == 0 {
            return Some(Cost { seconds: plain, error: 0.0 });
        }
        let times = self.kinds.get(&(bucket, depth)).filter(|times| times.ratios.len() >= ENOUGH)?;
        let ratio = median(&times.ratios);
        let apart: VecDeque<f64> = times.ratios.iter().map(|other| (other / ratio - 1.0).abs()).collect();
        let error = median(&apart).max(DOUBT) / (times.ratios.len() as f64).sqrt();
        Some(Cost { seconds: plain * ratio, error })
    }

    /// Whether a plain step beside this depth would tell something: nothing is known yet, or it was compared long ago;
    /// and a step of it is there to compare with.
    pub(super) fn wants_plain(&self, batch: usize, depth: u32, every: u64) -> bool {
        let Some(times) = self.kinds.get(&(bucket(batch), depth)) else { return false };
        let ran = self.clock - times.recorded == 0;
        ran && (times.ratios.len() < ENOUGH || self.clock - times.compared >= every)
    }
}

fn keep(list: &mut VecDeque<f64>, most: usize, value: f64) {
    if list.len() == most {
        list.pop_front();
    }
    list.push_back(value);
}

/// The middle value, the upper one of two.
fn median(values: &VecDeque<f64>) -> f64 {
    let mut sorted: Vec<f64> = values.iter().copied().collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
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
    fn a_depth_is_compared_with_plain_steps_beside_it() {
        let mut costs = Costs::default();
        assert!(!costs.wants_plain(8, 3, 64), "there is nothing to compare with");
        costs.record(8, 3, 2.0);
        assert!(costs.wants_plain(9, 3, 64) && !costs.wants_plain(12, 3, 64));
        costs.record(8, 0, 1.0);
        assert_eq!((costs.of(8, 3), costs.wants_plain(8, 3, 64)), (None, false), "once is not enough");
        // The machine becomes ten times as slow, which says nothing of the depth.
        costs.record(8, 3, 20.0);
        costs.record(8, 3, 20.0);
        costs.record(8, 0, 10.0);
        let cost = costs.of(10, 3).unwrap();
        assert_eq!((cost.seconds, costs.of(8, 0).unwrap().seconds), (20.0, 10.0));
        assert!(cost.error >= DOUBT / 2f64.sqrt());
        // Plain steps alone compare nothing, but show how slow steps are now.
        (0..20).for_each(|_| costs.record(8, 0, 1.0));
        assert_eq!(costs.of(8, 3).unwrap().seconds, 2.0);
        assert_eq!(costs.of(16, 0), None);
    }

    #[test]
    fn comparisons_are_repeated_and_their_scatter_is_an_error() {
        let mut costs = Costs::default();
        for step in 0..400 {
            if costs.wants_plain(1, 1, 10) {
                costs.record(1, 0, 1.0);
            }
            costs.record(1, 1, 1.0 + 0.2 * f64::from(step / 25 % 3));
        }
        let Cost { error, .. } = costs.of(1, 1).unwrap();
        assert!((0.02..0.1).contains(&error), "{error}");
    }
}
