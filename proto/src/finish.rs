//! Owns the reasons for which a request ends, and their JSON form (SGLang's `finish_reason`).

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::ids::TokenId;

/// What a stop matched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Matched {
    /// An end token or one of `stop_token_ids`.
    Token(TokenId),
    /// One of the request's stop strings.
    Str(String),
    /// One of the request's stop patterns; the pattern's text.
    Regex(String),
}

/// Why a request ended. Every accepted request ends in exactly one of these.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    Stop { matched: Matched },
    Length { length: u32 },
    Abort { message: String, status_code: Option<u16>, err_type: Option<String> },
}

impl FinishReason {
    /// An abort that the client asked for: the answer so far is returned with status 200.
    pub fn aborted(message: &str) -> Self {
        Self::Abort { message: message.to_owned(), status_code: None, err_type: None }
    }

    /// An abort that becomes an error reply with this status.
    pub fn failed(status_code: u16, err_type: &str, message: impl Into<String>) -> Self {
        Self::Abort {
            message: message.into(),
            status_code: Some(status_code),
            err_type: Some(err_type.to_owned()),
        }
    }

    /// The label value of outcome counters and the OpenAI `finish_reason`.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Stop { .. } => "stop",
            Self::Length { .. } => "length",
            Self::Abort { .. } => "abort",
        }
    }

    /// SGLang's JSON object.
    pub fn to_json(&self) -> Value {
        match self {
            Self::Stop { matched: Matched::Token(id) } => json!({"type": "stop", "matched": id}),
            Self::Stop { matched: Matched::Str(text) | Matched::Regex(text) } => {
                json!({"type": "stop", "matched": text})
            }
            Self::Length { length } => json!({"type": "length", "length": length}),
            Self::Abort { message, status_code, err_type } => json!({
                "type": "abort", "message": message, "status_code": status_code, "err_type": err_type
            }),
        }
    }
}
