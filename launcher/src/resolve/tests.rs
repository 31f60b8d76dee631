//! Owns the tests of resolving: command lines in, configurations or refusals out.

use candle_core::quantized::gguf_file::{self, Value as Gguf};
use clap::Parser;
use proto::{AcceptanceRule, SpecAlgorithm};
use serde_json::json;

use super::*;

mod drafts;

fn machine() -> Machine {
    Machine { cpus: 4, computes_bfloat16: false, available_memory: 8 << 30 }
}

/// A folder that looks like a small Llama.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, value: serde_json::Value| {
        std::fs::write(dir.path().join(name), value.to_string()).unwrap();
    };
    write(
        "config.json",
        json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 2048, "eos_token_id": 2, "bos_token_id": 1,
        }),
    );
    write("generation_config.json", json!({"eos_token_id": [2, 7], "temperature": 0.6, "do_sample": true}));
    write("tokenizer_config.json", json!({"eos_token": {"content": "<end>"}}));
    write("tokenizer.json", json!({"added_tokens": [{"id": 9, "content": "<end>"}], "model": {"vocab": {}}}));
    std::fs::write(dir.path().join("model.safetensors"), "").unwrap();
    dir
}

fn resolve_in(dir: &Path, flags: &str) -> Result<Resolved> {
    let mut argv = vec!["launcher", "--model-path", dir.to_str().unwrap()];
    argv.extend(flags.split_whitespace());
    resolve(&Args::try_parse_from(argv)?, Path::new("/tmp/run"), 4321, &machine())
}

fn config(flags: &str) -> ServeConfig {
    resolve_in(folder().path(), flags).unwrap().config
}

fn refusal(flags: &str) -> String {
    format!("{:#}", resolve_in(folder().path(), flags).unwrap_err())
}

/// For tests of other modules.
pub(crate) fn dummy_config() -> ServeConfig {
    config("--load-format dummy")
}

#[test]
fn end_tokens_are_the_union_of_three_files() {
    let model = config("").model;
    assert_eq!(model.eos_token_ids, [2, 7, 9]);
    assert_eq!(model.bos_token_id, Some(1));
    assert_eq!(serde_json::Value::Object(model.generation_defaults), json!({"temperature": 0.6}));
}

#[test]
fn defaults_follow_model_and_machine() {
    let Resolved { config, notes } = resolve_in(folder().path(), "").unwrap();
    assert_eq!(config.model.context_length, 2048);
    assert_eq!(config.model.dtype, Dtype::Float32);
    assert_eq!(config.server.port, 4321);
    assert_eq!(config.schedule.num_threads, 4);
    assert_eq!(config.schedule.max_running_requests, 128);
    assert_eq!(config.spec, None);
    assert!(notes.iter().any(|note| note.contains("at most 128 requests")), "{notes:?}");
}

#[test]
fn a_small_pool_bounds_the_running_requests() {
    assert_eq!(config("--max-total-tokens 4096").schedule.max_running_requests, 4);
    assert_eq!(config("--max-total-tokens 10").schedule.max_running_requests, 1);
    assert_eq!(config("--max-total-tokens 4096 --max-running-requests 9").schedule.max_running_requests, 9);
}

#[test]
fn bfloat16_is_chosen_where_it_is_computed() {
    let able = Machine { computes_bfloat16: true, ..machine() };
    assert_eq!(dtype(DtypeArg::Auto, DeviceKind::Cpu, &able), Dtype::Bfloat16);
    assert_eq!(dtype(DtypeArg::Auto, DeviceKind::Cuda, &machine()), Dtype::Bfloat16);
    assert_eq!(dtype(DtypeArg::Float32, DeviceKind::Cpu, &able), Dtype::Float32);
}

/// With the target's own folder as the draft: what it holds is the engine's business.
fn drafting(algorithm: &str, flags: &str) -> Result<Resolved> {
    let dir = folder();
    let path = dir.path().display();
    let flags = format!("--speculative-algorithm {algorithm} --speculative-draft-model-path {path} {flags}");
    resolve_in(dir.path(), &flags)
}

