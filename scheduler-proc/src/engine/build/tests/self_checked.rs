//! The start-up check tells a draft that belongs to its target from one that does not, and leaves nothing behind.

use proto::TokenBytes;

use super::*;

/// A draft with the very weights of the target that the tests give it to.
const TWIN: Pair = Pair { draft: "llama-tiny/target", ..STANDALONE };

/// Tokens per verify step that the check finds with `weights` in the target's place.
fn checked(weights: Option<Weights>, vocabulary: Option<&TokenBytes>) -> f64 {
    let mut config = serve_config(TWIN, Some(chain(3)));
    config.model.weights = weights.unwrap_or(config.model.weights);
    let Parts { target, drafter, .. } = load(&config, &mut |_, _| {}).unwrap();
    let limits = target.limits().clone();
    let mut engine = SpecEngine::new(target, limits, drafter);
    self_check::run(&mut engine, &config, vocabulary).unwrap().expect("tiny models have time and room")
}

#[test]
fn a_draft_that_is_its_target_is_always_right() {
    let vocabulary = TokenBytes::load(&fixtures().join("llama-tiny/target")).unwrap();
    assert_eq!(checked(None, Some(&vocabulary)), 4.0);
    assert_eq!(checked(None, None), 4.0, "without a vocabulary any ids will do");
}

#[test]
fn a_draft_beside_another_target_is_found_out() {
    let stranger = Weights::Dummy { dir: fixtures().join("llama-tiny/target"), seed: 1 };
    let length = checked(Some(stranger), None);
    assert!(length < self_check::USEFUL_LENGTH, "{length}");
}
