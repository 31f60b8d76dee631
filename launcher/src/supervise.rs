//! Owns the state of the server as the launcher sees it: one closed set of events in, actions out. It starts and
//! signals nothing itself, so every course of events can be tested.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use proto::{Command, Role, Status};

use crate::shutdown::{Ending, Patience};

/// Everything that can happen to the launcher.
#[derive(Debug)]
pub(crate) enum Event {
    Status(Role, Status),
    Exited(Role, ExitStatus),
    /// The launcher itself was signalled.
    Signal(Signal),
    /// A deadline passed.
    Timeout,
}

/// What is to be done about it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Tell(Role, Command),
    Signal(Role, Signal),
    /// A start-up stage of a child moved on.
    Progress {
        role: Role,
        stage: String,
        done: u64,
        total: u64,
    },
    /// A child does its work from now on.
    ChildReady {
        role: Role,
        detail: String,
        after: Duration,
    },
    /// All do: the address may be announced.
    Serving,
    Notice(String),
}

/// How it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub code: u8,
    pub reason: Option<String>,
}

/// Ended as asked.
pub const EXIT_OK: u8 = 0;
/// A child could not start, or died, or had to be killed.
pub const EXIT_FAILED: u8 = 1;
/// The command line or the model was refused before anything was started.
pub const EXIT_REFUSED: u8 = 2;
/// A second signal cut the end short: 128 + its number.
pub const EXIT_FORCED: u8 = 128;

enum Phase {
    Starting,
    Serving,
    Ending { ending: Ending, cause: Cause },
}

enum Cause {
    Asked,
    Forced(Signal),
    /// What is known when nobody gives a better reason.
    Failed(Role, String),
}

/// The launcher's view of its children.
pub(crate) struct Supervisor {
    phase: Phase,
    started: Instant,
    alive: BTreeSet<Role>,
    ready: BTreeSet<Role>,
    /// What children said of themselves before they left.
    reasons: BTreeMap<Role, String>,
    watch: Watchdog,
    patience: Patience,
    signalled: Option<Instant>,
}

/// `timeout` and some shells signal a process and its group: what comes twice within this time was sent once.
const ECHO: Duration = Duration::from_millis(250);

impl Supervisor {
    /// All children have just been started.
    pub(crate) fn new(patience: Patience, watchdog: Duration, now: Instant) -> Self {
        Self {
            phase: Phase::Starting,
            started: now,
            alive: Role::CHILDREN.into(),
            ready: BTreeSet::new(),
            reasons: BTreeMap::new(),
            watch: Watchdog { limit: watchdog, busy_since: None },
            patience,
            signalled: None,
        }
    }

