//! The chooser against the golden laws, by value and by frequency, and against a plain implementation of itself
//! on vocabularies of real size.

use proto::SamplingParams;
use serde_json::Value;

use super::*;
use crate::batch::RowParams;
use crate::engine::rng::{philox4x32_10, uniform};

fn golden() -> Value {
    serde_json::from_str(include_str!("../../../tests/fixtures/sampling.json")).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn ids(value: &Value) -> Vec<TokenId> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as TokenId).collect()
}

fn row_params(sampling: SamplingParams) -> RowParams {
    RowParams { sampling, terminators: Vec::new(), logprobs: None }
}

fn f32s(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&value| value as f32).collect()
}

fn assert_close(got: &[f64], expect: &[f64], what: &str) {
    assert_eq!(got.len(), expect.len());
    for (got, expect) in got.iter().zip(expect) {
        assert!((got - expect).abs() <= 1e-6, "{what}: {got} != {expect}");
    }
}

/// The setting of one entry of the golden's `filters`, its logits, and its law in the joint form.
fn filter_case(golden: &Value, case: &Value) -> (RowParams, Vec<f32>, Vec<f64>) {
    let number = |key: &str| case[key].as_f64().unwrap();
    let logits = &golden[format!("{}_logits", case["logits"].as_str().unwrap())];
    let sampling = SamplingParams {
        temperature: number("temperature"),
        top_k: Some(number("top_k") as u32).filter(|&k| k > 0),
        top_p: number("top_p"),
        min_p: number("min_p"),
        ..SamplingParams::default()
    };
    let joint = if case["probs_joint"].is_null() { "probs_sequential" } else { "probs_joint" };
    (row_params(sampling), f32s(&numbers(logits)), numbers(&case[joint]))
}

#[test]
fn filters_match_the_golden_laws() {
    let golden = golden();
    let mut chooser = Chooser::default();
    for case in golden["filters"].as_array().unwrap() {
        let (params, logits, expect) = filter_case(&golden, case);
        let law = chooser.law(&logits, &Path::new(&params, &[0], 1)).unwrap();
        assert_close(&law, &expect, &case.to_string());
    }
}

#[test]
fn penalties_match_the_golden_logits() {
    let golden = golden();
    let logits = f32s(&numbers(&golden["target_logits"]));
    let mut cases = 0;
    for case in golden["penalties"].as_array().unwrap() {
        if case["repetition_scope"] != "output_only" {
            continue;
        }
        cases += 1;
        let number = |key: &str| case[key].as_f64().unwrap();
        let sampling = SamplingParams {
            repetition_penalty: number("repetition_penalty"),
            frequency_penalty: number("frequency_penalty"),
            presence_penalty: number("presence_penalty"),
            temperature: 0.7,
            ..SamplingParams::default()
        };
        let params = row_params(sampling);
        let (mut tokens, output) = (ids(&case["prompt"]), ids(&case["output"]));
        let prompt_len = tokens.len();
        tokens.extend(&output);
        let path = Path::new(&params, &tokens, prompt_len);
        let mut edited = logits.clone();
        path.edit(&mut edited);
        let edited: Vec<_> = edited.into_iter().map(f64::from).collect();
        assert_close(&edited, &numbers(&case["logits_additive_then_repetition"]), &case.to_string());
        if case["logits_additive_then_repetition"] == case["logits_repetition_then_additive"] {
            let law = Chooser::default().law(&logits, &path).unwrap();
            assert_close(&law, &numbers(&case["probs_T0p7_repetition_then_additive"]), &case.to_string());
        }
    }
    assert_eq!(cases, 7);
}

/// 99.99th percentile of chi-square by degrees of freedom.
const CHI_SQUARE: [f64; 8] = [0.0, 15.14, 18.42, 21.11, 23.51, 25.74, 27.86, 29.88];

/// Whether draws follow a law, beyond what 1 in 10,000 right samplers would be blamed for.
pub(in crate::engine) fn assert_law(counts: &[f64], law: &[f64], what: &str) {
    let (chi, freedom) = chi_square(counts, law);
    assert!(chi <= CHI_SQUARE[freedom], "{what}: chi-square {chi}, freedom {freedom}, {counts:?}");
}

