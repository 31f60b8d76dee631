//! What the prefix cache shares of the target's keys and values it shares of the draft's: acceptance does not suffer
//! from a cached prefix, however it came to be cached.

use super::*;

/// Every kind of draft model, some in a folder that the caller keeps.
fn pairs() -> (tempfile::TempDir, [Pair; 8]) {
    let (dir, chained) = in_layout("nextn", MULTI_LAYER);
    (dir, [EAGLE, EAGLE3, STANDALONE, NEXTN, DFLASH, DFLASH_FIXED, MULTI_LAYER, chained])
}

/// Drafts and acceptance of a request in an engine that knows nothing.
fn fresh(pair: Pair, shape: Shape, schedule: Schedule, ask: &Ask) -> Answer {
    Rig::new(pair, Some(shape), schedule).serve_one(ask)
}

#[test]
fn the_second_run_of_a_prompt_accepts_as_the_first() {
    let (_dir, pairs) = pairs();
    for pair in pairs {
        for shape in pair.shapes {
            for page in [1, 16] {
                let schedule = Schedule { page, ..PLAIN };
                let mut rig = Rig::new(pair, Some(shape), schedule);
                let ask = greedy(&prompt(pair), 30);
                let first = rig.serve_one(&ask);
                let second = rig.serve_one(&ask);
                assert!(second.cached >= 32, "{} tokens were cached", second.cached);
                assert!(first.counters.accepted_drafts > 0, "{}, {shape:?}", pair.draft);
                assert_eq!(first.verified, second.verified, "{}, {shape:?}, page {page}", pair.draft);
            }
        }
    }
}

/// A second turn continues an answer, whose drafts were accepted from a tree or a chain.
#[test]
fn a_second_turn_accepts_as_without_a_cache() {
    let (_dir, pairs) = pairs();
    for pair in pairs {
        for shape in pair.shapes {
            let mut rig = Rig::new(pair, Some(shape), PLAIN);
            let first = rig.serve_one(&greedy(&prompt(pair), 25));
            let turn: Vec<_> = prompt(pair).into_iter().chain(first.ids).chain([9, 4, 7]).collect();
            let ask = greedy(&turn, 30);
            let second = rig.serve_one(&ask);
            assert_eq!(second.cached, prompt(pair).len() + 24, "prompt and answer but for its last token");
            assert_eq!(
                second.verified,
                fresh(pair, shape, PLAIN, &ask).verified,
                "{}, {shape:?}",
                pair.draft
            );
        }
    }
}

/// A request that never drafts leaves a prefix behind that others draft from.
#[test]
fn a_prefix_of_a_request_without_speculation_serves_one_with() {
    let (_dir, pairs) = pairs();
    for pair in pairs {
        let mut rig = Rig::new(pair, Some(pair.shapes[0]), PLAIN);
        let plain = Ask { speculates: false, ..greedy(&prompt(pair), 25) };
        let first = rig.serve_one(&plain);
        let turn: Vec<_> = prompt(pair).into_iter().chain(first.ids).chain([9]).collect();
        let ask = greedy(&turn, 30);
        let second = rig.serve_one(&ask);
        assert_eq!(second.cached, prompt(pair).len() + 24);
        assert_eq!(second.verified, fresh(pair, pair.shapes[0], PLAIN, &ask).verified, "{}", pair.draft);
    }
}

/// A request that comes while another with the same prompt is running takes over its slots.
#[test]
fn requests_that_share_a_prompt_while_running_accept_alike() {
    let (_dir, pairs) = pairs();
    for pair in pairs {
        for page in [1, 16] {
            let schedule = Schedule { page, chunk: 16, ..PLAIN };
            let mut rig = Rig::new(pair, Some(pair.shapes[0]), schedule);
            let ask = greedy(&prompt(pair), 30);
            let answers = rig.serve(&[ask.clone(), ask.clone(), ask.clone()]);
            assert!(answers[2].cached > 0);
            for answer in &answers[1..] {
                assert_eq!(answer.verified, answers[0].verified, "{}, page {page}", pair.draft);
            }
        }
    }
}

#[test]
fn a_retracted_request_goes_on_accepting() {
    let (_dir, pairs) = pairs();
    for pair in pairs {
        for radix in [true, false] {
            let ask = greedy(&prompt(pair), 40);
            let whole = fresh(pair, pair.shapes[0], PLAIN, &ask);
            let schedule = Schedule { retract_at: Some(5), radix, ..PLAIN };
            let broken = fresh(pair, pair.shapes[0], schedule, &ask);
            assert_eq!(whole.ids, broken.ids);
            // The step that brings it back makes one token without a draft, so the steps shift a little.
            let (whole, broken) = (whole.counters.accepted_drafts, broken.counters.accepted_drafts);
            assert!(broken + 6 >= whole, "{}: {broken} accepted instead of {whole}", pair.draft);
        }
    }
}
