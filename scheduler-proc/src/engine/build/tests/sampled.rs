//! Sampled requests through real drafts: what the rules of acceptance leave alone, what each accepts, and that every
//! parameter of sampling reaches every token of an accepted block.

use super::lossless::mixed;
use super::*;

const RULES: [AcceptanceRule; 3] = [
    AcceptanceRule::Equality,
    AcceptanceRule::Rejection,
    AcceptanceRule::Thresholds { single: 0.4, acc: 0.7 },
];
const PAIRS: [Pair; 3] = [EAGLE, EAGLE3, STANDALONE];
const TREE: Shape = (4, 4, 13);

fn rig(pair: Pair, shape: Shape, rule: AcceptanceRule) -> Rig {
    Rig::by(pair, Some(shape), PLAIN, rule)
}

fn ids(answers: Vec<Answer>) -> Vec<Vec<TokenId>> {
    answers.into_iter().map(|answer| answer.ids).collect()
}

#[test]
fn no_rule_changes_greedy_answers() {
    for pair in PAIRS {
        let asks = mixed(pair, 0.0);
        let plain = ids(Rig::new(pair, None, PLAIN).serve(&asks));
        for (shape, rule) in [chain(4), TREE].into_iter().flat_map(|shape| RULES.map(|rule| (shape, rule))) {
            let answers = rig(pair, shape, rule).serve(&asks);
            assert!(answers.iter().any(|answer| answer.counters.accepted_drafts > 0));
            assert_eq!(ids(answers), plain, "{}, {shape:?}, {rule:?}", pair.draft);
        }
    }
}

/// Neighbours with and without a seed of their own, another page size, other chunks: a seed gives one answer.
#[test]
fn by_every_rule_an_answer_depends_on_its_own_request_only() {
    for rule in RULES {
        for pair in PAIRS {
            let mut asks = mixed(pair, 0.8);
            asks.push(asks[0].clone());
            let together = ids(rig(pair, chain(4), rule).serve(&asks));
            let mut alone = rig(pair, chain(4), rule);
            let alone: Vec<_> = asks.iter().map(|ask| alone.serve_one(ask).ids).collect();
            assert_eq!(together, alone, "{}, {rule:?}", pair.draft);
            assert_eq!(together[0], together[6], "the same request twice");
            let schedule = Schedule { page: 16, radix: false, chunk: 7, retract_at: None };
            let other = ids(Rig::by(pair, Some(chain(4)), schedule, rule).serve(&asks));
            assert_eq!(together, other, "{}, {rule:?}", pair.draft);
            // This one opted out, so it has the answer of plain decoding by any rule.
            let plain = Rig::new(pair, None, PLAIN).serve_one(&asks[5]).ids;
            assert_eq!(together[5], plain);
        }
    }
}

/// Both laws are those of the request's edits, temperature and filters, at every position of a block: where draft and
/// target are one model nothing is ever refused.
#[test]
fn a_ratio_of_equal_laws_refuses_nothing() {
    let pair = Pair { draft: "llama-tiny/target", ..STANDALONE };
    let mut rig = rig(pair, chain(3), AcceptanceRule::Rejection);
    for temperature in [0.3, 0.8, 1.5] {
        let mut total = SpecCounters::default();
        rig.serve(&mixed(pair, temperature)).iter().for_each(|answer| total.add(&answer.counters));
        assert!(total.proposed_drafts > 50, "{total:?}");
        assert_eq!(total.accepted_drafts, total.proposed_drafts, "at {temperature}");
    }
}

/// Ways to draw and to accept: by luck, with shared noise, by ratio.
const WAYS: [(AcceptanceRule, Option<DraftDraw>); 3] = [
    (AcceptanceRule::Equality, Some(DraftDraw::Own)),
    (AcceptanceRule::Equality, None),
    (AcceptanceRule::Rejection, None),
];

