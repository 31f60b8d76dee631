//! Tests against the published tokenizers: files written from their vocabularies, and the default model's file.

use std::path::PathBuf;

use candle_core::quantized::gguf_file::{self, Value as Entry};
use tokenizers::Tokenizer as Published;

use super::*;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn golden(name: &str) -> Value {
    let path = root().join("tests/fixtures/golden").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn texts<'a>(texts: impl IntoIterator<Item = &'a str>) -> Entry {
    Entry::Array(texts.into_iter().map(|text| Entry::String(text.to_owned())).collect())
}

/// The vocabulary of a `tokenizer.json`, in order of the ids.
fn tokens(json: &Value) -> Vec<&str> {
    let vocab = json["model"]["vocab"].as_object().unwrap();
    let mut tokens = vec![""; vocab.len()];
    vocab.iter().for_each(|(token, id)| tokens[id.as_u64().unwrap() as usize] = token);
    tokens
}

/// Token types as a converter writes them: control for the special tokens, bytes for byte pieces.
fn token_types(json: &Value) -> Entry {
    let added = json["added_tokens"].as_array().unwrap();
    let kind = |token: &&str| match added.iter().find(|entry| entry["content"] == **token) {
        Some(_) if *token == "<unk>" => 2,
        Some(_) => 3,
        None if token.len() == 6 && token.starts_with("<0x") => 6,
        None => 1,
    };
    Entry::Array(tokens(json).iter().map(kind).map(Entry::I32).collect())
}

/// The two files that are rebuilt from this metadata.
fn rebuild(metadata: &[(&str, Entry)]) -> Result<(Value, Value)> {
    let dir = tempfile::tempdir().unwrap();
    let gguf = dir.path().join("model.gguf");
    let entries: Vec<_> = metadata.iter().map(|(name, entry)| (*name, entry)).collect();
    gguf_file::write(&mut File::create(&gguf).unwrap(), &entries, &[]).unwrap();
    rebuild_file(&gguf)
}

fn rebuild_file(gguf: &Path) -> Result<(Value, Value)> {
    let dir = tempfile::tempdir().unwrap();
    let dest = dir.path().join("tokenizer");
    write_tokenizer(gguf, &dest)?;
    let read = |name: &str| serde_json::from_slice(&std::fs::read(dest.join(name)).unwrap()).unwrap();
    Ok((read("tokenizer.json"), read("tokenizer_config.json")))
}

fn refusal(metadata: &[(&str, Entry)]) -> String {
    format!("{:#}", rebuild(metadata).expect_err("accepted"))
}

fn smollm2(json: &Value) -> Vec<(&'static str, Entry)> {
    let merges = json["model"]["merges"].as_array().unwrap();
    vec![
        ("general.architecture", Entry::String("llama".into())),
        ("llama.context_length", Entry::U32(8192)),
        ("tokenizer.ggml.model", Entry::String("gpt2".into())),
        ("tokenizer.ggml.pre", Entry::String("smollm".into())),
        ("tokenizer.ggml.tokens", texts(tokens(json))),
        ("tokenizer.ggml.token_type", token_types(json)),
        ("tokenizer.ggml.merges", texts(merges.iter().map(|merge| merge.as_str().unwrap()))),
        ("tokenizer.ggml.bos_token_id", Entry::U32(1)),
        ("tokenizer.ggml.eos_token_id", Entry::U32(2)),
        ("tokenizer.ggml.unknown_token_id", Entry::U32(0)),
        ("tokenizer.ggml.padding_token_id", Entry::U32(2)),
        ("tokenizer.ggml.add_bos_token", Entry::Bool(false)),
    ]
}

fn small() -> Vec<(&'static str, Entry)> {
    vec![
        ("tokenizer.ggml.model", Entry::String("gpt2".into())),
        ("tokenizer.ggml.tokens", texts(["a", "b", "ab", "<s>", "</s>", "<tool>"])),
        ("tokenizer.ggml.token_type", Entry::Array([1, 1, 1, 3, 3, 4].map(Entry::I32).into())),
        ("tokenizer.ggml.merges", texts(["a b"])),
        ("tokenizer.ggml.bos_token_id", Entry::U32(3)),
        ("tokenizer.ggml.eos_token_id", Entry::U32(4)),
    ]
}

