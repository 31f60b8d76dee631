//! Owns the identifiers that travel between processes, as types that cannot be swapped by accident.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A token's number in the target model's vocabulary.
pub type TokenId = u32;

/// A request's name, unique among the requests that are alive (SGLang's `rid`).
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(pub String);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&str> for RequestId {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

/// One life of one process: later starts compare greater. Peers drop messages of older incarnations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(pub u64);

impl Incarnation {
    /// Microseconds since 1970 with the process id in the low bits: unique on one machine, and growing.
    pub fn now() -> Self {
        let micros = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |elapsed| elapsed.as_micros() as u64);
        Self((micros << 10) | u64::from(std::process::id() & 0x3ff))
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// The kinds of process, in start order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Launcher,
    Scheduler,
    Detokenizer,
    Tokenizer,
}

impl Role {
    /// Every process the launcher starts.
    pub const CHILDREN: [Self; 3] = [Self::Scheduler, Self::Detokenizer, Self::Tokenizer];

    /// The role's name in logs, file names and metric labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Launcher => "launcher",
            Self::Scheduler => "scheduler",
            Self::Detokenizer => "detokenizer",
            Self::Tokenizer => "tokenizer",
        }
    }

    /// The binary that plays the role.
    pub const fn binary(self) -> &'static str {
        match self {
            Self::Launcher => "launcher",
            Self::Scheduler => "scheduler-proc",
            Self::Detokenizer => "detokenizer-proc",
            Self::Tokenizer => "tokenizer-proc",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
