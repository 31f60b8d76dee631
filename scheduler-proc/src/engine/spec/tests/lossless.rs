//! Speculation never changes the answer: token for token, greedy and sampled, whatever is drafted.

use proto::{NgramConfig, NgramMatchType};

use super::workers::{Counted, Scripted, chain, oracle, random};
use super::*;
use crate::engine::spec::mixed::MixedDrafter;
use crate::engine::spec::ngram::NgramDrafter;

/// A batch in which every option occurs, at temperatures 0, 0.3, 0.8 and 1.5.
fn requests() -> Vec<Request> {
    let mut requests = Vec::new();
    for (row, temperature) in [0.0, 0.3, 0.8, 1.5].into_iter().cycle().take(16).enumerate() {
        let mut sampling = SamplingParams { temperature, ..SamplingParams::default() };
        match row / 4 {
            1 => {
                sampling.top_k = Some(6);
                sampling.top_p = 0.9;
                sampling.min_new_tokens = 11;
            }
            2 => {
                sampling.frequency_penalty = 0.3;
                sampling.presence_penalty = 0.4;
                sampling.repetition_penalty = 1.2;
            }
            3 => {
                sampling.min_p = 0.05;
                sampling.top_p = 0.97;
                sampling.logit_bias = vec![(1, 1.5), (3, -100.0)];
                sampling.repetition_penalty = 0.9;
                sampling.min_new_tokens = 30;
            }
            _ => {}
        }
        let mut request = request(row as u64, 40 + row, sampling);
        request.speculates = row != 5;
        requests.push(request);
    }
    requests
}

fn ngram(match_type: NgramMatchType, num_draft_tokens: usize) -> NgramDrafter {
    let config = NgramConfig {
        min_bfs_breadth: 1,
        max_bfs_breadth: 10,
        match_type,
        max_trie_depth: 18,
        capacity: 10_000_000,
    };
    NgramDrafter::new(&config, num_draft_tokens, 1)
}

/// Prompts and answers of plain decoding.
fn truth(requests: &[Request], plain: &[Outcome]) -> Vec<Vec<TokenId>> {
    let whole = |(request, outcome): (&Request, &Outcome)| {
        request.prompt.iter().copied().chain(outcome.ids()).collect()
    };
    requests.iter().zip(plain).map(whole).collect()
}