fn with(
    mut metadata: Vec<(&'static str, Entry)>,
    name: &'static str,
    entry: Entry,
) -> Vec<(&'static str, Entry)> {
    metadata.retain(|(other, _)| *other != name);
    metadata.push((name, entry));
    metadata
}

#[track_caller]
fn check_encodings(tokenizer: &Value, checks: &Value) {
    let tokenizer: Published = serde_json::from_value(tokenizer.clone()).unwrap();
    let checks = checks.as_array().unwrap();
    assert!(!checks.is_empty());
    for check in checks {
        let text = check["text"].as_str().unwrap();
        let encoding = tokenizer.encode(text, true).unwrap();
        assert_eq!(json!(encoding.get_ids()), check["ids"], "{text:?}");
    }
}

#[test]
fn a_byte_level_tokenizer_is_the_published_one() {
    let published = golden("detok/smollm2/tokenizer.json");
    let (tokenizer, config) = rebuild(&smollm2(&published)).unwrap();
    assert_eq!(tokenizer, published);
    check_encodings(&tokenizer, &golden("detok/smollm2/golden.json")["encode_checks"]);
    let published = golden("detok/smollm2/tokenizer_config.json");
    for key in
        ["bos_token", "eos_token", "pad_token", "unk_token", "model_max_length", "added_tokens_decoder"]
    {
        assert_eq!(config[key], published[key], "{key}");
    }
}

#[test]
fn the_default_models_file_gives_its_published_tokenizer() {
    let gguf = root().join("models/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !gguf.exists() {
        eprintln!("skipped: the default model is not here (make model)");
        return;
    }
    let (tokenizer, config) = rebuild_file(&gguf).unwrap();
    assert_eq!(tokenizer, golden("detok/smollm2/tokenizer.json"));
    let published = golden("detok/smollm2/tokenizer_config.json");
    for key in ["chat_template", "bos_token", "eos_token", "pad_token", "unk_token", "add_bos_token"] {
        assert_eq!(config[key], published[key], "{key}");
    }
    let prompts = golden("smollm2-greedy.json")["prompts"].clone();
    let checks = prompts.as_array().unwrap().iter();
    let checks = checks.map(|prompt| json!({"text": prompt["prompt_text"], "ids": prompt["prompt_ids"]}));
    check_encodings(&tokenizer, &checks.collect());
}

/// A vocabulary of SentencePiece's kind in full size: user-defined runs of spaces, no space before a text.
#[test]
fn gemmas_file_encodes_like_the_published_tokenizer() {
    let gguf = root().join("models/gemma-3-270m/gemma-3-270m-q4_k_m.gguf");
    if !gguf.exists() {
        eprintln!("skipped: Gemma is not here (scripts/gemma.sh models/gemma-3-270m)");
        return;
    }
    check_encodings(&rebuild_file(&gguf).unwrap().0, &golden("gemma3-270m.json")["encodings"]);
}

/// The golden SentencePiece vocabulary with the scores that its merges stand for.
fn sentence_piece(json: &Value) -> Vec<(&'static str, Entry)> {
    let merges = json["model"]["merges"].as_array().unwrap();
    let rank = |token: &str| {
        merges.iter().position(|merge| {
            let [left, right] = [0, 1].map(|part| merge[part].as_str().unwrap());
            token.strip_prefix(left) == Some(right)
        })
    };
    let scores =
        tokens(json).into_iter().map(|token| Entry::F32(rank(token).map_or(0.0, |rank| -(rank as f32))));
    vec![
        ("tokenizer.ggml.model", Entry::String("llama".into())),
        ("tokenizer.ggml.tokens", texts(tokens(json))),
        ("tokenizer.ggml.token_type", token_types(json)),
        ("tokenizer.ggml.scores", Entry::Array(scores.collect())),
        ("tokenizer.ggml.bos_token_id", Entry::U32(1)),
        ("tokenizer.ggml.eos_token_id", Entry::U32(2)),
        ("tokenizer.ggml.unknown_token_id", Entry::U32(0)),
    ]
}

#[test]
fn a_sentence_piece_tokenizer_encodes_like_the_published_one() {
    let published = golden("detok/spm_legacy/tokenizer.json");
    let (tokenizer, config) = rebuild(&sentence_piece(&published)).unwrap();
    for key in ["added_tokens", "normalizer", "pre_tokenizer", "decoder"] {
        assert_eq!(tokenizer[key], published[key], "{key}");
    }
    assert_eq!(tokenizer["model"]["vocab"], published["model"]["vocab"]);
    assert_eq!(config["bos_token"], "<s>");
    check_encodings(&tokenizer, &golden("detok/spm_legacy/golden.json")["encode_checks"]);
}

#[test]
fn merges_are_ordered_by_the_score_of_what_they_make() {
    let tokens = ["a", "b", "ab", "aba", "<x>"].map(str::to_owned);
    let types =
        [TokenType::Normal, TokenType::Normal, TokenType::Normal, TokenType::Normal, TokenType::Control];
    let merges = sentence_piece::merges(&tokens, &types, &[-9.0, -9.0, -2.0, -1.0, 0.0]);
    assert_eq!(merges, [["ab", "a"], ["a", "b"]].map(|pair| pair.map(str::to_owned)));
}

#[test]
fn numbers_are_split_as_the_pre_tokenizer_says() {
    let published = golden("detok/smollm2/tokenizer.json");
    let ids = |pre: &'static str| {
        let metadata = with(smollm2(&published), "tokenizer.ggml.pre", Entry::String(pre.into()));
        let tokenizer: Published = serde_json::from_value(rebuild(&metadata).unwrap().0).unwrap();
        tokenizer.encode("12 a", false).unwrap().get_tokens().to_vec()
    };
    assert_eq!(ids("smollm"), ["1", "2", "Ġa"]);
    for pre in ["gpt-2", "llama-bpe", "qwen2", "gpt-4o", "tekken", "command-r"] {
        assert!(!ids(pre).is_empty(), "{pre} does not load");
    }
}

