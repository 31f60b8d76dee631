//! Pairs that do not belong together are refused before anything is loaded, naming the flag to use.

use super::*;

fn refusal(pair: Pair, shape: Shape) -> String {
    match load(&serve_config(pair, Some(shape)), &mut |_, _| {}) {
        Ok(_) => panic!("{pair:?} was loaded"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn wrong_pairs_are_refused_with_the_right_flag() {
    let check = |pair: Pair, part: &str| {
        let error = refusal(pair, chain(3));
        assert!(error.contains(part), "{error}");
        assert!(error.contains("--speculative-"), "no flag is named: {error}");
    };
    check(Pair { algorithm: SpecAlgorithm::Eagle, ..EAGLE3 }, "--speculative-algorithm EAGLE3");
    check(Pair { algorithm: SpecAlgorithm::Eagle3, ..EAGLE }, "--speculative-algorithm EAGLE");
    check(Pair { algorithm: SpecAlgorithm::Eagle, ..STANDALONE }, "--speculative-algorithm STANDALONE");
    check(Pair { target: "eagle3-tiny", ..EAGLE }, "hidden size 64");
    check(Pair { target: "llama-tiny", ..EAGLE3 }, "hidden size 48");
    check(Pair { draft: "eagle1-tiny/nowhere", ..EAGLE }, "config.json");
    check(Pair { algorithm: SpecAlgorithm::Standalone, ..EAGLE }, "--speculative-algorithm EAGLE");
    check(Pair { algorithm: SpecAlgorithm::Standalone, ..EAGLE3 }, "--speculative-algorithm EAGLE3");
    check(Pair { algorithm: SpecAlgorithm::Eagle3, ..NEXTN }, "--speculative-algorithm NEXTN");
    check(Pair { target: "llama-tiny", ..NEXTN }, "hidden size 48");
}

#[test]
fn a_tree_must_hold_its_width_and_no_more_than_it_tries() {
    for shape in [(3, 4, 4), (1, 4, 6), (0, 1, 2), (2, 1, 4), (3, 1, 1)] {
        let error = refusal(EAGLE, shape);
        assert!(error.contains("--speculative-eagle-topk"), "{shape:?}: {error}");
    }
}

/// A copy of a draft folder with its config or tensors changed.
fn altered(
    draft: &str,
    config: impl Fn(String) -> String,
    tensors: impl Fn(&str) -> bool,
) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let from = fixtures().join(draft);
    let text = std::fs::read_to_string(from.join("config.json")).unwrap();
    std::fs::write(dir.path().join("config.json"), config(text)).unwrap();
    let kept: Vec<_> = Tensor::read_safetensors(from.join("model.safetensors")).unwrap();
    let kept: Vec<_> =
        kept.iter().filter(|(name, _)| tensors(name)).map(|(name, t)| (name.as_str(), t)).collect();
    Tensor::write_safetensors(&kept, dir.path().join("model.safetensors")).unwrap();
    dir
}

fn load_altered(pair: Pair, dir: &tempfile::TempDir) -> Result<Parts, EngineError> {
    let mut config = serve_config(pair, Some(chain(3)));
    let weights = Weights::Safetensors(PathBuf::from(dir.path()));
    config.spec.as_mut().unwrap().algorithm =
        (pair.algorithm)(DraftModelConfig { path: String::new(), weights, token_map: None });
    load(&config, &mut |_, _| {})
}

#[test]
fn incomplete_heads_are_refused_by_what_is_missing() {
    let check = |pair: Pair, missing: &str, part: &str| {
        let dir = altered(pair.draft, |text| text, |name| name != missing);
        let error = load_altered(pair, &dir).err().expect("incomplete").to_string();
        assert!(error.contains(part), "{error}");
    };
    check(EAGLE3, "d2t", "no d2t");
    check(EAGLE3, "lm_head.weight", "no lm_head.weight");
    check(EAGLE3, "norm.weight", "norm.weight is missing");
    check(EAGLE3, "midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight is missing");
    check(
        NEXTN,
        "model.mtp_layers.0.token_layernorm.weight",
        "model.mtp_layers.0.token_layernorm.weight is missing",
    );
    check(EAGLE, "layers.0.self_attn.k_proj.weight", "layers.0.self_attn.k_proj.weight is missing");
}

/// Published heads of the first EAGLE call themselves plain Llama models.
#[test]
fn both_architecture_names_of_an_eagle_head_load() {
    let dir =
        altered(EAGLE.draft, |text| text.replace("LlamaForCausalLMEagle", "LlamaForCausalLM"), |_| true);
    assert!(load_altered(EAGLE, &dir).is_ok());
}

/// NEXTN without a draft model is EAGLE with the target's own folder.
#[test]
fn a_target_without_a_layer_to_draft_with_is_refused_with_what_to_use_instead() {
    let error = refusal(Pair { draft: "llama-tiny/target", ..EAGLE }, chain(3));
    for part in ["--speculative-algorithm NEXTN", "EAGLE", "--speculative-draft-model-path", "NGRAM"] {
        assert!(error.contains(part), "{error}");
    }
    let mut config = serve_config(NEXTN, Some(chain(3)));
    config.model.weights = Weights::Gguf("some.gguf".into());
    let weights = config.model.weights.clone();
    config.spec.as_mut().unwrap().algorithm =
        SpecAlgorithm::Eagle(DraftModelConfig { path: String::new(), weights, token_map: None });
    let error = load(&config, &mut |_, _| {}).err().expect("no such layer").to_string();
    assert!(error.contains("--speculative-algorithm NEXTN"), "{error}");
}

#[test]
fn other_vocabularies_are_refused_with_both_sizes() {
    let check = |pair: Pair| {
        let text = |text: String| text.replace("\"vocab_size\": 512", "\"vocab_size\": 500");
        let dir = altered(pair.draft, text, |_| true);
        let error = load_altered(pair, &dir).err().expect("another vocabulary").to_string();
        assert!(error.contains("500") && error.contains("512"), "{error}");
    };
    check(EAGLE);
    check(EAGLE3);
    check(STANDALONE);
}

#[test]
fn layers_that_the_target_does_not_have_cannot_be_captured() {
    let dir = altered(EAGLE3.draft, |text| text.replace("      4\n", "      8\n"), |_| true);
    let error = load_altered(EAGLE3, &dir).err().expect("out of range").to_string();
    assert!(error.contains("output of layer 8") && error.contains("layers 0 to 7"), "{error}");
}
