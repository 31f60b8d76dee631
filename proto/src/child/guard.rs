//! Owns a child's dependence on its launcher: it dies with it, and takes its signals.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::unistd::{Pid, getppid};
use tokio::signal::unix::{SignalKind, signal};

use super::{Phase, ShutdownSender};
use crate::link::LinkThread;

/// How long the control link may be down while the parent is gone.
const ORPHANED_AFTER: Duration = Duration::from_secs(1);
/// How long a launcher may take to answer at all: it listens before it starts a child.
const UNHEARD_AFTER: Duration = Duration::from_secs(30);
const WATCH_INTERVAL: Duration = Duration::from_millis(200);

/// What is known of the launcher.
#[derive(Clone)]
pub(super) struct Launcher {
    parent: Pid,
    contact: Arc<Mutex<Contact>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Contact {
    NeverSince(Instant),
    Up,
    DownSince(Instant),
}

impl Launcher {
    /// Asks the kernel to end this process with its parent. The kernel means the parent's thread that started it.
    pub(super) fn bind_to_parent() -> io::Result<Self> {
        let parent = getppid();
        #[cfg(target_os = "linux")]
        nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
        if getppid() != parent {
            return Err(io::Error::other("the launcher is gone"));
        }
        Ok(Self { parent, contact: Arc::new(Mutex::new(Contact::NeverSince(Instant::now()))) })
    }

    pub(super) fn heard(&self) {
        self.set(Contact::Up);
    }

    pub(super) fn lost(&self) {
        self.set(Contact::DownSince(Instant::now()));
    }

    fn set(&self, contact: Contact) {
        *self.contact.lock().unwrap_or_else(PoisonError::into_inner) = contact;
    }

    fn is_gone(&self) -> bool {
        let contact = *self.contact.lock().unwrap_or_else(PoisonError::into_inner);
        match contact {
            Contact::Up => false,
            Contact::DownSince(since) => since.elapsed() > ORPHANED_AFTER && getppid() != self.parent,
            Contact::NeverSince(since) => since.elapsed() > UNHEARD_AFTER,
        }
    }
}

/// Ends the process when nobody is left to end it. There is nobody to report to, and nobody who would restart what
/// the process serves.
pub(super) fn watch_launcher(links: &LinkThread, launcher: Launcher) {
    links.spawn(async move {
        let mut turns = tokio::time::interval(WATCH_INTERVAL);
        loop {
            turns.tick().await;
            if launcher.is_gone() {
                tracing::error!("the launcher is gone");
                std::process::exit(1);
            }
        }
    });
}

/// SIGTERM drains, a second one stops. SIGINT is for the launcher: a terminal sends it to the whole group.
pub(super) fn watch_signals(links: &LinkThread, shutdown: ShutdownSender) -> io::Result<()> {
    let _context = links.enter();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    // Caught, so that a file that may not grow is an error of its writer's and not the end of the process.
    drop(signal(SignalKind::from_raw(nix::libc::SIGXFSZ))?);
    links.spawn(async move {
        let mut next = Phase::Draining;
        loop {
            tokio::select! {
                received = terminate.recv() => {
                    if received.is_none() {
                        return;
                    }
                    shutdown.advance(next);
                    next = Phase::Stopping;
                }
                received = interrupt.recv() => {
                    if received.is_none() {
                        return;
                    }
                }
            }
        }
    });
    Ok(())
}
