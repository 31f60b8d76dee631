//! Owns the operators' way to a running server: one line of JSON with a question and one with the answer, over a unix
//! socket in the run directory. `server` answers, `client` asks.

mod client;
mod server;

use proto::Member;
use serde::{Deserialize, Serialize};

use crate::board::ProcessReport;

pub(crate) use client::{is_command, main};
pub(crate) use server::listen;

/// What an operator asks. `role` names a process, or all of a role.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "lowercase")]
enum Question {
    Ps,
    Restart { role: Member },
    Drain,
    Logs { role: Member, lines: usize },
}

/// What the server says to it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Reply {
    Processes(Vec<ProcessReport>),
    Lines(Vec<String>),
    /// The order was passed on.
    Accepted,
    Error(String),
}
