//! Speculation from models never changes the answer: token for token that of plain decoding.

use super::*;

/// Six requests with other options each, at one temperature.
pub(super) fn mixed(pair: Pair, temperature: f64) -> Vec<Ask> {
    let prompts = prompts(pair);
    let ask = |seed: u32, change: fn(&mut SamplingParams)| {
        let mut sampling =
            SamplingParams { temperature, sampling_seed: u64::from(seed), ..SamplingParams::default() };
        change(&mut sampling);
        let params = RowParams { sampling, terminators: vec![2, 503], logprobs: None };
        let max_new = 16 + seed as usize;
        Ask {
            prompt: prompts[seed as usize % prompts.len()].clone(),
            params,
            max_new,
            speculates: true,
            clipped: true,
        }
    };
    let mut asks = vec![
        ask(1, |_| {}),
        ask(2, |sampling| {
            sampling.top_k = Some(8);
            sampling.top_p = 0.9;
        }),
        ask(3, |sampling| {
            sampling.frequency_penalty = 0.6;
            sampling.presence_penalty = 0.4;
        }),
        ask(4, |sampling| {
            sampling.min_p = 0.05;
            sampling.repetition_penalty = 1.3;
        }),
        ask(5, |sampling| {
            sampling.logit_bias = vec![(7, 4.0), (503, -100.0)];
            sampling.min_new_tokens = 12;
        }),
        ask(6, |sampling| sampling.top_p = 0.95),
    ];
    asks[5].speculates = false;
    asks
}

/// What a rig made of all requests, in one batch or one by one.
fn ids(rig: &mut Rig, asks: &[Ask], together: bool) -> (Vec<Vec<TokenId>>, SpecCounters) {
    let answers = match together {
        true => rig.serve(asks),
        false => asks.iter().map(|ask| rig.serve_one(ask)).collect(),
    };
    let mut total = SpecCounters::default();
    for answer in &answers {
        assert_eq!(answer.counters.check(), Ok(()));
        total.add(&answer.counters);
    }
    (answers.into_iter().map(|answer| answer.ids).collect(), total)
}

/// Every shape, page size, batch, chunk and cache setting against plain decoding.
fn check(pair: Pair) {
    let mut cells = 0;
    for temperature in [0.0, 0.3, 0.8, 1.5] {
        let asks = mixed(pair, temperature);
        let mut accepted = 0;
        let (plain, _) = ids(&mut Rig::new(pair, None, PLAIN), &asks, false);
        for shape in pair.shapes {
            for (page, radix, chunk) in [
                (1, true, 512),
                (16, true, 512),
                (1, false, 7),
                (16, true, 7),
                (16, false, 512),
                (1, true, 7),
                (1, false, 512),
                (16, false, 7),
            ] {
                let mut rig = Rig::new(pair, Some(shape), Schedule { page, radix, chunk, retract_at: None });
                for together in [false, true] {
                    let what = format!(
                        "{} at {temperature}, {shape:?}, page {page}, radix {radix}, chunk {chunk}, batch {together}",
                        pair.draft
                    );
                    let (drafted, counters) = ids(&mut rig, &asks, together);
                    assert_eq!(drafted, plain, "{what}");
                    accepted += counters.accepted_drafts;
                    cells += 1;
                }
            }
        }
        // The hotter, the less a tiny draft agrees with its target.
        let enough = if temperature < 0.5 { 100 } else { 20 };
        assert!(accepted > enough, "{} at {temperature} proves little with {accepted} accepted", pair.draft);
    }
    assert_eq!(cells, 4 * 2 * 8 * 2);
}

#[test]
fn eagle_leaves_the_answer_alone() {
    check(EAGLE);
}

#[test]
fn eagle3_leaves_the_answer_alone() {
    check(EAGLE3);
}

#[test]
fn standalone_leaves_the_answer_alone() {
    check(STANDALONE);
}

#[test]
fn nextn_leaves_the_answer_alone() {
    check(NEXTN);
}

/// Depth that changes in the midst of every request, plain steps included.
#[test]
fn changing_depth_leaves_the_answer_alone() {
    let (_dir, chained) = in_layout("nextn", MULTI_LAYER);
    let pairs =
        [EAGLE, EAGLE3, STANDALONE, NEXTN, NGRAM, DFLASH, MULTI_LAYER, chained, EAGLE_NGRAM, EAGLE3_NGRAM];
    for pair in pairs {
        let mut accepted = 0;
        for temperature in [0.0, 0.8] {
            let asks = mixed(pair, temperature);
            let plain = ids(&mut Rig::new(pair, None, PLAIN), &asks, false).0;
            for (shape, page) in [(pair.shapes[0], 1), (pair.shapes[1], 16)] {
                let mut rig = Rig::new(pair, Some(shape), Schedule { page, ..PLAIN });
                for depths in [&[4, 0, 1, 0, 0, 3, 2][..], &[0, 0, 0, 0, 4]] {
                    rig.depths = depths;
                    let (drafted, counters) = ids(&mut rig, &asks, true);
                    assert_eq!(drafted, plain, "{} at {temperature}, {shape:?}, {depths:?}", pair.draft);
                    accepted += counters.accepted_drafts;
                }
            }
        }
        assert!(accepted > 50, "{} proves little with {accepted} accepted", pair.draft);
    }
}

