//! Owns the signals that end the server.

use std::sync::mpsc::Sender;
use std::thread;

use nix::sys::signal::Signal;
use tokio::signal::unix::{SignalKind, signal};

use crate::supervise::Event;

/// Turns SIGINT, SIGTERM and SIGHUP into events, from the return of this call on. Ends with the process.
pub(crate) fn forward(events: Sender<Event>) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let guard = runtime.enter();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    // The terminal went away.
    let mut hangup = signal(SignalKind::hangup())?;
    // Caught, so that a file that may not grow is an error of its writer's and not the end of the server.
    drop(signal(SignalKind::from_raw(nix::libc::SIGXFSZ))?);
    drop(guard);
    thread::Builder::new().name("signals".into()).spawn(move || {
        runtime.block_on(async move {
            loop {
                let seen = tokio::select! {
                    _ = interrupt.recv() => Signal::SIGINT,
                    _ = terminate.recv() => Signal::SIGTERM,
                    _ = hangup.recv() => Signal::SIGHUP,
                };
                if events.send(Event::Signal(seen)).is_err() {
                    return;
                }
            }
        });
    })?;
    Ok(())
}
