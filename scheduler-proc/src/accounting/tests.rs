//! Blocks of which the answer keeps all, some or nothing.

use super::*;
use crate::stop::Vocabulary;
use crate::testing;

fn fresh() -> Request {
    let vocabulary = Vocabulary { size: 64, eos_token_ids: [63].into(), bytes: None };
    Request::new(testing::request("a", vec![1, 2], 100), &vocabulary, 1000).expect("valid")
}

#[test]
fn a_block_counts_drafts_and_bonus_apart() {
    let verify = VerifyCount { proposed_at: vec![2, 2, 1], accepted: 2, ..VerifyCount::default() };
    for (kept, delivered, bonuses) in [(3, 2, 1), (2, 2, 0), (1, 1, 0), (0, 0, 0)] {
        let mut request = fresh();
        assert_eq!(count_block(&mut request, Origin::Verify(&verify), kept), delivered);
        let spec = &request.spec;
        assert_eq!((spec.verify_ct, spec.proposed_drafts, spec.accepted_drafts), (1, 5, 2));
        assert_eq!((spec.delivered_drafts, request.made.bonuses), (delivered as u64, bonuses));
        assert_eq!(spec.acceptance_histogram, [0, 0, 1]);
        assert_eq!(spec.check(), Ok(()));
    }
}

#[test]
fn tokens_of_other_steps_are_in_no_verify_count() {
    let mut request = fresh();
    count_block(&mut request, Origin::Prefill, 1);
    count_block(&mut request, Origin::Plain, 1);
    assert_eq!(request.spec.verify_ct, 0);
    assert_eq!(request.made, crate::request::Made { by_prefill: 1, bonuses: 0, plain: 1 });
}
