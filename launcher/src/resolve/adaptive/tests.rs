//! Files of slots, as SGLang reads them, and the shapes that come of them.

use clap::Parser;
use proto::{DraftModelConfig, NgramConfig, NgramMatchType, Weights};
use serde_json::json;

use super::*;
use crate::args::Args;

fn slots(file: Value) -> Vec<AdaptiveSlot> {
    parse(file).unwrap().into_iter().map(|slot| slot.resolve(99, Width::Chain).unwrap()).collect()
}

fn refusal(file: Value) -> String {
    let resolved = parse(file).and_then(|slots| {
        slots.into_iter().map(|slot| slot.resolve(99, Width::Chain)).collect::<Result<Vec<_>>>()
    });
    format!("{:#}", resolved.unwrap_err())
}

fn steps(slot: &AdaptiveSlot) -> Vec<u32> {
    slot.tiers.iter().map(|tier| tier.num_steps).collect()
}

fn spec(ngram: bool, (num_steps, eagle_topk, num_draft_tokens): (u32, u32, u32)) -> SpecConfig {
    let algorithm = match ngram {
        true => SpecAlgorithm::Ngram(NgramConfig {
            min_bfs_breadth: 1,
            max_bfs_breadth: 10,
            match_type: NgramMatchType::Bfs,
            max_trie_depth: 18,
            capacity: 1000,
        }),
        false => SpecAlgorithm::Eagle(DraftModelConfig {
            path: "head".into(),
            weights: Weights::Safetensors("head".into()),
            token_map: None,
        }),
    };
    SpecConfig {
        algorithm,
        num_steps,
        eagle_topk,
        num_draft_tokens,
        acceptance: AcceptanceRule::Equality,
        adaptive: None,
        ngram_first: None,
    }
}

/// Resolves over what the other flags made; `file` is written down and named.
fn resolved(flags: &str, file: Option<Value>, mut config: SpecConfig) -> Result<SpecConfig> {
    let dir = tempfile::tempdir().unwrap();
    let mut argv: Vec<String> = format!("launcher --model x --speculative-adaptive {flags}")
        .split_whitespace()
        .map(Into::into)
        .collect();
    if let Some(file) = file {
        let path = dir.path().join("slots.json");
        std::fs::write(&path, file.to_string()).unwrap();
        argv.extend(["--speculative-adaptive-config".into(), path.display().to_string()]);
    }
    resolve(&Args::try_parse_from(argv).unwrap().spec, &mut config)?;
    Ok(config)
}

fn shapes(slot: &AdaptiveSlot) -> Vec<(u32, u32)> {
    slot.tiers.iter().map(|tier| (tier.num_steps, tier.num_draft_tokens)).collect()
}

#[test]
fn what_no_slot_says_is_sglangs_default() {
    let slots = slots(json!({"1": {"candidate_steps": [1, 3, 7]}}));
    let [slot] = slots.as_slice() else { panic!("{slots:?}") };
    assert_eq!((slot.batch_size, steps(slot)), (1, vec![1, 3, 7]));
    assert_eq!((slot.ema_alpha, slot.update_interval, slot.warmup_batches), (0.2, 5, 10));
    assert_eq!((slot.down_hysteresis, slot.up_hysteresis, slot.ceiling_coeff), (-0.25, 0.0, 0.0));
    assert_eq!(slot.initial_steps, 3, "the middle");
}

#[test]
fn common_keys_are_inherited_and_a_slots_own_win() {
    let slots = slots(json!({
        "ema_alpha": 0.5, "update_interval": 2, "cost_margin": null,
        "8": {"candidate_steps": [1], "ema_alpha": 0.9, "cost_margin": 0.1},
        "1": {"candidate_steps": [7, 3, 3], "isolate_depths": false},
    }));
    assert_eq!(slots.iter().map(|slot| slot.batch_size).collect::<Vec<_>>(), [1, 8]);
    assert_eq!((slots[0].ema_alpha, slots[1].ema_alpha), (0.5, 0.9));
    assert_eq!((slots[0].update_interval, slots[1].update_interval), (2, 2));
    assert_eq!((slots[0].cost_margin, slots[1].cost_margin), (None, Some(0.1)));
    assert_eq!((slots[0].isolate_depths, slots[1].isolate_depths), (false, true));
    assert_eq!(steps(&slots[0]), [3, 7], "sorted, each once");
}

#[test]
fn what_is_no_file_of_slots_is_refused_by_name() {
    let check = |file: Value, expect: &str| {
        let refusal = refusal(file);
        assert!(refusal.contains(expect), "{refusal}");
    };
    check(json!({"candidate_steps": [1, 3]}), "unknown field `candidate_steps`");
    check(json!({"ema_alpha": 0.3}), "at least one batch size");
    check(json!([1, 3]), "one JSON object");
    check(json!({"1": [1, 3]}), "must be an object");
    check(json!({"1": {"ema_alpha": 1}}), "no candidate_steps");
    check(json!({"1": {"candidate_steps": []}}), "must not be empty");
    check(json!({"1": {"candidate_steps": 3}}), "list of depths");
    check(json!({"1": {"candidate_steps": [-1]}}), "list of depths");
    check(json!({"1": {"candidate_steps": [1]}, "01": {"candidate_steps": [1]}}), "twice");
    check(json!({"1": {"candidate_steps": [1], "alpha": 1}}), "unknown field `alpha`");
    check(json!({"-1": {"candidate_steps": [1]}}), "unknown field `-1`");
    check(json!({"99999999999": {"candidate_steps": [1]}}), "no batch size");
    check(json!({"1": {"candidate_steps": [1], "ema_alpha": 0}}), "above 0");
    check(json!({"1": {"candidate_steps": [1], "update_interval": 0}}), "at least 1");
    check(json!({"1": {"candidate_steps": [1], "cost_margin": 1.5}}), "less than 1");
}

