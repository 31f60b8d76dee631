//! Owns what every child process does besides its work: reading the configuration, logging, the control link to
//! the launcher with its heartbeat, dying with the launcher, and turning the outcome into an exit code.

mod args;
mod guard;
mod health;
mod log;
mod status;

use std::io;
use std::os::fd::RawFd;
use std::panic::AssertUnwindSafe;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::config::ServeConfig;
use crate::control::{Command, Status};
use crate::endpoints::Endpoints;
use crate::ids::{Incarnation, Role};
use crate::link::{AckMode, LinkEvent, LinkHandle, LinkSpec, LinkThread, Side};
use crate::topology::Member;
use args::Args;
use guard::Launcher;

pub use health::HealthView;
pub use log::init_logging;
pub use status::StatusReporter;

/// How far the end has come. Only ever grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Running,
    /// Take no more clients: a successor does. Serve those that are there.
    Retiring,
    /// Admit nothing, finish what runs.
    Draining,
    /// Leave now.
    Stopping,
}

/// The end of the process, as a value that is passed in and watched.
#[derive(Debug, Clone)]
pub struct Shutdown {
    phase: watch::Receiver<Phase>,
}

/// The other half of a [`Shutdown`].
#[derive(Debug, Clone)]
pub struct ShutdownSender {
    phase: Arc<watch::Sender<Phase>>,
}

impl Shutdown {
    pub fn new() -> (ShutdownSender, Self) {
        let (sender, phase) = watch::channel(Phase::Running);
        (ShutdownSender { phase: Arc::new(sender) }, Self { phase })
    }

    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Waits, on an async thread, until at least this phase is reached.
    pub async fn reached(&self, phase: Phase) {
        // A sender that is gone can announce nothing: the process is ending.
        let _ = self.phase.clone().wait_for(|now| *now >= phase).await;
    }
}

impl ShutdownSender {
    /// Moves on to `phase`; going back has no effect.
    pub fn advance(&self, phase: Phase) {
        self.phase.send_if_modified(|now| {
            let grows = *now < phase;
            if grows {
                *now = phase;
            }
            grows
        });
    }
}

/// What a child's `run` is given.
pub struct Child {
    pub config: Arc<ServeConfig>,
    pub member: Member,
    pub incarnation: Incarnation,
    pub links: LinkThread,
    pub shutdown: Shutdown,
    pub status: StatusReporter,
    /// What the launcher tells of the whole server (tokenizer process only).
    pub health: HealthView,
    /// The listening HTTP socket that the launcher opened (tokenizer process only).
    pub listen_fd: Option<RawFd>,
    /// It takes the place of one that died or was sent away, and clients wait for it.
    pub successor: bool,
}

/// How long a child tries to hand over its last messages.
pub const CLOSE_DEADLINE: Duration = Duration::from_secs(2);

/// How old the last [`StatusReporter::alive`] may be. A scheduler's step can be long, and has the watchdog's time.
const STALE_AFTER: Duration = Duration::from_secs(10);

impl Child {
    /// A child without a launcher, for tests that call a process's `run`. The sender ends it.
    pub fn detached(role: Role, config: ServeConfig) -> io::Result<(Self, ShutdownSender)> {
        let incarnation = Incarnation::now();
        let links = LinkThread::start(role, incarnation)?;
        let (sender, shutdown) = Shutdown::new();
        let child = Self {
            config: Arc::new(config),
            member: role.into(),
            incarnation,
            links,
            shutdown,
            status: StatusReporter::detached(),
            health: HealthView::default(),
            listen_fd: None,
            successor: false,
        };
        Ok((child, sender))
    }
}

/// A child's `main`: parses `--config FILE [--number N] [--listen-fd N] [--successor]`, calls `run`, reports a
/// failure to the launcher with its chain of causes, and returns the exit code.
pub fn child_main<E: std::fmt::Display>(role: Role, run: impl FnOnce(Child) -> Result<(), E>) -> ExitCode {
    let args = match Args::parse(std::env::args_os().skip(1)) {
        Ok(args) => args,
        Err(error) => {
            eprintln!(
                "{}: {error}\nusage: {} --config FILE [--number N] [--listen-fd N] [--successor]",
                role.binary(),
                role.binary()
            );
            return ExitCode::from(2);
        }
    };
    let config = match ServeConfig::load(&args.config) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("{}: {error}", role.binary());
            return ExitCode::FAILURE;
        }
    };
    init_logging(&config.server.log_level);
    let member = args.number.map_or(Member::only(role), |number| Member::nth(role, number));
    match Post::take(member, &config) {
        Ok(post) => post.serve(config, &args, run),
        Err(error) => {
            tracing::error!(%role, %error, "cannot start");
            ExitCode::FAILURE
        }
    }
}

