//! What sharing the choice's noise with the draft does and does not do: the target's law stays, also given that the
//! draft was right or wrong, by the exact law of the coupling; and the draft is right more often than by luck.

use proto::AcceptanceRule;

use super::*;
use crate::engine::rng::Stream;
use crate::engine::sample::tests::{assert_law, chi_square};
use crate::engine::sample::{Chooser, Path};
use crate::engine::spec::growth::{Chain, Growth};
use crate::engine::spec::verify::Verifier;

const SIZE: usize = 8;
const TARGET: [f64; SIZE] = [2.0, 1.3, 0.6, 0.1, -0.4, -1.0, -1.7, -2.5];
const OTHER: [f64; SIZE] = [-0.5, 1.6, -1.0, 1.2, 0.3, -2.0, 0.9, -0.8];

/// The target's logits with some of another model's mixed in.
fn mixed(share: f64) -> Vec<f64> {
    TARGET.iter().zip(OTHER).map(|(target, other)| target + share * (other - target)).collect()
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let total: f64 = logits.iter().map(|logit| logit.exp()).sum();
    logits.iter().map(|logit| logit.exp() / total).collect()
}

fn f32s(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&value| value as f32).collect()
}

/// `joint[x][y]`: the probability that the draft takes `x` from `q` and the target `y` from `p` with the same
/// exponential times `E`. The draft takes the first of `E / q`, the target the first of `E / p`. For `x = y` that is
/// one race; for `x != y` the density of `E_x = q_x s, E_y = p_y r s`, all others being later in both races,
/// integrates over `s` to `q_x p_y / C(r)^2` with a `C` that is linear between the ratios `q_k / p_k`.
fn joint(p: &[f64], q: &[f64]) -> Vec<Vec<f64>> {
    let both = |i: usize| 1.0 / (0..SIZE).map(|k| (p[k] / p[i]).max(q[k] / q[i])).sum::<f64>();
    let apart = |x: usize, y: usize| {
        let (from, to) = (q[y] / p[y], q[x] / p[x]);
        let rate = |r: f64| {
            let others = (0..SIZE).filter(|&k| k != x && k != y).map(|k| q[k].max(p[k] * r));
            q[x] + p[y] * r + others.sum::<f64>()
        };
        let mut cuts: Vec<f64> = (0..SIZE).map(|k| q[k] / p[k]).filter(|&r| from < r && r < to).collect();
        cuts.extend([from, to]);
        cuts.sort_by(f64::total_cmp);
        let pieces = cuts.windows(2).map(|piece| (piece[1] - piece[0]) / (rate(piece[0]) * rate(piece[1])));
        if from < to { q[x] * p[y] * pieces.sum::<f64>() } else { 0.0 }
    };
    let cell = |x, y| if x == y { both(x) } else { apart(x, y) };
    (0..SIZE).map(|x| (0..SIZE).map(|y| cell(x, y)).collect()).collect()
}

fn distance(p: &[f64], q: &[f64]) -> f64 {
    p.iter().zip(q).map(|(p, q)| (p - q).abs()).sum::<f64>() / 2.0
}

fn sampled(seed: u64) -> RowParams {
    let sampling = SamplingParams { temperature: 1.0, sampling_seed: seed, ..SamplingParams::default() };
    RowParams { sampling, terminators: Vec::new(), logprobs: None }
}

#[test]
fn the_couplings_formula_has_both_laws_as_its_margins() {
    for share in [0.0, 0.3, 1.0, 1.7] {
        let (p, q) = (softmax(&TARGET), softmax(&mixed(share)));
        let joint = joint(&p, &q);
        for i in 0..SIZE {
            let (row, column): (f64, f64) = (joint[i].iter().sum(), joint.iter().map(|row| row[i]).sum());
            assert!((row - q[i]).abs() < 1e-12 && (column - p[i]).abs() < 1e-12, "{share}: {joint:?}");
        }
    }
}