#[test]
fn draft_models_have_sglangs_defaults() {
    let check = |algorithm: &str, flags: &str, expect: (u32, u32, u32)| {
        let spec = drafting(algorithm, flags).unwrap().config.spec.unwrap();
        assert_eq!(spec.algorithm.as_str(), algorithm.to_uppercase());
        assert_eq!((spec.num_steps, spec.eagle_topk, spec.num_draft_tokens), expect, "{algorithm} {flags}");
    };
    check("eagle", "", (5, 4, 8));
    check("Eagle3", "", (5, 4, 8));
    check("standalone", "", (3, 1, 4));
    check("eagle", "--speculative-draft-load-format safetensors", (5, 4, 8));
    check("eagle", "--speculative-num-steps 4", (4, 1, 5));
    check(
        "eagle",
        "--speculative-num-steps 2 --speculative-eagle-topk 4 --speculative-num-draft-tokens 21",
        (2, 4, 21),
    );
}

/// A block is as long as a flag says, else as the draft model's config, else as SGLang's default.
#[test]
fn dflash_blocks_are_sized_by_flag_or_config() {
    let dir = folder();
    let draft = folder();
    let resolve = |flags: &str| {
        let path = draft.path().display();
        resolve_in(
            dir.path(),
            &format!("--speculative-algorithm dflash --speculative-draft-model-path {path} {flags}"),
        )
    };
    let check = |flags: &str, block: u32| {
        let Resolved { config, notes } = resolve(flags).unwrap();
        let spec = config.spec.unwrap();
        assert_eq!((spec.num_steps, spec.eagle_topk, spec.num_draft_tokens), (1, 1, block), "{flags}");
        assert_eq!(config.server_args["speculative_algorithm"], "DFLASH");
        assert_eq!(config.server_args["speculative_dflash_block_size"], block);
        notes
    };
    check("", 16);
    let file = draft.path().join("config.json");
    let mut text: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    text["block_size"] = json!(10);
    std::fs::write(&file, text.to_string()).unwrap();
    check("", 10);
    text["dflash_config"] = json!({"block_size": 8});
    std::fs::write(&file, text.to_string()).unwrap();
    check("--speculative-num-steps 1", 8);
    check("--speculative-num-draft-tokens 8 --speculative-dflash-block-size 8", 8);
    let notes = check("--speculative-dflash-block-size 4 --speculative-dflash-fixed-block", 4);
    assert!(notes.iter().any(|note| note.contains("made for blocks of 8 tokens")), "{notes:?}");
    let refused = |flags: &str, part: &str| {
        let said = format!("{:#}", resolve(flags).unwrap_err());
        assert!(said.contains(part), "{said}");
    };
    refused("--speculative-dflash-block-size 1", "must be 2 to");
    refused("--speculative-eagle-topk 4", "--speculative-eagle-topk has no effect with DFLASH");
    refused("--speculative-num-steps 3", "--speculative-num-steps has no effect with DFLASH");
    refused("--speculative-num-draft-tokens 4 --speculative-dflash-block-size 8", "two names for one number");
    refused("--speculative-token-map nowhere.pt", "nowhere.pt is no file");
    refused("--speculative-use-rejection-sampling", "needs --speculative-algorithm EAGLE or EAGLE3");
}

/// As in SGLang, NEXTN is EAGLE by another name: with the model's own layer where no draft model is named.
#[test]
fn nextn_is_eagle_with_the_models_own_layer() {
    let dir = folder();
    let Resolved { config, .. } = resolve_in(dir.path(), "--speculative-algorithm nextn").unwrap();
    let spec = config.spec.unwrap();
    let SpecAlgorithm::Eagle(draft) = &spec.algorithm else { panic!("{spec:?}") };
    assert_eq!(draft.weights, config.model.weights);
    assert_eq!((spec.num_steps, spec.eagle_topk, spec.num_draft_tokens), (5, 4, 8));
    assert_eq!(config.server_args["speculative_algorithm"], "EAGLE");
    assert_eq!(config.server_args["speculative_draft_model_path"], dir.path().to_str().unwrap());

    // A layer per step is a variant of it, and has one branch.
    let flags = "--speculative-algorithm nextn --enable-multi-layer-eagle";
    let Resolved { config, .. } = resolve_in(dir.path(), flags).unwrap();
    assert_eq!(config.server_args["speculative_algorithm"], "EAGLE");
    assert_eq!(config.server_args["enable_multi_layer_eagle"], true);
    let spec = config.spec.unwrap();
    assert!(matches!(spec.algorithm, SpecAlgorithm::MultiLayerEagle(_)));
    assert_eq!((spec.num_steps, spec.eagle_topk, spec.num_draft_tokens), (3, 1, 4));

    let other = folder();
    let path = other.path().display();
    let flags = format!("--speculative-algorithm NEXTN --speculative-draft-model-path {path}");
    let spec = resolve_in(dir.path(), &flags).unwrap().config.spec.unwrap();
    assert_eq!(spec.algorithm.draft_model().unwrap().weights, Weights::Safetensors(other.path().to_owned()));
}

