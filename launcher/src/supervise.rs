//! Owns the state of the server as the launcher sees it: one closed set of events in, actions out. It starts and
//! signals nothing itself, so every course of events can be tested.

mod event;
mod post;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use proto::{Command, Incarnation, Member, Role, ServerHealth, Status, Topology};

use crate::shutdown::{Ending, Patience};
use post::{Life, Post};

pub(crate) use event::{Action, Event, Order};
pub(crate) use post::Limits;

/// How it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub code: u8,
    pub reason: Option<String>,
}

/// Ended as asked.
pub const EXIT_OK: u8 = 0;
/// A child could not start, or died again and again, or had to be killed.
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
    Failed(Member, String),
}

/// The launcher's view of its children.
pub(crate) struct Supervisor {
    phase: Phase,
    posts: BTreeMap<Member, Post>,
    /// To be replaced, each when the one before is at work again.
    rolling: VecDeque<Member>,
    /// The one that is being replaced.
    replacing: Option<Member>,
    limits: Limits,
    patience: Patience,
    signalled: Option<Instant>,
    /// The last event, to notice that the launcher itself stood still.
    last_event: Instant,
    /// What children said of themselves, for the one that ends the server.
    reasons: BTreeMap<Member, String>,
}

/// `timeout` and some shells signal a process and its group: what comes twice within this time was sent once.
const ECHO: Duration = Duration::from_millis(250);
/// Heartbeats come several times a second: a launcher without any event for longer has been stopped itself.
const STOOD_STILL: Duration = Duration::from_secs(1);

impl Supervisor {
    /// All children have just been started.
    pub(crate) fn new(topology: Topology, patience: Patience, limits: Limits, now: Instant) -> Self {
        let children = topology.children().into_iter();
        Self {
            phase: Phase::Starting,
            posts: children.map(|member| (member, Post::new(member, now))).collect(),
            rolling: VecDeque::new(),
            replacing: None,
            limits,
            patience,
            signalled: None,
            last_event: now,
            reasons: BTreeMap::new(),
        }
    }

    pub(crate) fn on(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let stood_still = now.saturating_duration_since(std::mem::replace(&mut self.last_event, now));
        if stood_still > STOOD_STILL {
            self.posts.values_mut().for_each(|post| post.forgive(stood_still));
        }
        let mut actions = self.take(event, now);
        actions.extend(self.roll(now));
        actions
    }

