//! Owns top_k, top_p and min_p, in SGLang's joint form: every test is made on the unfiltered temperature
//! softmax, then what is left is renormalised once.
//!
//! Tokens are ordered by logit, ties by lower id. Each test keeps a front part of that order (top_k the best
//! `k`; top_p the tokens with at most `top_p` of the mass strictly before them; min_p those with at least
//! `min_p` of the best token's mass), so together they are one [`Cutoff`], the tightest of the three.

use proto::{SamplingParams, TokenId};

use super::scan::{self, key};
use super::{Row, mass};
use crate::engine::rng::GROUP;

/// The last token that is kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Cutoff {
    pub(super) logit: f32,
    last: TokenId,
}

impl Cutoff {
    /// Keeps every token that is not masked.
    pub(super) const NONE: Self = Self { logit: f32::MIN, last: TokenId::MAX };

    pub(super) fn keeps(&self, logit: f32, token: TokenId) -> bool {
        logit > self.logit || (logit == self.logit && token <= self.last)
    }

    fn at(logits: &[f32], token: TokenId) -> Self {
        Self { logit: logits[token as usize], last: token }
    }

    fn tighter(self, other: Self) -> Self {
        if other.keeps(self.logit, self.last) { self } else { other }
    }
}

/// Memory of [`cutoff`], kept between rows.
#[derive(Debug, Default)]
pub(super) struct FilterScratch {
    masses: Vec<f32>,
    buckets: Vec<f64>,
    keys: Vec<u64>,
}

pub(super) fn cutoff(row: &Row<'_>, sampling: &SamplingParams, scratch: &mut FilterScratch) -> Cutoff {
    let mut cutoff = Cutoff::NONE;
    if let Some(k) = sampling.top_k
        && (1..row.logits.len()).contains(&(k as usize))
        && let Some(&last) = row.scan.top(row.logits, k as usize).last()
    {
        cutoff = cutoff.tighter(Cutoff::at(row.logits, scan::token_of(last)));
    }
    if sampling.min_p > 0.0 {
        let logit = row.scale.logit_at_share(sampling.min_p);
        cutoff = cutoff.tighter(Cutoff { logit, last: TokenId::MAX });
    }
    if sampling.top_p < 1.0 {
        cutoff = cutoff.tighter(nucleus(row, sampling.top_p, scratch));
    }
    cutoff
}

/// The kept tokens' probabilities, in f64.
pub(super) fn law(row: &Row<'_>, cutoff: Cutoff) -> Vec<f64> {
    let mut law: Vec<f64> = (0..)
        .zip(row.logits)
        .map(|(token, &logit)| if cutoff.keeps(logit, token) { row.scale.log_mass(logit).exp() } else { 0.0 })
        .collect();
    let total: f64 = law.iter().sum();
    law.iter_mut().for_each(|mass| *mass /= total);
    law
}

const BUCKETS: usize = 1024;
const BUCKETS_PER_BIT: f32 = 32.0;

/// Which slice of the order a logit falls in; 0 is the best. Monotone, since [`Scale::bits`] is.
///
/// [`Scale::bits`]: super::mass::Scale::bits
#[inline]
fn bucket(row: &Row<'_>, logit: f32) -> usize {
    let depth = -row.scale.bits(logit) * BUCKETS_PER_BIT;
    let last = (BUCKETS - 1) as f32;
    (if depth < last { depth } else { last }) as usize
}

/// top_p's cutoff: sums masses by bucket, and sorts just the bucket in which the sum passes `top_p`.
fn nucleus(row: &Row<'_>, top_p: f64, scratch: &mut FilterScratch) -> Cutoff {
    mass::fill(row, &mut scratch.masses);
    scratch.buckets.clear();
    scratch.buckets.resize(BUCKETS, 0.0);
    for (&logit, &mass) in row.logits.iter().zip(&scratch.masses) {
        scratch.buckets[bucket(row, logit)] += f64::from(mass);
    }
    let budget = top_p * scratch.buckets.iter().sum::<f64>();
    let mut before = 0.0;
    let Some(crossing) = scratch.buckets.iter().position(|&mass| {
        before += mass;
        before > budget
    }) else {
        return Cutoff::NONE;
    };
    before = scratch.buckets[..crossing].iter().sum();
    collect_bucket(row, crossing, &mut scratch.keys);
    scratch.keys.sort_unstable_by(|a, b| b.cmp(a));
    let mut last = row.scan.argmax(row.logits);
    for &key in &scratch.keys {
        if before > budget {
            break;
        }
        last = scan::token_of(key);
        before += f64::from(scratch.masses[last as usize]);
    }
    Cutoff::at(row.logits, last)
}

fn collect_bucket(row: &Row<'_>, wanted: usize, keys: &mut Vec<u64>) {
    keys.clear();
    for (group, (logits, &max)) in row.logits.chunks(GROUP).zip(row.scan.group_max()).enumerate() {
        if bucket(row, max) <= wanted {
            let members = logits.iter().enumerate().filter(|&(_, &logit)| bucket(row, logit) == wanted);
            keys.extend(members.map(|(i, &logit)| key(logit, group * GROUP + i)));
        }
    }
}