#[test]
fn a_standalone_draft_of_another_tokenizer_is_refused_by_the_first_token() {
    let (target, draft) = (folder(), folder());
    let write = |dir: &tempfile::TempDir, vocab: serde_json::Value| {
        let added = json!([{"id": 9, "content": "<end>"}]);
        let text = json!({"added_tokens": added, "model": {"vocab": vocab}}).to_string();
        std::fs::write(dir.path().join("tokenizer.json"), text).unwrap();
    };
    let path = draft.path().display();
    let standalone = format!("--speculative-algorithm STANDALONE --speculative-draft-model-path {path}");
    write(&target, json!({"a": 0, "b": 1, "c": 2, "d": 4}));
    write(&draft, json!({"a": 0, "c": 1, "b": 2, "padding": 3}));
    let said = format!("{:#}", resolve_in(target.path(), &standalone).unwrap_err());
    assert!(said.contains(r#"token 1 is "c" there and "b" here"#), "{said}");
    assert!(said.contains("--speculative-draft-model-path"), "{said}");
    // Heads share the target's tokens, whatever lies beside them; a list by id is the same vocabulary, too.
    resolve_in(target.path(), &standalone.replace("STANDALONE", "EAGLE")).unwrap();
    write(&draft, json!([["a", 0.0], ["b", -1.0], ["c", -2.0], ["padding", 0.0]]));
    resolve_in(target.path(), &standalone).unwrap();
    write(&draft, json!([["a", 0.0], ["b", -1.0], ["c", -2.0], ["padding", 0.0], ["e", 0.0]]));
    assert!(resolve_in(target.path(), &standalone).is_err());

    let gguf = |tokens: [&str; 4]| {
        let file = draft.path().join("draft.gguf");
        let tokens = Gguf::Array(tokens.map(|token| Gguf::String(token.into())).to_vec());
        gguf_file::write(
            &mut std::fs::File::create(&file).unwrap(),
            &[("tokenizer.ggml.tokens", &tokens)],
            &[],
        )
        .unwrap();
        let named =
            format!("--speculative-algorithm STANDALONE --speculative-draft-model-path {}", file.display());
        resolve_in(target.path(), &named)
    };
    gguf(["a", "b", "c", "[PAD3]"]).unwrap();
    let said = format!("{:#}", gguf(["a", "b", "d", "c"]).unwrap_err());
    assert!(said.contains(r#"token 2 is "d" there and "c" here"#), "{said}");
}

#[test]
fn a_token_map_goes_with_eagle_alone() {
    let map = tempfile::NamedTempFile::new().unwrap();
    let flags = format!("--speculative-token-map {}", map.path().display());
    let config = drafting("EAGLE", &flags).unwrap().config;
    assert_eq!(config.server_args["speculative_token_map"], map.path().to_str().unwrap());
    assert_eq!(config.spec.unwrap().algorithm.draft_model().unwrap().token_map.as_deref(), Some(map.path()));
    let check = |algorithm: &str, flags: &str, part: &str| {
        let said = format!("{:#}", drafting(algorithm, flags).unwrap_err());
        assert!(said.contains("--speculative-token-map") && said.contains(part), "{said}");
    };
    check("EAGLE3", &flags, "d2t");
    check("STANDALONE", &flags, "has no effect with STANDALONE");
    check("EAGLE", "--speculative-token-map nowhere.pt", "nowhere.pt is no file");
}

#[test]
fn a_chain_has_the_width_of_its_depth_and_says_so() {
    let flags = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 9";
    let Resolved { config, notes } = drafting("EAGLE", flags).unwrap();
    assert_eq!(config.spec.unwrap().num_draft_tokens, 4);
    assert_eq!(config.server_args["speculative_num_draft_tokens"], 4);
    assert_eq!(config.server_args["speculative_algorithm"], "EAGLE");
    assert!(
        notes.iter().any(|note| note.contains("--speculative-num-draft-tokens is 4, not 9")),
        "{notes:?}"
    );
}

#[test]
fn trees_that_cannot_be_are_refused() {
    let check = |flags: &str, part: &str| {
        let error = format!("{:#}", drafting("EAGLE", flags).unwrap_err());
        assert!(error.contains(part), "{flags:?} gave {error:?}");
    };
    let steps = "--speculative-num-steps 2 --speculative-eagle-topk 4 --speculative-num-draft-tokens";
    check(&format!("{steps} 22"), "at most 21");
    check(&format!("{steps} 4"), "--speculative-eagle-topk 4 must be less than");
    check("--speculative-num-steps 2 --speculative-eagle-topk 4", "needs --speculative-num-draft-tokens");
    check("--speculative-eagle-topk 4", "need --speculative-num-steps too");
    check("--speculative-num-steps 0", "must be at least 1");
    check("--speculative-ngram-capacity 100", "has no effect with EAGLE");
}

#[test]
fn rules_of_acceptance_are_chosen_by_sglangs_flags() {
    let check = |flags: &str, expect: AcceptanceRule, shown: (bool, f64, f64)| {
        let Resolved { config, notes } = drafting("EAGLE3", flags).unwrap();
        assert_eq!(config.spec.unwrap().acceptance, expect, "{flags}");
        let args = config.server_args;
        assert_eq!(args["speculative_use_rejection_sampling"], shown.0);
        assert_eq!(args["speculative_accept_threshold_single"], shown.1);
        assert_eq!(args["speculative_accept_threshold_acc"], shown.2);
        let told = notes.iter().any(|note| note.contains("sampled answers"));
        assert_eq!(told, expect != AcceptanceRule::Equality, "{notes:?}");
    };
    let ones = "--speculative-accept-threshold-single 1 --speculative-accept-threshold-acc 1.0";
    check("", AcceptanceRule::Equality, (false, 1.0, 1.0));
    check(ones, AcceptanceRule::Equality, (false, 1.0, 1.0));
    let chain = "--speculative-num-steps 3 --speculative-use-rejection-sampling";
    check(chain, AcceptanceRule::Rejection, (true, 1.0, 1.0));
    check(&format!("{chain} {ones}"), AcceptanceRule::Rejection, (true, 1.0, 1.0));
    let low = "--speculative-accept-threshold-single 0.3";
    check(low, AcceptanceRule::Thresholds { single: 0.3, acc: 1.0 }, (false, 0.3, 1.0));
    let low = "--speculative-accept-threshold-acc 0";
    check(low, AcceptanceRule::Thresholds { single: 1.0, acc: 0.0 }, (false, 1.0, 0.0));
}

#[test]
fn rules_of_acceptance_that_sglang_refuses_are_refused() {
    let check = |algorithm: &str, flags: &str, part: &str| {
        let error = format!("{:#}", drafting(algorithm, flags).unwrap_err());
        assert!(error.contains(part), "{algorithm} {flags}: {error}");
    };
    let rejection = "--speculative-use-rejection-sampling";
    check("EAGLE", rejection, "needs --speculative-eagle-topk 1, not 4");
    check("STANDALONE", rejection, "needs --speculative-algorithm EAGLE or EAGLE3");
    let both = format!("--speculative-num-steps 3 {rejection} --speculative-accept-threshold-acc 0.9");
    check("EAGLE", &both, "two rules for one question");
    for (flags, part) in [
        ("--speculative-accept-threshold-single 1.5", "-single 1.5 must be between 0 and 1"),
        ("--speculative-accept-threshold-acc=-1", "-acc -1 must be between 0 and 1"),
        ("--speculative-accept-threshold-acc NaN", "-acc NaN must be between 0 and 1"),
    ] {
        check("STANDALONE", flags, part);
        let alone = refusal(flags);
        assert!(alone.contains("needs --speculative-algorithm"), "{alone}");
    }
    assert!(refusal(rejection).contains("needs --speculative-algorithm"));
    let ngram = refusal(&format!("--speculative-algorithm NGRAM {rejection}"));
    assert!(ngram.contains("has no effect with NGRAM"), "{ngram}");
    let ngram = config("--speculative-algorithm NGRAM --speculative-accept-threshold-single 0.5");
    let expect = AcceptanceRule::Thresholds { single: 0.5, acc: 1.0 };
    assert_eq!(ngram.spec.unwrap().acceptance, expect, "thresholds need no law of the draft");
}

#[test]
fn ngram_has_sglangs_defaults() {
    let spec = config("--speculative-algorithm ngram").spec.unwrap();
    let SpecAlgorithm::Ngram(ngram) = &spec.algorithm else { panic!("{spec:?}") };
    assert_eq!((spec.num_steps, spec.eagle_topk, spec.num_draft_tokens), (1, 10, 12));
    assert_eq!((ngram.min_bfs_breadth, ngram.max_bfs_breadth, ngram.max_trie_depth), (1, 10, 18));
    assert_eq!(ngram.capacity, 10_000_000);
}

#[test]
fn impossible_combinations_are_refused_with_the_relation() {
    for (flags, expected) in [
        ("--context-length 4096", "--context-length 4096 must be at most 2048"),
        (
            "--page-size 16 --chunked-prefill-size 100",
            "--chunked-prefill-size 100 must be a multiple of --page-size 16",
        ),
        ("--page-size 64 --max-total-tokens 32", "--max-total-tokens 32 must be at least --page-size 64"),
        ("--quantization gguf", "--quantization gguf needs a .gguf file as --model-path"),
        ("--quantization fp8", "--quantization fp8 is not supported: give a quantised GGUF file"),
        ("--page-size 0", "--page-size must be at least 1"),
        ("--mem-fraction-static 1.5", "--mem-fraction-static 1.5 must be between 0 and 1"),
        ("--num-threads 0", "--num-threads must be at least 1"),
        ("--stream-interval 0", "--stream-interval must be at least 1"),
        ("--log-level loud", "--log-level loud is none of error"),
        ("--speculative-num-draft-tokens 4", "--speculative-num-draft-tokens needs --speculative-algorithm"),
        ("--speculative-algorithm DFLASH", "needs --speculative-draft-model-path"),
        ("--speculative-algorithm UNO", "UNO is not planned"),
        ("--enable-multi-layer-eagle", "--enable-multi-layer-eagle needs --speculative-algorithm"),
        ("--speculative-algorithm NGRAM --enable-multi-layer-eagle", "EAGLE or NEXTN, not NGRAM"),
        ("--speculative-algorithm EAGLE3 --enable-multi-layer-eagle", "EAGLE or NEXTN, not EAGLE3"),
        (
            "--speculative-algorithm NEXTN --enable-multi-layer-eagle --speculative-num-steps 2 \
             --speculative-eagle-topk 2 --speculative-num-draft-tokens 4",
            "--speculative-eagle-topk 2 must be 1 with --enable-multi-layer-eagle",
        ),
        ("--speculative-algorithm NGRAM --speculative-dflash-block-size 8", "has no effect with NGRAM"),
        ("--speculative-dflash-fixed-block", "needs --speculative-algorithm DFLASH"),
        ("--speculative-algorithm EAGLE3", "needs --speculative-draft-model-path"),
        ("--speculative-token-map a.pt", "--speculative-token-map needs --speculative-algorithm"),
        (
            "--speculative-algorithm NGRAM --speculative-token-map a.pt",
            "--speculative-token-map has no effect with --speculative-algorithm NGRAM",
        ),
        (
            "--speculative-algorithm NEXTN --speculative-draft-load-format auto",
            "--speculative-draft-load-format needs --speculative-draft-model-path",
        ),
        (
            "--speculative-algorithm EAGLE --speculative-draft-model-path . --speculative-draft-load-format gguf",
            "gguf is for STANDALONE",
        ),
        (
            "--speculative-algorithm EAGLE --speculative-draft-model-path . --speculative-draft-load-format dummy",
            "--speculative-draft-load-format dummy is not supported",
        ),
        ("--speculative-draft-model-path .", "--speculative-draft-model-path needs --speculative-algorithm"),
        (
            "--speculative-algorithm NGRAM --speculative-draft-model-path .",
            "--speculative-draft-model-path has no effect with --speculative-algorithm NGRAM",
        ),
        (
            "--speculative-algorithm eagle --speculative-draft-model-path nowhere",
            "--speculative-draft-model-path nowhere does not exist",
        ),
        ("--speculative-algorithm magic", "MAGIC is unknown"),
        ("--speculative-algorithm NGRAM --speculative-num-draft-tokens 1", "must be 2 to"),
        (
            "--speculative-algorithm NGRAM --speculative-num-draft-tokens 4 --speculative-num-steps 4",
            "--speculative-num-steps 4 must be less than --speculative-num-draft-tokens 4",
        ),
        (
            "--speculative-algorithm NGRAM --speculative-ngram-min-bfs-breadth 11",
            "--speculative-ngram-min-bfs-breadth 11 must be at most --speculative-ngram-max-bfs-breadth 10",
        ),
        ("--load-format gguf", "nor a single .gguf"),
    ] {
        let said = refusal(flags);
        assert!(said.contains(expected), "{flags}: {said}");
    }
}

#[test]
fn a_folder_without_tokenizer_is_refused_with_the_way_out() {
    let dir = folder();
    std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    let said = format!("{:#}", resolve_in(dir.path(), "").unwrap_err());
    assert!(said.contains("--tokenizer-path") && said.contains("--skip-tokenizer-init"), "{said}");
    assert_eq!(resolve_in(dir.path(), "--skip-tokenizer-init").unwrap().config.model.tokenizer_dir, None);
}

#[test]
fn server_args_hold_every_resolved_flag_by_sglangs_name() {
    use clap::CommandFactory;
    let args = config("--speculative-algorithm NGRAM --api-key secret").server_args;
    for argument in Args::command().get_arguments() {
        let Some(long) = argument.get_long() else { continue };
        let name = long.replace('-', "_");
        assert!(args.contains_key(&name) || ["help", "version"].contains(&long), "{name} is missing");
    }
    assert_eq!(args["speculative_num_draft_tokens"], 12);
    assert!(!serde_json::to_string(&args).unwrap().contains("secret"));
}

#[test]
fn the_config_file_survives_the_trip_to_the_children() {
    let run = tempfile::tempdir().unwrap();
    let config = ServeConfig { run_dir: run.path().to_owned(), ..config("--speculative-algorithm NGRAM") };
    config.store().unwrap();
    assert_eq!(ServeConfig::load(&config.path()).unwrap(), config);
}

#[test]
fn a_gguf_file_tells_the_same_facts_alone_or_as_the_only_one_of_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.gguf");
    let tokens = ["a", "b", "c", "<end_of_turn>", "<|im_end|>"].map(|token| Gguf::String(token.into()));
    // The last one is plain text that looks like a control token.
    let types = [1, 3, 3, 3, 1].map(Gguf::I32);
    let metadata = [
        ("general.architecture", Gguf::String("qwen2".into())),
        ("qwen2.context_length", Gguf::U32(1024)),
        ("qwen2.block_count", Gguf::U32(2)),
        ("qwen2.embedding_length", Gguf::U32(64)),
        ("qwen2.attention.head_count", Gguf::U32(4)),
        ("qwen2.attention.head_count_kv", Gguf::U32(1)),
        ("tokenizer.ggml.tokens", Gguf::Array(tokens.to_vec())),
        ("tokenizer.ggml.token_type", Gguf::Array(types.to_vec())),
        ("tokenizer.ggml.eos_token_id", Gguf::U32(2)),
        ("tokenizer.ggml.eot_token_id", Gguf::U32(1)),
    ];
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    gguf_file::write(&mut std::fs::File::create(&file).unwrap(), &metadata, &[]).unwrap();

    let alone = resolve_in(&file, "--skip-tokenizer-init").unwrap().config.model;
    let inside = resolve_in(dir.path(), "--skip-tokenizer-init").unwrap().config.model;
    assert_eq!(alone.weights, Weights::Gguf(file));
    assert_eq!(ModelConfig { model_path: alone.model_path.clone(), ..inside }, alone);
    assert_eq!(alone.architectures, ["Qwen2ForCausalLM"]);
    assert_eq!((alone.vocab_size, alone.context_length), (5, 1024));
    assert_eq!(alone.eos_token_ids, [1, 2, 3]);

    let quantised = resolve_in(dir.path(), "--skip-tokenizer-init --quantization gguf").unwrap().config;
    assert_eq!(quantised.server_args["quantization"], "gguf");
    let decoded = resolve_in(dir.path(), "--skip-tokenizer-init --quantization none").unwrap().config;
    for config in [config(""), decoded] {
        assert_eq!(config.server_args["quantization"], serde_json::Value::Null);
    }

    std::fs::copy(dir.path().join("model.gguf"), dir.path().join("second.gguf")).unwrap();
    let said = format!("{:#}", resolve_in(dir.path(), "--skip-tokenizer-init").unwrap_err());
    assert!(said.contains("name the file itself"), "{said}");
}