pub(in crate::engine) fn chi_square(counts: &[f64], law: &[f64]) -> (f64, usize) {
    let draws: f64 = counts.iter().sum();
    let mut chi = 0.0;
    let mut cells = 0;
    let mut rare = (0.0, 0.0);
    for (&count, &p) in counts.iter().zip(law) {
        if p * draws >= 5.0 {
            chi += (count - p * draws).powi(2) / (p * draws);
            cells += 1;
        } else {
            assert!(p > 0.0 || count == 0.0, "a filtered token was drawn");
            rare = (rare.0 + count, rare.1 + p * draws);
        }
    }
    if rare.1 >= 5.0 {
        chi += (rare.0 - rare.1).powi(2) / rare.1;
        cells += 1;
    }
    (chi, cells - 1)
}

/// 100,000 draws of every golden law, half along positions and half along seeds.
#[test]
fn draws_follow_the_golden_laws() {
    const DRAWS: u64 = 100_000;
    let golden = golden();
    let mut chooser = Chooser::default();
    // Many settings leave the same law of the same logits; it is drawn from once.
    let mut seen = Vec::new();
    for (index, case) in golden["filters"].as_array().unwrap().iter().enumerate() {
        let (mut params, logits, law) = filter_case(&golden, case);
        if seen.contains(&law) {
            continue;
        }
        seen.push(law.clone());
        let mut counts = vec![0.0; law.len()];
        let tokens = vec![0; DRAWS as usize / 2];
        for draw in 0..DRAWS {
            let position = if draw % 2 == 0 { 1 + draw as usize / 2 } else { 7 };
            params.sampling.sampling_seed = if draw % 2 == 0 { index as u64 } else { draw << 20 };
            let path = Path::new(&params, &tokens[..position.min(tokens.len())], position.min(tokens.len()));
            counts[chooser.choose(&logits, &path).unwrap().id as usize] += 1.0;
        }
        assert_law(&counts, &law, &case.to_string());
    }
    assert!(seen.len() > 30, "{} laws", seen.len());
}

fn logits(seed: u64, vocab: usize, spread: f32) -> Vec<f32> {
    let unit = |token, position| uniform(seed, position, token) as f32;
    (0..vocab as u32)
        .map(|token| {
            // A bell with a few peaks, rounded so that ties occur.
            let bell = (0..4).map(|position| unit(token, position)).sum::<f32>() - 2.0;
            let peak = if unit(token, 9) > 0.999 { 2.0 } else { 0.0 };
            ((bell + peak) * spread * 64.0).round() / 64.0
        })
        .collect()
}

/// Order, filters and race written the long way: sort all, keep a front part, score every token.
fn plain(logits: &[f32], sampling: &SamplingParams, position: u64) -> TokenId {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let best = f64::from(logits[order[0]]);
    let log_mass = |token: usize| (f64::from(logits[token]) - best) / sampling.temperature;
    let total: f64 = order.iter().map(|&token| log_mass(token).exp()).sum();
    let mut before = 0.0;
    let mut kept = 0;
    for (rank, &token) in order.iter().enumerate() {
        let mass = log_mass(token).exp();
        let keeps = sampling.top_k.is_none_or(|k| rank < k as usize)
            && (sampling.top_p >= 1.0 || before <= sampling.top_p * total)
            && mass >= sampling.min_p;
        if !keeps {
            break;
        }
        before += mass;
        kept += 1;
    }
    let score = |token: usize| {
        let u = uniform(sampling.sampling_seed, position, token as TokenId);
        log_mass(token) - (-u.ln()).ln()
    };
    order.truncate(kept);
    order.into_iter().max_by(|&a, &b| score(a).total_cmp(&score(b))).unwrap() as TokenId
}

