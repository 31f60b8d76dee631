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
    check(Pair { algorithm: MULTI_LAYER.algorithm, ..EAGLE }, "no multi-token-prediction layers");
    check(Pair { target: "llama-tiny", ..MULTI_LAYER }, "hidden size 48");
    for algorithm in [SpecAlgorithm::Eagle, SpecAlgorithm::Eagle3, SpecAlgorithm::Standalone] {
        check(Pair { algorithm, ..DFLASH }, "--speculative-algorithm DFLASH");
    }
    check(Pair { algorithm: DFLASH.algorithm, ..EAGLE }, "--speculative-algorithm EAGLE");
    check(Pair { algorithm: DFLASH.algorithm, ..EAGLE3 }, "--speculative-algorithm EAGLE3");
    check(Pair { algorithm: DFLASH.algorithm, ..NEXTN }, "--speculative-algorithm NEXTN");
    check(Pair { algorithm: DFLASH.algorithm, ..STANDALONE }, "--speculative-algorithm STANDALONE");
    check(Pair { target: "llama-tiny", ..DFLASH }, "hidden size 48");
    check(Pair { target: "qwen3-tiny", ..DFLASH }, "a target of 6 layers (num_target_layers)");
}

#[test]
fn a_tree_must_hold_its_width_and_no_more_than_it_tries() {
    for shape in [(3, 4, 4), (1, 4, 6), (0, 1, 2), (2, 1, 4), (3, 1, 1)] {
        let error = refusal(EAGLE, shape);
        assert!(error.contains("--speculative-eagle-topk"), "{shape:?}: {error}");
    }
}

#[test]
fn a_step_needs_a_layer_and_layers_have_no_branches() {
    let error = refusal(MULTI_LAYER, chain(4));
    assert!(error.contains("has 3 multi-token") && error.contains("--speculative-num-steps 3"), "{error}");
    let error = refusal(MULTI_LAYER, (3, 2, 6));
    for part in ["--speculative-eagle-topk", "--enable-multi-layer-eagle"] {
        assert!(error.contains(part), "{error}");
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

/// What a DFLASH folder has, lacks or says beyond what the network is made of is refused by name.
#[test]
fn dflash_models_load_strictly() {
    let refusal = |dir: &tempfile::TempDir| load_altered(DFLASH, dir).err().expect("refused").to_string();
    for missing in ["fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight"] {
        let error = refusal(&altered(DFLASH.draft, |text| text, |name| name != missing));
        assert!(error.contains(&format!("{missing} is missing")), "{error}");
    }
    let says = |key: &str, value: &str, part: &str| {
        let text = |text: String| {
            let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
            config["dflash_config"][key] = serde_json::from_str(value).unwrap();
            config.to_string()
        };
        let error = refusal(&altered(DFLASH.draft, text, |_| true));
        assert!(error.contains(part) && error.contains("--speculative-"), "{error}");
    };
    says("mask_token_id", "null", "no mask_token_id");
    says("mask_token_id", "512", "mask_token_id 512, outside a vocabulary of 512");
    says("target_layer_ids", "[1, 6]", "outputs of layers [1, 6] (target_layer_ids)");
    says("target_layer_ids", "[1, 2, 3]", "fc.weight has shape [48, 96], not [48, 144]");
    says("projector_type", "\"domino\"", "projector_type");
    says("final_logit_softcapping", "30.0", "final_logit_softcapping");
    let sliding = |text: String| text.replacen("full_attention", "sliding_attention", 1);
    let error = refusal(&altered(DFLASH.draft, sliding, |_| true));
    assert!(error.contains("no sliding_window"), "{error}");

    let dir = altered(DFLASH.draft, |text| text, |_| true);
    let file = dir.path().join("model.safetensors");
    let mut tensors = Tensor::read_safetensors(&file).unwrap();
    tensors.push((
        "markov_head.markov_w1.weight".into(),
        Tensor::zeros([4, 4], (tch::Kind::Float, tch::Device::Cpu)),
    ));
    let all: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    Tensor::write_safetensors(&all, &file).unwrap();
    assert!(refusal(&dir).contains("markov_head.markov_w1.weight"));
}

/// Exports of other tools have other names for the two tensors before the layers.
#[test]
fn both_namings_of_a_dflash_model_load() {
    let dir = altered(DFLASH.draft, |text| text, |_| true);
    let file = dir.path().join("model.safetensors");
    let tensors = Tensor::read_safetensors(&file).unwrap();
    let renamed = |name: &str| match name {
        "fc.weight" => "model.encoder.fc.weight".to_owned(),
        "hidden_norm.weight" => "model.encoder.output_norm_enc.weight".to_owned(),
        name => format!("model.{name}"),
    };
    let tensors: Vec<_> = tensors.into_iter().map(|(name, tensor)| (renamed(&name), tensor)).collect();
    let all: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    Tensor::write_safetensors(&all, &file).unwrap();
    assert!(load_altered(DFLASH, &dir).is_ok());
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
