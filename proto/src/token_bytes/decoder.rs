//! Owns reading the `decoder` of a `tokenizer.json`: which family it is, and what one token's string means.

use std::collections::HashMap;

use serde_json::Value;

use super::{TokenBytesError, TokenKind};

/// The parts of a decoder that this project knows how to follow.
pub(super) struct Decoder {
    pub(super) kind: TokenKind,
    pub(super) strips_leading_space: bool,
    replaces_underline: bool,
    byte_fallback: bool,
}

impl Decoder {
    pub(super) fn from_json(json: &Value) -> Result<Self, TokenBytesError> {
        let mut steps = Vec::new();
        flatten(json, &mut steps);
        if steps.len() == 1 && kind_of(steps[0]) == "ByteLevel" {
            return Ok(Self {
                kind: TokenKind::ByteLevel,
                strips_leading_space: false,
                replaces_underline: false,
                byte_fallback: false,
            });
        }
        Self::sentence_piece(&steps)
    }

    fn sentence_piece(steps: &[&Value]) -> Result<Self, TokenBytesError> {
        let mut decoder = Self {
            kind: TokenKind::SentencePiece,
            strips_leading_space: false,
            replaces_underline: false,
            byte_fallback: false,
        };
        let mut fused = false;
        for &step in steps {
            match kind_of(step) {
                "Replace" if step["pattern"]["String"] == "\u{2581}" && step["content"] == " " => {
                    decoder.replaces_underline = true;
                }
                "ByteFallback" => decoder.byte_fallback = true,
                "Fuse" => fused = true,
                // Before Fuse it would strip every token, not the text.
                "Strip" if fused && is_one_leading_space(step) => decoder.strips_leading_space = true,
                _ => return Err(unknown(step)),
            }
        }
        // Without the replacement this is no SentencePiece vocabulary, whatever else it is.
        if decoder.replaces_underline { Ok(decoder) } else { Err(unknown_all(steps)) }
    }

    pub(super) fn bytes_of(&self, token: &str, alphabet: &HashMap<char, u8>) -> Vec<u8> {
        match self.kind {
            // A string with a character outside the alphabet (an added token, mostly) stands for itself.
            TokenKind::ByteLevel => token
                .chars()
                .map(|c| alphabet.get(&c).copied())
                .collect::<Option<Vec<u8>>>()
                .unwrap_or_else(|| token.as_bytes().to_vec()),
            TokenKind::SentencePiece => match byte_piece(token).filter(|_| self.byte_fallback) {
                Some(byte) => vec![byte],
                None => token.replace('\u{2581}', " ").into_bytes(),
            },
        }
    }
}

/// GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for the characters from
/// U+0100 on, in order.
pub(super) fn byte_level_alphabet() -> HashMap<char, u8> {
    let mut shifted = 0;
    (0..=u8::MAX)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => (char::from(byte), byte),
            _ => {
                let stand_in = char::from_u32(0x100 + shifted).expect("68 characters from U+0100 are valid");
                shifted += 1;
                (stand_in, byte)
            }
        })
        .collect()
}

/// The byte of a piece of the form `<0xNN>`.
fn byte_piece(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

fn flatten<'a>(step: &'a Value, steps: &mut Vec<&'a Value>) {
    match step["decoders"].as_array() {
        Some(inner) if kind_of(step) == "Sequence" => inner.iter().for_each(|step| flatten(step, steps)),
        _ => steps.push(step),
    }
}

fn kind_of(step: &Value) -> &str {
    step["type"].as_str().unwrap_or("none")
}

fn is_one_leading_space(step: &Value) -> bool {
    step["content"] == " " && step["start"] == 1 && step["stop"] == 0
}

fn unknown(step: &Value) -> TokenBytesError {
    let settings = if step.is_object() { format!(" {step}") } else { String::new() };
    TokenBytesError::UnknownDecoder { name: format!("{}{settings}", kind_of(step)) }
}

fn unknown_all(steps: &[&Value]) -> TokenBytesError {
    let names: Vec<_> = steps.iter().map(|step| kind_of(step)).collect();
    TokenBytesError::UnknownDecoder { name: format!("[{}]", names.join(", ")) }
}
