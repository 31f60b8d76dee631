//! What cannot be served is refused with the reason, never guessed at.

use super::*;

fn copy(case: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixtures().join(case).join("target")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

#[track_caller]
fn assert_refused(config: &ServeConfig, parts: &[&str]) {
    let error = TargetModel::load(config, &mut |_, _| {}).err().expect("is refused").to_string();
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

fn edit(dir: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let path = dir.join("config.json");
    let mut value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
}

fn float32(dir: &Path) -> ServeConfig {
    config(Weights::Safetensors(dir.to_owned()), Dtype::Float32)
}

#[test]
fn a_missing_shard_is_named() {
    let dir = copy("llama-tiny-untied-llama3rope-sharded");
    std::fs::remove_file(dir.path().join("model-00002-of-00003.safetensors")).unwrap();
    assert_refused(&float32(dir.path()), &["model-00002-of-00003.safetensors"]);
}

#[test]
fn every_missing_parameter_is_named() {
    let dir = copy("llama-tiny");
    edit(dir.path(), |config| {
        config["num_hidden_layers"] = 5.into();
        config["tie_word_embeddings"] = false.into();
    });
    let parts = ["lm_head.weight is missing", "model.layers.4.self_attn.q_proj.weight is missing"];
    assert_refused(&float32(dir.path()), &parts);
}

#[test]
fn a_parameter_of_another_shape_is_named() {
    let dir = copy("llama-tiny");
    edit(dir.path(), |config| config["intermediate_size"] = 80.into());
    let part = "model.layers.0.mlp.gate_proj.weight has shape [96, 64], not [80, 64]";
    assert_refused(&float32(dir.path()), &[part]);
}

#[test]
fn an_unknown_architecture_lists_the_known_ones() {
    let dir = copy("llama-tiny");
    edit(dir.path(), |config| config["architectures"] = serde_json::json!(["FalconForCausalLM"]));
    let known = [
        "FalconForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    ];
    assert_refused(&float32(dir.path()), &known);
}

#[test]
fn float16_on_a_cpu_is_refused_with_a_hint() {
    let mut config = float32(&fixtures().join("llama-tiny/target"));
    config.model.dtype = Dtype::Float16;
    assert_refused(&config, &["float16", "--dtype bfloat16 or float32"]);
}

#[test]
fn a_pool_smaller_than_a_page_is_refused() {
    let mut config = float32(&fixtures().join("llama-tiny/target"));
    config.schedule.max_total_tokens = Some(10);
    config.schedule.page_size = 16;
    assert_refused(&config, &["KV pool", "--page-size"]);
}

#[test]
fn the_pool_has_whole_pages_and_no_more_than_can_be_used() {
    let mut config = float32(&fixtures().join("llama-tiny/target"));
    config.schedule.page_size = 16;
    config.schedule.max_total_tokens = Some(1000);
    let load = |config: &ServeConfig| TargetModel::load(config, &mut |_, _| {}).unwrap().limits().clone();
    assert_eq!(load(&config).kv_slots, 992);
    config.schedule.max_total_tokens = None;
    let limits = load(&config);
    assert_eq!((limits.kv_slots, limits.context_len, limits.vocab_size), (4 * 512, 512, 512));
    assert_eq!(limits.kv_bytes, 2048 * 4 * 2 * 2 * 16 * 4);
}

#[test]
fn a_token_outside_the_vocabulary_fails_the_step() {
    let mut model = tiny("llama-tiny", Dtype::Float32);
    let error = model.forward(&[chain(&[512], 0, &[0])]).unwrap_err().to_string();
    assert!(error.contains("512"), "{error}");
}

#[test]
fn loading_reports_every_byte() {
    let mut heard = Vec::new();
    let config = float32(&fixtures().join("llama-tiny/target"));
    TargetModel::load(&config, &mut |done, total| heard.push((done, total))).unwrap();
    let total = heard[0].1;
    assert_eq!(heard[0].0, 0);
    assert_eq!(*heard.last().unwrap(), (total, total));
    assert!(heard.is_sorted());
}

#[test]
fn dummy_weights_depend_on_the_seed_alone() {
    let logits = |seed: u64| {
        let dir = fixtures().join("qwen3-tiny/target");
        let config = config(Weights::Dummy { dir, seed }, Dtype::Float32);
        let mut model = TargetModel::load(&config, &mut |_, _| {}).unwrap();
        model.forward(&[chain(&[1, 2, 3], 0, &[0, 1, 2])]).unwrap()
    };
    assert_eq!(logits(1), logits(1));
    assert_ne!(logits(1), logits(2));
    assert!(logits(1).values.iter().all(|value| value.is_finite()));
}
