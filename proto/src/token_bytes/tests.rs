//! Tests of the two decoder families and of what is refused.

use serde_json::{Value, json};

use super::*;

fn byte_level() -> Value {
    json!({
        "added_tokens": [
            {"id": 3, "content": "<|end|>", "special": true},
            {"id": 4, "content": "<| tool |>", "special": false},
        ],
        "decoder": {"type": "ByteLevel", "add_prefix_space": true},
        "model": {"type": "BPE", "vocab": {"Ġhi": 0, "Ċ": 1, "âĤ¬": 2, "<|end|>": 3}},
    })
}

fn sentence_piece(decoders: Value) -> Value {
    json!({
        "added_tokens": [{"id": 1, "content": "<s>", "special": true}],
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"vocab": [["<unk>", 0.0], ["<s>", 0.0], ["<0xE2>", 0.0], ["▁▁a", -1.0], ["<0x1>", -2.0]]},
    })
}

fn llama_steps() -> Value {
    json!([
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ])
}

#[test]
fn byte_level_characters_become_bytes() {
    let tokens = TokenBytes::from_json(&byte_level()).unwrap();
    assert_eq!(tokens.kind(), TokenKind::ByteLevel);
    assert_eq!(tokens.bytes(0), b" hi");
    assert_eq!(tokens.bytes(1), b"\n");
    assert_eq!(tokens.bytes(2), "€".as_bytes());
    assert_eq!(tokens.bytes(3), b"<|end|>");
    assert_eq!(
        tokens.bytes(4),
        b"<| tool |>",
        "a space is outside the alphabet: the token stands for itself"
    );
    assert!(tokens.is_special(3) && !tokens.is_special(4) && !tokens.is_special(0));
    assert!(!tokens.leading_space_stripped());
    assert_eq!(tokens.vocab_size(), 5);
}

#[test]
fn the_alphabet_names_each_byte_once() {
    let alphabet = byte_level_alphabet();
    let mut bytes: Vec<u8> = alphabet.values().copied().collect();
    bytes.sort_unstable();
    assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
    assert_eq!(alphabet[&'Ġ'], b' ');
    assert_eq!(alphabet[&'\u{143}'], 0xad);
}

#[test]
fn sentence_piece_strings_become_bytes() {
    let tokens = TokenBytes::from_json(&sentence_piece(llama_steps())).unwrap();
    assert_eq!(tokens.kind(), TokenKind::SentencePiece);
    assert!(tokens.leading_space_stripped());
    assert_eq!(tokens.bytes(2), &[0xe2]);
    assert_eq!(tokens.bytes(3), b"  a");
    assert_eq!(tokens.bytes(4), b"<0x1>", "two digits or it is text");
    assert_eq!(tokens.decode(&[1, 3, 2], true), " a\u{fffd}");
    assert_eq!(tokens.decode(&[1, 3], false), "<s>  a");
}

#[test]
fn byte_pieces_are_text_without_byte_fallback() {
    let steps = json!([{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "Fuse"}]);
    let tokens = TokenBytes::from_json(&sentence_piece(steps)).unwrap();
    assert_eq!(tokens.bytes(2), b"<0xE2>");
    assert!(!tokens.leading_space_stripped());
}

#[test]
fn undefined_ids_are_empty() {
    let tokens = TokenBytes::from_json(&byte_level()).unwrap();
    for id in [5, 6, TokenId::MAX] {
        assert_eq!(tokens.bytes(id), b"");
        assert!(!tokens.is_special(id));
    }
    let gap = [TokenPiece { id: 2, bytes: b"x".to_vec(), special: false }];
    let sparse = TokenBytes::from_pieces(TokenKind::ByteLevel, false, gap);
    assert_eq!((sparse.bytes(0), sparse.bytes(1), sparse.bytes(2)), (&b""[..], &b""[..], &b"x"[..]));
}

#[test]
fn other_decoders_are_refused_by_name() {
    let refused = |decoder: Value| {
        let mut json = byte_level();
        json["decoder"] = decoder;
        TokenBytes::from_json(&json).unwrap_err().to_string()
    };
    assert!(refused(json!({"type": "WordPiece", "prefix": "##"})).contains("decoder WordPiece"));
    assert!(refused(json!({"type": "Metaspace", "replacement": "▁"})).contains("decoder Metaspace"));
    assert!(refused(Value::Null).contains("decoder none"));
    assert!(refused(json!({"type": "Sequence", "decoders": [{"type": "Fuse"}]})).contains("[Fuse]"));
    let mut early_strip = llama_steps();
    early_strip.as_array_mut().unwrap().swap(2, 3);
    let error = TokenBytes::from_json(&sentence_piece(early_strip)).unwrap_err();
    assert!(error.to_string().contains("decoder Strip"), "{error}");
}

#[test]
fn broken_files_are_refused() {
    let with = |key: &str, value: Value| {
        let mut json = byte_level();
        json[key] = value;
        TokenBytes::from_json(&json).unwrap_err().to_string()
    };
    assert!(with("model", json!({"vocab": 7})).contains("model.vocab"));
    assert!(with("model", json!({"vocab": {"a": -1}})).contains("-1 is not a token id"));
    assert!(with("added_tokens", json!([{"id": 1u64 << 40, "content": "x"}])).contains("not a token id"));
    assert!(with("added_tokens", json!([{"id": 1}])).contains("content"));
    assert!(matches!(
        TokenBytes::load(Path::new("/nonexistent")).unwrap_err(),
        TokenBytesError::Io { path, .. } if path.ends_with("tokenizer.json")
    ));
}

#[test]
fn a_text_is_covered_by_its_longest_ordinary_tokens() {
    let tokens = ["a", "ab", "abc", "c", "<|end|>", ""];
    let pieces = tokens.iter().zip(0..).map(|(text, id)| TokenPiece {
        id,
        bytes: text.as_bytes().to_vec(),
        special: text.starts_with('<'),
    });
    let vocabulary = TokenBytes::from_pieces(TokenKind::ByteLevel, false, pieces);
    assert_eq!(vocabulary.cover(b"abcabaac"), Some(vec![2, 1, 0, 0, 3]));
    assert_eq!(vocabulary.cover(b""), Some(vec![]));
    assert_eq!(vocabulary.cover(b"ab<|end|>"), None, "a special token is no text");
}
