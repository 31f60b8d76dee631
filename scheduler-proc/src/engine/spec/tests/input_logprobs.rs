//! Log-probabilities: of prompts in any chunks, and of answers with and without speculation.

use proto::{NgramConfig, NgramMatchType};

use super::*;
use crate::batch::LogprobParams;
use crate::engine::sample::Chooser;
use crate::engine::spec::ngram::NgramDrafter;

fn scored_request(start_len: Option<usize>) -> Request {
    let mut request = request(8, 12, SamplingParams { temperature: 0.8, ..SamplingParams::default() });
    request.params.logprobs = Some(LogprobParams { start_len, top_num: 3, token_ids: vec![4, 1] });
    request
}

/// Position by position, from the table itself.
fn expected(request: &Request) -> Vec<Option<TokenLogprobs>> {
    let wanted = request.params.logprobs.as_ref().unwrap();
    let mut chooser = Chooser::default();
    (wanted.start_len.unwrap()..request.prompt.len())
        .map(|position| {
            let before = position.checked_sub(1)?;
            let logits = table(&request.prompt[..=before]);
            Some(chooser.score(&logits, request.prompt[position], wanted).unwrap())
        })
        .collect()
}

#[test]
fn prompts_are_scored_alike_in_any_chunks() {
    let len = scored_request(None).prompt.len();
    for chunk in 1..=len + 2 {
        for start in 0..=len {
            let request = scored_request(Some(start));
            let schedule = Schedule { chunk, ..SCHEDULE };
            let outcome = serve(std::slice::from_ref(&request), schedule, None).remove(0);
            assert_eq!(outcome.error, None);
            assert_eq!(outcome.input_logprobs, expected(&request), "chunk {chunk}, start {start}");
        }
    }
}

#[test]
fn without_a_start_only_the_answer_is_scored() {
    let outcome = serve(&[scored_request(None)], SCHEDULE, None).remove(0);
    assert!(outcome.input_logprobs.is_empty());
    assert!(outcome.output.iter().all(|token| token.logprobs.as_ref().is_some_and(|l| l.top.len() == 3)));
}

#[test]
fn a_cached_prefix_may_end_before_the_first_wanted_logits() {
    let request = scored_request(Some(5));
    for cached in 0..=4 {
        let (output, expect) = (extend_behind(&request, cached), expected(&request));
        assert_eq!((output.error, output.input_logprobs), (None, expect), "{cached} cached");
    }
    // Position 5 is scored by the logits at 4, which nothing ran.
    assert!(extend_behind(&request, 5).error.is_some());
}

/// Runs a prompt whose first tokens another request left in the pool.
fn extend_behind(request: &Request, cached: usize) -> crate::batch::RowOutput {
    let (mut engine, pool) = engine(None);
    for (position, &token) in request.prompt[..cached].iter().enumerate() {
        pool.borrow_mut()[position] = Some((token, position));
    }
    let kv_slots: Vec<_> = (0..64).collect();
    let row = BatchRow {
        slot: EngineSlot(0),
        kind: RowKind::Extend,
        params: &request.params,
        tokens: &request.prompt,
        prompt_len: request.prompt.len(),
        computed_len: cached,
        extend_len: request.prompt.len() - cached,
        kv_slots: &kv_slots,
    };
    engine.step(&Batch { rows: vec![row] }).unwrap().rows.remove(0)
}

#[test]
fn answers_are_scored_alike_with_speculation() {
    let config = NgramConfig {
        min_bfs_breadth: 1,
        max_bfs_breadth: 10,
        match_type: NgramMatchType::Bfs,
        max_trie_depth: 18,
        capacity: 1000,
    };
    let requests = [scored_request(Some(2)), scored_request(None)];
    let plain = serve(&requests, SCHEDULE, None);
    let drafted = serve(&requests, SCHEDULE, Some(Box::new(NgramDrafter::new(&config, 12, 1))));
    for (plain, drafted) in plain.iter().zip(&drafted) {
        assert!(drafted.counters.accepted_drafts > 0);
        assert_eq!((&plain.output, &plain.input_logprobs), (&drafted.output, &drafted.input_logprobs));
    }
}