/// 200,000 draws, half along seeds and half along positions.
#[test]
fn choices_follow_their_law_also_given_that_the_draft_was_right_or_wrong() {
    const DRAWS: u64 = 200_000;
    let tokens = vec![0; DRAWS as usize / 2 + 1];
    for share in [0.3, 1.0] {
        let (p, q) = (softmax(&TARGET), softmax(&mixed(share)));
        let (target, draft) = (f32s(&TARGET), f32s(&mixed(share)));
        let mut chooser = Chooser::default();
        let mut counts = vec![vec![0.0; SIZE]; SIZE];
        for draw in 0..DRAWS {
            let (seed, position) = if draw % 2 == 0 { (3, 1 + draw as usize / 2) } else { (draw, 7) };
            let params = sampled(seed);
            let path = Path::new(&params, &tokens[..position], position);
            let guess = chooser.guess(&draft, &path).unwrap();
            let choice = chooser.choose(&target, &path).unwrap().id;
            counts[guess as usize][choice as usize] += 1.0;
        }
        let joint = joint(&p, &q);
        let by_choice = |table: &[Vec<f64>], keep: fn(usize, usize) -> bool| -> Vec<f64> {
            let kept = |y| (0..SIZE).filter(|&x| keep(x, y)).map(|x| table[x][y]).sum();
            (0..SIZE).map(kept).collect()
        };
        let check = |keep: fn(usize, usize) -> bool, what: &str| {
            let law = by_choice(&joint, keep);
            let total: f64 = law.iter().sum();
            let law: Vec<f64> = law.iter().map(|p| p / total).collect();
            assert_law(&by_choice(&counts, keep), &law, what);
            law
        };
        let all = check(|_, _| true, "all choices");
        assert!(distance(&all, &p) < 1e-12);
        let right = check(|x, y| x == y, "choices given acceptance");
        let wrong = check(|x, y| x != y, "choices given rejection");
        // Both differ from `p`, so what was tested is not the same thing three times.
        assert!(distance(&right, &p) > 0.05 && distance(&wrong, &p) > 0.05);
        let (chi, freedom) = chi_square(&counts.concat(), &joint.concat());
        // Wilson and Hilferty's 99.99th percentile.
        let k = freedom as f64;
        let limit = k * (1.0 - 2.0 / (9.0 * k) + 3.719 * (2.0 / (9.0 * k)).sqrt()).powi(3);
        assert!(chi < limit && freedom > 20, "chi-square {chi} of {freedom}, {counts:?}");
    }
}

/// How often a chain of one is accepted, over 20,000 seeds.
fn accepted(rule: AcceptanceRule, draw: DraftDraw, draft: &[f32], target: &[f32]) -> f64 {
    const DRAWS: u64 = 20_000;
    let mut chooser = Chooser::default();
    let mut verifier = Verifier::new(rule);
    let one = DraftLimit { enabled: true, nodes: 1, depth: 1 };
    let right = (0..DRAWS).filter(|&seed| {
        let params = sampled(seed);
        let mut path = Path::new(&params, &[0, 0], 1);
        let mut growth = Growth::Chain(Chain::new(path.clone(), draw));
        growth.grow(&mut chooser, &[draft], None);
        let tree = growth.finish(one);
        !verifier.walk(&mut path, &tree, |_| target).unwrap().accepted.is_empty()
    });
    right.count() as f64 / DRAWS as f64
}

/// The table in docs/speculation.md; `--nocapture` prints it.
#[test]
fn sharing_beats_luck_and_comes_close_to_rejection_sampling() {
    println!("| TV | own noise | (1 - TV) / (1 + TV) | shared noise | rejection, 1 - TV |");
    for share in [0.0, 0.1, 0.25, 0.5, 1.0, 1.5] {
        let (p, q) = (softmax(&TARGET), softmax(&mixed(share)));
        let tv = distance(&p, &q);
        let luck: f64 = p.iter().zip(&q).map(|(p, q)| p * q).sum();
        let joint = joint(&p, &q);
        let shared: f64 = (0..SIZE).map(|i| joint[i][i]).sum();
        let floor = (1.0 - tv) / (1.0 + tv);
        println!("| {tv:.3} | {luck:.3} | {floor:.3} | {shared:.3} | {:.3} |", 1.0 - tv);
        assert!(luck < shared && floor <= shared + 1e-12 && shared <= 1.0 - tv + 1e-12);

        let (target, draft) = (f32s(&TARGET), f32s(&mixed(share)));
        let check = |rule, draw, expect: f64| {
            let got = accepted(rule, draw, &draft, &target);
            let sigma = (expect * (1.0 - expect) / 20_000.0).sqrt();
            assert!((got - expect).abs() <= 4.0 * sigma + 1e-9, "{rule:?} {draw:?}: {got}, not {expect}");
            got
        };
        let own = check(AcceptanceRule::Equality, DraftDraw::Own, luck);
        let together = check(AcceptanceRule::Equality, DraftDraw::Shared, shared);
        let ratio = check(AcceptanceRule::Rejection, DraftDraw::Own, 1.0 - tv);
        assert!(own < together && (share == 0.0 || together < ratio));
    }
}

/// The streams of one position know nothing of each other: what a coin and a choice show together is chance.
#[test]
fn streams_are_independent() {
    let pairs =
        [(Stream::Choice, Stream::Draft), (Stream::Choice, Stream::Coin), (Stream::Draft, Stream::Coin)];
    for (one, other) in pairs {
        let mut cells = vec![0.0; 16];
        for seed in 0..40_000 {
            let params = sampled(seed);
            let path = Path::new(&params, &[0; 3], 3);
            let quarter = |stream| (path.noise(stream).uniform(5) * 4.0) as usize;
            cells[4 * quarter(one) + quarter(other)] += 1.0;
        }
        let (chi, _) = chi_square(&cells, &[1.0 / 16.0; 16]);
        assert!(chi < 44.3, "{one:?} and {other:?}: chi-square {chi} of 15 degrees of freedom");
    }
}
