//! Owns the count of frames that made no sense, and a log of them that a flood cannot flood.

use std::fmt::Display;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

static DROPPED: AtomicU64 = AtomicU64::new(0);
static LAST_LOG: Mutex<Option<Instant>> = Mutex::new(None);
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Frames of this process that did not decode and were dropped, ever.
pub fn dropped_frames() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

pub(super) fn drop_frame(link: &str, reason: &dyn Display) {
    let total = DROPPED.fetch_add(1, Ordering::Relaxed) + 1;
    let Ok(mut last) = LAST_LOG.lock() else { return };
    let now = Instant::now();
    if last.is_none_or(|last| now.duration_since(last) >= LOG_INTERVAL) {
        *last = Some(now);
        tracing::warn!(link, total, %reason, "dropped a frame");
    }
}
