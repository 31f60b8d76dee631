//! Owns what handlers share: the parts of this process, and whether it takes requests.

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

use proto::child::{HealthView, Phase, Shutdown};
use proto::metrics::{Format, SnapshotWriter, join};
use proto::{Front, Member, Role, ServeConfig};
use tokio::sync::{Notify, watch};
use tracing::warn;

use crate::bridge::{Bridge, SchedulerView};
use crate::intake::Intake;
use crate::metrics::TokenizerMetrics;
use crate::probe::Probe;
use crate::refusal::Refusal;
use crate::registry::Registry;
use crate::tokenize::Codec;
use proto::text::chat_template::ChatTemplate;

/// The state of the HTTP front end.
pub(crate) struct App {
    pub config: Arc<ServeConfig>,
    /// Which of the tokenizer processes this is.
    member: Member,
    pub registry: Arc<Registry>,
    pub intake: Intake,
    pub bridge: Bridge,
    pub scheduler: watch::Receiver<SchedulerView>,
    pub metrics: Arc<TokenizerMetrics>,
    pub probe: Probe,
    pub started: SystemTime,
    /// Locked while the file is written: the draft has one name.
    snapshots: Mutex<SnapshotWriter>,
    shutdown: Shutdown,
    pub health: HealthView,
    texts: OnceLock<Texts>,
    texts_loaded: Notify,
}

/// What an [`App`] is made of.
pub(crate) struct Parts {
    pub(crate) config: Arc<ServeConfig>,
    pub(crate) member: Member,
    pub(crate) registry: Arc<Registry>,
    pub(crate) bridge: Bridge,
    pub(crate) metrics: Arc<TokenizerMetrics>,
    pub(crate) snapshots: SnapshotWriter,
    pub(crate) shutdown: Shutdown,
    pub(crate) health: HealthView,
}

/// What is read from the tokenizer's folder; nothing of it with `--skip-tokenizer-init`.
struct Texts {
    codec: Option<Codec>,
    template: Option<ChatTemplate>,
}

impl App {
    pub(crate) fn new(parts: Parts) -> Arc<Self> {
        let Parts { config, member, registry, bridge, metrics, snapshots, shutdown, health } = parts;
        let scheduler = bridge.scheduler_view();
        let front = Front(member.number());
        let intake = Intake::new(Arc::clone(&config), front, Arc::clone(&registry), scheduler.clone());
        let app = Arc::new(Self {
            config,
            member,
            registry,
            intake,
            bridge,
            scheduler,
            metrics,
            probe: Probe::default(),
            started: SystemTime::now(),
            snapshots: Mutex::new(snapshots),
            shutdown,
            health,
            texts: OnceLock::new(),
            texts_loaded: Notify::new(),
        });
        if app.config.server.enable_metrics {
            // Weak, for the registry is part of what it would keep alive.
            let weak = Arc::downgrade(&app);
            app.registry.publish_with(Box::new(move || {
                if let Some(app) = weak.upgrade() {
                    app.publish_metrics();
                }
            }));
        }
        app
    }

    /// Reads the tokenizer and the chat template; takes as long as the files are big.
    pub(crate) fn load_texts(&self) -> anyhow::Result<()> {
        let dir = self.config.model.tokenizer_dir.as_deref();
        let texts = match dir.filter(|_| !self.config.server.skip_tokenizer_init) {
            Some(dir) => Texts { codec: Some(Codec::load(dir)?), template: load_template(dir)? },
            None => Texts { codec: None, template: None },
        };
        // A second load would bring the same.
        let _ = self.texts.set(texts);
        self.texts_loaded.notify_waiters();
        Ok(())
    }

    /// Waits until requests can be served.
    pub(crate) async fn serving(&self) {
        loop {
            let loaded = self.texts_loaded.notified();
            if self.texts.get().is_some() {
                break;
            }
            loaded.await;
        }
        // The sender lives as long as the bridge, which is ours.
        let _ = self.scheduler.clone().wait_for(|view| view.info.is_some()).await;
    }

    pub(crate) fn codec(&self) -> Result<Option<&Codec>, Refusal> {
        self.texts().map(|texts| texts.codec.as_ref())
    }

    pub(crate) fn template(&self) -> Result<Option<&ChatTemplate>, Refusal> {
        self.texts().map(|texts| texts.template.as_ref())
    }

    /// Whether new requests are taken. They are while the scheduler is being restarted: they wait for it.
    pub(crate) fn check_serving(&self) -> Result<(), Refusal> {
        if self.shutdown.phase() >= Phase::Draining {
            return Err(Refusal::Unavailable("The server is stopping.".to_owned()));
        }
        self.texts()?;
        match self.scheduler.borrow().info {
            Some(_) => Ok(()),
            None => Err(starting()),
        }
    }

    /// Whether all that a request needs is there.
    pub(crate) fn check_ready(&self) -> Result<(), Refusal> {
        self.check_serving()?;
        let view = self.scheduler.borrow();
        let away = [(view.up, "scheduler"), (view.silent_lanes == 0, "detokenizer")];
        match away.iter().find(|(up, _)| !up) {
            None => Ok(()),
            Some((_, who)) => Err(Refusal::Unavailable(format!("The {who} is being started again."))),
        }
    }

    /// Whether a request sent now would be admitted.
    pub(crate) fn check_admits(&self) -> Result<(), Refusal> {
        self.check_ready()?;
        self.scheduler.borrow().info.as_ref().map_or(Ok(()), |info| self.intake.check_room(info))
    }

    /// Requests alive in all tokenizer processes: here now, and elsewhere as far as the launcher has told.
    pub(crate) fn in_flight(&self) -> u64 {
        let told = self.health.current().unwrap_or_default().processes.into_iter();
        let others = told.filter(|p| p.process.role == Role::Tokenizer && p.process != self.member);
        self.registry.len() as u64 + others.map(|p| p.heartbeat.in_flight).sum::<u64>()
    }

    /// Whether there are other tokenizer processes.
    pub(crate) fn has_siblings(&self) -> bool {
        self.config.topology.tokenizer_worker_num > 1
    }

    /// Whether the process is on its way out, to be followed by another or not.
    pub(crate) fn is_leaving(&self) -> bool {
        self.shutdown.phase() >= Phase::Retiring
    }

    /// Whether the server is.
    pub(crate) fn is_stopping(&self) -> bool {
        self.shutdown.phase() >= Phase::Draining
    }

    /// Writes this process' snapshot.
    pub(crate) fn publish_metrics(&self) {
        let snapshots = self.snapshots.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = snapshots.write(self.metrics.registry()) {
            warn!(%error, "cannot write the metrics snapshot");
        }
    }

    /// All processes' series, from their snapshots, with this process' own brought up to date. Blocks on files,
    /// never on another process.
    pub(crate) fn metrics_page(&self, format: Format) -> String {
        self.publish_metrics();
        format.render(&join(&self.config.metrics_dir(), None))
    }

    fn texts(&self) -> Result<&Texts, Refusal> {
        self.texts.get().ok_or_else(starting)
    }
}

fn load_template(dir: &Path) -> anyhow::Result<Option<ChatTemplate>> {
    ChatTemplate::load(dir)
}

fn starting() -> Refusal {
    Refusal::Unavailable("The server is starting.".to_owned())
}