fn workers(truth: Vec<Vec<TokenId>>) -> Vec<(&'static str, Box<dyn Drafter>)> {
    let (other, third) = (truth.clone(), truth.clone());
    let model = Scripted::new(8, move |input: &DraftInput<'_>| chain(&third, input));
    vec![
        ("ngram bfs", Box::new(ngram(NgramMatchType::Bfs, 12))),
        ("ngram prob", Box::new(ngram(NgramMatchType::Prob, 12))),
        ("ngram narrow", Box::new(ngram(NgramMatchType::Bfs, 3))),
        (
            "mixed",
            Box::new(MixedDrafter::new(ngram(NgramMatchType::Bfs, 8).from_matches_of(2), Box::new(model))),
        ),
        ("random", Box::new(Scripted::new(12, random))),
        ("oracle", Box::new(Scripted::new(13, move |input: &DraftInput<'_>| oracle(&truth, input, 4)))),
        ("chain", Box::new(Scripted::new(8, move |input: &DraftInput<'_>| chain(&other, input)))),
        ("nothing", Box::new(Scripted::new(5, |_: &DraftInput<'_>| DraftTree::new()))),
    ]
}

fn assert_same(name: &str, requests: &[Request], plain: &[Outcome], drafted: &[Outcome]) {
    for (row, (plain, drafted)) in plain.iter().zip(drafted).enumerate() {
        assert_eq!(plain.ids(), drafted.ids(), "{name}, row {row}");
        assert_eq!(drafted.output.len(), requests[row].max_new);
        let counters = &drafted.counters;
        assert_eq!(counters.check(), Ok(()));
        let made = if requests[row].speculates {
            drafted.prefilled as u64 + counters.accepted_drafts + counters.verify_ct
        } else {
            assert_eq!(*counters, SpecCounters::default());
            drafted.output.len() as u64
        };
        assert_eq!(made, drafted.output.len() as u64, "{name}, row {row}");
    }
}

fn accepted(outcomes: &[Outcome]) -> u64 {
    outcomes.iter().map(|outcome| outcome.counters.accepted_drafts).sum()
}

#[test]
fn every_worker_leaves_the_answer_alone() {
    let requests = requests();
    let plain = serve(&requests, SCHEDULE, None);
    assert_eq!(plain[0].counters, SpecCounters::default(), "plain decoding verifies nothing");
    for (name, worker) in workers(truth(&requests, &plain)) {
        let drafted = serve(&requests, SCHEDULE, Some(worker));
        assert_same(name, &requests, &plain, &drafted);
        let tokens: u64 = drafted.iter().map(|outcome| outcome.output.len() as u64).sum();
        let share = accepted(&drafted) as f64 / tokens as f64;
        match name {
            "nothing" => assert_eq!(share, 0.0),
            "oracle" => assert!(share > 0.7, "{share}"),
            _ => assert!(share > 0.05, "{name} proves nothing if nothing is accepted: {share}"),
        }
    }
}

/// 1 node and no drafts at all included: a limit of 0 is still a verify step.
#[test]
fn depth_limits_change_nothing_but_the_counts() {
    let requests = requests();
    let plain = serve(&requests, SCHEDULE, None);
    let mut before = 0;
    for max_depth in 0..=5 {
        let schedule = Schedule { max_depth, ..SCHEDULE };
        for (name, worker) in workers(truth(&requests, &plain)) {
            let drafted = serve(&requests, schedule, Some(worker));
            assert_same(name, &requests, &plain, &drafted);
            if name == "oracle" {
                assert!(accepted(&drafted) >= before);
                before = accepted(&drafted);
            }
            if max_depth == 0 {
                assert!(drafted.iter().all(|outcome| outcome.counters.proposed_drafts == 0));
                assert!(drafted[0].counters.verify_ct > 0);
            }
        }
    }
}

/// Depth that changes in the midst of every request, plain steps included.
#[test]
fn changing_depth_changes_nothing() {
    let requests = requests();
    let plain = serve(&requests, SCHEDULE, None);
    for depths in [&[4, 0, 1, 7, 0, 0, 2][..], &[0, 0, 0, 0, 0, 5], &[1, 12]] {
        for (name, worker) in workers(truth(&requests, &plain)) {
            let drafted = serve(&requests, Schedule { depths, ..SCHEDULE }, Some(worker));
            assert_same(name, &requests, &plain, &drafted);
            assert!(name != "oracle" || accepted(&drafted) > 50, "{depths:?}");
        }
    }
}

#[test]
fn every_length_is_met_exactly() {
    for max_new in 1..8 {
        let mut requests = requests();
        requests.iter_mut().for_each(|request| request.max_new = max_new);
        let plain = serve(&requests, SCHEDULE, None);
        for (name, worker) in workers(truth(&requests, &plain)) {
            assert_same(name, &requests, &plain, &serve(&requests, SCHEDULE, Some(worker)));
        }
    }
}

#[test]
fn company_chunks_and_retraction_change_nothing() {
    let requests = requests();
    let plain = serve(&requests, SCHEDULE, None);
    for (row, request) in requests.iter().enumerate() {
        // Slots, not rows, name a request; alone it has slot 0.
        let alone = serve(std::slice::from_ref(request), SCHEDULE, None);
        assert_eq!(alone[0].ids(), plain[row].ids());
    }
    let truth = truth(&requests, &plain);
    for (stagger, chunk, retract_at) in [(0, 1, None), (1, 100, Some(7)), (3, 3, Some(20)), (5, 2, Some(33))]
    {
        let schedule = Schedule { stagger, chunk, retract_at, ..SCHEDULE };
        for (name, worker) in workers(truth.clone()) {
            let drafted = serve(&requests, schedule, Some(worker));
            assert_same(name, &requests, &plain, &drafted);
        }
    }
}

#[test]
fn what_is_counted_is_what_was_drafted() {
    let requests = requests();
    for match_type in [NgramMatchType::Bfs, NgramMatchType::Prob] {
        let proposed = Rc::new(RefCell::new(0));
        let worker = Counted { inner: ngram(match_type, 12), proposed: proposed.clone() };
        let outcomes = serve(&requests, SCHEDULE, Some(Box::new(worker)));
        let counted: u64 = outcomes.iter().map(|outcome| outcome.counters.proposed_drafts).sum();
        assert_eq!(counted, *proposed.borrow());
        assert!(counted > 0);
    }
}
