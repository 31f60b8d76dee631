//! Owns what a child was last told of the whole server.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::control::{HEALTH_INTERVAL, ServerHealth};

/// What was told longer ago says nothing any more.
const STALE_AFTER: Duration = Duration::from_secs(5);

/// The launcher's view of the server, as far as it told; cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct HealthView {
    latest: Arc<Mutex<Option<(Instant, ServerHealth)>>>,
}

impl HealthView {
    pub(super) fn update(&self, health: ServerHealth) {
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), health));
    }

    /// The latest word, with the time since then added to every age. `None` when there was none, or it is old: a
    /// launcher repeats itself every [`HEALTH_INTERVAL`].
    pub fn current(&self) -> Option<ServerHealth> {
        const { assert!(STALE_AFTER.as_millis() > 4 * HEALTH_INTERVAL.as_millis()) };
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (told, mut health) = latest.filter(|(told, _)| told.elapsed() < STALE_AFTER)?;
        let since = told.elapsed().as_millis() as u64;
        health.processes.iter_mut().for_each(|process| process.heartbeat_age_ms += since);
        Some(health)
    }
}