/// Plain steps keep the draft warm: behind them it drafts what it would have drafted without them.
#[test]
fn a_draft_after_plain_steps_is_as_good() {
    for pair in [EAGLE, EAGLE3, STANDALONE, NEXTN] {
        for shape in [chain(4), pair.shapes[1]] {
            let ask = greedy(&prompt(pair), 40);
            let trees = |depths: &'static [usize]| {
                let mut rig = Rig::new(pair, Some(shape), PLAIN);
                rig.depths = depths;
                let verified = rig.serve_one(&ask).verified;
                let drafted = verified.into_iter().filter(|step| step.tree.len() + 1 == shape.2 as usize);
                drafted.map(|step| (step.committed, step.tree)).collect::<BTreeMap<_, _>>()
            };
            let always: BTreeMap<_, _> =
                [&[4][..], &[1, 4], &[4, 1, 1]].into_iter().flat_map(trees).collect();
            let seldom = trees(&[0, 0, 0, 0, 0, 4]);
            let same = seldom.iter().filter(|(at, _)| always.contains_key(at)).count();
            assert!(same >= 2, "{} {shape:?}: {same} of {} met", pair.draft, seldom.len());
            for (at, tree) in seldom {
                assert!(
                    always.get(&at).is_none_or(|other| *other == tree),
                    "{} {shape:?} at {at}",
                    pair.draft
                );
            }
        }
    }
}

/// The model drafts behind tokens that n-grams drafted what it would have drafted had it drafted those itself.
#[test]
fn a_draft_after_n_grams_is_as_good() {
    for (alone, mixed) in [(EAGLE, EAGLE_NGRAM), (EAGLE3, EAGLE3_NGRAM)] {
        for shape in alone.shapes {
            let ask = greedy(&prompt(alone), 120);
            let trees = |depths: &'static [usize]| {
                let mut rig = Rig::new(alone, Some(shape), PLAIN);
                rig.depths = depths;
                rig.serve_one(&ask).verified
            };
            let always: BTreeMap<_, _> = [&[][..], &[1, 4], &[4, 1, 1], &[0, 4], &[2, 4, 4]]
                .into_iter()
                .flat_map(trees)
                .filter(|step| step.tree.len() + 1 == shape.2 as usize)
                .map(|step| (step.committed, step.tree))
                .collect();
            let (mut same, mut by_trie) = (0, 0);
            let mut rig = Rig::new(mixed, Some(shape), PLAIN);
            // N-grams know the beginning of the answer.
            rig.serve_one(&greedy(&prompt(alone), 40));
            for step in rig.serve_one(&ask).verified {
                match step.tree.source() {
                    DraftSource::Ngram => by_trie += 1,
                    DraftSource::Model if by_trie > 0 && step.tree.len() + 1 == shape.2 as usize => {
                        let Some(other) = always.get(&step.committed) else { continue };
                        assert_eq!(step.tree, *other, "{} {shape:?} at {}", alone.draft, step.committed);
                        same += 1;
                    }
                    DraftSource::Model => {}
                }
            }
            assert!(same > 0 && by_trie > 0, "{} {shape:?}: {same} met, {by_trie} by n-grams", alone.draft);
        }
    }
}

#[test]
fn mixed_drafts_leave_the_answer_alone() {
    check(EAGLE_NGRAM);
}

#[test]
fn dflash_leaves_the_answer_alone() {
    check(DFLASH);
}

#[test]
fn multi_layer_eagle_leaves_the_answer_alone() {
    check(MULTI_LAYER);
}

#[test]
fn chained_layers_leave_the_answer_alone() {
    let (_dir, chained) = in_layout("nextn", MULTI_LAYER);
    check(chained);
}

#[test]
fn every_length_from_one_token_on() {
    let (_dir, other_layout) = in_layout("nextn", NEXTN);
    let (_other, chained) = in_layout("nextn", MULTI_LAYER);
    let pairs = [
        EAGLE,
        EAGLE3,
        STANDALONE,
        NEXTN,
        other_layout,
        NGRAM,
        DFLASH,
        DFLASH_FIXED,
        MULTI_LAYER,
        chained,
        EAGLE_NGRAM,
    ];
    for pair in pairs {
        let mut plain = Rig::new(pair, None, PLAIN);
        for shape in pair.shapes {
            let mut rig = Rig::new(pair, Some(shape), PLAIN);
            for max_new in 1..=7 {
                let ask = greedy(&prompt(pair), max_new);
                let answer = rig.serve_one(&ask);
                assert_eq!(answer.ids, plain.serve_one(&ask).ids);
                assert_eq!(answer.ids.len(), max_new);
            }
        }
    }
}

/// A chain draws with the request's own noise, edits and filters: a model that drafts for itself is never refused,
/// at any temperature.
#[test]
fn a_model_that_drafts_for_itself_is_always_right() {
    let pair = Pair { draft: "llama-tiny/target", ..STANDALONE };
    let mut rig = Rig::new(pair, Some(chain(3)), PLAIN);
    for temperature in [0.0, 0.3, 0.8, 1.5] {
        let (_, counters) = ids(&mut rig, &mixed(pair, temperature), true);
        assert!(counters.proposed_drafts > 50, "{counters:?}");
        assert_eq!(counters.accepted_drafts, counters.proposed_drafts, "at {temperature}");
    }
}
