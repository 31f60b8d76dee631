//! Owns one child process: started in a group of its own, its output pumped line by line to the console, its end
//! reported as an event. Children die with the launcher by themselves.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::Sender;
use std::thread;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use proto::Member;

use crate::console::Console;
use crate::plan::ChildSpec;
use crate::supervise::Event;

/// Longest line passed on in one piece; what is longer is cut into pieces, so that memory stays flat.
const MAX_LINE: u64 = 16 * 1024;

/// A child that was started.
#[derive(Debug)]
pub(crate) struct Child {
    group: Pid,
}

/// What a child is connected to.
#[derive(Clone, Copy)]
pub(crate) struct Surroundings<'a> {
    pub(crate) listener: &'a TcpListener,
    pub(crate) console: &'a Console,
    pub(crate) events: &'a Sender<Event>,
}

impl Child {
    /// Must be called on the main thread: a child's parent-death signal is tied to the thread that started it.
    pub(crate) fn spawn(
        spec: &ChildSpec,
        successor: bool,
        Surroundings { listener, console, events }: Surroundings<'_>,
    ) -> Result<Self> {
        // A duplicate without the close-on-exec flag lives just for the start of the child that listens.
        let handed: Option<OwnedFd> = if spec.listens { Some(nix::unistd::dup(listener)?) } else { None };
        let mut process = Command::new(&spec.program)
            .args(spec.arguments(handed.as_ref().map(AsRawFd::as_raw_fd), successor))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {} ({})", spec.member, spec.program.display()))?;
        drop(handed);

        let member = spec.member;
        let group = Pid::from_raw(process.id() as i32);
        let stdout = process.stdout.take().context("stdout was piped")?;
        let stderr = process.stderr.take().context("stderr was piped")?;
        pump(member, "out", stdout, console.clone())?;
        pump(member, "err", stderr, console.clone())?;
        let events = events.clone();
        thread::Builder::new().name(format!("wait-{member}")).spawn(move || {
            // Waiting fails only for a child that is gone already, and nobody else waits for it.
            if let Ok(status) = process.wait() {
                let _ = events.send(Event::Exited(member, status));
            }
        })?;
        Ok(Self { group })
    }

    pub(crate) fn pid(&self) -> i32 {
        self.group.as_raw()
    }

    /// Signals the child and whatever it started. A group that is gone is a success.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = killpg(self.group, signal);
    }
}

/// Copies lines to the console until the pipe closes. The console never blocks, so neither does the child.
fn pump(member: Member, name: &str, pipe: impl Read + Send + 'static, console: Console) -> Result<()> {
    thread::Builder::new().name(format!("{name}-{member}")).spawn(move || {
        let mut reader = BufReader::new(pipe);
        let mut line = Vec::new();
        while (&mut reader).take(MAX_LINE).read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
            let text = String::from_utf8_lossy(&line);
            console.log(member, text.trim_end_matches(['\n', '\r']));
            line.clear();
        }
    })?;
    Ok(())
}
