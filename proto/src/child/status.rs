//! Owns what a child tells the launcher about itself.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::control::{HEARTBEAT_INTERVAL, Heartbeat, Status};
use crate::link::{LinkHandle, LinkThread};

/// Heartbeats that may wait for a launcher that does not read. Later ones say no more than these.
const WAITING_HEARTBEATS: usize = 16;
/// The same for steps of progress.
const WAITING_PROGRESS: usize = 256;

/// Tells the launcher how the child is doing. Cheap to clone; never blocks.
#[derive(Clone)]
pub struct StatusReporter {
    link: Option<LinkHandle<Status>>,
    pulse: Arc<Mutex<Pulse>>,
}

struct Pulse {
    heartbeat: Heartbeat,
    /// `None` until the child is ready: loading is work, but no loop turns yet.
    last_alive: Option<Instant>,
}

impl StatusReporter {
    /// Reports to nobody, for tests that call a process's `run` directly.
    pub fn detached() -> Self {
        Self::over(None)
    }

    pub(super) fn new(link: LinkHandle<Status>) -> Self {
        Self::over(Some(link))
    }

    fn over(link: Option<LinkHandle<Status>>) -> Self {
        let pulse = Pulse { heartbeat: Heartbeat::default(), last_alive: None };
        Self { link, pulse: Arc::new(Mutex::new(pulse)) }
    }

    pub fn progress(&self, stage: &str, done: u64, total: u64) {
        self.send(&Status::Progress { stage: stage.to_owned(), done, total }, WAITING_PROGRESS);
    }

    pub fn ready(&self, detail: &str) {
        self.pulse().last_alive = Some(Instant::now());
        self.send(&Status::Ready { detail: detail.to_owned() }, usize::MAX);
    }

    /// The next heartbeats say this. A process whose event loop stands still stops calling it, and some time later
    /// (10 s; for a scheduler at least its watchdog's time) the heartbeat stops as well.
    pub fn alive(&self, heartbeat: Heartbeat) {
        let mut pulse = self.pulse();
        pulse.heartbeat = heartbeat;
        if pulse.last_alive.is_some() {
            pulse.last_alive = Some(Instant::now());
        }
    }

    pub(super) fn failed(&self, reason: String) {
        self.send(&Status::Failed { reason }, usize::MAX);
    }

    /// Sends heartbeats from the links' thread from now on.
    pub(super) fn beat_on(&self, links: &LinkThread, stale_after: Duration) {
        let reporter = self.clone();
        links.spawn(async move {
            let mut turns = tokio::time::interval(HEARTBEAT_INTERVAL);
            loop {
                turns.tick().await;
                if let Some(heartbeat) = reporter.pulse().current(stale_after) {
                    reporter.send(&Status::Heartbeat(heartbeat), WAITING_HEARTBEATS);
                }
            }
        });
    }

    fn pulse(&self) -> MutexGuard<'_, Pulse> {
        self.pulse.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, status: &Status, most_waiting: usize) {
        let Some(link) = &self.link else { return };
        if link.backlog().messages < most_waiting
            && let Err(error) = link.send(status)
        {
            tracing::debug!(%error, "cannot report to the launcher");
        }
    }
}

impl Pulse {
    fn current(&self, stale_after: Duration) -> Option<Heartbeat> {
        let beats = self.last_alive.is_none_or(|last| last.elapsed() < stale_after);
        beats.then(|| self.heartbeat.clone())
    }
}
