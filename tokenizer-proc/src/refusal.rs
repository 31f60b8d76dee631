//! Owns the reasons for which a request gets an error instead of an answer. How they look on each route is the
//! business of `http::error`.

use proto::FinishReason;

/// Why a request is refused or fails.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// The client's mistake: 400.
    #[error("{0}")]
    Invalid(String),
    /// Right now not possible, later perhaps: 503 with `Retry-After`.
    #[error("{0}")]
    Unavailable(String),
    /// Ours: 500.
    #[error("{0}")]
    Internal(String),
}

impl Refusal {
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::Invalid(message.into())
    }

    /// The refusal that a finish reason stands for; `None` when the answer is to be returned (a stop, a limit,
    /// or an abort that the client asked for).
    pub(crate) fn from_finish(reason: &FinishReason) -> Option<Self> {
        let FinishReason::Abort { message, status_code: Some(status), .. } = reason else { return None };
        Some(match status {
            400..=499 => Self::Invalid(message.clone()),
            500 => Self::Internal(message.clone()),
            _ => Self::Unavailable(message.clone()),
        })
    }
}

/// Shorthand for a refusal that is the client's mistake.
macro_rules! invalid {
    ($($arg:tt)*) => { Err($crate::refusal::Refusal::Invalid(format!($($arg)*))) };
}
pub(crate) use invalid;
