//! Owns the check of chat messages: what a template would silently drop is refused here.

use serde_json::{Map, Value};

use crate::refusal::{Refusal, invalid};

const ROLES: &[&str] = &["system", "developer", "user", "assistant", "tool", "function"];

/// Checks every message and brings its content into the form templates read: one string.
pub(crate) fn check_messages(messages: &[Value]) -> Result<Vec<Value>, Refusal> {
    if messages.is_empty() {
        return invalid!("Messages cannot be empty.");
    }
    messages.iter().enumerate().map(|(index, message)| check_message(index, message)).collect()
}

fn check_message(index: usize, message: &Value) -> Result<Value, Refusal> {
    let Some(fields) = message.as_object() else {
        return invalid!("messages[{index}] must be an object with a role and a content.");
    };
    let role = match fields.get("role").and_then(Value::as_str) {
        Some(role) if ROLES.contains(&role) => role,
        Some(role) => {
            return invalid!("messages[{index}].role must be one of {}, got '{role}'.", ROLES.join(", "));
        }
        None => return invalid!("messages[{index}].role is missing."),
    };
    let has_calls = fields.get("tool_calls").is_some_and(|calls| !calls.is_null());
    let content = match fields.get("content") {
        None | Some(Value::Null) if role == "assistant" && has_calls => Value::Null,
        None | Some(Value::Null) => return invalid!("messages[{index}].content is missing."),
        Some(Value::String(text)) => Value::String(text.clone()),
        Some(Value::Array(parts)) => Value::String(join_parts(index, parts)?),
        Some(_) => return invalid!("messages[{index}].content must be a string or a list of parts."),
    };
    let mut checked: Map<String, Value> = fields.clone();
    checked.insert("content".to_owned(), content);
    Ok(Value::Object(checked))
}

fn join_parts(index: usize, parts: &[Value]) -> Result<String, Refusal> {
    let mut texts = Vec::with_capacity(parts.len());
    for part in parts {
        match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
            (Some("text"), Some(text)) => texts.push(text),
            (Some("text"), None) => return invalid!("messages[{index}].content: a text part has no text."),
            (Some(kind), _) => {
                return invalid!("messages[{index}].content: parts of type '{kind}' are not supported.");
            }
            (None, _) => return invalid!("messages[{index}].content: a part has no type."),
        }
    }
    Ok(texts.join("\n"))
}
