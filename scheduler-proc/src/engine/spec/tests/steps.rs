//! Single steps: what fails alone, what a limit cuts, what the engine reports.

use super::workers::{Scripted, random};
use super::*;
use crate::batch::{StepOutput, StepTiming};

fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, ..SamplingParams::default() }
}

#[test]
fn a_row_that_is_not_finite_fails_alone() {
    let mut poisoned = request(3, 9, greedy());
    poisoned.params.sampling.logit_bias = vec![(POISON, 100.0)];
    let requests = [request(1, 9, greedy()), poisoned, request(2, 9, greedy())];
    let expect = serve(&[requests[0].clone(), requests[2].clone()], SCHEDULE, None);
    for drafter in [None, Some(Box::new(Scripted::new(12, random)) as Box<dyn Drafter>)] {
        let outcomes = serve(&requests, SCHEDULE, drafter);
        assert_eq!(outcomes[1].ids(), [POISON]);
        assert!(outcomes[1].error.as_ref().is_some_and(|error| error.contains("finite")));
        assert_eq!(outcomes[0].ids(), expect[0].ids());
        assert_eq!(outcomes[2].ids(), expect[1].ids());
    }
}

/// One decode step after the prompt `0 1 2`, whose last token is the root.
fn decode(
    drafter: Box<dyn Drafter>,
    draft: DraftLimit,
    spare_slots: usize,
) -> Result<StepOutput, EngineError> {
    let (mut engine, _) = engine(Some(drafter));
    let params = request(0, 9, greedy()).params;
    let kv_slots: Vec<_> = (0..3 + spare_slots as KvSlot).collect();
    let row = |kind, tokens, computed_len, extend_len| BatchRow {
        slot: EngineSlot(0),
        kind,
        params: &params,
        tokens,
        prompt_len: 2,
        computed_len,
        extend_len,
        kv_slots: &kv_slots,
    };
    engine.step(&Batch { rows: vec![row(RowKind::Extend, &[0, 1], 0, 2)] })?;
    engine.step(&Batch { rows: vec![row(RowKind::Decode { draft }, &[0, 1, 2], 2, 1)] })
}

fn wide() -> Box<dyn Drafter> {
    struct Wide;
    impl Drafter for Wide {
        fn draft(&mut self, inputs: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError> {
            let mut tree = DraftTree::new();
            for token in 0..4 {
                let parent = tree.push(0, token).unwrap();
                tree.push(parent, token).unwrap();
            }
            Ok(inputs.iter().map(|_| tree.clone()).collect())
        }
        fn commit(&mut self, _: &[Commit<'_>], _: Option<&()>) -> Result<(), EngineError> {
            Ok(())
        }
        fn release(&mut self, _: EngineSlot) {}
        fn flush(&mut self) {}
        fn status(&self) -> DraftStatus {
            DraftStatus { num_steps: 2, num_draft_tokens: 9 }
        }
    }
    Box::new(Wide)
}

#[test]
fn proposals_are_counted_after_every_cut() {
    let check = |draft, spare, expect: &[u32]| {
        let output = decode(wide(), draft, spare).unwrap();
        assert_eq!(output.rows[0].verify.as_ref().unwrap().proposed_at, expect);
    };
    let limit = |nodes, depth| DraftLimit { enabled: true, nodes, depth };
    check(limit(8, 8), 8, &[4, 4]);
    check(limit(8, 1), 8, &[4]);
    check(limit(3, 8), 8, &[2, 1]);
    check(limit(8, 8), 3, &[2, 1]);
    check(limit(8, 8), 0, &[]);
    check(limit(0, 8), 8, &[]);
    assert_eq!(decode(wide(), DraftLimit::OFF, 8).unwrap().rows[0].verify, None);
}

#[test]
fn a_worker_that_answers_for_the_wrong_rows_breaks_the_engine() {
    struct Silent;
    impl Drafter for Silent {
        fn draft(&mut self, _: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError> {
            Ok(Vec::new())
        }
        fn commit(&mut self, _: &[Commit<'_>], _: Option<&()>) -> Result<(), EngineError> {
            Ok(())
        }
        fn release(&mut self, _: EngineSlot) {}
        fn flush(&mut self) {}
        fn status(&self) -> DraftStatus {
            DraftStatus::default()
        }
    }
    let limit = DraftLimit { enabled: true, nodes: 4, depth: 4 };
    assert!(matches!(decode(Box::new(Silent), limit, 4), Err(EngineError::Step { stage: "draft", .. })));
}

#[test]
fn an_engine_reports_its_worker_and_its_time() {
    let (plain, _) = engine(None);
    assert_eq!(plain.draft_status(), DraftStatus::default());
    assert_eq!(plain.limits().vocab_size, VOCAB);
    let (mut drafting, _) = engine(Some(wide()));
    assert_eq!(drafting.draft_status().max_nodes(), 8);
    assert_eq!(drafting.step(&Batch::default()).unwrap(), StepOutput::default());
    let timing = decode(wide(), DraftLimit { enabled: true, nodes: 8, depth: 8 }, 8).unwrap().timing;
    let StepTiming { draft, extend, forward, choose } = timing;
    assert!([draft, extend, forward, choose].iter().all(|&part| part > 0.0), "{timing:?}");
}
