//! Owns the life of the process: start, serve, drain, stop.

use std::net::TcpListener;
use std::os::fd::{FromRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use proto::child::{CLOSE_DEADLINE, Child, Phase, Shutdown, StatusReporter};
use proto::metrics::SnapshotWriter;
use proto::{Front, HEARTBEAT_INTERVAL, Heartbeat, ServeConfig};
use tracing::info;

use crate::app::{App, Parts};
use crate::bridge::Bridge;
use crate::door::Door;
use crate::http::router;
use crate::metrics::TokenizerMetrics;
use crate::registry::Registry;

/// Threads of the event loop; tokenisation and rendering have their own.
const EVENT_LOOP_THREADS: usize = 2;
/// Threads for blocking work, most of them idle.
const BLOCKING_THREADS: usize = 16;
const SNAPSHOT_INTERVAL: Duration = Duration::from_secs(1);
/// How long clients of a successor wait for it without an answer.
const WAIT_AT_DOOR: Duration = Duration::from_secs(10);
/// How long a client that came in before this process retired may take to ask for something.
const FIRST_BYTES: Duration = Duration::from_millis(500);
/// How long open connections may take to receive their last bytes.
const LAST_BYTES: Duration = Duration::from_secs(2);

/// Serves until shutdown. On draining, new requests get 503 and running ones finish; on stopping, they fail.
pub fn run(child: Child) -> anyhow::Result<()> {
    let Child { config, member, incarnation, links, shutdown, status, health, listen_fd, successor } = child;
    let front = Front(member.number());
    let listener = listen(&config, listen_fd)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(EVENT_LOOP_THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_name("http")
        .enable_all()
        .build()
        .context("starting the event loop")?;
    let metrics = TokenizerMetrics::new(&config.server.served_model_name).context("registering metrics")?;
    let snapshots = SnapshotWriter::new(&config.metrics_dir(), member, incarnation);
    let registry = Registry::new(Arc::clone(&metrics), front);
    let bridge = Bridge::open(&links, &config, front, Arc::clone(&registry));
    let parts =
        Parts { config, member, registry, bridge, metrics, snapshots, shutdown: shutdown.clone(), health };
    let app = App::new(parts);
    let outcome = runtime.block_on(async {
        let door = Door::open(listener, shutdown.clone())?;
        serve(app, door, successor, shutdown, status).await
    });
    links.close(CLOSE_DEADLINE);
    runtime.shutdown_background();
    outcome
}

async fn serve(
    app: Arc<App>,
    door: Door,
    successor: bool,
    shutdown: Shutdown,
    status: StatusReporter,
) -> anyhow::Result<()> {
    let beat = tokio::spawn(beat(Arc::clone(&app), status.clone()));
    let loading = tokio::task::spawn_blocking({
        let app = Arc::clone(&app);
        move || app.load_texts()
    });
    let announce = tokio::spawn(announce(Arc::clone(&app), status));
    let publish = tokio::spawn(publish(Arc::clone(&app)));
    if successor {
        // Clients know this server as one that works: they wait at the door instead of being told that it starts.
        // Without the others, clients are told how things stand.
        let _ = tokio::time::timeout(WAIT_AT_DOOR, app.serving()).await;
    }
    let closing = closing(Arc::clone(&app), shutdown.clone());
    let server = axum::serve(door, router(Arc::clone(&app))).with_graceful_shutdown(closing);
    let outcome = tokio::select! {
        served = server.into_future() => served.context("serving HTTP"),
        failed = failure(loading) => Err(failed).context("loading the tokenizer"),
        () = overdue(&app, &shutdown) => Ok(()),
    };
    app.registry.close("The server is stopping.");
    beat.abort();
    announce.abort();
    publish.abort();
    app.publish_metrics();
    outcome
}

/// Resolves only when the task fails.
async fn failure(loading: tokio::task::JoinHandle<anyhow::Result<()>>) -> anyhow::Error {
    match loading.await {
        Ok(Ok(())) => std::future::pending().await,
        Ok(Err(error)) => error,
        Err(panic) => panic.into(),
    }
}

/// Ends when connections are to be closed as soon as nothing is under way on them: no request is left, or none is to be
/// answered. A client that came in before the door was closed has time to say what it wants.
async fn closing(app: Arc<App>, shutdown: Shutdown) {
    shutdown.reached(Phase::Retiring).await;
    info!(in_flight = app.registry.len(), phase = ?shutdown.phase(), "leaving");
    while shutdown.phase() == Phase::Retiring {
        tokio::select! {
            () = tokio::time::sleep(FIRST_BYTES) => {}
            () = shutdown.reached(Phase::Draining) => break,
        }
        if app.registry.len() == 0 {
            return;
        }
        finished(&app, &shutdown).await;
    }
    finished(&app, &shutdown).await;
    app.registry.close("The server is stopping.");
}

/// Ends when connections that are still open have had their time.
async fn overdue(app: &App, shutdown: &Shutdown) {
    shutdown.reached(Phase::Retiring).await;
    loop {
        finished(app, shutdown).await;
        tokio::time::sleep(LAST_BYTES).await;
        if app.registry.len() == 0 || shutdown.phase() == Phase::Stopping {
            return;
        }
    }
}

/// Ends when no request is left to serve, or none is to be served.
async fn finished(app: &App, shutdown: &Shutdown) {
    tokio::select! {
        () = app.registry.idle() => {}
        () = shutdown.reached(Phase::Stopping) => {}
    }
}

async fn announce(app: Arc<App>, status: StatusReporter) {
    app.serving().await;
    let started = app.started.elapsed().unwrap_or_default();
    app.metrics.started("tokenizer_e2e", started.as_secs_f64());
    let scheduler = app.scheduler.borrow().info.as_ref().map(|info| info.startup_time);
    if let Some(seconds) = scheduler {
        app.metrics.started("scheduler_e2e", seconds);
    }
    let server = &app.config.server;
    status.ready(&format!("http://{}:{}", server.host, server.port));
}

/// Says, from the event loop itself, that it turns.
async fn beat(app: Arc<App>, status: StatusReporter) {
    let mut ticks = tokio::time::interval(HEARTBEAT_INTERVAL);
    let activity = app.registry.activity();
    loop {
        ticks.tick().await;
        let in_flight = app.registry.len() as u64;
        status.alive(Heartbeat { in_flight, queued: 0, progress: *activity.borrow() });
    }
}

/// Keeps the snapshot in the run directory fresh, for whoever else joins it.
async fn publish(app: Arc<App>) {
    if !app.config.server.enable_metrics {
        return;
    }
    let mut ticks = tokio::time::interval(SNAPSHOT_INTERVAL);
    loop {
        ticks.tick().await;
        let app = Arc::clone(&app);
        // A panic there is logged by the runtime and says nothing about the next snapshot.
        let _ = tokio::task::spawn_blocking(move || app.publish_metrics()).await;
    }
}

fn listen(config: &ServeConfig, fd: Option<RawFd>) -> anyhow::Result<TcpListener> {
    if let Some(fd) = fd {
        return Ok(inherited(fd));
    }
    let address = (config.server.host.as_str(), config.server.port);
    TcpListener::bind(address).with_context(|| format!("listening on {}:{}", address.0, address.1))
}

#[allow(unsafe_code)]
fn inherited(fd: RawFd) -> TcpListener {
    // SAFETY: the launcher opened this socket for this process and named it on the command line; nothing else
    // here uses the number, and `run` is called once.
    unsafe { TcpListener::from_raw_fd(fd) }
}