/// What each way makes of some prompts at a temperature, over some seeds.
fn acceptance(
    config: &ServeConfig,
    prompts: &[Vec<TokenId>],
    temperature: f64,
    seeds: u64,
) -> [SpecCounters; 3] {
    WAYS.map(|(rule, draw)| {
        let mut rig = Rig::of(config, PLAIN, rule);
        rig.draw.set(draw);
        let mut total = SpecCounters::default();
        for (seed, prompt) in (0..seeds).flat_map(|seed| prompts.iter().map(move |prompt| (seed, prompt))) {
            let ask = greedy_with(prompt, 32, |sampling| {
                sampling.temperature = temperature;
                sampling.sampling_seed = seed;
            });
            total.add(&rig.serve_one(&ask).counters);
        }
        total
    })
}

/// Of the first draft of every step, which all ways draft alike.
fn first_accepted(total: &SpecCounters) -> f64 {
    1.0 - total.acceptance_histogram[0] as f64 / total.verify_ct as f64
}

fn print_ways(what: &str, ways: &[SpecCounters; 3]) {
    let show = |total: &SpecCounters| {
        let length = 1.0 + total.accepted_drafts as f64 / total.verify_ct as f64;
        format!("{length:.2} ({:.1} %)", 100.0 * first_accepted(total))
    };
    println!("| {what} | {} | {} | {} |", show(&ways[0]), show(&ways[1]), show(&ways[2]));
}

/// A model that drafts for itself: whatever is refused then is refused for the noise alone.
#[test]
fn shared_noise_and_ratio_lose_nothing_where_luck_does() {
    let pair = Pair { draft: "llama-tiny/target", ..STANDALONE };
    let config = serve_config(pair, Some(chain(3)));
    for temperature in [0.8, 1.0] {
        let ways = acceptance(&config, &prompts(pair)[..2], temperature, 2);
        print_ways(&temperature.to_string(), &ways);
        let [luck, shared, ratio] = ways.map(|total| first_accepted(&total));
        assert!(shared == 1.0 && ratio == 1.0 && luck < 0.9, "{luck} {shared} {ratio}");
    }
}

