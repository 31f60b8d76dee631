//! The policy as a state machine: SGLang's table row by row in `sglang`, and whole courses of steps in worlds whose
//! acceptance and times are known in `worlds`.

mod sglang;
mod worlds;

use proto::{AdaptiveConfig, AdaptiveSlot, DraftTier};

use super::*;

fn tier(num_steps: u32) -> DraftTier {
    DraftTier { num_steps, num_draft_tokens: num_steps + 1 }
}

/// SGLang's rule alone, deciding at every step, on the last step alone.
pub(crate) fn sglang(batch_size: u32, steps: &[u32]) -> AdaptiveSlot {
    AdaptiveSlot {
        batch_size,
        tiers: steps.iter().copied().map(tier).collect(),
        initial_steps: steps[steps.len() / 2],
        ema_alpha: 1.0,
        update_interval: 1,
        warmup_batches: 0,
        down_hysteresis: 0.0,
        up_hysteresis: 0.0,
        ceiling_coeff: 0.0,
        min_dwell: 0,
        max_backoff: 0,
        cost_margin: None,
        isolate_depths: false,
    }
}

/// As the flags leave it without a file.
fn ours(batch_size: u32, steps: &[u32]) -> AdaptiveSlot {
    AdaptiveSlot {
        ema_alpha: 0.2,
        update_interval: 5,
        warmup_batches: 10,
        down_hysteresis: -0.25,
        min_dwell: 8,
        max_backoff: 1024,
        cost_margin: Some(0.03),
        isolate_depths: true,
        ..sglang(batch_size, steps)
    }
}

fn depth_of(slots: Vec<AdaptiveSlot>) -> AdaptiveDepth {
    AdaptiveDepth::new(&AdaptiveConfig { initial: tier(slots[0].initial_steps), slots })
}

impl AdaptiveDepth {
    fn steps(&self) -> u32 {
        self.in_force().num_steps
    }

    fn ema(&self) -> f64 {
        self.slots[self.active].report(&self.costs)["ema_accept_len"].as_f64().unwrap()
    }

    /// One step without a time; the depth after it.
    fn accept(&mut self, accepted: &[usize]) -> u32 {
        let batch = accepted.len();
        self.choose(batch.max(1), true);
        self.observe(&Observation { batch, speculating: batch, accepted, seconds: None });
        self.steps()
    }

    /// Several such steps.
    fn accept_all(&mut self, steps: &[&[usize]]) -> Vec<u32> {
        steps.iter().map(|accepted| self.accept(accepted)).collect()
    }
}

#[test]
fn a_dwell_is_kept_and_a_failed_step_up_waits_ever_longer() {
    let slot = AdaptiveSlot { min_dwell: 5, max_backoff: 100, ..sglang(1, &[1, 3]) };
    let mut depth = depth_of(vec![slot]);
    // It starts at 3. Everything is accepted at 1 and nothing at 3, so it would change at every step.
    let mut changes = Vec::new();
    for step in 0..600 {
        let before = depth.steps();
        let accepted = if before == 1 { 1 } else { 0 };
        if depth.accept(&[accepted]) != before {
            changes.push(step);
        }
    }
    let gaps: Vec<_> = changes.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.iter().all(|&gap| gap >= 5), "{gaps:?}");
    let waits: Vec<_> = gaps.iter().step_by(2).copied().collect();
    assert_eq!(waits[..3], [64, 100, 100], "doubles up to the most that is configured: {gaps:?}");
}

/// A depth that is left and comes back starts from its own prior, whatever others accepted.
#[test]
fn what_one_depth_showed_decides_about_no_other() {
    let slot = AdaptiveSlot { ema_alpha: 0.5, isolate_depths: true, ..sglang(1, &[1, 3, 7]) };
    let mut isolated = depth_of(vec![slot]);
    assert_eq!((isolated.accept(&[4, 4]), isolated.ema()), (7, 6.0), "as if 7 was never asked");
    assert_eq!((isolated.accept(&[0, 0]), isolated.ema()), (7, 3.0), "half of 6: above the threshold of 2.5");
    assert_eq!((isolated.accept(&[0, 0]), isolated.ema()), (3, 2.0), "1.5 at 7 is none of 3's");
}

/// The steps before a decision, and rows cut short, which say nothing.
#[test]
fn steps_that_say_nothing_change_nothing() {
    let mut depth = depth_of(vec![ours(1, &[0, 1, 3])]);
    for _ in 0..100 {
        depth.choose(4, true);
        depth.observe(&Observation { batch: 4, speculating: 0, accepted: &[], seconds: Some(0.01) });
    }
    assert_eq!((depth.steps(), depth.take_switches().len()), (1, 0));
    // One without a choice before it is none.
    depth.observe(&Observation { batch: 1, speculating: 1, accepted: &[0], seconds: None });
    assert_eq!(depth.ema(), 0.0);
}

#[test]
fn a_switch_says_why_with_its_numbers() {
    let mut depth = depth_of(vec![ours(1, &[0, 1, 3])]);
    let seconds = |steps: u32| 0.010 + 0.004 * f64::from(steps);
    for _ in 0..40 {
        let tier = depth.choose(8, true);
        let accepted = [0; 8];
        let seconds = Some(seconds(tier.num_steps));
        depth.observe(&Observation { batch: 8, speculating: 8, accepted: &accepted, seconds });
    }
    let switches = depth.take_switches();
    let line = switches[0].to_string();
    assert_eq!((switches[0].from, switches[0].to, switches[0].reason), (1, 0, Reason::PlainFaster), "{line}");
    assert!(
        line.starts_with(
            "Adaptive spec params updated: steps 1 -> 0 (ema_accept_len=0.00), reason: plain_faster, batch size: 8, \
             token/s by steps: 0: 800.0 10.00 ms, 1: 571.4 0.00±"
        ),
        "{line}"
    );
    assert!(line.contains(" accepted 14.00 ms, 3: at most 444.4"), "{line}");
    let report = depth.report();
    let slot = &report[0];
    assert_eq!((slot["num_steps"].as_u64(), slot["num_draft_tokens"].as_u64()), (Some(0), Some(1)));
    assert_eq!(slot["candidates"][0]["tokens_per_second"], 800.0);
    assert!(slot["candidates"][1]["retry_in_steps"].as_u64() > Some(0), "{report}");
}