#[test]
fn unknown_names_are_refused_with_the_known_ones() {
    let pre = with(small(), "tokenizer.ggml.pre", Entry::String("viking".into()));
    let message = refusal(&pre);
    assert!(message.contains("viking") && message.contains("smollm, starcoder"), "{message}");
    let model = with(small(), "tokenizer.ggml.model", Entry::String("t5".into()));
    assert!(refusal(&model).contains("\"t5\""));
    assert!(refusal(&small()[1..]).contains("carries no tokenizer"));
}

#[test]
fn broken_metadata_is_named() {
    let cases = [
        ("tokenizer.ggml.tokens", Entry::U32(7), "tokenizer.ggml.tokens has an unexpected type"),
        ("tokenizer.ggml.token_type", Entry::Array(vec![Entry::I32(1)]), "1 token types for 6 tokens"),
        ("tokenizer.ggml.token_type", Entry::Array([1, 1, 1, 1, 1, 9].map(Entry::I32).into()), "has 9"),
        ("tokenizer.ggml.bos_token_id", Entry::U32(6), "bos_token_id is 6"),
        ("tokenizer.ggml.merges", texts(["a b c"]), "\"a b c\""),
        ("tokenizer.ggml.add_bos_token", Entry::U32(1), "add_bos_token has an unexpected type"),
    ];
    for (name, entry, expect) in cases {
        let message = refusal(&with(small(), name, entry));
        assert!(message.contains(expect), "{message}");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("no.gguf");
    std::fs::write(&path, "no").unwrap();
    assert!(format!("{:#}", rebuild_file(&path).unwrap_err()).contains("is not a GGUF file"));
}

#[test]
fn user_defined_tokens_are_matched_but_not_hidden() {
    let (tokenizer, _) = rebuild(&small()).unwrap();
    let special = tokenizer["added_tokens"].as_array().unwrap().iter();
    let special: Vec<_> =
        special.map(|token| (token["content"].as_str().unwrap(), token["special"] == true)).collect();
    assert_eq!(special, [("<s>", true), ("</s>", true), ("<tool>", false)]);
}

#[test]
fn begin_and_end_tokens_are_added_where_the_file_says() {
    let ids = |metadata: Vec<(&'static str, Entry)>| {
        let tokenizer: Published = serde_json::from_value(rebuild(&metadata).unwrap().0).unwrap();
        tokenizer.encode("ab", true).unwrap().get_ids().to_vec()
    };
    assert_eq!(ids(small()), [2]);
    let bos = with(small(), "tokenizer.ggml.add_bos_token", Entry::Bool(true));
    assert_eq!(ids(bos.clone()), [3, 2]);
    assert_eq!(ids(with(bos, "tokenizer.ggml.add_eos_token", Entry::Bool(true))), [3, 2, 4]);
    let llama3 = with(small(), "tokenizer.ggml.pre", Entry::String("llama-bpe".into()));
    assert_eq!(ids(llama3), [3, 2], "this family adds it by default");
}

#[test]
fn several_chat_templates_become_a_list() {
    let one = with(small(), "tokenizer.chat_template", Entry::String("plain".into()));
    assert_eq!(rebuild(&one).unwrap().1["chat_template"], "plain");
    let several = with(
        with(one, "tokenizer.chat_templates", texts(["tool_use"])),
        "tokenizer.chat_template.tool_use",
        Entry::String("tools".into()),
    );
    let expect = json!([
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]);
    assert_eq!(rebuild(&several).unwrap().1["chat_template"], expect);
    assert_eq!(rebuild(&small()).unwrap().1.get("chat_template"), None);
}
