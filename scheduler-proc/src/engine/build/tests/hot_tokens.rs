//! A head that drafts some tokens only: less work per draft, the same answer.

use std::path::Path;

use super::*;

fn hot_config(pair: Pair, shape: Shape, map: &Path) -> ServeConfig {
    let mut config = serve_config(pair, Some(shape));
    if let SpecAlgorithm::Eagle(draft) = &mut config.spec.as_mut().unwrap().algorithm {
        draft.token_map = Some(map.to_owned());
    }
    config
}

fn written(ids: &[TokenId]) -> tempfile::TempPath {
    let file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    std::fs::write(file.path(), serde_json::to_vec(ids).unwrap()).unwrap();
    file.into_temp_path()
}

const SHAPES: [Shape; 2] = [chain(4), (4, 4, 13)];

/// The same head row by row, whatever the order of the rows.
#[test]
fn a_map_of_all_tokens_changes_no_draft() {
    let all: Vec<TokenId> = (0..512).rev().collect();
    let map = written(&all);
    for pair in [EAGLE, NEXTN] {
        for shape in SHAPES {
            let ask = greedy(&prompt(pair), 30);
            let expected = Rig::new(pair, Some(shape), PLAIN).serve_one(&ask);
            let mapped =
                Rig::of(&hot_config(pair, shape, &map), PLAIN, AcceptanceRule::Equality).serve_one(&ask);
            assert_eq!(mapped.verified, expected.verified, "{}, {shape:?}", pair.draft);
        }
    }
}

#[test]
fn only_hot_tokens_are_drafted_and_the_answer_is_the_same() {
    for pair in [EAGLE, NEXTN] {
        for temperature in [0.0, 0.8] {
            let mut asks: Vec<_> = prompts(pair).iter().map(|prompt| greedy(prompt, 40)).collect();
            asks.iter_mut().for_each(|ask| ask.params.sampling.temperature = temperature);
            let plain = Rig::new(pair, None, PLAIN).serve(&asks);
            // Every second token, and those of the answers but for some.
            let mut hot: Vec<TokenId> = (0..512).step_by(2).collect();
            let said = plain.iter().flat_map(|answer| &answer.ids).filter(|&&id| id % 2 == 1 && id % 5 > 0);
            hot.extend(said.collect::<std::collections::BTreeSet<_>>());
            let map = written(&hot);
            for shape in SHAPES {
                let what = format!("{} at {temperature}, {shape:?}", pair.draft);
                let answers =
                    Rig::of(&hot_config(pair, shape, &map), PLAIN, AcceptanceRule::Equality).serve(&asks);
                let mut accepted = 0;
                for (answer, plain) in answers.iter().zip(&plain) {
                    assert_eq!(answer.ids, plain.ids, "{what}");
                    let mut drafted = answer.verified.iter().flat_map(|step| step.tree.tokens());
                    assert!(drafted.all(|id| hot.contains(id)), "{what}");
                    accepted += answer.counters.accepted_drafts;
                }
                assert!(accepted > 0, "{what}");
            }
        }
    }
}

#[test]
fn maps_that_no_draft_can_come_from_are_refused() {
    let refusal = |ids: &[TokenId], shape| {
        let map = written(ids);
        let error = load(&hot_config(EAGLE, shape, &map), &mut |_, _| {}).err().expect("refused").to_string();
        assert!(error.contains("--speculative-token-map"), "{error}");
        error
    };
    assert!(refusal(&[1, 2, 512], chain(3)).contains("entry 2 is 512, outside a vocabulary of 512"));
    assert!(refusal(&[], chain(3)).contains("names no tokens"));
    assert!(refusal(&[1, 2, 3], (4, 4, 13)).contains("--speculative-eagle-topk 4"));
}
