//! Owns one server from its listening socket to its last child: starts everything, then carries out what the
//! supervisor decides, one event at a time.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use proto::link::{AckMode, LinkEvent, LinkHandle, LinkSpec, LinkThread, Side};
use proto::{Command, Endpoints, Incarnation, Role, ServeConfig, Status};

use crate::args::Args;
use crate::child::Child;
use crate::console::{self, Console};
use crate::plan::plan;
use crate::resolve::{Machine, resolve};
use crate::run_dir::RunDir;
use crate::shutdown::Patience;
use crate::signals;
use crate::supervise::{Action, Event, Outcome, Supervisor};

/// How long the reason of a child that is gone may still be under way.
const LAST_WORDS: Duration = Duration::from_millis(300);
/// How long a terminal may hold up the end.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Serves until a signal or a failure. An error means that nothing was started.
pub fn run(args: &Args) -> Result<Outcome> {
    let listener = listen(&args.http.host, args.http.port)?;
    let address = listener.local_addr()?;
    let run_dir = RunDir::create()?;
    let resolved = resolve(args, run_dir.path(), address.port(), &Machine::detect())?;
    let config = resolved.config;
    config.store()?;

    let (console, console_thread) = console::start()?;
    resolved.notes.iter().for_each(|note| console.say(note));
    let (events, inbox) = channel();
    signals::forward(events.clone())?;

    let links = LinkThread::start(Role::Launcher, Incarnation::now())?;
    let endpoints = Endpoints::new(run_dir.path());
    let mut controls = BTreeMap::new();
    for role in Role::CHILDREN {
        let spec =
            LinkSpec { path: endpoints.control(role), side: Side::Bind, peer: role, ack: AckMode::Auto };
        let events = events.clone();
        let handle = links.open::<Command, Status>(spec, move |event| {
            if let LinkEvent::Message { message, .. } = event {
                // The loop is gone only when the server has ended.
                let _ = events.send(Event::Status(role, message));
            }
        });
        controls.insert(role, handle);
    }

    let bin = std::env::current_exe()?.parent().context("the launcher lies in a folder")?.to_owned();
    let mut children = BTreeMap::new();
    for spec in plan(&config, &bin) {
        match Child::spawn(&spec, &listener, &console, &events) {
            Ok(child) => children.insert(spec.role, child),
            Err(error) => {
                kill_all(&children);
                return Err(error);
            }
        };
    }
    let mut server = Server { config, address, console, controls, children };
    let outcome = server.supervise(&inbox);
    drop(server);
    links.close(Duration::ZERO);
    console_thread.finish(LAST_LINES);
    Ok(outcome)
}

/// A server whose children run.
struct Server {
    config: ServeConfig,
    address: SocketAddr,
    console: Console,
    controls: BTreeMap<Role, LinkHandle<Command>>,
    children: BTreeMap<Role, Child>,
}

impl Server {
    fn supervise(&mut self, inbox: &Receiver<Event>) -> Outcome {
        let watchdog = Duration::from_secs_f64(self.config.schedule.watchdog_timeout_s);
        let mut supervisor = Supervisor::new(Patience::default(), watchdog, Instant::now());
        loop {
            let event = next_event(inbox, supervisor.deadline());
            for action in supervisor.on(event, Instant::now()) {
                self.carry_out(action);
            }
            if supervisor.outcome().is_some() {
                break;
            }
        }
        let give_up = Instant::now() + LAST_WORDS;
        while supervisor.awaits_last_words() && Instant::now() < give_up {
            supervisor.on(next_event(inbox, Some(give_up)), Instant::now());
        }
        supervisor.outcome().expect("the loop above ends with an outcome, and no event takes it back")
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Tell(role, command) => {
                if let Some(control) = self.controls.get(&role) {
                    // A child that cannot be told meets the signal that follows at the deadline.
                    let _ = control.send(&command);
                }
            }
            Action::Signal(role, signal) => {
                self.console.complain(format!("{role} gets {signal}"));
                if let Some(child) = self.children.get(&role) {
                    child.signal(signal);
                }
            }
            Action::Progress { role, stage, done, total } => self.console.progress(role, &stage, done, total),
            Action::ChildReady { role, detail, after } => {
                self.console.progress_end(role);
                let line =
                    format!("{:<12} ready after {:.1} s  {detail}", role.as_str(), after.as_secs_f64());
                self.console.say(line.trim_end());
            }
            Action::Serving => self.console.say(welcome(&self.config, self.address)),
            Action::Notice(text) => self.console.complain(text),
        }
    }
}

fn next_event(inbox: &Receiver<Event>, deadline: Option<Instant>) -> Event {
    let Some(deadline) = deadline else {
        return inbox.recv().expect("the signal thread holds a sender for as long as the process lives");
    };
    match inbox.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        Ok(event) => event,
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Event::Timeout,
    }
}

fn kill_all(children: &BTreeMap<Role, Child>) {
    children.values().for_each(|child| child.signal(nix::sys::signal::Signal::SIGKILL));
}

fn listen(host: &str, port: u16) -> Result<TcpListener> {
    match TcpListener::bind((host, port)) {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            bail!("--port {port} is in use on {host}; choose another one, or 0 for a free one")
        }
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            bail!("--port {port} is not allowed for this user; choose one above 1023")
        }
        Err(error) => Err(error).with_context(|| format!("cannot listen on --host {host} --port {port}")),
    }
}

/// The address, and a line to paste.
fn welcome(config: &ServeConfig, address: SocketAddr) -> String {
    let reachable = match address.ip() {
        ip if ip.is_unspecified() && ip.is_ipv6() => format!("[::1]:{}", address.port()),
        ip if ip.is_unspecified() => format!("127.0.0.1:{}", address.port()),
        _ => address.to_string(),
    };
    let key = match config.server.api_key {
        Some(_) => " -H 'Authorization: Bearer <your key>'",
        None => "",
    };
    let prompt = match config.server.skip_tokenizer_init {
        true => r#""input_ids": [1, 2, 3]"#,
        false => {
            r#""text": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. Monday, Tuesday,""#
        }
    };
    format!(
        "\nserving on http://{reachable}\ntry:\n  curl -s http://{reachable}/generate -H 'Content-Type: \
         application/json'{key} -d '{{{prompt}, \"sampling_params\": {{\"temperature\": 0, \"max_new_tokens\": \
         64}}}}'\n"
    )
}
