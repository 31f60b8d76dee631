//! Owns the bytes that each token id stands for, read from `tokenizer.json`. Whoever turns ids into text joins
//! these bytes and decodes them as UTF-8; a process that only needs that needs no tokenizer.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::ids::TokenId;

mod decoder;
#[cfg(test)]
mod tests;

use decoder::{Decoder, byte_level_alphabet};

/// How the vocabulary's strings encode bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// One character of the GPT-2 alphabet per byte.
    ByteLevel,
    /// Plain text with U+2581 for a space; `<0xNN>` is one byte where the tokenizer falls back to bytes.
    SentencePiece,
}

/// The bytes of every token of one vocabulary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenBytes {
    kind: TokenKind,
    leading_space_stripped: bool,
    bytes: Vec<u8>,
    /// Token `id` is `bytes[ends[id]..ends[id + 1]]`.
    ends: Vec<u32>,
    special: Vec<bool>,
}

/// One token of a vocabulary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenPiece {
    pub id: TokenId,
    pub bytes: Vec<u8>,
    pub special: bool,
}

/// Why a tokenizer's vocabulary cannot be turned into bytes.
#[derive(Debug, thiserror::Error)]
pub enum TokenBytesError {
    #[error("cannot read {path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{path} is not JSON: {source}")]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("tokenizer.json: {what}")]
    Shape { what: String },
    #[error(
        "tokenizer.json has the decoder {name}; supported are ByteLevel, and Sequences of Replace (U+2581 by a \
         space), ByteFallback, Fuse and Strip (one leading space)"
    )]
    UnknownDecoder { name: String },
}

/// Ids above this are no vocabulary but a broken file, and would make the table huge.
const MAX_ID: u64 = 1 << 24;

impl TokenBytes {
    /// Reads `tokenizer.json` in `tokenizer_dir`.
    pub fn load(tokenizer_dir: &Path) -> Result<Self, TokenBytesError> {
        let path = tokenizer_dir.join("tokenizer.json");
        let text =
            std::fs::read(&path).map_err(|source| TokenBytesError::Io { path: path.clone(), source })?;
        let json = serde_json::from_slice(&text).map_err(|source| TokenBytesError::Json { path, source })?;
        Self::from_json(&json)
    }

    /// Reads the contents of a `tokenizer.json`.
    pub fn from_json(json: &Value) -> Result<Self, TokenBytesError> {
        let decoder = Decoder::from_json(&json["decoder"])?;
        let alphabet = byte_level_alphabet();
        let pieces = all_tokens(json)?.into_iter().map(|token| TokenPiece {
            id: token.id,
            bytes: decoder.bytes_of(token.text, &alphabet),
            special: token.special,
        });
        Ok(Self::from_pieces(decoder.kind, decoder.strips_leading_space, pieces))
    }

    /// Every id of a `tokenizer.json` with its string there; of two with one id the later stands.
    pub fn names(json: &Value) -> Result<Vec<(TokenId, &str)>, TokenBytesError> {
        Ok(all_tokens(json)?.into_iter().map(|token| (token.id, token.text)).collect())
    }

    /// A vocabulary given token by token; of two tokens with one id the later stands.
    pub fn from_pieces(
        kind: TokenKind,
        leading_space_stripped: bool,
        pieces: impl IntoIterator<Item = TokenPiece>,
    ) -> Self {
        let mut table: Vec<Option<TokenPiece>> = Vec::new();
        for piece in pieces {
            let at = piece.id as usize;
            if table.len() <= at {
                table.resize(at + 1, None);
            }
            table[at] = Some(piece);
        }
        let mut all =
            Self { kind, leading_space_stripped, bytes: Vec::new(), ends: vec![0], special: Vec::new() };
        for entry in table {
            let special = entry.as_ref().is_some_and(|piece| piece.special);
            all.bytes.extend(entry.map(|piece| piece.bytes).unwrap_or_default());
            all.ends.push(all.bytes.len() as u32);
            all.special.push(special);
        }
        all
    }

