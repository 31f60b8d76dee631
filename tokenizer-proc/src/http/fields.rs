//! Owns what bodies of different routes have in common: prompts in their four forms, fields that may be given per
//! prompt, and the refusal of fields that this server cannot honour.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::intake::Prompt;
use crate::refusal::{Refusal, invalid};

/// The prompts of one body.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Prompts {
    One(Prompt),
    Many(Vec<Prompt>),
}

impl Prompts {
    /// Reads a string, a list of strings, a list of ids, or a list of lists of ids.
    pub(super) fn read(name: &str, value: &Value) -> Result<Self, Refusal> {
        match value {
            Value::String(text) => Ok(Self::One(Prompt::Text(text.clone()))),
            Value::Array(items) => match items.first() {
                None => Ok(Self::One(Prompt::Ids(Vec::new()))),
                Some(Value::Number(_)) => Ok(Self::One(ids(name, items)?)),
                Some(_) => {
                    items.iter().map(|item| Self::item(name, item)).collect::<Result<_, _>>().map(Self::Many)
                }
            },
            _ => invalid!("{name} must be a string, a list of strings, or token ids."),
        }
    }

    fn item(name: &str, value: &Value) -> Result<Prompt, Refusal> {
        match value {
            Value::String(text) => Ok(Prompt::Text(text.clone())),
            Value::Array(items) => ids(name, items),
            _ => invalid!("{name} must hold only strings or only lists of token ids."),
        }
    }

    /// The prompts, and how many the client listed if it sent a list.
    pub(super) fn into_list(self) -> (Vec<Prompt>, Option<usize>) {
        match self {
            Self::One(prompt) => (vec![prompt], None),
            Self::Many(prompts) => {
                let listed = prompts.len();
                (prompts, Some(listed))
            }
        }
    }
}

fn ids(name: &str, items: &[Value]) -> Result<Prompt, Refusal> {
    let read = |item: &Value| match item.as_i64() {
        Some(id) => Ok(id),
        None => invalid!("{name} must hold token ids, got {item}."),
    };
    items.iter().map(read).collect::<Result<_, _>>().map(Prompt::Ids)
}

/// A field that holds one value for all prompts, or a list with one value per prompt.
pub(super) struct PerPrompt<'a> {
    pub name: &'a str,
    pub value: Option<&'a Value>,
    /// Prompts listed; `None` when there is a single one, not in a list.
    pub listed: Option<usize>,
}

impl PerPrompt<'_> {
    /// The value for prompt `index`, where a single value is no list.
    pub(super) fn scalar<T: DeserializeOwned>(&self, index: usize) -> Result<Option<T>, Refusal> {
        self.read(index, Value::is_array)
    }

    /// The value for prompt `index`, where a single value is itself a list.
    pub(super) fn list<T: DeserializeOwned>(&self, index: usize) -> Result<Option<T>, Refusal> {
        let nested = |value: &Value| {
            value.as_array().is_some_and(|items| items.iter().any(|item| item.is_array() || item.is_null()))
        };
        self.read(index, nested)
    }

    fn read<T: DeserializeOwned>(
        &self,
        index: usize,
        is_per_prompt: impl Fn(&Value) -> bool,
    ) -> Result<Option<T>, Refusal> {
        let Some(value) = self.value.filter(|value| !value.is_null()) else { return Ok(None) };
        let value = match (value.as_array(), self.listed) {
            (Some(items), Some(listed)) if is_per_prompt(value) => {
                if items.len() != listed {
                    return invalid!("{} has {} entries for {listed} prompts.", self.name, items.len());
                }
                &items[index]
            }
            (Some(_), None) if is_per_prompt(value) => {
                return invalid!("{} must not be a list for a single prompt.", self.name);
            }
            _ => value,
        };
        serde_path_to_error::deserialize(value)
            .map_err(|error| Refusal::Invalid(format!("{}: {}", self.name, error.inner())))
    }
}

/// Whether a field says nothing: what clients send for options they do not use.
fn is_blank(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

/// The first of `names` that the body really uses.
pub(super) fn first_used<'a>(body: &Map<String, Value>, names: &[&'a str]) -> Option<&'a str> {
    names.iter().copied().find(|name| body.get(*name).is_some_and(|value| !is_blank(value)))
}