/// Prints what each way accepts for the default model with the EAGLE head in the folder `EAGLE_HEAD`:
/// `cargo test --release -p scheduler-proc real_acceptance -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn real_acceptance() {
    let gguf = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
    );
    let head = std::env::var("EAGLE_HEAD").expect("EAGLE_HEAD names the head's folder");
    let mut config = serve_config(EAGLE, Some(chain(3)));
    config.model.weights = Weights::Gguf(gguf.into());
    config.schedule.num_threads = 2;
    let weights = Weights::Safetensors(head.into());
    config.spec.as_mut().unwrap().algorithm =
        SpecAlgorithm::Eagle(DraftModelConfig { path: String::new(), weights, token_map: None });
    let text = std::fs::read_to_string(fixtures().join("smollm2-greedy.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ids = |prompt: &serde_json::Value| serde_json::from_value(prompt["prompt_ids"].clone()).unwrap();
    let prompts: Vec<Vec<TokenId>> = golden["prompts"].as_array().unwrap().iter().map(ids).collect();
    for temperature in [0.8, 1.0] {
        print_ways(&temperature.to_string(), &acceptance(&config, &prompts, temperature, 2));
    }
}

fn greedy_with(prompt: &[TokenId], max_new: usize, change: impl Fn(&mut SamplingParams)) -> Ask {
    let mut ask = greedy(prompt, max_new);
    change(&mut ask.params.sampling);
    ask
}

/// Checks that every pair and shape gives the answer of plain decoding, and that answer; the drafts accepted on the
/// way, by pair.
fn same_as_plain(
    what: &str,
    ask: impl Fn(Pair) -> Ask,
    check: impl Fn(Pair, &[TokenId]),
) -> [u64; PAIRS.len()] {
    PAIRS.map(|pair| {
        let ask = ask(pair);
        let plain = Rig::new(pair, None, PLAIN).serve_one(&ask).ids;
        check(pair, &plain);
        let mut accepted = 0;
        for shape in [chain(4), TREE] {
            let answer = rig(pair, shape, AcceptanceRule::Equality).serve_one(&ask);
            assert_eq!(answer.ids, plain, "{what}: {}, {shape:?}", pair.draft);
            accepted += answer.counters.accepted_drafts;
        }
        accepted
    })
}

#[test]
fn penalties_count_every_token_of_a_block() {
    let ask = |pair| greedy_with(&prompt(pair), 60, |sampling| sampling.frequency_penalty = 2.0);
    let accepted = same_as_plain("frequency penalty", ask, |pair, answer| {
        let free = Rig::new(pair, None, PLAIN).serve_one(&greedy(&prompt(pair), 60)).ids;
        assert_ne!(answer, free, "the penalty changes something");
    });
    assert!(accepted.iter().all(|&accepted| accepted > 0), "{accepted:?}");
    let ask = |pair| greedy_with(&prompt(pair), 60, |sampling| sampling.repetition_penalty = 1.5);
    let accepted = same_as_plain("repetition penalty", ask, |_, _| {});
    assert!(accepted.iter().all(|&accepted| accepted > 0), "{accepted:?}");
}

/// What was refused leaves no trace in the penalties: a draft that is mostly wrong, and a penalty that minds.
#[test]
fn refused_drafts_are_not_penalised() {
    for pair in PAIRS {
        let mut ask = greedy(&prompt(pair), 60);
        ask.params.sampling =
            SamplingParams { temperature: 1.5, repetition_penalty: 1.8, ..SamplingParams::default() };
        let plain = Rig::new(pair, None, PLAIN).serve_one(&ask).ids;
        for shape in [chain(4), TREE] {
            let answer = rig(pair, shape, AcceptanceRule::Equality).serve_one(&ask);
            let SpecCounters { accepted_drafts, proposed_drafts, .. } = answer.counters;
            assert!(proposed_drafts > 3 * accepted_drafts, "{accepted_drafts} of {proposed_drafts}");
            assert_eq!(answer.ids, plain, "{}, {shape:?}", pair.draft);
        }
    }
}

/// The end token is what the model wants most from the start, and comes as soon as it may: not a step's worth later.
#[test]
fn the_minimum_length_counts_tokens_not_steps() {
    let mut accepted = [0; PAIRS.len()];
    for min_new in [1, 7, 20] {
        let ask = |pair| {
            greedy_with(&prompt(pair), min_new as usize + 4, |sampling| {
                sampling.min_new_tokens = min_new;
                sampling.logit_bias = vec![(2, 60.0)];
            })
        };
        let more = same_as_plain("min_new_tokens", ask, |_, answer| {
            assert_eq!(answer.iter().position(|&token| token == 2), Some(min_new as usize));
        });
        accepted.iter_mut().zip(more).for_each(|(accepted, more)| *accepted += more);
    }
    assert!(accepted.iter().all(|&accepted| accepted > 0), "{accepted:?}");
}

#[test]
fn a_banned_token_never_comes_and_min_p_reaches_every_token() {
    let free = |pair| Rig::new(pair, None, PLAIN).serve_one(&greedy(&prompt(pair), 120)).ids;
    let common = |pair| {
        let answer = free(pair);
        let count = |token: TokenId| answer.iter().filter(|&&other| other == token).count();
        answer.iter().copied().max_by_key(|&token| count(token)).unwrap()
    };
    let ask = |pair| {
        let banned = common(pair);
        greedy_with(&prompt(pair), 120, move |sampling| sampling.logit_bias = vec![(banned, -100.0)])
    };
    let accepted = same_as_plain("logit_bias", ask, |pair, answer| assert!(!answer.contains(&common(pair))));
    assert!(accepted.iter().all(|&accepted| accepted > 0), "{accepted:?}");
    // Only the best token has all of the best token's probability, so a draw is the argmax.
    let ask = |pair| {
        greedy_with(&prompt(pair), 120, |sampling| {
            sampling.temperature = 1.0;
            sampling.min_p = 1.0;
        })
    };
    let accepted = same_as_plain("min_p", ask, |pair, answer| assert_eq!(answer, free(pair)));
    assert!(accepted.iter().all(|&accepted| accepted > 0), "{accepted:?}");
}
