//! Owns what the supervisor knows of one child: its life, its signs of life, and how often it has died.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use proto::{Heartbeat, Incarnation, Member, ProcessHealth, Role};

/// When a child counts as hung, and when dying counts as a loop.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// Silence of a child that has been heard.
    pub heartbeat: Duration,
    /// The same for one that was just started: the machine may be busy.
    pub first_heartbeat: Duration,
    /// A busy scheduler without progress.
    pub watchdog: Duration,
    /// This many deaths of one child within `window` are a crash loop.
    pub deaths: usize,
    pub window: Duration,
    /// How long a child that is to be replaced may take to leave.
    pub farewell: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_secs(10),
            first_heartbeat: Duration::from_secs(30),
            watchdog: Duration::from_secs(300),
            deaths: 5,
            window: Duration::from_secs(60),
            farewell: Duration::from_secs(30),
        }
    }
}

/// Pause before a child that never became ready is started again; doubled with every further failure.
const BACKOFF: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// Where a child stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// Started, not yet at work.
    Starting,
    Ready,
    /// Asked to leave, and to be replaced.
    Leaving {
        until: Instant,
    },
    /// Killed; its end is not reported yet.
    Dying,
    /// Dead; to be started again at this time.
    Pausing {
        until: Instant,
    },
    /// Dead for good.
    Gone,
}

/// One child's place.
#[derive(Debug)]
pub(crate) struct Post {
    member: Member,
    pub life: Life,
    /// The present life, once it has said hello.
    pub incarnation: Option<Incarnation>,
    /// The last life that ended: what still arrives of it is old.
    buried: Option<Incarnation>,
    pub started: Instant,
    pub restarts: u64,
    /// Recent ones, oldest first.
    deaths: VecDeque<Instant>,
    /// Deaths in a row without having been ready.
    failures: u32,
    was_ready: bool,
    heard: Instant,
    pub heartbeat: Heartbeat,
    /// The progress mark that has not moved while busy, and since when.
    standstill: Option<(u64, Instant)>,
    /// Why it was killed, or what it said of itself before it left.
    pub verdict: Option<String>,
    /// How the life before this one ended.
    pub last_end: Option<String>,
}

impl Post {
    /// The process has just been started.
    pub(crate) fn new(member: Member, now: Instant) -> Self {
        Self {
            member,
            life: Life::Starting,
            incarnation: None,
            buried: None,
            started: now,
            restarts: 0,
            deaths: VecDeque::new(),
            failures: 0,
            was_ready: false,
            heard: now,
            heartbeat: Heartbeat::default(),
            standstill: None,
            verdict: None,
            last_end: None,
        }
    }

    /// A process exists.
    pub(crate) fn is_alive(&self) -> bool {
        !matches!(self.life, Life::Pausing { .. } | Life::Gone)
    }

    /// Whether a message of this life concerns the present.
    pub(crate) fn hears(&mut self, incarnation: Incarnation, now: Instant) -> bool {
        if self.buried == Some(incarnation) || !self.is_alive() {
            return false;
        }
        self.incarnation = Some(incarnation);
        self.heard = now;
        true
    }

    /// Whether these are words of the life that ended last.
    pub(crate) fn is_buried(&self, incarnation: Incarnation) -> bool {
        self.buried == Some(incarnation)
    }

    pub(crate) fn ready(&mut self) {
        self.life = Life::Ready;
        self.was_ready = true;
        self.failures = 0;
    }

    pub(crate) fn beat(&mut self, heartbeat: Heartbeat, now: Instant) {
        let still = self.standstill.is_some_and(|(mark, _)| mark == heartbeat.progress);
        // Only a scheduler has a watchdog: the work of the others is to wait.
        if heartbeat.in_flight == 0 || self.member.role != Role::Scheduler {
            self.standstill = None;
        } else if !still {
            self.standstill = Some((heartbeat.progress, now));
        }
        self.heartbeat = heartbeat;
    }

    /// The process is gone; how it ended. A planned end is no death.
    pub(crate) fn died(&mut self, how: String, limits: &Limits, now: Instant) -> String {
        let planned = matches!(self.life, Life::Leaving { .. });
        let how = self.verdict.take().unwrap_or(how);
        self.buried = self.incarnation.take().or(self.buried);
        self.standstill = None;
        self.heartbeat = Heartbeat::default();
        self.last_end = Some(how.clone());
        if !planned {
            self.deaths.push_back(now);
            self.failures = if self.was_ready { 0 } else { self.failures + 1 };
        }
        while self.deaths.front().is_some_and(|death| now - *death > limits.window) {
            self.deaths.pop_front();
        }
        self.life = Life::Gone;
        how
    }

    /// Too many deaths of late.
    pub(crate) fn loops(&self, limits: &Limits) -> bool {
        self.deaths.len() >= limits.deaths
    }

    /// To be started again, at once if the last life had worked.
    pub(crate) fn pause(&mut self, now: Instant) {
        let pause = match self.failures {
            0 => Duration::ZERO,
            failures => BACKOFF.saturating_mul(1 << (failures - 1).min(10)).min(BACKOFF_MAX),
        };
        self.life = Life::Pausing { until: now + pause };
    }

    pub(crate) fn restarted(&mut self, now: Instant) {
        self.life = Life::Starting;
        self.was_ready = false;
        self.restarts += 1;
        (self.started, self.heard) = (now, now);
    }

    /// When something is to be done about it.
    pub(crate) fn deadline(&self, limits: &Limits) -> Option<Instant> {
        match self.life {
            Life::Pausing { until } => Some(until),
            Life::Leaving { until } => Some(until.min(self.silence_ends(limits))),
            Life::Starting | Life::Ready => {
                let standstill = self.standstill.map(|(_, since)| since + limits.watchdog);
                let silence = self.silence_ends(limits);
                Some(standstill.map_or(silence, |standstill| standstill.min(silence)))
            }
            Life::Dying | Life::Gone => None,
        }
    }

    fn silence_ends(&self, limits: &Limits) -> Instant {
        self.heard + if self.incarnation.is_some() { limits.heartbeat } else { limits.first_heartbeat }
    }

    /// Why it must be killed, if it must.
    pub(crate) fn hangs(&self, limits: &Limits, now: Instant) -> Option<String> {
        match self.life {
            Life::Leaving { until } if until <= now => return Some("did not leave when asked".to_owned()),
            Life::Leaving { .. } | Life::Starting | Life::Ready => {}
            Life::Dying | Life::Pausing { .. } | Life::Gone => return None,
        }
        if self.silence_ends(limits) <= now {
            let silent = (now - self.heard).as_secs_f64();
            return Some(format!("gave no sign of life for {silent:.1} s"));
        }
        let (_, since) = self.standstill?;
        (since + limits.watchdog <= now).then(|| {
            let limit = limits.watchdog.as_secs_f64();
            format!("no progress for {limit} s with requests running (--watchdog-timeout)")
        })
    }

    /// The launcher itself stood still for so long: nobody is to blame for that time.
    pub(crate) fn forgive(&mut self, time: Duration) {
        self.heard += time;
        if let Some((_, since)) = &mut self.standstill {
            *since += time;
        }
    }

    pub(crate) fn health(&self, now: Instant) -> ProcessHealth {
        ProcessHealth {
            process: self.member,
            alive: self.is_alive(),
            ready: matches!(self.life, Life::Ready | Life::Leaving { .. }),
            restarts: self.restarts,
            heartbeat_age_ms: now.saturating_duration_since(self.heard).as_millis() as u64,
            heartbeat: self.heartbeat.clone(),
        }
    }
}
