//! Owns where a process's log goes: plain lines on standard error, which the launcher passes on.

use std::sync::{Arc, Mutex, PoisonError};

use tracing_subscriber::EnvFilter;

/// Starts logging at one of SGLang's levels; `RUST_LOG` overrides it. Has no effect the second time.
pub fn init_logging(level: &str) {
    let level = match level.to_ascii_lowercase().as_str() {
        "warning" => "warn".to_owned(),
        "critical" | "fatal" => "error".to_owned(),
        level => level.to_owned(),
    };
    // The socket crate warns of what is normal when a peer goes.
    let filter = EnvFilter::try_from_default_env()
        .or_else(|_| EnvFilter::try_new(format!("{level},zeromq=error")))
        .unwrap_or_else(|_| EnvFilter::new("info,zeromq=error"));
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init();
}

/// The panics of all threads, so that the reason of a failure names the first.
#[derive(Clone, Default)]
pub(super) struct Panics(Arc<Mutex<Option<String>>>);

impl Panics {
    pub(super) fn first(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Logs panics as events, and remembers the first.
pub(super) fn remember_panics() -> Panics {
    let panics = Panics::default();
    let seen = panics.clone();
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("unnamed");
        let backtrace = std::backtrace::Backtrace::capture();
        tracing::error!(thread, %backtrace, "{panic}");
        let mut first = seen.0.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert_with(|| format!("thread {thread:?}: {panic}"));
    }));
    panics
}
