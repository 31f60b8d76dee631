//! Owns the softmax of a row: its scale, its unnormalised masses and their sum.

use super::Row;
use crate::engine::rng::GROUP;

/// Masses below `2^-SKIP_BITS` of the largest are taken for 0 where a whole group is that small.
const SKIP_BITS: f32 = -64.0;

/// How a request reads logits: relative to the row's maximum, over its temperature.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scale {
    max: f32,
    temperature: f64,
    /// Powers of two per logit.
    bits_per_logit: f32,
}

impl Scale {
    pub(super) fn new(max: f32, temperature: f64) -> Self {
        let bits_per_logit = (std::f64::consts::LOG2_E / temperature) as f32;
        Self { max, temperature, bits_per_logit }
    }

    /// The log of a token's mass relative to the best token's, exact enough to decide a race.
    pub(super) fn log_mass(&self, logit: f32) -> f64 {
        (f64::from(logit) - f64::from(self.max)) / self.temperature
    }

    /// The same in powers of two and f32, for bulk passes. Never positive, and monotone in the logit.
    #[inline(always)]
    pub(super) fn bits(&self, logit: f32) -> f32 {
        (logit - self.max) * self.bits_per_logit
    }

    /// The smallest logit whose mass is at least `share` of the best token's.
    pub(super) fn logit_at_share(&self, share: f64) -> f32 {
        let exact = f64::from(self.max) + self.temperature * share.ln();
        let rounded = exact as f32;
        if f64::from(rounded) < exact { rounded.next_up() } else { rounded }
    }
}

/// Sum of the masses relative to the best token's.
pub(super) fn total(row: &Row<'_>) -> f64 {
    groups(row).map(|(group, max)| if skips(row, max) { 0.0 } else { group_total(row, group) }).sum()
}

/// The masses relative to the best token's, one per token.
pub(super) fn fill(row: &Row<'_>, masses: &mut Vec<f32>) {
    masses.clear();
    for (group, max) in groups(row) {
        if skips(row, max) {
            masses.resize(masses.len() + group.len(), 0.0);
        } else {
            masses.extend(group.iter().map(|&logit| exp2(row.scale.bits(logit))));
        }
    }
}

fn groups<'a>(row: &Row<'a>) -> impl Iterator<Item = (&'a [f32], f32)> {
    row.logits.chunks(GROUP).zip(row.scan.group_max().iter().copied())
}

fn skips(row: &Row<'_>, group_max: f32) -> bool {
    row.scale.bits(group_max) < SKIP_BITS
}

fn group_total(row: &Row<'_>, group: &[f32]) -> f64 {
    const LANES: usize = 16;
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = group.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane += exp2(row.scale.bits(logit));
        }
    }
    let rest = rest.iter().map(|&logit| f64::from(exp2(row.scale.bits(logit))));
    lanes.iter().map(|&lane| f64::from(lane)).chain(rest).sum()
}

/// 2^y for y <= 0 to 2e-7, without a branch so that it vectorises, and the same bits on every machine.
#[inline(always)]
fn exp2(y: f32) -> f32 {
    /// Adding this rounds to an integer and leaves it in the low bits of the mantissa.
    const ROUNDER: f32 = 12_582_912.0;
    const ROUNDER_BITS: i32 = 0x4B40_0000;
    const LN2: f64 = std::f64::consts::LN_2;
    const C1: f32 = LN2 as f32;
    const C2: f32 = (LN2 * LN2 / 2.0) as f32;
    const C3: f32 = (LN2 * LN2 * LN2 / 6.0) as f32;
    const C4: f32 = (LN2 * LN2 * LN2 * LN2 / 24.0) as f32;
    const C5: f32 = (LN2 * LN2 * LN2 * LN2 * LN2 / 120.0) as f32;
    const C6: f32 = (LN2 * LN2 * LN2 * LN2 * LN2 * LN2 / 720.0) as f32;
    let y = if y > -126.0 { y } else { -126.0 };
    let shifted = y + ROUNDER;
    let fraction = y - (shifted - ROUNDER);
    let exponent = (shifted.to_bits() as i32 - ROUNDER_BITS + 127) << 23;
    let poly = C6 * fraction + C5;
    let poly = poly * fraction + C4;
    let poly = poly * fraction + C3;
    let poly = poly * fraction + C2;
    let poly = poly * fraction + C1;
    (poly * fraction + 1.0) * f32::from_bits(exponent as u32)
}

#[cfg(test)]
mod tests {
    use super::exp2;

    #[test]
    fn exp2_is_close_everywhere() {
        for step in 0..126_000 {
            let y = -(step as f32) * 1e-3;
            let exact = f64::from(y).exp2();
            assert!((f64::from(exp2(y)) - exact).abs() <= 3e-7 * exact, "2^{y}");
        }
        assert!(exp2(f32::NEG_INFINITY) < 1e-37);
    }
}
