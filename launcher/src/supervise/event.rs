//! Owns the words of the supervisor: what can happen, what can be asked for, and what is to be done about it.

use std::process::ExitStatus;
use std::time::Duration;

use nix::sys::signal::Signal;
use proto::{Command, Incarnation, Member, Status};

/// Everything that can happen to the launcher.
#[derive(Debug)]
pub(crate) enum Event {
    /// A child has said hello.
    Up(Member, Incarnation),
    Status(Member, Incarnation, Status),
    Exited(Member, ExitStatus),
    /// A child that was to be started could not be.
    CannotStart(Member, String),
    /// The launcher itself was signalled.
    Signal(Signal),
    /// An operator asks for something.
    Order(Order),
    /// A deadline passed.
    Timeout,
}

/// What an operator can ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Replace a child by a new one, or all of this name one after the other.
    Restart(Member),
    /// End the server as SIGTERM does.
    Drain,
}

/// What is to be done about it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Tell(Member, Command),
    Signal(Member, Signal),
    /// Start this child; the life before it is over.
    Start(Member),
    /// A child is dead, and what it leaves behind is to be put in order.
    Bury(Member),
    /// A start-up stage of a child moved on.
    Progress {
        member: Member,
        stage: String,
        done: u64,
        total: u64,
    },
    /// A child does its work from now on.
    ChildReady {
        member: Member,
        detail: String,
        after: Duration,
    },
    /// All do: the address may be announced.
    Serving,
    Notice(String),
}
