//! Owns what every child process does besides its work: reading the configuration, logging, the control link to
//! the launcher with its heartbeat, dying with the launcher, and turning the outcome into an exit code.

use std::os::fd::RawFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::config::ServeConfig;
use crate::control::Heartbeat;
use crate::ids::{Incarnation, Role};
use crate::link::LinkThread;

/// How far the end has come. Only ever grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Running,
    /// Admit nothing, finish what runs.
    Draining,
    /// Leave now.
    Stopping,
}

/// The end of the process, as a value that is passed in and watched.
#[derive(Debug, Clone)]
pub struct Shutdown {
    phase: watch::Receiver<Phase>,
}

/// The other half of a [`Shutdown`].
#[derive(Debug, Clone)]
pub struct ShutdownSender {
    phase: Arc<watch::Sender<Phase>>,
}

impl Shutdown {
    pub fn new() -> (ShutdownSender, Self) {
        let (sender, phase) = watch::channel(Phase::Running);
        (ShutdownSender { phase: Arc::new(sender) }, Self { phase })
    }

    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Waits, on an async thread, until at least this phase is reached.
    pub async fn reached(&self, phase: Phase) {
        // A sender that is gone can announce nothing: the process is ending.
        let _ = self.phase.clone().wait_for(|now| *now >= phase).await;
    }
}

impl ShutdownSender {
    /// Moves on to `phase`; going back has no effect.
    pub fn advance(&self, phase: Phase) {
        self.phase.send_if_modified(|now| {
            let grows = *now < phase;
            if grows {
                *now = phase;
            }
            grows
        });
    }
}

/// Tells the launcher how the child is doing. Cheap to clone; never blocks.
#[derive(Clone)]
pub struct StatusReporter {}

impl StatusReporter {
    /// Reports to nobody, for tests that call a process's `run` directly.
    pub fn detached() -> Self {
        todo!()
    }

    pub fn progress(&self, _stage: &str, _done: u64, _total: u64) {}

    pub fn ready(&self, _detail: &str) {}

    /// The next heartbeats say this. A process whose event loop stands still stops calling it; the reporter
    /// stops the heartbeat when the last call is older than `stale_after` given to [`ChildOptions`].
    pub fn alive(&self, _heartbeat: Heartbeat) {}
}

/// What a child's `run` is given.
pub struct Child {
    pub config: Arc<ServeConfig>,
    pub incarnation: Incarnation,
    pub links: LinkThread,
    pub shutdown: Shutdown,
    pub status: StatusReporter,
    /// The listening HTTP socket that the launcher opened (tokenizer process only).
    pub listen_fd: Option<RawFd>,
}

/// A child's `main`: parses `--config FILE [--listen-fd N]`, calls `run`, reports a failure to the launcher with
/// its chain of causes, and returns the exit code.
pub fn child_main<E: std::fmt::Display>(_role: Role, _run: impl FnOnce(Child) -> Result<(), E>) -> ExitCode {
    todo!()
}

/// How long a child tries to hand over its last messages.
pub const CLOSE_DEADLINE: Duration = Duration::from_secs(2);