    pub(crate) fn on(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Status(role, status) => self.on_status(role, status, now),
            Event::Exited(role, status) => self.on_exit(role, status, now),
            Event::Signal(signal) => self.on_signal(signal, now),
            Event::Timeout => self.on_timeout(now),
        }
    }

    /// When [`Event::Timeout`] is due.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Ending { ending, .. } => ending.deadline(),
            Phase::Starting | Phase::Serving => self.watch.deadline(),
        }
    }

    /// `None` until the last child is gone.
    pub(crate) fn outcome(&self) -> Option<Outcome> {
        let Phase::Ending { ending, cause } = &self.phase else { return None };
        if !self.alive.is_empty() {
            return None;
        }
        Some(match cause {
            Cause::Failed(role, what) => {
                let said = self.reasons.get(role).map_or(what.as_str(), String::as_str);
                Outcome { code: EXIT_FAILED, reason: Some(format!("{role}: {said}")) }
            }
            Cause::Forced(signal) => Outcome { code: EXIT_FORCED + *signal as u8, reason: None },
            Cause::Asked if ending.killed => {
                let reason = "a process did not end when asked and was killed".to_owned();
                Outcome { code: EXIT_FAILED, reason: Some(reason) }
            }
            Cause::Asked => Outcome { code: EXIT_OK, reason: None },
        })
    }

    /// Whether the child whose failure ends the server may still tell why: its last words travel over a link and
    /// can arrive after its exit.
    pub(crate) fn awaits_last_words(&self) -> bool {
        matches!(&self.phase, Phase::Ending { cause: Cause::Failed(role, _), .. } if !self.reasons.contains_key(role))
    }

    fn on_status(&mut self, role: Role, status: Status, now: Instant) -> Vec<Action> {
        match status {
            Status::Progress { stage, done, total } => vec![Action::Progress { role, stage, done, total }],
            Status::Ready { detail } => self.on_ready(role, detail, now),
            Status::Heartbeat(beat) => {
                if role == Role::Scheduler {
                    self.watch.observe(beat.in_flight, beat.progress, now);
                }
                Vec::new()
            }
            Status::Failed { reason } => {
                self.reasons.insert(role, reason);
                self.fail(role, "failed".to_owned(), now)
            }
        }
    }

    fn on_ready(&mut self, role: Role, detail: String, now: Instant) -> Vec<Action> {
        if !self.ready.insert(role) {
            return Vec::new();
        }
        let mut actions = vec![Action::ChildReady { role, detail, after: now - self.started }];
        if matches!(self.phase, Phase::Starting) && self.ready.len() == Role::CHILDREN.len() {
            self.phase = Phase::Serving;
            actions.push(Action::Serving);
        }
        actions
    }

    fn on_exit(&mut self, role: Role, status: ExitStatus, now: Instant) -> Vec<Action> {
        self.alive.remove(&role);
        match &mut self.phase {
            // A child that leaves after it was asked to is no news.
            Phase::Ending { ending, .. } => ending.advance(&self.alive, now),
            Phase::Starting | Phase::Serving => self.fail(role, describe(status), now),
        }
    }

    fn on_signal(&mut self, signal: Signal, now: Instant) -> Vec<Action> {
        if self.signalled.replace(now).is_some_and(|before| now - before < ECHO) {
            return Vec::new();
        }
        let ending = match &mut self.phase {
            Phase::Ending { ending, cause } => {
                if matches!(cause, Cause::Asked) {
                    *cause = Cause::Forced(signal);
                }
                return ending.force(&self.alive, now);
            }
            Phase::Starting => Ending::during_start(&self.patience),
            Phase::Serving if signal == Signal::SIGINT => {
                Ending::orderly(&self.patience, self.patience.drain_interactive)
            }
            Phase::Serving => Ending::orderly(&self.patience, self.patience.drain),
        };
        let notice = Action::Notice(format!("{signal}: ending; signal again to end at once"));
        let mut actions = vec![notice];
        actions.extend(self.end(ending, Cause::Asked, now));
        actions
    }

    fn on_timeout(&mut self, now: Instant) -> Vec<Action> {
        match &mut self.phase {
            Phase::Ending { ending, .. } => ending.advance(&self.alive, now),
            Phase::Starting | Phase::Serving if self.watch.deadline().is_some_and(|due| due <= now) => {
                let limit = self.watch.limit.as_secs_f64();
                let reason = format!("no progress for {limit} s with requests running (--watchdog-timeout)");
                let mut actions = vec![Action::Signal(Role::Scheduler, Signal::SIGKILL)];
                actions.extend(self.fail(Role::Scheduler, reason, now));
                actions
            }
            Phase::Starting | Phase::Serving => Vec::new(),
        }
    }

    /// A child is gone, or as good as. Every course from here is an end; a restart would branch off here.
    fn fail(&mut self, role: Role, what: String, now: Instant) -> Vec<Action> {
        let ending = match self.phase {
            Phase::Ending { .. } => return Vec::new(),
            Phase::Starting => Ending::during_start(&self.patience),
            Phase::Serving => Ending::after_failure(&self.patience),
        };
        self.end(ending, Cause::Failed(role, what), now)
    }

    fn end(&mut self, mut ending: Ending, cause: Cause, now: Instant) -> Vec<Action> {
        let actions = ending.advance(&self.alive, now);
        self.phase = Phase::Ending { ending, cause };
        actions
    }
}

/// Notices a scheduler that stands still with work at hand.
struct Watchdog {
    limit: Duration,
    /// The progress mark that has not moved, and since when; `None` while idle.
    busy_since: Option<(u64, Instant)>,
}

impl Watchdog {
    fn observe(&mut self, in_flight: u64, progress: u64, now: Instant) {
        let stands_still = self.busy_since.is_some_and(|(mark, _)| mark == progress);
        if in_flight == 0 {
            self.busy_since = None;
        } else if !stands_still {
            self.busy_since = Some((progress, now));
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.busy_since.map(|(_, since)| since + self.limit)
    }
}

fn describe(status: ExitStatus) -> String {
    if let Some(number) = status.signal() {
        let name = Signal::try_from(number).map_or(String::new(), |signal| format!(" ({signal})"));
        return format!("was killed by signal {number}{name}");
    }
    match status.code() {
        Some(0) => "ended although nobody asked it to".to_owned(),
        Some(code) => format!("ended with exit code {code}"),
        None => format!("ended: {status}"),
    }
}

#[cfg(test)]
mod tests;
