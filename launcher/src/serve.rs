//! Owns one server from its listening socket to its last child: starts everything, then carries out what the
//! supervisor decides, one event at a time.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::socket::Backlog;
use proto::link::{AckMode, LinkEvent, LinkHandle, LinkSpec, LinkThread, Side};
use proto::{
    Command, Endpoints, HEALTH_INTERVAL, Incarnation, Member, Role, ServeConfig, ServerHealth, Status,
    Topology,
};

use crate::admin;
use crate::args::Args;
use crate::board::Board;
use crate::child::{Child, Surroundings};
use crate::console::{self, Console};
use crate::metrics::LauncherMetrics;
use crate::metrics_port;
use crate::plan::{ChildSpec, plan};
use crate::resolve::{Machine, resolve};
use crate::run_dir::RunDir;
use crate::sample_chat::SampleChat;
use crate::shutdown::Patience;
use crate::signals;
use crate::supervise::{Action, Event, Limits, Outcome, Supervisor};

/// How long the reason of a child that is gone may still be under way.
const LAST_WORDS: Duration = Duration::from_millis(300);
/// How long a terminal may hold up the end.
const LAST_LINES: Duration = Duration::from_secs(1);
/// Words about the server's health that may wait for a tokenizer process that does not read.
const WAITING_HEALTH: usize = 4;

/// Serves until a signal or a failure. An error means that nothing was started.
pub fn run(args: &Args) -> Result<Outcome> {
    let limits = limits(args)?;
    let has_metrics = args.logs.enable_metrics || args.logs.metrics_port.is_none();
    ensure!(has_metrics, "--metrics-port needs --enable-metrics");
    ensure!(
        !(args.logs.sample_chat && args.model.skip_tokenizer_init),
        "--sample-chat needs a tokenizer: leave out --skip-tokenizer-init"
    );
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

    let incarnation = Incarnation::now();
    let links = LinkThread::start(Role::Launcher, incarnation)?;
    let board = Board::default();
    admin::listen(&Endpoints::new(run_dir.path()).admin(), board.clone(), console.clone(), events.clone())?;
    let metrics = match config.server.enable_metrics {
        true => {
            Some(LauncherMetrics::new(&config.metrics_dir(), incarnation).context("registering metrics")?)
        }
        false => None,
    };
    if let Some(port) = args.logs.metrics_port {
        let address = metrics_port::serve(&args.http.host, port, config.metrics_dir())?;
        console.say(format!("metrics on http://{address}/metrics"));
    }
    let bin = std::env::current_exe()?.parent().context("the launcher lies in a folder")?.to_owned();
    let mut server = Server {
        controls: open_controls(&links, run_dir.path(), config.topology, &events),
        specs: plan(&config, &bin).into_iter().map(|spec| (spec.member, spec)).collect(),
        children: BTreeMap::new(),
        config,
        listener,
        address,
        console,
        events,
        board,
        metrics,
        shows_sample_chat: args.logs.sample_chat,
    };
    let outcome = server.start_all().map(|()| server.supervise(&inbox, limits));
    drop(server);
    links.close(Duration::ZERO);
    console_thread.finish(LAST_LINES);
    outcome
}

fn limits(args: &Args) -> Result<Limits> {
    let processes = &args.processes;
    let heartbeat = processes.heartbeat_timeout;
    ensure!(
        heartbeat.is_finite() && heartbeat >= 1.0,
        "--heartbeat-timeout {heartbeat} must be at least 1: processes report several times a second"
    );
    ensure!(processes.restart_limit > 0, "--restart-limit must be at least 1");
    let defaults = Limits::default();
    let heartbeat = Duration::try_from_secs_f64(heartbeat).context("--heartbeat-timeout")?;
    Ok(Limits {
        heartbeat,
        first_heartbeat: defaults.first_heartbeat.max(heartbeat),
        watchdog: Duration::try_from_secs_f64(args.schedule.watchdog_timeout).unwrap_or(defaults.watchdog),
        deaths: processes.restart_limit as usize,
        ..defaults
    })
}

fn open_controls(
    links: &LinkThread,
    run_dir: &Path,
    topology: Topology,
    events: &Sender<Event>,
) -> BTreeMap<Member, LinkHandle<Command>> {
    let endpoints = Endpoints::new(run_dir);
    let open = |member: Member| {
        let spec = LinkSpec {
            path: endpoints.control(member),
            side: Side::Bind,
            peer: member.role,
            ack: AckMode::Auto,
        };
        let events = events.clone();
        let mut speaker = None;
        // The loop is gone only when the server has ended.
        links.open::<Command, Status>(spec, move |event| match (event, speaker) {
            (LinkEvent::Up { peer, .. }, _) => {
                speaker = Some(peer);
                let _ = events.send(Event::Up(member, peer));
            }
            (LinkEvent::Message { message, .. }, Some(peer)) => {
                let _ = events.send(Event::Status(member, peer, message));
            }
            _ => {}
        })
    };
    topology.children().into_iter().map(|member| (member, open(member))).collect()
}

/// A server, its children and all that is needed to replace one.
struct Server {
    config: ServeConfig,
    listener: TcpListener,
    address: SocketAddr,
    console: Console,
    events: Sender<Event>,
    controls: BTreeMap<Member, LinkHandle<Command>>,
    specs: BTreeMap<Member, ChildSpec>,
    children: BTreeMap<Member, Child>,
    board: Board,
    /// `None` without `--enable-metrics`.
    metrics: Option<LauncherMetrics>,
    shows_sample_chat: bool,
}

