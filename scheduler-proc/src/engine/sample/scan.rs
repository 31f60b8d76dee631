//! Owns the one pass over a row that everything else leans on: the maximum of every group of tokens. With it,
//! groups that cannot matter are skipped and the best `k` tokens are found without sorting the vocabulary.

use proto::TokenId;

use crate::engine::rng::GROUP;

/// Maxima of a row, by groups of [`GROUP`] tokens.
#[derive(Debug, Default)]
pub(super) struct Scan {
    group_max: Vec<f32>,
    max: f32,
}

impl Scan {
    pub(super) fn run(&mut self, logits: &[f32]) {
        self.group_max.clear();
        self.group_max.extend(logits.chunks(GROUP).map(max_of));
        self.max = max_of(&self.group_max);
    }

    pub(super) fn max(&self) -> f32 {
        self.max
    }

    pub(super) fn group_max(&self) -> &[f32] {
        &self.group_max
    }

    /// The lowest id among the tokens with the largest logit.
    pub(super) fn argmax(&self, logits: &[f32]) -> TokenId {
        let group = self.best_group();
        let first = group * GROUP;
        let inside = logits[first..].iter().position(|&logit| logit == self.max);
        (first + inside.expect("a group's maximum is one of its logits")) as TokenId
    }

    pub(super) fn best_group(&self) -> usize {
        self.group_max.iter().position(|&max| max == self.max).expect("the maximum is one of the groups'")
    }

    /// Keys of the best `k` tokens, best first; masked tokens are left out.
    pub(super) fn top(&self, logits: &[f32], k: usize) -> Vec<u64> {
        let floor = self.floor_of_top(k);
        let mut keys = Vec::with_capacity(2 * k.min(logits.len()));
        for (group, &max) in self.group_max.iter().enumerate() {
            if max >= floor {
                let first = group * GROUP;
                let members = logits[first..].iter().take(GROUP).enumerate();
                keys.extend(members.filter(|&(_, &logit)| logit >= floor).map(|(i, &l)| key(l, first + i)));
            }
        }
        if k < keys.len() {
            keys.select_nth_unstable_by(k, |a, b| b.cmp(a));
            keys.truncate(k);
        }
        keys.sort_unstable_by(|a, b| b.cmp(a));
        keys
    }

    /// A logit that at least `k` tokens reach, if there are so many: the k-th largest group maximum.
    fn floor_of_top(&self, k: usize) -> f32 {
        if k == 0 || k > self.group_max.len() {
            return f32::MIN;
        }
        let mut maxima = self.group_max.clone();
        let (_, floor, _) = maxima.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
        floor.max(f32::MIN)
    }
}

/// Orders tokens by logit, then by lower id: a larger key is better.
pub(super) fn key(logit: f32, token: usize) -> u64 {
    // Adding zero makes -0.0 and 0.0 the same tie.
    let bits = (logit + 0.0).to_bits();
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(ordered) << 32 | u64::from(!(token as TokenId))
}

pub(super) fn token_of(key: u64) -> TokenId {
    !(key as TokenId)
}

pub(super) fn all_finite(logits: &[f32]) -> bool {
    const MAGNITUDE: i32 = 0x7fff_ffff;
    const INFINITY: i32 = 0x7f80_0000;
    let bad =
        logits.iter().fold(0, |bad, logit| bad | i32::from((logit.to_bits() as i32 & MAGNITUDE) >= INFINITY));
    bad == 0
}

/// The largest value, in lanes so that it vectorises; negative infinity for none.
fn max_of(values: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |max, &value| max.max(value))
}
