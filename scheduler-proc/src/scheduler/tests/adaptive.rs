//! Depth that changes while requests run.

use proto::{
    AcceptanceRule, AdaptiveConfig, AdaptiveSlot, NgramConfig, NgramMatchType, SpecAlgorithm, SpecConfig,
};

use super::*;
use crate::adaptive::tests::sglang;

/// Decides at every step by the last one alone, as SGLang would, from the first depth on.
fn slot(batch_size: u32, steps: &[u32]) -> AdaptiveSlot {
    AdaptiveSlot { initial_steps: steps[0], ..sglang(batch_size, steps) }
}

fn spec(deepest: u32, slots: Vec<AdaptiveSlot>) -> SpecConfig {
    SpecConfig {
        algorithm: SpecAlgorithm::Ngram(NgramConfig {
            min_bfs_breadth: 1,
            max_bfs_breadth: 1,
            match_type: NgramMatchType::Bfs,
            max_trie_depth: 8,
            capacity: 100,
        }),
        num_steps: deepest,
        eagle_topk: 1,
        num_draft_tokens: deepest + 1,
        acceptance: AcceptanceRule::Equality,
        adaptive: Some(AdaptiveConfig { initial: slots[0].tiers[0], slots }),
        ngram_first: None,
    }
}

/// Depths from 0 to this one, which change at nearly every step.
pub(super) fn restless(deepest: u32) -> SpecConfig {
    let all: Vec<u32> = (0..=deepest).collect();
    spec(deepest, vec![slot(1, &all), slot(3, &all[..all.len().min(3)])])
}

fn adaptive(slots: Vec<AdaptiveSlot>, accept: Vec<usize>) -> TestScheduler {
    let deepest = slots.iter().flat_map(|slot| &slot.tiers).map(|tier| tier.num_steps).max().unwrap();
    let mut config = config();
    config.spec = Some(spec(deepest, slots));
    scheduler(config, Script { accept, ..speculative(deepest as usize + 1) })
}

fn proposed(scheduler: &TestScheduler, rid: &str) -> (u64, u64) {
    let spec = scheduler.answer(rid).last.expect("has rows").spec;
    (spec.verify_ct, spec.proposed_drafts)
}

#[test]
fn an_answer_is_the_same_at_any_depth() {
    let input = request("a", vec![1, 2, 3], 60);
    let mut config = config();
    config.spec = Some(restless(5));
    let mut scheduler = scheduler(config, Script { accept: vec![0, 5, 5, 2, 1], ..speculative(6) });
    scheduler.submit(input.clone());
    let mut depths = std::collections::BTreeSet::new();
    while scheduler.turn() {
        depths.insert(scheduler.draft_status().num_steps);
    }
    assert!(depths.len() >= 4, "{depths:?}");
    assert_eq!(scheduler.answer("a").ids, solo(&input, 1024).ids);
}

/// Proposed is what every step really submitted, whatever is configured.
#[test]
fn proposed_follows_the_depth() {
    // Everything is accepted: 1, then 3, then 7 deep.
    let mut scheduler = adaptive(vec![slot(1, &[1, 3, 7])], vec![9]);
    scheduler.submit(request("a", vec![1, 2, 3], 1 + 2 + 4 + 8 + 8));
    scheduler.turns(1);
    let mut shown = Vec::new();
    while scheduler.turn() {
        shown.push(scheduler.draft_status().num_steps);
    }
    assert_eq!(shown, [3, 7, 7, 7]);
    assert_eq!(proposed(&scheduler, "a"), (4, 1 + 3 + 7 + 7));
}

/// Plain steps are verify steps without a draft, so that a request's counts stay whole.
#[test]
fn depth_zero_is_plain_decoding() {
    let mut scheduler = adaptive(vec![slot(1, &[0, 2]), slot(2, &[0])], vec![0]);
    (0..3).for_each(|index| scheduler.submit(request(&index.to_string(), vec![index, 2], 9)));
    scheduler.settle();
    for rid in ["0", "1", "2"] {
        assert_eq!(proposed(&scheduler, rid), (8, 0));
    }
    assert_eq!(scheduler.draft_status().num_steps, 0);
}

#[test]
fn a_requests_own_limit_holds_and_says_nothing_of_the_depth() {
    let mut scheduler = adaptive(vec![slot(1, &[3, 5])], vec![9]);
    let mut input = request("a", vec![1, 2, 3], 30);
    input.sampling_params.max_draft_tokens = Some(2);
    scheduler.submit(input);
    scheduler.settle();
    let (verified, drafts) = proposed(&scheduler, "a");
    assert!(drafts <= 2 * verified, "{drafts} in {verified} steps");
    assert_eq!(
        scheduler.draft_status().num_steps,
        3,
        "two of two accepted is no reason to go deeper or less deep"
    );
}

/// Slots are kept for what may be drafted now, not for the deepest candidate.
#[test]
fn reserved_memory_follows_the_depth() {
    let used = |slots: Vec<AdaptiveSlot>| {
        let mut scheduler = adaptive(slots, vec![0]);
        scheduler.submit(request("a", (0..10).collect(), 50));
        scheduler.turns(3);
        scheduler.admission.cache.usage().used
    };
    let fixed = |steps: &[u32]| AdaptiveSlot { warmup_batches: 1000, ..slot(1, steps) };
    assert_eq!(used(vec![fixed(&[0, 7])]), 12);
    assert_eq!(used(vec![fixed(&[7])]), 12 + 7);
}

#[test]
fn the_depth_in_force_is_shown_everywhere_and_its_changes_are_counted() {
    let mut scheduler = adaptive(vec![slot(1, &[1, 3]), slot(2, &[2])], vec![9]);
    scheduler.submit(request("a", vec![1, 2, 3], 40));
    scheduler.turns(3);
    scheduler.submit(request("b", vec![4, 5, 6], 40));
    scheduler.turns(3);
    assert_eq!(scheduler.info().speculative_num_steps, 2);
    scheduler.tell(ToScheduler::GetInternalState(GetInternalStateReq { id: 1 }));
    let state = scheduler.recorder().replies.iter().find_map(|reply| match reply {
        ToTokenizer::InternalState(state) => Some(state.internal_state.clone()),
        _ => None,
    });
    let state = state.expect("was asked for");
    assert_eq!((state.speculative_num_steps, state.speculative_num_draft_tokens), (2, 3));
    let slots = state.speculative_adaptive_state.expect("depth is adaptive");
    assert_eq!((slots[0]["num_steps"].as_u64(), slots[1]["num_steps"].as_u64()), (Some(3), Some(2)));
    let counted = scheduler.metrics.counted("spec_depth_switches_total");
    let labels = |from: &str, to: &str, reason: &str| vec![from.to_owned(), reason.to_owned(), to.to_owned()];
    assert_eq!(counted, [(labels("1", "3", "acceptance_up"), 1.0), (labels("3", "2", "batch_size"), 1.0)]);
    let steps = scheduler.metrics.counted("spec_steps_at_depth_total");
    assert_eq!(steps.iter().map(|(_, count)| count).sum::<f64>(), 5.0);
}