    /// The token's bytes; none for an id that the tokenizer does not define.
    pub fn bytes(&self, id: TokenId) -> &[u8] {
        let at = id as usize;
        match self.ends.get(at + 1) {
            Some(&end) => &self.bytes[self.ends[at] as usize..end as usize],
            None => &[],
        }
    }

    /// Whether `skip_special_tokens` hides the token.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    pub fn kind(&self) -> TokenKind {
        self.kind
    }

    /// Whether a text loses one space at its very start (the space that the tokenizer had put there).
    pub fn leading_space_stripped(&self) -> bool {
        self.leading_space_stripped
    }

    /// One more than the highest id.
    pub fn vocab_size(&self) -> usize {
        self.special.len()
    }

    /// Ids whose bytes make up `text`, the longest ordinary token first at every place: near what a tokenizer would
    /// say, without being one. `None` if some byte is in no token.
    pub fn cover(&self, text: &[u8]) -> Option<Vec<TokenId>> {
        let mut ids = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let fitting = (0..self.vocab_size() as TokenId).filter(|&id| {
                let bytes = self.bytes(id);
                !bytes.is_empty() && !self.is_special(id) && rest.starts_with(bytes)
            });
            let id = fitting.max_by_key(|&id| self.bytes(id).len())?;
            rest = &rest[self.bytes(id).len()..];
            ids.push(id);
        }
        Some(ids)
    }

    /// The text of a whole answer, by the rules of a streamed one: special tokens vanish before bytes are
    /// joined, undefined ids are empty, and each broken part of UTF-8 becomes one U+FFFD.
    pub fn decode(&self, ids: &[TokenId], skip_special_tokens: bool) -> String {
        let shown = ids.iter().filter(|&&id| !(skip_special_tokens && self.is_special(id)));
        let bytes: Vec<u8> = shown.flat_map(|&id| self.bytes(id)).copied().collect();
        let start = usize::from(self.leading_space_stripped && bytes.first() == Some(&b' '));
        String::from_utf8_lossy(&bytes[start..]).into_owned()
    }
}

/// An entry of the file, before its string is turned into bytes.
struct Token<'a> {
    id: TokenId,
    text: &'a str,
    special: bool,
}

fn all_tokens(json: &Value) -> Result<Vec<Token<'_>>, TokenBytesError> {
    let mut tokens = model_vocabulary(&json["model"]["vocab"])?;
    tokens.extend(added_tokens(&json["added_tokens"])?);
    Ok(tokens)
}

/// The model's own vocabulary: a map from string to id, or a list of (string, score) pairs.
fn model_vocabulary(vocab: &Value) -> Result<Vec<Token<'_>>, TokenBytesError> {
    match vocab {
        Value::Object(map) => {
            map.iter().map(|(text, id)| Ok(Token { id: token_id(id)?, text, special: false })).collect()
        }
        Value::Array(pairs) => pairs
            .iter()
            .zip(0..)
            .map(|(pair, id)| Ok(Token { id, text: string(&pair[0], "a vocabulary entry")?, special: false }))
            .collect(),
        _ => Err(shape("model.vocab is neither a map nor a list")),
    }
}

fn added_tokens(added: &Value) -> Result<Vec<Token<'_>>, TokenBytesError> {
    let entries = added.as_array().map_or(&[][..], Vec::as_slice);
    entries
        .iter()
        .map(|entry| {
            Ok(Token {
                id: token_id(&entry["id"])?,
                text: string(&entry["content"], "an added token's content")?,
                special: entry["special"].as_bool().unwrap_or(false),
            })
        })
        .collect()
}

fn token_id(value: &Value) -> Result<TokenId, TokenBytesError> {
    match value.as_u64() {
        Some(id) if id <= MAX_ID => Ok(id as TokenId),
        _ => Err(shape(format!("{value} is not a token id (0 to {MAX_ID})"))),
    }
}

fn string<'a>(value: &'a Value, what: &str) -> Result<&'a str, TokenBytesError> {
    value.as_str().ok_or_else(|| shape(format!("{what} is not a string")))
}

fn shape(what: impl Into<String>) -> TokenBytesError {
    TokenBytesError::Shape { what: what.into() }
}
