//! Owns reading the `tokenizer.*` metadata: every entry with its type checked, so that a wrong one is named.

use std::collections::HashMap;

use anyhow::{Context, Result, bail};
use candle_core::quantized::gguf_file::Value as Entry;
use serde_json::{Value, json};

/// The metadata of a GGUF file.
pub(super) struct Metadata<'a>(pub(super) &'a HashMap<String, Entry>);

/// What a token is (`tokenizer.ggml.token_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenType {
    fn from_number(number: i64) -> Result<Self> {
        Ok(match number {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            other => bail!("tokenizer.ggml.token_type has {other}, which is not a token type"),
        })
    }

    /// Whether the token stands outside the merges.
    pub(super) fn is_added(self) -> bool {
        matches!(self, Self::Unknown | Self::Control | Self::UserDefined)
    }

    /// Whether the token is hidden from answers.
    pub(super) fn is_special(self) -> bool {
        matches!(self, Self::Unknown | Self::Control)
    }
}

impl<'a> Metadata<'a> {
    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>> {
        self.read(name, |entry| entry.to_string().ok().map(String::as_str))
    }

    pub(super) fn texts(&self, name: &str) -> Result<Option<Vec<String>>> {
        self.list(name, |entry| entry.to_string().ok().cloned())
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>> {
        self.read(name, |entry| entry.to_bool().ok())
    }

    pub(super) fn integer(&self, name: &str) -> Result<Option<u64>> {
        self.read(name, |entry| integer(entry).and_then(|number| u64::try_from(number).ok()))
    }

    pub(super) fn scores(&self) -> Result<Option<Vec<f32>>> {
        self.list("scores", |entry| entry.to_f32().ok())
    }

    pub(super) fn token_types(&self) -> Result<Option<Vec<TokenType>>> {
        let numbers = self.list("token_type", integer)?;
        numbers.map(|numbers| numbers.into_iter().map(TokenType::from_number).collect()).transpose()
    }

    /// The model's context length, which lies under the architecture's name.
    pub(super) fn context_length(&self) -> Result<Option<u64>> {
        let Some(architecture) = self.0.get("general.architecture").and_then(|entry| entry.to_string().ok())
        else {
            return Ok(None);
        };
        self.at(&format!("{architecture}.context_length"), |entry| {
            integer(entry).and_then(|length| u64::try_from(length).ok())
        })
    }

    /// One template as a string, several as a list of named ones, as `tokenizer_config.json` has them.
    pub(super) fn chat_template(&self) -> Result<Option<Value>> {
        let text = |key: &str| self.at(key, |entry| entry.to_string().ok());
        let default = text("tokenizer.chat_template")?;
        let names = self.list_at("tokenizer.chat_templates", |entry| entry.to_string().ok().cloned())?;
        let mut named = Vec::new();
        for name in names.unwrap_or_default() {
            let key = format!("tokenizer.chat_template.{name}");
            let template = text(&key)?.with_context(|| format!("{key} is missing"))?;
            named.push(json!({"name": name, "template": template}));
        }
        Ok(match (default, named.is_empty()) {
            (default, true) => default.map(|template| json!(template)),
            (None, false) => Some(named.into()),
            (Some(template), false) => {
                named.insert(0, json!({"name": "default", "template": template}));
                Some(named.into())
            }
        })
    }

    fn read<T>(&self, name: &str, convert: impl Fn(&'a Entry) -> Option<T>) -> Result<Option<T>> {
        self.at(&format!("tokenizer.ggml.{name}"), convert)
    }

    fn list<T>(&self, name: &str, convert: impl Fn(&'a Entry) -> Option<T>) -> Result<Option<Vec<T>>> {
        self.list_at(&format!("tokenizer.ggml.{name}"), convert)
    }

    fn list_at<T>(&self, key: &str, convert: impl Fn(&'a Entry) -> Option<T>) -> Result<Option<Vec<T>>> {
        self.at(key, |entry| entry.to_vec().ok()?.iter().map(&convert).collect())
    }

    fn at<T>(&self, key: &str, convert: impl Fn(&'a Entry) -> Option<T>) -> Result<Option<T>> {
        match self.0.get(key) {
            None => Ok(None),
            Some(entry) => match convert(entry) {
                Some(value) => Ok(Some(value)),
                None => bail!("{key} has an unexpected type ({:?})", entry.value_type()),
            },
        }
    }
}

fn integer(entry: &Entry) -> Option<i64> {
    match *entry {
        Entry::U8(number) => Some(number.into()),
        Entry::I8(number) => Some(number.into()),
        Entry::U16(number) => Some(number.into()),
        Entry::I16(number) => Some(number.into()),
        Entry::U32(number) => Some(number.into()),
        Entry::I32(number) => Some(number.into()),
        Entry::U64(number) => i64::try_from(number).ok(),
        Entry::I64(number) => Some(number),
        _ => None,
    }
}
