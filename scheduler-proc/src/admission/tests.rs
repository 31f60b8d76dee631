//! Budgets of a step, on requests that never meet an engine.

use super::*;
use crate::stop::Vocabulary;
use crate::testing;

fn admission(slots: usize, change: impl FnOnce(&mut Budgets)) -> Admission {
    let mut budgets = Budgets::new(&testing::config().schedule, 1000);
    change(&mut budgets);
    Admission::new(PrefixCache::new(slots, 1, true), budgets)
}

fn enqueue(admission: &mut Admission, first: u32, prompt_len: u32, max_new: u32) {
    let vocabulary = Vocabulary { size: 1000, eos_token_ids: [63].into(), bytes: None };
    let prompt = std::iter::once(first).chain(1..prompt_len).collect();
    let input = testing::request(&format!("r{first}"), prompt, max_new);
    admission.enqueue(Request::new(input, &vocabulary, 1000).expect("valid"));
}

/// Plays an engine that answers every finished prompt and every decode row with one token.
fn ran(admission: &mut Admission, plans: &[RowPlan]) {
    for plan in plans {
        let request = &mut admission.running_mut()[plan.index];
        request.ran(plan.extend_len);
        if request.missing_len() == 0 {
            request.append(&[1]);
        }
    }
}

fn extends(plans: &[RowPlan]) -> Vec<(usize, usize)> {
    plans
        .iter()
        .filter(|plan| plan.kind == RowKind::Extend)
        .map(|plan| (plan.index, plan.extend_len))
        .collect()
}

#[test]
fn a_chunk_is_shared_by_the_prompts_that_run() {
    let mut admission = admission(1000, |budgets| budgets.chunk = 10);
    (0..3).for_each(|first| enqueue(&mut admission, 100 + first, 8, 5));
    admission.admit(0);
    assert_eq!(admission.running().len(), 2, "the third would have nothing to run");
    let plans = admission.pick(DraftLimit::OFF);
    assert_eq!(extends(&plans), [(0, 8), (1, 2)]);
    ran(&mut admission, &plans);
    admission.admit(0);
    let plans = admission.pick(DraftLimit::OFF);
    assert_eq!(
        plans[0],
        RowPlan { index: 0, kind: RowKind::Decode { draft: DraftLimit::OFF }, extend_len: 1 }
    );
    assert_eq!(extends(&plans), [(1, 6), (2, 4)]);
}

#[test]
fn admitted_prompt_tokens_are_bounded_but_one_always_goes() {
    let mut admission = admission(1000, |budgets| (budgets.chunk, budgets.max_prefill) = (100, 10));
    (0..3).for_each(|first| enqueue(&mut admission, 100 + first, 20, 5));
    admission.admit(0);
    assert_eq!(admission.running().len(), 1);
}

#[test]
fn drafts_give_way_to_memory_before_anyone_is_retracted() {
    let mut admission = admission(24, |_| {});
    enqueue(&mut admission, 100, 10, 10);
    admission.admit(7);
    let plans = admission.pick(DraftLimit::nodes(7));
    ran(&mut admission, &plans);
    for left in [7, 7, 7, 7, 7, 7, 7, 6, 5] {
        let plans = admission.pick(DraftLimit::nodes(7));
        let RowKind::Decode { draft } = plans[0].kind else { panic!("{plans:?}") };
        let tokens = admission.running()[0].tokens().len();
        assert!(draft.nodes <= left && draft.nodes + tokens <= 24, "{draft:?} behind {tokens} tokens");
        assert!(draft.depth < admission.running()[0].budget());
        ran(&mut admission, &plans);
    }
    assert_eq!(admission.take_retracted(), Retracted::default());
}

#[test]
fn the_youngest_is_retracted_and_waits_in_front() {
    let mut admission = admission(24, |_| {});
    admission.expect_short_answers();
    (0..2).for_each(|first| enqueue(&mut admission, 100 + first, 8, 14));
    enqueue(&mut admission, 109, 8, 14);
    admission.admit(0);
    while admission.take_retracted().requests == 0 {
        let plans = admission.pick(DraftLimit::OFF);
        ran(&mut admission, &plans);
        assert_eq!(
            admission
                .cache
                .check(admission.running().iter().map(|r| &r.seat.as_ref().expect("seated").lease)),
            Ok(())
        );
    }
    assert_eq!(admission.running()[0].tokens()[0], 100);
    let front = &admission.waiting()[0];
    assert_eq!((front.tokens()[0], front.retractions, front.computed_len()), (101, 1, 0));
    assert!(front.output_len() > 0, "it keeps what it made");
    assert_eq!(admission.take_vacated().len(), 1);
}
