//! Turns token ids into text that never has to be taken back.
//!
//! ```text
//! scheduler ─ToDetokenizer→ worker ─ToTokenizer::Text→ tokenizer process
//!                             │ states: one DecodeState per live request
//!                             │           utf8 (bytes → text), trim (stop strings)
//!                             └ outbox: text that has not arrived yet
//! ```
//!
//! Where there are several tokenizer processes, one worker for each lane that this process serves.
//!
//! Decides nothing that a restart could not recompute from the ids.

mod decode;
mod metrics;
mod outbox;
mod states;
mod trim;
mod utf8;
mod worker;

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::Context;
use proto::child::{CLOSE_DEADLINE, Child, Phase};
use proto::link::{AckMode, LinkHandle, LinkSpec, LinkThread, Side};
use proto::metrics::SnapshotWriter;
use proto::{Endpoints, HEARTBEAT_INTERVAL, Heartbeat, Lane, Role, ToDetokenizer, ToTokenizer, TokenBytes};

pub use decode::DecodeState;
pub use metrics::{DetokenizerMetrics, Dropped};
pub use states::{Decoded, States};

use outbox::Closed;
use worker::{Event, Worker};

/// Serves until the shutdown is asked for, or until a drain has nothing left to do.
pub fn run(child: Child) -> anyhow::Result<()> {
    let tokens = match &child.config.model.tokenizer_dir {
        Some(dir) => Some(Arc::new(TokenBytes::load(dir).context("reading the tokenizer's vocabulary")?)),
        None => None,
    };
    let detail =
        tokens.as_ref().map_or("no tokenizer: rows pass through without text".to_owned(), |tokens| {
            format!("{} tokens", tokens.vocab_size())
        });
    let metrics =
        DetokenizerMetrics::new(&child.config.server.served_model_name).context("registering metrics")?;
    let endpoints = Endpoints::new(&child.config.run_dir);
    let (events, inbox) = mpsc::channel();
    let lanes = child.config.topology.lanes_of_detokenizer(child.member.number()).enumerate();
    let workers = lanes.map(|(at, lane)| {
        let (scheduler, tokenizer) = open_links(&child.links, &endpoints, lane, at, &events);
        Worker::new(tokens.clone(), scheduler, tokenizer, metrics.clone())
    });
    let workers = workers.collect();
    drop(events);
    child.status.ready(&detail);
    serve(workers, &inbox, &child, &metrics);
    child.links.close(CLOSE_DEADLINE);
    Ok(())
}

type LaneWorker = Worker<LinkHandle<()>, LinkHandle<ToTokenizer>>;
/// What happened, and to which of the process's lanes.
type LaneEvent = (usize, Event);

fn open_links(
    links: &LinkThread,
    endpoints: &Endpoints,
    lane: Lane,
    at: usize,
    events: &Sender<LaneEvent>,
) -> (LinkHandle<()>, LinkHandle<ToTokenizer>) {
    let (from_scheduler, from_tokenizer) = (events.clone(), events.clone());
    // The other end of the channel is gone only when `run` has returned.
    let scheduler = links.open::<(), ToDetokenizer>(
        connect(endpoints.detokenizer(lane), Role::Scheduler, AckMode::Manual),
        move |event| drop(from_scheduler.send((at, Event::Scheduler(event)))),
    );
    let tokenizer = links.open::<ToTokenizer, ()>(
        connect(endpoints.text(lane), Role::Tokenizer, AckMode::Auto),
        move |event| drop(from_tokenizer.send((at, Event::Tokenizer(event)))),
    );
    (scheduler, tokenizer)
}

fn connect(path: std::path::PathBuf, peer: Role, ack: AckMode) -> LinkSpec {
    LinkSpec { path, side: Side::Connect, peer, ack }
}

/// How often the metrics are published.
const SNAPSHOT_INTERVAL: Duration = Duration::from_secs(1);

/// How all lanes are doing; sets the load gauges to the same values.
fn heartbeat(workers: &[LaneWorker], metrics: &DetokenizerMetrics) -> Heartbeat {
    let add = |sum: Heartbeat, lane: Heartbeat| Heartbeat {
        in_flight: sum.in_flight + lane.in_flight,
        queued: sum.queued + lane.queued,
        progress: sum.progress + lane.progress,
    };
    let all = workers.iter().map(Worker::heartbeat).fold(Heartbeat::default(), add);
    metrics.load(all.in_flight as usize, all.queued as usize);
    all
}

fn serve(
    mut workers: Vec<LaneWorker>,
    inbox: &Receiver<LaneEvent>,
    child: &Child,
    metrics: &DetokenizerMetrics,
) {
    let snapshots = SnapshotWriter::new(&child.config.metrics_dir(), child.member, child.incarnation);
    let publish = || {
        if let Err(error) = snapshots.write(metrics.registry()) {
            tracing::warn!(%error, "metrics cannot be published");
        }
    };
    let (mut next_beat, mut next_snapshot) = (Instant::now(), Instant::now());
    loop {
        let now = Instant::now();
        if now >= next_beat {
            child.status.alive(heartbeat(&workers, metrics));
            next_beat = now + HEARTBEAT_INTERVAL;
        }
        if now >= next_snapshot {
            publish();
            next_snapshot = now + SNAPSHOT_INTERVAL;
        }
        match child.shutdown.phase() {
            Phase::Running | Phase::Retiring => {}
            Phase::Draining if !workers.iter().all(Worker::is_drained) => {}
            Phase::Draining | Phase::Stopping => break,
        }
        let handled = match inbox.recv_timeout(next_beat.saturating_duration_since(now)) {
            Ok((at, event)) => workers[at].handle(event),
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => Err(Closed),
        };
        if handled.is_err() {
            break;
        }
    }
    heartbeat(&workers, metrics);
    publish();
}
