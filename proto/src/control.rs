//! Owns what launcher and children tell each other.

use serde::{Deserialize, Serialize};

use crate::topology::Member;

/// Child → launcher.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Status {
    /// A start-up stage moved on: `done` of `total` units (bytes of weights, say).
    Progress { stage: String, done: u64, total: u64 },
    /// The child does its work from now on. `detail` is shown to the operator.
    Ready { detail: String },
    /// Sent every [`HEARTBEAT_INTERVAL`] by a child whose event loop turns.
    Heartbeat(Heartbeat),
    /// The child cannot go on; it exits right after.
    Failed { reason: String },
}

/// How a child is doing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Requests the process holds.
    pub in_flight: u64,
    /// Requests or messages that wait.
    pub queued: u64,
    /// Grows whenever work is done; still with `in_flight` above 0 means stuck.
    pub progress: u64,
}

/// How often a child reports.
pub const HEARTBEAT_INTERVAL: std::time::Duration = std::time::Duration::from_millis(200);

/// Launcher → child.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Stop admitting; finish what runs, then exit with 0.
    Drain,
    /// Leave to a successor: take no more connections, serve those that are there, then exit with 0.
    Retire,
    /// Exit now with 0.
    Stop,
    /// How the whole server is doing. Sent to every tokenizer process, every [`HEALTH_INTERVAL`] and when it changes.
    Health(ServerHealth),
}

/// How often the launcher tells the tokenizer processes how the server is doing.
pub const HEALTH_INTERVAL: std::time::Duration = std::time::Duration::from_millis(500);

/// All children, as the launcher sees them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerHealth {
    pub processes: Vec<ProcessHealth>,
}

/// One child, as the launcher sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessHealth {
    pub process: Member,
    /// The process exists.
    pub alive: bool,
    /// It does its work: neither loading nor about to be replaced.
    pub ready: bool,
    /// Lives before this one.
    pub restarts: u64,
    /// Since its last sign of life.
    pub heartbeat_age_ms: u64,
    /// What its last heartbeat said.
    pub heartbeat: Heartbeat,
}