/// A child's place under its launcher.
struct Post {
    member: Member,
    incarnation: Incarnation,
    /// The control link alone: it outlives the links of the child's work, so that their failure can be reported.
    control: LinkThread,
    shutdown: Shutdown,
    status: StatusReporter,
    health: HealthView,
}

impl Post {
    fn take(member: Member, config: &ServeConfig) -> io::Result<Self> {
        let launcher = Launcher::bind_to_parent()?;
        let incarnation = Incarnation::now();
        let control = LinkThread::start(member.role, incarnation)?;
        let (sender, shutdown) = Shutdown::new();
        guard::watch_signals(&control, sender.clone())?;
        let health = HealthView::default();
        let heard = Heard { launcher: launcher.clone(), shutdown: sender, health: health.clone() };
        let handle = open_control(&control, member, config, heard);
        guard::watch_launcher(&control, launcher);
        let stale_after = match member.role {
            Role::Scheduler => STALE_AFTER.max(watchdog(config)),
            _ => STALE_AFTER,
        };
        let status = StatusReporter::new(handle);
        status.beat_on(&control, stale_after);
        Ok(Self { member, incarnation, control, shutdown, status, health })
    }

    fn serve<E: std::fmt::Display>(
        self,
        config: ServeConfig,
        args: &Args,
        run: impl FnOnce(Child) -> Result<(), E>,
    ) -> ExitCode {
        let child = Child {
            config: Arc::new(config),
            member: self.member,
            incarnation: self.incarnation,
            links: self.control.sibling(),
            shutdown: self.shutdown,
            status: self.status.clone(),
            health: self.health,
            listen_fd: args.listen_fd,
            successor: args.successor,
        };
        let panics = log::remember_panics();
        let failure = match std::panic::catch_unwind(AssertUnwindSafe(|| run(child))) {
            Ok(Ok(())) => None,
            // The alternate form is the one with all causes.
            Ok(Err(error)) => Some(match panics.first() {
                None => format!("{error:#}"),
                Some(panic) => format!("{error:#} (after a panic: {panic})"),
            }),
            Err(_) => Some(format!("panic: {}", panics.first().unwrap_or_default())),
        };
        let code = match failure {
            None => ExitCode::SUCCESS,
            Some(reason) => {
                tracing::error!(role = %self.member, reason, "failed");
                self.status.failed(reason);
                ExitCode::FAILURE
            }
        };
        self.control.close(CLOSE_DEADLINE);
        code
    }
}

fn watchdog(config: &ServeConfig) -> Duration {
    Duration::try_from_secs_f64(config.schedule.watchdog_timeout_s).unwrap_or(Duration::MAX)
}

/// Whom the launcher's words concern.
struct Heard {
    launcher: Launcher,
    shutdown: ShutdownSender,
    health: HealthView,
}

fn open_control(
    links: &LinkThread,
    member: Member,
    config: &ServeConfig,
    heard: Heard,
) -> LinkHandle<Status> {
    let spec = LinkSpec {
        path: Endpoints::new(&config.run_dir).control(member),
        side: Side::Connect,
        peer: Role::Launcher,
        ack: AckMode::Auto,
    };
    links.open(spec, move |event| match event {
        LinkEvent::Up { .. } => heard.launcher.heard(),
        LinkEvent::Down => heard.launcher.lost(),
        LinkEvent::Message { message: Command::Retire, .. } => heard.shutdown.advance(Phase::Retiring),
        LinkEvent::Message { message: Command::Drain, .. } => heard.shutdown.advance(Phase::Draining),
        LinkEvent::Message { message: Command::Stop, .. } => heard.shutdown.advance(Phase::Stopping),
        LinkEvent::Message { message: Command::Health(health), .. } => heard.health.update(health),
        LinkEvent::Acked { .. } => {}
    })
}

#[cfg(test)]
mod tests;