impl Server {
    fn start_all(&mut self) -> Result<()> {
        for member in self.config.topology.children() {
            if let Err(error) = self.start(member) {
                self.children.values().for_each(|child| child.signal(nix::sys::signal::Signal::SIGKILL));
                return Err(error);
            }
        }
        Ok(())
    }

    fn start(&mut self, member: Member) -> Result<()> {
        let surroundings =
            Surroundings { listener: &self.listener, console: &self.console, events: &self.events };
        let successor = self.children.contains_key(&member);
        let child = Child::spawn(&self.specs[&member], successor, surroundings)?;
        self.children.insert(member, child);
        Ok(())
    }

    fn supervise(&mut self, inbox: &Receiver<Event>, limits: Limits) -> Outcome {
        let mut supervisor =
            Supervisor::new(self.config.topology, Patience::default(), limits, Instant::now());
        let mut next_report = Instant::now();
        let mut reported = ServerHealth::default();
        loop {
            let now = Instant::now();
            let health = supervisor.health(now);
            if now >= next_report || is_news(&health, &reported) {
                self.report(&supervisor, &health, now);
                (reported, next_report) = (health, now + HEALTH_INTERVAL);
            }
            let due = supervisor.deadline().map_or(next_report, |deadline| deadline.min(next_report));
            let event = next_event(inbox, Some(due));
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

    /// Tells everybody who wants to know how the processes are doing.
    fn report(&mut self, supervisor: &Supervisor, health: &ServerHealth, now: Instant) {
        let pids = self.children.iter().map(|(member, child)| (*member, child.pid())).collect();
        self.board.update(supervisor, &pids, now);
        let fronts = self.controls.iter().filter(|(member, _)| member.role == Role::Tokenizer);
        for (_, control) in fronts.filter(|(_, control)| control.backlog().messages < WAITING_HEALTH) {
            let _ = control.send(&Command::Health(health.clone()));
        }
        if let Some(error) = self.metrics.as_mut().and_then(|metrics| metrics.publish(health)) {
            self.console.complain(error);
        }
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Tell(member, command) => {
                if let Some(control) = self.controls.get(&member) {
                    // A child that cannot be told meets the signal that follows at the deadline.
                    let _ = control.send(&command);
                }
            }
            Action::Signal(member, signal) => {
                self.console.complain(format!("{member} gets {signal}"));
                if let Some(child) = self.children.get(&member) {
                    child.signal(signal);
                }
            }
            Action::Start(member) => {
                if let Err(error) = self.start(member) {
                    // The loop holds the other end.
                    let _ = self.events.send(Event::CannotStart(member, format!("{error:#}")));
                }
            }
            Action::Bury(member) => {
                self.console.progress_end(member);
                if let Some(error) = self.metrics.as_mut().and_then(|metrics| metrics.bury(member)) {
                    self.console.complain(error);
                }
            }
            Action::Progress { member, stage, done, total } => {
                self.console.progress(member, &stage, done, total)
            }
            Action::ChildReady { member, detail, after } => {
                self.console.progress_end(member);
                let line = format!("{member:<12} ready after {:.1} s  {detail}", after.as_secs_f64());
                self.console.say(line.trim_end());
            }
            Action::Serving => self.welcome(),
            Action::Notice(text) => self.console.complain(text),
        }
    }

    fn welcome(&self) {
        let address = reachable(self.address);
        self.console.say(welcome(&self.config, &address));
        if self.shows_sample_chat {
            let (chat, console) = (SampleChat::new(&self.config, &address), self.console.clone());
            // It ends by itself, or with the process.
            std::thread::spawn(move || match chat.run() {
                Ok(table) => console.say(table),
                Err(error) => console.complain(format!("{error:#}")),
            });
        }
    }
}

/// Whether something changed that others should not have to wait for.
fn is_news(now: &ServerHealth, before: &ServerHealth) -> bool {
    let facts = |health: &ServerHealth| -> Vec<_> {
        health.processes.iter().map(|p| (p.process, p.alive, p.ready, p.restarts)).collect()
    };
    facts(now) != facts(before)
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

fn listen(host: &str, port: u16) -> Result<TcpListener> {
    match TcpListener::bind((host, port)) {
        Ok(listener) => {
            // While a tokenizer process is replaced, connections wait here: more than the usual 128.
            nix::sys::socket::listen(&listener, Backlog::MAXALLOWABLE)?;
            Ok(listener)
        }
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            bail!("--port {port} is in use on {host}; choose another one, or 0 for a free one")
        }
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            bail!("--port {port} is not allowed for this user; choose one above 1023")
        }
        Err(error) => Err(error).with_context(|| format!("cannot listen on --host {host} --port {port}")),
    }
}

/// Where this machine's own clients find the server.
fn reachable(address: SocketAddr) -> String {
    match address.ip() {
        ip if ip.is_unspecified() && ip.is_ipv6() => format!("[::1]:{}", address.port()),
        ip if ip.is_unspecified() => format!("127.0.0.1:{}", address.port()),
        _ => address.to_string(),
    }
}

/// The address, and a line to paste.
fn welcome(config: &ServeConfig, reachable: &str) -> String {
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