/// SGLang's slots, with plain decoding in the first one as well.
#[test]
fn without_a_file_each_slot_can_fall_back_on_plain_decoding() {
    let of = |ngram, asked| default_slots(ngram, asked).unwrap();
    let shown = |slots: Vec<Slot>| -> Vec<(u32, Vec<u32>)> {
        slots.into_iter().map(|slot| (slot.batch_size, slot.candidate_steps.into_iter().collect())).collect()
    };
    let heads = vec![(1, vec![0, 1, 3, 5, 7]), (8, vec![0, 1, 3]), (32, vec![0, 1]), (64, vec![0])];
    assert_eq!(shown(of(false, None)), heads);
    assert_eq!(shown(of(false, Some(4)))[0], (1, vec![0, 1, 3, 4, 5, 7]));
    assert_eq!(shown(of(true, None))[0], (1, vec![0, 1, 3, 7, 11]));
    assert_eq!(
        shown(of(true, Some(5))),
        [(1, vec![0, 1, 3, 5]), (8, vec![0, 1, 3]), (32, vec![0, 1, 3]), (64, vec![0, 1])]
    );
}

/// Buffers are sized by what is configured, so that is the largest candidate's; a slot starts where the flags say.
#[test]
fn the_largest_candidate_is_what_is_configured() {
    let file = json!({
        "1": {"candidate_steps": [1, 3, 7]},
        "8": {"candidate_steps": [0, 1]},
    });
    let config = resolved("--speculative-num-steps 3", Some(file), spec(false, (3, 1, 4))).unwrap();
    assert_eq!((config.num_steps, config.eagle_topk, config.num_draft_tokens), (7, 1, 8));
    let adaptive = config.adaptive.unwrap();
    assert_eq!(adaptive.initial, DraftTier { num_steps: 3, num_draft_tokens: 4 });
    assert_eq!(shapes(&adaptive.slots[0]), [(1, 2), (3, 4), (7, 8)]);
    assert_eq!(shapes(&adaptive.slots[1]), [(0, 1), (1, 2)]);
    assert_eq!(adaptive.slots.iter().map(|slot| slot.initial_steps).collect::<Vec<_>>(), [3, 1]);
}

/// Without a depth of the user's: a chain of the middle of all candidates, whatever the default tree would be.
#[test]
fn without_a_depth_the_middle_candidate_of_a_chain() {
    let config = resolved("", None, spec(false, (5, 4, 8))).unwrap();
    assert_eq!((config.num_steps, config.eagle_topk, config.num_draft_tokens), (7, 1, 8));
    assert_eq!(config.adaptive.unwrap().initial.num_steps, 3);
    let config = resolved("", None, spec(true, (1, 10, 12))).unwrap();
    assert_eq!((config.num_steps, config.eagle_topk, config.num_draft_tokens), (11, 10, 12));
}

#[test]
fn a_tree_keeps_its_proportions() {
    let file = json!({"1": {"candidate_steps": [0, 1, 2, 4, 8]}});
    let flags = "--speculative-num-steps 4 --speculative-eagle-topk 4 --speculative-num-draft-tokens 13";
    let config = resolved(flags, Some(file), spec(false, (4, 4, 13))).unwrap();
    assert_eq!(shapes(&config.adaptive.unwrap().slots[0]), [(0, 1), (1, 4), (2, 7), (4, 13), (8, 25)]);
    assert_eq!((config.num_steps, config.num_draft_tokens), (8, 25));
    // A shallow tree has no room for its share of a wide one.
    let wide = Width::Tree { steps: 2, topk: 2, nodes: 6 };
    assert_eq!(wide.of(1), DraftTier { num_steps: 1, num_draft_tokens: 3 });
}

#[test]
fn what_cannot_work_is_refused() {
    let refused = |flags: &str, file: Option<Value>, config: SpecConfig| {
        format!("{:#}", resolved(flags, file, config).unwrap_err())
    };
    let slot = |steps: &[u32]| Some(json!({"1": {"candidate_steps": steps}}));
    let chain = || spec(false, (3, 1, 4));
    let refusal = refused("--speculative-num-steps 4", slot(&[1, 3]), chain());
    assert!(refusal.contains("4 must be one of the candidates") && refusal.contains("[1, 3]"), "{refusal}");
    assert!(refused("", slot(&[0]), chain()).contains("no candidate above 0"));
    assert!(refused("", slot(&[256]), chain()).contains("less than 256"));
    let weighing = SpecConfig { acceptance: AcceptanceRule::Rejection, ..chain() };
    assert!(refused("", None, weighing).contains("depends on the draft"));
    let args =
        Args::try_parse_from(["launcher", "--model", "x", "--speculative-adaptive-config", "y"]).unwrap();
    let refusal = resolve(&args.spec, &mut chain()).unwrap_err().to_string();
    assert!(refusal.contains("needs --speculative-adaptive"), "{refusal}");
}
