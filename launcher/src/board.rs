//! Owns what an operator can see of the processes: the loop writes it, the admin socket and the metrics read it, and
//! neither waits for the other.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use proto::metrics::resident_bytes;
use proto::{Member, Role};
use serde::{Deserialize, Serialize};

use crate::supervise::Supervisor;

/// One process, as `launcher ps` shows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ProcessReport {
    /// Its name: the role, with a number where that has several processes.
    pub process: Member,
    pub role: Role,
    /// `None` while it is dead.
    pub pid: Option<i32>,
    /// As it stands in logs and file names.
    pub incarnation: Option<String>,
    /// starting, ready, leaving, dying or dead.
    pub state: String,
    pub uptime_s: f64,
    pub restarts: u64,
    pub heartbeat_age_s: f64,
    pub in_flight: u64,
    pub queue_depth: u64,
    pub rss_bytes: Option<u64>,
    /// How the life before this one ended.
    pub last_end: Option<String>,
}

/// The latest reports; cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Board {
    latest: Arc<Mutex<Vec<ProcessReport>>>,
}

impl Board {
    /// `pids` of the processes that were started last.
    pub(crate) fn update(&self, supervisor: &Supervisor, pids: &BTreeMap<Member, i32>, now: Instant) {
        let health = supervisor.health(now).processes.into_iter();
        let reports = health.map(|process| {
            let story = supervisor.story(process.process);
            let uptime = now.saturating_duration_since(story.started);
            ProcessReport {
                process: process.process,
                role: process.process.role,
                pid: pids.get(&process.process).copied().filter(|_| process.alive),
                incarnation: story.incarnation.map(|incarnation| incarnation.to_string()),
                state: story.state.to_owned(),
                uptime_s: if process.alive { uptime.as_secs_f64() } else { 0.0 },
                restarts: process.restarts,
                heartbeat_age_s: process.heartbeat_age_ms as f64 / 1e3,
                in_flight: process.heartbeat.in_flight,
                queue_depth: process.heartbeat.queued,
                rss_bytes: None,
                last_end: story.last_end,
            }
        });
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = reports.collect();
    }

    /// The latest reports, with the memory the processes have now.
    pub(crate) fn read(&self) -> Vec<ProcessReport> {
        let mut reports = self.latest.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for report in &mut reports {
            report.rss_bytes = report.pid.and_then(|pid| resident_bytes(u32::try_from(pid).ok()?));
        }
        reports
    }
}
