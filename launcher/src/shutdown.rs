//! Owns how the server ends: in which order its children go, and how much force is used when.
//!
//! After a signal the tokenizer processes go first: they stop admitting, answer what runs, and leave; then nothing
//! is left to do for the others. After a failure it goes last, because its clients wait for an answer until the end.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use proto::{Command, Member, Role};

use crate::supervise::Action;

/// How long each kind of pressure is given to work.
#[derive(Debug, Clone)]
pub(crate) struct Patience {
    /// Requests that run may finish, after SIGTERM.
    pub drain: Duration,
    /// The same after Ctrl-C, with somebody waiting at the terminal.
    pub drain_interactive: Duration,
    /// From the command to stop until SIGTERM.
    pub stop: Duration,
    /// From SIGTERM until SIGKILL.
    pub terminate: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            drain: Duration::from_secs(25),
            drain_interactive: Duration::from_secs(3),
            stop: Duration::from_secs(5),
            terminate: Duration::from_secs(2),
        }
    }
}

/// Ever more force; each is tried on the children that the one before did not end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Pressure {
    Drain,
    Stop,
    Terminate,
    Kill,
}

/// Children that go together, and what they are told first.
#[derive(Debug, Clone)]
struct Stage {
    roles: Vec<Role>,
    first: Pressure,
}

/// An end under way.
#[derive(Debug)]
pub(crate) struct Ending {
    /// The current one first.
    stages: Vec<Stage>,
    pressure: Pressure,
    deadline: Option<Instant>,
    drain: Duration,
    patience: Patience,
    /// Whether SIGKILL was needed.
    pub killed: bool,
}

impl Ending {
    /// Finishes what runs. `drain` says how long that may take.
    pub(crate) fn orderly(patience: &Patience, drain: Duration) -> Self {
        let tokenizer = Stage { roles: vec![Role::Tokenizer], first: Pressure::Drain };
        let others = Stage { roles: vec![Role::Scheduler, Role::Detokenizer], first: Pressure::Stop };
        Self::new(vec![tokenizer, others], patience, drain)
    }

    /// Something died: waiting clients are told, nothing is finished.
    pub(crate) fn after_failure(patience: &Patience) -> Self {
        let others = Stage { roles: vec![Role::Scheduler, Role::Detokenizer], first: Pressure::Stop };
        let tokenizer = Stage { roles: vec![Role::Tokenizer], first: Pressure::Stop };
        Self::new(vec![others, tokenizer], patience, Duration::ZERO)
    }

    /// No request was ever admitted: all leave at once.
    pub(crate) fn during_start(patience: &Patience) -> Self {
        let all = Stage { roles: Role::CHILDREN.to_vec(), first: Pressure::Stop };
        // A child that loads weights may not listen yet, and has nothing to lose.
        let patience = Patience { stop: patience.stop.min(Duration::from_secs(1)), ..patience.clone() };
        Self::new(vec![all], &patience, Duration::ZERO)
    }

