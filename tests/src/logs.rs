//! Owns what the launcher and its children wrote, in order, and lets a test wait for a line.

use std::io::{BufRead, BufReader, Read};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Grows while the processes live; cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Logs {
    inner: Arc<(Mutex<Vec<String>>, Condvar)>,
}

impl Logs {
    /// Collects the lines of one pipe until it closes; then the thread ends.
    pub(crate) fn collect(&self, pipe: impl Read + Send + 'static) -> JoinHandle<()> {
        let logs = self.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                let (lines, grown) = &*logs.inner;
                lines.lock().unwrap_or_else(PoisonError::into_inner).push(line);
                grown.notify_all();
            }
        })
    }

    pub(crate) fn text(&self) -> String {
        self.inner.0.lock().unwrap_or_else(PoisonError::into_inner).join("\n")
    }

    /// The first value that `find` makes of a line, as soon as there is one; `None` after the deadline, or when
    /// `given_up` says that no more lines will come.
    pub(crate) fn wait_for<T>(
        &self,
        timeout: Duration,
        mut find: impl FnMut(&str) -> Option<T>,
        mut given_up: impl FnMut() -> bool,
    ) -> Option<T> {
        const LOOK_AGAIN: Duration = Duration::from_millis(100);
        let deadline = Instant::now() + timeout;
        let (lines, grown) = &*self.inner;
        let mut seen = 0;
        let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let last_look = given_up();
            if let Some(found) = lines[seen..].iter().find_map(|line| find(line)) {
                return Some(found);
            }
            seen = lines.len();
            if last_look || Instant::now() >= deadline {
                return None;
            }
            lines = grown.wait_timeout(lines, LOOK_AGAIN).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
