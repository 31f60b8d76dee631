//! Queue, batch, KV pool, prefix cache, model, draft workers, sampling and the acceptance counters. Never text.
//!
//! Layers, bottom up: `batch` (plain data between the halves); `engine` (tensors); `cache` (KV slots); `stop`,
//! `request`, `stream`, `accounting` (one request); `admission` (who runs); `adaptive` (how deep to draft); `outbox`, `metrics`, `journal` (what
//! leaves); `scheduler` (the loop).

pub mod accounting;
pub mod adaptive;
pub mod admission;
pub mod batch;
pub mod cache;
pub mod engine;
pub mod journal;
pub mod metrics;
pub mod outbox;
pub mod request;
pub mod scheduler;
pub mod stop;
pub mod stream;
#[cfg(test)]
mod testing;

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Instant;

use anyhow::Context;
use proto::child::{CLOSE_DEADLINE, Child, Shutdown, StatusReporter};
use proto::link::{AckMode, LinkSpec, LinkThread, Side};
use proto::metrics::SnapshotWriter;
use proto::{Endpoints, Incarnation, Role, ServeConfig, TokenBytes};

use self::engine::Engine;
use self::journal::Journal;
use self::metrics::{SchedulerMetrics, WriteSnapshot};
use self::outbox::LinkPeers;
use self::scheduler::{Event, Scheduler};

/// Plays the scheduler process until it is told to end, or its engine breaks.
pub fn run(child: Child) -> anyhow::Result<()> {
    let started = Instant::now();
    let Child { config, incarnation, links, shutdown, status, .. } = child;
    let (peers, inbox) = open_links(&config, &links);
    let snapshots = SnapshotWriter::new(&config.metrics_dir(), Role::Scheduler, incarnation);
    // Tensors stay on one named thread, from loading to the end.
    let engine = std::thread::Builder::new()
        .name("engine".to_owned())
        .spawn(move || {
            let mut scheduler = load(&config, started, peers, snapshots, &status)?;
            if config.server.enable_metrics {
                keep_journal(&mut scheduler, &config, incarnation);
            }
            serve(scheduler, &inbox, &shutdown, &status)
        })
        .context("starting the engine thread")?;
    let outcome = engine.join().map_err(|_| anyhow::anyhow!("the engine thread panicked"))?;
    links.close(CLOSE_DEADLINE);
    outcome
}

fn open_links(config: &ServeConfig, links: &LinkThread) -> (LinkPeers, Receiver<Event>) {
    let (sender, inbox) = mpsc::channel();
    let endpoints = Endpoints::new(&config.run_dir);
    let spec = |path, peer| LinkSpec { path, side: Side::Bind, peer, ack: AckMode::Auto };
    // A scheduler that is gone needs no events.
    let fronts = config.topology.fronts().map(|front| {
        let inbox = sender.clone();
        links.open(spec(endpoints.scheduler(front), Role::Tokenizer), move |event| {
            let _ = inbox.send(Event::Tokenizer(front, event));
        })
    });
    let lanes = config.topology.lanes().map(|lane| {
        let inbox = sender.clone();
        links.open(spec(endpoints.detokenizer(lane), Role::Detokenizer), move |event| {
            let _ = inbox.send(Event::Detokenizer(lane, event));
        })
    });
    (LinkPeers { fronts: fronts.collect(), lanes: lanes.collect() }, inbox)
}

/// Reads what the scheduler needs, which takes as long as the weights are large.
fn load(
    config: &Arc<ServeConfig>,
    started: Instant,
    peers: LinkPeers,
    snapshots: SnapshotWriter,
    status: &StatusReporter,
) -> anyhow::Result<Scheduler<Box<dyn Engine>, LinkPeers>> {
    let bytes = match &config.model.tokenizer_dir {
        Some(dir) => Some(Arc::new(TokenBytes::load(dir).context("reading the vocabulary")?)),
        None => None,
    };
    let loading = Instant::now();
    let mut progress = |done, total| status.progress("loading weights", done, total);
    let engine = engine::build(config, bytes.as_deref(), &mut progress).context("building the engine")?;
    let write: WriteSnapshot = Box::new(move |registry| {
        if let Err(error) = snapshots.write(registry) {
            tracing::warn!(%error, "metrics snapshot could not be written");
        }
    });
    let mut metrics = SchedulerMetrics::new(config, Some(write)).context("registering metrics")?;
    metrics.weights_loaded(loading.elapsed());
    let mut scheduler = Scheduler::new(config.clone(), engine, peers, bytes, metrics);
    scheduler.started_at(started);
    Ok(scheduler)
}

/// Counts that are shown must be exact across a restart; without one they would end with the process.
fn keep_journal(
    scheduler: &mut Scheduler<Box<dyn Engine>, LinkPeers>,
    config: &ServeConfig,
    incarnation: Incarnation,
) {
    match Journal::open(&config.metrics_dir(), incarnation) {
        Ok(journal) => scheduler.keep(journal),
        Err(error) => tracing::warn!(%error, "counts will not survive a restart exactly"),
    }
}

fn serve(
    mut scheduler: Scheduler<Box<dyn Engine>, LinkPeers>,
    inbox: &Receiver<Event>,
    shutdown: &Shutdown,
    status: &StatusReporter,
) -> anyhow::Result<()> {
    let info = scheduler.info();
    status.ready(&format!(
        "{} KV slots, {} requests at once",
        info.max_total_num_tokens, info.max_running_requests
    ));
    scheduler.run(inbox, shutdown, status).context("running a step")
}