    fn new(stages: Vec<Stage>, patience: &Patience, drain: Duration) -> Self {
        Self {
            stages,
            pressure: Pressure::Drain,
            deadline: None,
            drain,
            patience: patience.clone(),
            killed: false,
        }
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// The front still answers what runs, for which it needs the others.
    pub(crate) fn is_draining(&self) -> bool {
        self.stages.len() > 1 && self.pressure == Pressure::Drain && self.drain > Duration::ZERO
    }

    /// Moves on: to the next stage when the children of this one are gone, to more force when their time is up.
    pub(crate) fn advance(&mut self, alive: &BTreeSet<Member>, now: Instant) -> Vec<Action> {
        while let Some(stage) = self.stages.first() {
            let left: Vec<_> =
                alive.iter().copied().filter(|member| stage.roles.contains(&member.role)).collect();
            if left.is_empty() {
                self.stages.remove(0);
                self.deadline = None;
                continue;
            }
            let pressure = match self.deadline {
                None => stage.first,
                Some(deadline) if deadline > now => return Vec::new(),
                Some(_) => self.pressure.more(),
            };
            return self.apply(pressure, &left, now);
        }
        Vec::new()
    }

    /// Ends every child at once.
    pub(crate) fn force(&mut self, alive: &BTreeSet<Member>, now: Instant) -> Vec<Action> {
        self.stages = vec![Stage { roles: Role::CHILDREN.to_vec(), first: Pressure::Kill }];
        let all: Vec<Member> = alive.iter().copied().collect();
        self.apply(Pressure::Kill, &all, now)
    }

    fn apply(&mut self, pressure: Pressure, members: &[Member], now: Instant) -> Vec<Action> {
        let patience = match pressure {
            Pressure::Drain => self.drain,
            Pressure::Stop => self.patience.stop,
            Pressure::Terminate | Pressure::Kill => self.patience.terminate,
        };
        self.pressure = pressure;
        self.deadline = Some(now + patience);
        self.killed |= pressure == Pressure::Kill;
        let action = |member: &Member| match pressure {
            Pressure::Drain => Action::Tell(*member, Command::Drain),
            Pressure::Stop => Action::Tell(*member, Command::Stop),
            Pressure::Terminate => Action::Signal(*member, Signal::SIGTERM),
            Pressure::Kill => Action::Signal(*member, Signal::SIGKILL),
        };
        members.iter().map(action).collect()
    }
}

impl Pressure {
    const fn more(self) -> Self {
        match self {
            Self::Drain => Self::Stop,
            Self::Stop => Self::Terminate,
            Self::Terminate | Self::Kill => Self::Kill,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(actions: &[Action]) -> Vec<String> {
        actions.iter().map(|action| format!("{action:?}")).collect()
    }

    #[test]
    fn an_orderly_end_drains_the_front_and_then_stops_the_rest() {
        let start = Instant::now();
        let mut alive: BTreeSet<Member> = Role::CHILDREN.map(Member::only).into();
        let mut ending = Ending::orderly(&Patience::default(), Duration::from_secs(3));
        assert_eq!(show(&ending.advance(&alive, start)), ["Tell(Tokenizer, Drain)"]);
        assert_eq!(ending.deadline(), Some(start + Duration::from_secs(3)));
        assert_eq!(show(&ending.advance(&alive, start)), [""; 0], "nothing new before the deadline");
        alive.remove(&Role::Tokenizer.into());
        assert_eq!(
            show(&ending.advance(&alive, start)),
            ["Tell(Scheduler, Stop)", "Tell(Detokenizer, Stop)"]
        );
        alive.clear();
        assert!(ending.advance(&alive, start).is_empty() && !ending.killed);
    }

    #[test]
    fn a_child_that_does_not_leave_meets_ever_more_force() {
        let mut now = Instant::now();
        let mut alive: BTreeSet<Member> = [Role::Tokenizer.into()].into();
        let mut ending = Ending::orderly(&Patience::default(), Duration::from_secs(3));
        let mut seen = Vec::new();
        for _ in 0..5 {
            seen.extend(show(&ending.advance(&alive, now)));
            now = ending.deadline().unwrap();
        }
        assert_eq!(
            seen,
            [
                "Tell(Tokenizer, Drain)",
                "Tell(Tokenizer, Stop)",
                "Signal(Tokenizer, SIGTERM)",
                "Signal(Tokenizer, SIGKILL)",
                "Signal(Tokenizer, SIGKILL)"
            ]
        );
        assert!(ending.killed);
        alive.clear();
        assert!(ending.advance(&alive, now).is_empty());
    }

    #[test]
    fn after_a_failure_the_clients_are_answered_last() {
        let now = Instant::now();
        let mut alive: BTreeSet<Member> = [Role::Detokenizer, Role::Tokenizer].map(Member::only).into();
        let mut ending = Ending::after_failure(&Patience::default());
        assert_eq!(show(&ending.advance(&alive, now)), ["Tell(Detokenizer, Stop)"]);
        alive.remove(&Role::Detokenizer.into());
        assert_eq!(show(&ending.advance(&alive, now)), ["Tell(Tokenizer, Stop)"]);
    }
}
