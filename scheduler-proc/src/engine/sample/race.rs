//! Owns the draw: the argmax of `log p + g` with Gumbel noise `g = -ln E`, `E = -ln u`, over the kept tokens.
//! Equivalently the first finisher of an exponential race, whose law is exactly `p`.
//!
//! Since `E >= 1 - u`, a token can win only if `ln(1 - u) < log p - best`. A cheap lower bound of that logarithm
//! rules out all but a handful, and only those are scored exactly. Bounds err on the side of scoring, so the
//! result is that of scoring every token.

use std::f64::consts::LOG2_E;

use proto::TokenId;

use super::Row;
use super::filter::Cutoff;
use crate::engine::rng::{self, GROUP, Noise};

/// More than the largest noise: `-ln(2^-33)`.
const MAX_NOISE: f64 = 22.9;
/// Covers the rounding of the f32 bound, in powers of two, wherever a token still has a chance.
const SLACK: f64 = 1e-3;

#[derive(Clone, Copy)]
struct Best {
    score: f64,
    token: TokenId,
}

/// The drawn token. The row has at least one kept token.
pub(super) fn winner(row: &Row<'_>, cutoff: Cutoff, noise: Noise) -> TokenId {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx2") {
        #[expect(unsafe_code, reason = "the same code, compiled for wider vectors")]
        // SAFETY: the machine was just asked.
        return unsafe { winner_avx2(row, cutoff, noise) };
    }
    run(row, cutoff, noise)
}

/// Wider vectors only: without fused multiply-add, every result has the same bits as the portable one.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn winner_avx2(row: &Row<'_>, cutoff: Cutoff, noise: Noise) -> TokenId {
    run(row, cutoff, noise)
}

/// The same draw from weights that need not add up to 1; `None` where all are 0.
pub(super) fn winner_of(weights: &[f64], noise: Noise) -> Option<TokenId> {
    let runners = (0..).zip(weights).filter(|&(_, &weight)| weight > 0.0);
    let score = |(token, &weight): (TokenId, &f64)| (weight.ln() + gumbel(noise.word(token)), token);
    // The earlier of two equals stays.
    let better = |best: (f64, TokenId), other: (f64, TokenId)| if other.0 > best.0 { other } else { best };
    runners.map(score).reduce(better).map(|(_, token)| token)
}

#[inline(always)]
fn run(row: &Row<'_>, cutoff: Cutoff, noise: Noise) -> TokenId {
    let mut best = Best { score: f64::NEG_INFINITY, token: TokenId::MAX };
    // The likeliest group first: it makes a bar that few others pass.
    let first = row.scan.best_group();
    run_group(row, cutoff, noise, first, &mut best);
    for (group, &max) in row.scan.group_max().iter().enumerate() {
        if group != first && max >= cutoff.logit && row.scale.log_mass(max) + MAX_NOISE > best.score {
            run_group(row, cutoff, noise, group, &mut best);
        }
    }
    best.token
}

#[inline(always)]
fn run_group(row: &Row<'_>, cutoff: Cutoff, noise: Noise, group: usize, best: &mut Best) {
    let start = group * GROUP;
    let members = &row.logits[start..row.logits.len().min(start + GROUP)];
    let mut logits = [f32::NEG_INFINITY; GROUP];
    logits[..members.len()].copy_from_slice(members);
    let words = noise.group(group as u32);
    let bar = (SLACK - best.score * LOG2_E) as f32;

    let mut chances = [false; GROUP];
    let mut any = false;
    for i in 0..GROUP {
        let chance = log2_floor(words[i]) < row.scale.bits(logits[i]) + bar;
        chances[i] = chance;
        any |= chance;
    }
    if !any {
        return;
    }
    for i in (0..GROUP).filter(|&i| chances[i]) {
        let token = (start + i) as TokenId;
        if cutoff.keeps(logits[i], token) {
            let score = row.scale.log_mass(logits[i]) + gumbel(words[i]);
            if score > best.score || (score == best.score && token < best.token) {
                *best = Best { score, token };
            }
        }
    }
}

/// At most `log2(1 - u)`: the exponent, plus the mantissa taken for its own logarithm.
#[inline(always)]
fn log2_floor(word: u32) -> f32 {
    let rest = (!word >> 1) as i32 as f32;
    rest.to_bits() as i32 as f32 * (1.0 / 8_388_608.0) - (127.0 + 31.0)
}

/// `-ln(-ln u)`, without loss where u is close to 1.
fn gumbel(word: u32) -> f64 {
    let exponential = -(-(1.0 - rng::to_uniform(word))).ln_1p();
    -exponential.ln()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::rng::Stream;

    #[test]
    fn the_bound_never_exceeds_what_it_bounds() {
        let edges = [0, 1, 2, 3, u32::MAX, u32::MAX - 1, u32::MAX - 2, 1 << 31, (1 << 31) - 1];
        let random = (0..200_000u32).map(|token| Noise::new(9, 9, Stream::Choice).word(token));
        for word in edges.into_iter().chain(random) {
            let exact = (1.0 - rng::to_uniform(word)).log2();
            assert!(f64::from(log2_floor(word)) <= exact + SLACK / 2.0, "{word}");
            let gumbel = gumbel(word);
            assert!(gumbel.is_finite() && gumbel <= MAX_NOISE, "{word} {gumbel}");
            assert!(gumbel <= -exact / LOG2_E + 1e-12, "E >= 1 - u");
        }
    }

    #[test]
    fn wide_vectors_draw_what_portable_code_draws() {
        let mut scan = super::super::Scan::default();
        for seed in 0..200 {
            let logits: Vec<f32> = (0..3000).map(|token| rng::uniform(seed, 1, token) as f32 * 9.0).collect();
            scan.run(&logits);
            let scale = super::super::Scale::new(scan.max(), 0.7 + seed as f64 / 50.0);
            let row = Row { logits: &logits, scan: &scan, scale };
            let noise = Noise::new(seed, 3, Stream::Choice);
            assert_eq!(winner(&row, Cutoff::NONE, noise), run(&row, Cutoff::NONE, noise));
        }
    }
}