    fn take(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Up(member, incarnation) => {
                self.post(member).hears(incarnation, now);
                Vec::new()
            }
            Event::Status(member, incarnation, status) => self.on_status(member, incarnation, status, now),
            Event::Exited(member, status) => self.on_death(member, describe(status), now),
            Event::CannotStart(member, why) => self.on_death(member, why, now),
            Event::Signal(signal) => self.on_signal(signal, now),
            Event::Order(order) => self.on_order(order, now),
            Event::Timeout => self.on_timeout(now),
        }
    }

    /// When [`Event::Timeout`] is due.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let ending = match &self.phase {
            Phase::Ending { ending, .. } => ending.deadline(),
            Phase::Starting | Phase::Serving => None,
        };
        let posts = self.posts.values().filter(|_| self.replaces()).filter_map(|p| p.deadline(&self.limits));
        posts.chain(ending).min()
    }

    /// `None` until the last child is gone.
    pub(crate) fn outcome(&self) -> Option<Outcome> {
        let Phase::Ending { ending, cause } = &self.phase else { return None };
        if !self.alive().is_empty() {
            return None;
        }
        Some(match cause {
            Cause::Failed(member, what) => {
                let said = self.reasons.get(member).map_or(what.as_str(), String::as_str);
                Outcome { code: EXIT_FAILED, reason: Some(format!("{member}: {said}")) }
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
        matches!(&self.phase, Phase::Ending { cause: Cause::Failed(member, _), .. } if !self.reasons.contains_key(member))
    }

    /// How every child is doing.
    pub(crate) fn health(&self, now: Instant) -> ServerHealth {
        ServerHealth { processes: self.posts.values().map(|post| post.health(now)).collect() }
    }

    /// What is known of a child beyond that.
    pub(crate) fn story(&self, member: Member) -> Story {
        let post = &self.posts[&member];
        Story {
            state: match post.life {
                Life::Starting => "starting",
                Life::Ready => "ready",
                Life::Leaving { .. } => "leaving",
                Life::Dying => "dying",
                Life::Pausing { .. } | Life::Gone => "dead",
            },
            incarnation: post.incarnation,
            started: post.started,
            last_end: post.last_end.clone(),
        }
    }

    fn post(&mut self, member: Member) -> &mut Post {
        self.posts.get_mut(&member).expect("every process that is supervised has a post")
    }

    fn alive(&self) -> BTreeSet<Member> {
        self.posts.iter().filter(|(_, post)| post.is_alive()).map(|(member, _)| *member).collect()
    }

    /// Whether a child that dies is started again: also while the front still answers what runs.
    fn replaces(&self) -> bool {
        match &self.phase {
            Phase::Starting | Phase::Serving => true,
            Phase::Ending { ending, .. } => ending.is_draining(),
        }
    }

    fn on_status(
        &mut self,
        member: Member,
        incarnation: Incarnation,
        status: Status,
        now: Instant,
    ) -> Vec<Action> {
        if let Status::Failed { reason } = &status {
            self.reasons.insert(member, reason.clone());
            if self.post(member).is_buried(incarnation) {
                self.post(member).last_end = Some(reason.clone());
            }
        }
        if !self.post(member).hears(incarnation, now) {
            return Vec::new();
        }
        match status {
            Status::Progress { stage, done, total } => vec![Action::Progress { member, stage, done, total }],
            Status::Ready { detail } => self.on_ready(member, detail, now),
            Status::Heartbeat(beat) => {
                self.post(member).beat(beat, now);
                Vec::new()
            }
            // It leaves by itself right after.
            Status::Failed { reason } => {
                self.post(member).verdict = Some(reason.clone());
                match self.phase {
                    Phase::Starting => self.fail(member, reason, now),
                    Phase::Serving | Phase::Ending { .. } => Vec::new(),
                }
            }
        }
    }

    fn on_ready(&mut self, member: Member, detail: String, now: Instant) -> Vec<Action> {
        let post = self.post(member);
        if post.life != Life::Starting {
            return Vec::new();
        }
        post.ready();
        let mut actions = vec![Action::ChildReady { member, detail, after: now - post.started }];
        let all = self.posts.values().all(|post| post.life == Life::Ready);
        if matches!(self.phase, Phase::Starting) && all {
            self.phase = Phase::Serving;
            actions.push(Action::Serving);
        }
        actions
    }

    /// A child is gone: it is replaced, unless the server ends, or ends because of it.
    fn on_death(&mut self, member: Member, how: String, now: Instant) -> Vec<Action> {
        let limits = self.limits.clone();
        let post = self.post(member);
        let how = post.died(how, &limits, now);
        let loops = post.loops(&limits);
        let mut actions = vec![Action::Bury(member)];
        actions.extend(match &self.phase {
            Phase::Starting => self.fail(member, how, now),
            Phase::Ending { ending, .. } if !ending.is_draining() || member.role == Role::Tokenizer => {
                self.advance(now)
            }
            Phase::Serving | Phase::Ending { .. } if loops => {
                let (count, window) = (limits.deaths, limits.window.as_secs());
                self.fail(member, format!("died {count} times within {window} s, at last: {how}"), now)
            }
            Phase::Serving | Phase::Ending { .. } => self.replace(member, &how, now),
        });
        actions
    }

    fn replace(&mut self, member: Member, how: &str, now: Instant) -> Vec<Action> {
        self.reasons.remove(&member);
        self.post(member).pause(now);
        let mut actions = vec![Action::Notice(format!("{member}: {how}; starting it again"))];
        actions.extend(self.start_due(now));
        actions
    }

    fn start_due(&mut self, now: Instant) -> Vec<Action> {
        let due = |post: &Post| matches!(post.life, Life::Pausing { until } if until <= now);
        let due: Vec<Member> =
            self.posts.iter().filter(|(_, post)| due(post)).map(|(member, _)| *member).collect();
        due.iter().for_each(|member| self.post(*member).restarted(now));
        due.into_iter().map(Action::Start).collect()
    }

    fn on_signal(&mut self, signal: Signal, now: Instant) -> Vec<Action> {
        if self.signalled.replace(now).is_some_and(|before| now - before < ECHO) {
            return Vec::new();
        }
        let alive = self.alive();
        let ending = match &mut self.phase {
            Phase::Ending { ending, cause } => {
                if matches!(cause, Cause::Asked) {
                    *cause = Cause::Forced(signal);
                }
                let mut actions = ending.force(&alive, now);
                actions.extend(self.stop_replacing());
                return actions;
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

    fn on_order(&mut self, order: Order, now: Instant) -> Vec<Action> {
        match (order, &self.phase) {
            (Order::Drain, Phase::Starting) => {
                self.end(Ending::during_start(&self.patience), Cause::Asked, now)
            }
            (Order::Drain, Phase::Serving) => {
                self.end(Ending::orderly(&self.patience, self.patience.drain), Cause::Asked, now)
            }
            (Order::Restart(name), Phase::Serving) => {
                let named = self.posts.keys().copied().filter(|member| name.means(*member));
                let new: Vec<_> = named.filter(|member| !self.is_to_be_replaced(*member)).collect();
                self.rolling.extend(new);
                Vec::new()
            }
            (Order::Drain, Phase::Ending { .. })
            | (Order::Restart(_), Phase::Starting | Phase::Ending { .. }) => Vec::new(),
        }
    }

    fn is_to_be_replaced(&self, member: Member) -> bool {
        self.replacing == Some(member) || self.rolling.contains(&member)
    }

    /// Goes on to the next child that is to be replaced, once the one before is at work.
    fn roll(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        while matches!(self.phase, Phase::Serving) {
            if self.replacing.is_some_and(|member| self.post(member).life != Life::Ready) {
                break;
            }
            self.replacing = self.rolling.pop_front();
            let Some(member) = self.replacing else { break };
            actions.extend(self.send_away(member, now));
        }
        actions
    }

    /// Asks a child to leave so that it can be replaced. A front answers what it holds first, and leaves new clients
    /// to others or to its successor; the others have nothing that their successors do not get again.
    fn send_away(&mut self, member: Member, now: Instant) -> Vec<Action> {
        let farewell = self.limits.farewell;
        let post = self.post(member);
        match post.life {
            Life::Ready => {
                post.life = Life::Leaving { until: now + farewell };
                let command = if member.role == Role::Tokenizer { Command::Retire } else { Command::Stop };
                vec![Action::Tell(member, command)]
            }
            // It holds nothing yet, and may not listen.
            Life::Starting => {
                post.life = Life::Dying;
                post.verdict = Some("was replaced while it started".to_owned());
                vec![Action::Signal(member, Signal::SIGKILL)]
            }
            Life::Leaving { .. } | Life::Dying | Life::Pausing { .. } | Life::Gone => Vec::new(),
        }
    }

    fn on_timeout(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.replaces() {
            for (member, post) in &mut self.posts {
                if let Some(why) = post.hangs(&self.limits, now) {
                    post.life = Life::Dying;
                    post.verdict = Some(why);
                    actions.push(Action::Signal(*member, Signal::SIGKILL));
                }
            }
            actions.extend(self.start_due(now));
        }
        actions.extend(self.advance(now));
        actions
    }

    /// Moves an end on, if one is under way.
    fn advance(&mut self, now: Instant) -> Vec<Action> {
        let alive = self.alive();
        let Phase::Ending { ending, .. } = &mut self.phase else { return Vec::new() };
        let mut actions = ending.advance(&alive, now);
        if !ending.is_draining() {
            actions.extend(self.stop_replacing());
        }
        actions
    }

    /// A child is gone for good.
    fn fail(&mut self, member: Member, what: String, now: Instant) -> Vec<Action> {
        let ending = match &self.phase {
            Phase::Ending { ending, .. } if !ending.is_draining() => return Vec::new(),
            Phase::Starting => Ending::during_start(&self.patience),
            Phase::Serving | Phase::Ending { .. } => Ending::after_failure(&self.patience),
        };
        self.end(ending, Cause::Failed(member, what), now)
    }

    fn end(&mut self, mut ending: Ending, cause: Cause, now: Instant) -> Vec<Action> {
        let mut actions = ending.advance(&self.alive(), now);
        let started = !matches!(self.phase, Phase::Starting);
        if started && !ending.is_draining() {
            actions.extend(self.stop_replacing());
        }
        self.phase = Phase::Ending { ending, cause };
        actions
    }

    /// What is being replaced holds nothing, and may not listen yet.
    fn stop_replacing(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        for (member, post) in &mut self.posts {
            match post.life {
                Life::Pausing { .. } => post.life = Life::Gone,
                Life::Starting if post.restarts > 0 => {
                    post.life = Life::Dying;
                    actions.push(Action::Signal(*member, Signal::SIGKILL));
                }
                _ => {}
            }
        }
        actions
    }
}

/// What an operator may want to know of one child.
pub(crate) struct Story {
    pub state: &'static str,
    pub incarnation: Option<Incarnation>,
    pub started: Instant,
    pub last_end: Option<String>,
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