#[test]
fn equals_the_long_way_on_large_vocabularies() {
    let mut chooser = Chooser::default();
    let settings = [
        (None, 1.0, 0.0),
        (Some(2), 1.0, 0.0),
        (Some(50), 1.0, 0.0),
        (Some(3000), 1.0, 0.0),
        (None, 0.1, 0.0),
        (None, 0.9, 0.0),
        (None, 0.999, 0.0),
        (None, 1.0, 0.05),
        (None, 1.0, 1.0),
        (Some(40), 0.95, 0.02),
    ];
    for (case, vocab) in [5, 63, 64, 65, 1000, 5000].into_iter().enumerate() {
        for temperature in [1e-4, 0.05, 0.3, 1.0, 1.5, 20.0] {
            for spread in [0.02, 3.0] {
                let logits = logits(case as u64, vocab, spread);
                for (top_k, top_p, min_p) in settings {
                    for seed in 0..3 {
                        let sampling = SamplingParams {
                            temperature,
                            top_k,
                            top_p,
                            min_p,
                            sampling_seed: seed,
                            ..SamplingParams::default()
                        };
                        let expect = plain(&logits, &sampling, 17);
                        let params = row_params(sampling);
                        let got = chooser.choose(&logits, &Path::new(&params, &[0; 17], 17)).unwrap().id;
                        assert_eq!(got, expect, "{vocab} {spread} {params:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_draw_depends_on_its_own_row_only() {
    let rows: Vec<_> = (0..6).map(|seed| logits(seed, 700, 4.0)).collect();
    let params: Vec<_> = (0..6u64)
        .map(|seed| {
            row_params(SamplingParams {
                sampling_seed: seed,
                temperature: 0.2 + seed as f64 * 0.3,
                top_p: if seed % 2 == 0 { 0.8 } else { 1.0 },
                logit_bias: vec![(seed as u32, 3.0)],
                ..SamplingParams::default()
            })
        })
        .collect();
    let choose = |chooser: &mut Chooser, row: usize| {
        chooser.choose(&rows[row], &Path::new(&params[row], &[1, 2, 3], 2)).unwrap()
    };
    let alone: Vec<_> = (0..6).map(|row| choose(&mut Chooser::default(), row)).collect();
    let mut shared = Chooser::default();
    for row in [3, 1, 5, 0, 2, 4, 4, 1] {
        assert_eq!(choose(&mut shared, row), alone[row]);
    }
}

fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, ..SamplingParams::default() }
}

#[test]
fn greedy_takes_the_lowest_of_the_best() {
    let choose = |logits: &[f32], sampling| {
        let params = row_params(sampling);
        Chooser::default().choose(logits, &Path::new(&params, &[0], 1)).unwrap().id
    };
    assert_eq!(choose(&[1.0, 3.0, 3.0, -0.0], greedy()), 1);
    assert_eq!(choose(&[-0.0, 0.0], greedy()), 0);
    let tiny = SamplingParams { temperature: 1e-9, ..SamplingParams::default() };
    assert_eq!(choose(&[1.0, 3.0, 3.0], tiny), 1);
    let one = SamplingParams { top_k: Some(1), ..SamplingParams::default() };
    assert_eq!(choose(&[1.0, 3.0, 3.0], one), 1);
}

#[test]
fn a_small_temperature_does_not_overflow() {
    let sampling = SamplingParams { temperature: 1e-4, top_p: 0.9, ..SamplingParams::default() };
    let params = row_params(sampling);
    let logits = [-80.0, 35.0, 90.0, 89.9];
    for position in 1..200 {
        let tokens = vec![0; position];
        let chosen = Chooser::default().choose(&logits, &Path::new(&params, &tokens, position)).unwrap();
        assert_eq!(chosen.id, 2);
    }
}

#[test]
fn what_is_not_finite_is_an_error() {
    let params = row_params(greedy());
    let path = Path::new(&params, &[0], 1);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
        assert_eq!(Chooser::default().choose(&[0.0, bad, 1.0], &path), Err(ChooseError::NotFinite));
    }
}

#[test]
fn masks_and_biases() {
    let mut params = row_params(SamplingParams { min_new_tokens: 2, ..greedy() });
    params.terminators = vec![1, 2, 99];
    let logits = [0.0, 5.0, 4.0, 1.0];
    let choose = |params: &RowParams, tokens: &[TokenId]| {
        Chooser::default().choose(&logits, &Path::new(params, tokens, 1)).map(|chosen| chosen.id)
    };
    assert_eq!(choose(&params, &[7]), Ok(3));
    assert_eq!(choose(&params, &[7, 3]), Ok(3));
    assert_eq!(choose(&params, &[7, 3, 3]), Ok(1));
    params.sampling.logit_bias = vec![(0, 100.0), (3, -1e300)];
    assert_eq!(choose(&params, &[7]), Ok(0));
    params.terminators = vec![0, 1, 2, 3];
    assert_eq!(choose(&params, &[7]), Err(ChooseError::AllMasked));
    for temperature in [0.3, 5.0] {
        params.sampling = SamplingParams { min_new_tokens: 9, temperature, ..SamplingParams::default() };
        params.terminators = vec![1, 2];
        for seed in 0..200 {
            params.sampling.sampling_seed = seed;
            assert!([0, 3].contains(&choose(&params, &[7]).unwrap()));
        }
    }
}

#[test]
fn logprobs_are_those_of_the_edited_scaled_logits() {
    let logits = [0.5, 2.0, -1.0, 1.0];
    let log_softmax = |logits: &[f64], temperature: f64| -> Vec<f32> {
        let total: f64 = logits.iter().map(|logit| (logit / temperature).exp()).sum();
        logits.iter().map(|logit| (logit / temperature - total.ln()) as f32).collect()
    };
    let check = |sampling: SamplingParams, expect: Vec<f32>| {
        let wanted = LogprobParams { start_len: None, top_num: 2, token_ids: vec![2, 0] };
        let params = RowParams { sampling, terminators: Vec::new(), logprobs: Some(wanted) };
        let chosen = Chooser::default().choose(&logits, &Path::new(&params, &[0], 1)).unwrap();
        let got = chosen.logprobs.unwrap();
        let mut best: Vec<_> = expect.iter().copied().zip(0..).collect();
        best.sort_by(|a: &(f32, TokenId), b| b.0.total_cmp(&a.0));
        let close = |got: &[(f32, TokenId)], expect: &[(f32, TokenId)]| {
            assert_eq!(got.len(), expect.len());
            for (got, expect) in got.iter().zip(expect) {
                assert!(got.1 == expect.1 && (got.0 - expect.0).abs() < 1e-6, "{got:?} {expect:?}");
            }
        };
        close(&[(got.logprob, chosen.id)], &[(expect[chosen.id as usize], chosen.id)]);
        close(&got.top, &best[..2]);
        close(&got.token_ids, &[(expect[2], 2), (expect[0], 0)]);
    };
    check(greedy(), log_softmax(&[0.5, 2.0, -1.0, 1.0], 1.0));
    let warm = SamplingParams { temperature: 0.5, top_k: Some(2), top_p: 0.9, ..SamplingParams::default() };
    check(warm.clone(), log_softmax(&[0.5, 2.0, -1.0, 1.0], 0.5));
    let biased = SamplingParams { logit_bias: vec![(1, -3.0)], ..warm };
    check(biased, log_softmax(&[0.5, -1.0, -1.0, 1.0], 0.5));
}

#[test]
fn noise_is_the_documented_draw() {
    let [word, ..] = philox4x32_10([2, 9, 1, 0], [5, 6]);
    assert_eq!(uniform((6 << 32) | 5, (1 << 32) | 9, 8), (f64::from(word) + 0.5) / 2f64.powi(32));
}

/// Prints microseconds per choice: `cargo test --release -p scheduler-proc chooser_speed -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn chooser_speed() {
    let rows: Vec<_> = (0..8).map(|seed| logits(seed, 49_152, 8.0)).collect();
    let flat: Vec<_> = (0..8).map(|seed| logits(seed, 49_152, 0.5)).collect();
    let sampled = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    let cases = [
        ("greedy", greedy()),
        ("greedy, penalties", SamplingParams { frequency_penalty: 0.5, ..greedy() }),
        ("temperature 0.3", SamplingParams { temperature: 0.3, ..sampled.clone() }),
        ("temperature 1", sampled.clone()),
        ("top_k 50", SamplingParams { top_k: Some(50), ..sampled.clone() }),
        ("top_p 0.95", SamplingParams { top_p: 0.95, ..sampled.clone() }),
        ("min_p 0.05", SamplingParams { min_p: 0.05, ..sampled.clone() }),
        ("top_k 50, top_p 0.95", SamplingParams { top_k: Some(50), top_p: 0.95, ..sampled.clone() }),
    ];
    for (name, sampling) in cases {
        let mut params = row_params(sampling);
        for logprobs in [None, Some(LogprobParams { start_len: None, top_num: 5, token_ids: vec![1] })] {
            params.logprobs = logprobs;
            let time = |rows: &[Vec<f32>]| {
                let mut chooser = Chooser::default();
                let tokens: Vec<_> = (0..400).collect();
                let mut best = f64::INFINITY;
                for _ in 0..20 {
                    let start = std::time::Instant::now();
                    for (index, row) in rows.iter().enumerate() {
                        let path = Path::new(&params, &tokens[..100 + index], 50);
                        std::hint::black_box(chooser.choose(row, &path).unwrap());
                    }
                    best = best.min(start.elapsed().as_secs_f64() / rows.len() as f64);
                }
                best * 1e6
            };
            let with = if params.logprobs.is_some() { "with logprobs" } else { "" };
            println!("{name:24} {with:14} {:7.1} us, flat law {:7.1} us", time(&rows), time(&flat));
        }
    }
}
