//! The table of SGLang's `test_adaptive_spec_params.py`.

use super::*;

#[test]
fn a_slot_starts_in_the_middle_as_if_all_but_one_were_accepted() {
    let depth = depth_of(vec![sglang(1, &[1, 3, 7])]);
    assert_eq!((depth.steps(), depth.ema()), (3, 2.0));
}

#[test]
fn warm_up_and_interval() {
    let slot = AdaptiveSlot { warmup_batches: 1, update_interval: 2, ..sglang(1, &[1, 3, 7]) };
    let mut depth = depth_of(vec![slot]);
    assert_eq!(depth.accept_all(&[&[0, 0], &[0, 0], &[0, 0]]), [3, 3, 1]);
}

#[test]
fn an_empty_batch_consumes_nothing() {
    let slot = AdaptiveSlot { warmup_batches: 1, ..sglang(1, &[1, 3, 7]) };
    let mut depth = depth_of(vec![slot]);
    assert_eq!(depth.accept_all(&[&[], &[], &[], &[0]]), [3, 3, 3, 3], "the last is the warm-up");
    assert_eq!(depth.accept(&[0]), 1);
}

#[test]
fn up_by_one_when_all_is_accepted() {
    let mut depth = depth_of(vec![AdaptiveSlot { initial_steps: 1, ..sglang(1, &[1, 3, 7]) }]);
    assert_eq!(depth.accept_all(&[&[1, 1], &[3, 3]]), [3, 7]);
}

#[test]
fn the_rise_threshold_itself_does_not_rise_and_the_drop_threshold_drops() {
    let mut depth = depth_of(vec![sglang(1, &[1, 3, 7])]);
    assert_eq!(depth.accept(&[2, 3]), 3, "2.5");
    assert_eq!(depth.accept(&[0, 1]), 1, "0.5");
}

#[test]
fn several_depths_down_at_once() {
    let mut depth = depth_of(vec![AdaptiveSlot { initial_steps: 7, ..sglang(1, &[1, 3, 7]) }]);
    assert_eq!(depth.accept(&[0]), 1);
}

#[test]
fn hysteresis() {
    let slot = AdaptiveSlot { up_hysteresis: 0.75, ..sglang(1, &[1, 3, 7]) };
    assert_eq!(depth_of(vec![slot]).accept_all(&[&[3], &[4]]), [3, 7]);
    let slot = AdaptiveSlot { down_hysteresis: -0.75, initial_steps: 7, ..sglang(1, &[1, 3, 7]) };
    assert_eq!(depth_of(vec![slot]).accept_all(&[&[2], &[1]]), [7, 3]);
}

#[test]
fn the_mean_of_sglang_goes_on_over_changes() {
    let mut depth = depth_of(vec![AdaptiveSlot { ema_alpha: 0.5, ..sglang(1, &[1, 3, 7]) }]);
    let mut step = |accepted: &[usize]| (depth.accept(accepted), depth.ema());
    assert_eq!(step(&[4, 4]), (7, 3.0));
    assert_eq!(step(&[0, 0]), (3, 1.5));
    assert_eq!(step(&[0, 0]), (3, 0.75));
    assert_eq!(step(&[0, 0]), (1, 0.375));
}

#[test]
fn plain_decoding_is_left_again_to_see() {
    let mut depth = depth_of(vec![sglang(1, &[0, 3])]);
    assert_eq!((depth.accept(&[0]), depth.ema()), (0, 0.0));
    assert_eq!((depth.accept(&[0]), depth.ema()), (3, 0.0), "any step there tries again, the mean stays");
    assert_eq!(depth.accept(&[0]), 0);
    let reasons: Vec<_> = depth.take_switches().iter().map(|switch| switch.reason).collect();
    assert_eq!(reasons, [Reason::AcceptanceDown, Reason::Probe, Reason::AcceptanceDown]);
}

#[test]
fn a_slot_that_starts_plain_tries_with_a_mean_of_its_own() {
    let mut depth = depth_of(vec![AdaptiveSlot { initial_steps: 0, ..sglang(1, &[0, 3]) }]);
    assert_eq!(depth.ema(), -1.0);
    assert_eq!((depth.accept(&[0]), depth.ema()), (3, 2.0));
}

#[test]
fn a_ceiling_caps_what_does_not_rise() {
    let slot = AdaptiveSlot { ceiling_coeff: 1.5, initial_steps: 5, ..sglang(1, &[1, 3, 5, 7]) };
    // ceil(1.5 * 3) is 5: it may stay; ceil(1.5 * 2.6) is 4: the largest candidate below is 3.
    assert_eq!(depth_of(vec![slot.clone()]).accept(&[3]), 5);
    assert_eq!(depth_of(vec![slot.clone()]).accept(&[2, 3, 3, 2, 3]), 3);
    assert_eq!(depth_of(vec![slot.clone()]).accept(&[5]), 7, "a rise is not capped");
    let off = AdaptiveSlot { ceiling_coeff: 0.0, ..slot };
    assert_eq!(depth_of(vec![off]).accept(&[3, 3, 2]), 5);
}

/// SGLang's own default slots.
fn defaults() -> Vec<AdaptiveSlot> {
    vec![sglang(1, &[1, 3, 5, 7]), sglang(8, &[0, 1, 3]), sglang(32, &[0, 1]), sglang(64, &[0])]
}

#[test]
fn the_slot_is_the_largest_key_that_is_not_above_the_batch() {
    let mut depth = depth_of(defaults());
    let mut at = |batch: usize| depth.choose(batch, true).num_steps;
    assert_eq!([1, 7, 8, 31, 32, 63, 64, 200].map(&mut at), [5, 5, 1, 1, 1, 1, 0, 0]);
    assert_eq!(at(1), 5);
    let mut high = depth_of(vec![sglang(4, &[2]), sglang(8, &[1])]);
    assert_eq!(high.choose(1, true).num_steps, 2, "the first takes what is below all");
}

#[test]
fn slots_learn_apart_and_moving_between_them_is_told() {
    let mut depth = depth_of(vec![sglang(1, &[1, 3]), sglang(2, &[0, 2])]);
    assert_eq!(depth.accept(&[0]), 1);
    assert_eq!(depth.accept(&[2, 2]), 2, "the other slot saw nothing of it");
    assert_eq!(depth.accept(&[0, 0]), 0);
    let told: Vec<_> = depth.take_switches().iter().map(|s| (s.from, s.to, s.reason)).collect();
    assert_eq!(
        told,
        [(3, 1, Reason::AcceptanceDown), (1, 2, Reason::BatchSize), (2, 0, Reason::AcceptanceDown),]
    );
    depth.choose(0, true);
    assert_eq!(depth.steps(), 0, "no rows, no news");
}
