//! Turns token ids into text that never has to be taken back.
//!
//! ```text
//! scheduler ─ToDetokenizer→ worker ─ToTokenizer::Text→ tokenizer process
//!                             │ states: one DecodeState per live request
//!                             │           utf8 (bytes → text), trim (stop strings)
//!                             └ outbox: text that has not arrived yet
//! ```
//!
//! Decides nothing that a restart could not recompute from the ids.

mod decode;
mod metrics;
mod outbox;
mod states;
mod trim;
mod utf8;
mod worker;

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::Context;
use proto::child::{CLOSE_DEADLINE, Child, Phase};
use proto::link::{AckMode, LinkSpec, Side};
use proto::metrics::SnapshotWriter;
use proto::{Endpoints, HEARTBEAT_INTERVAL, Role, ToDetokenizer, ToTokenizer, TokenBytes};

pub use decode::DecodeState;
pub use metrics::{DetokenizerMetrics, Dropped};
pub use states::{Decoded, States};

use outbox::{Closed, SendText};
use worker::{AckTokens, Event, Worker};

/// Serves until the shutdown is asked for, or until a drain has nothing left to do.
pub fn run(child: Child) -> anyhow::Result<()> {
    let tokens = match &child.config.model.tokenizer_dir {
        Some(dir) => Some(TokenBytes::load(dir).context("reading the tokenizer's vocabulary")?),
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
    let from_scheduler = events.clone();
    let scheduler = child.links.open::<(), ToDetokenizer>(
        connect(endpoints.detokenizer(), Role::Scheduler, AckMode::Manual),
        // The other end is gone only when `run` has returned.
        move |event| drop(from_scheduler.send(Event::Scheduler(event))),
    );
    let tokenizer = child
        .links
        .open::<ToTokenizer, ()>(connect(endpoints.text(), Role::Tokenizer, AckMode::Auto), move |event| {
            drop(events.send(Event::Tokenizer(event)))
        });
    child.status.ready(&detail);
    serve(Worker::new(tokens, scheduler, tokenizer, metrics.clone()), &inbox, &child, &metrics);
    child.links.close(CLOSE_DEADLINE);
    Ok(())
}

fn connect(path: std::path::PathBuf, peer: Role, ack: AckMode) -> LinkSpec {
    LinkSpec { path, side: Side::Connect, peer, ack }
}

/// How often the metrics are published.
const SNAPSHOT_INTERVAL: Duration = Duration::from_secs(1);

fn serve<S: AckTokens, T: SendText>(
    mut worker: Worker<S, T>,
    inbox: &Receiver<Event>,
    child: &Child,
    metrics: &DetokenizerMetrics,
) {
    let snapshots = SnapshotWriter::new(&child.config.metrics_dir(), Role::Detokenizer, child.incarnation);
    let publish = || {
        if let Err(error) = snapshots.write(metrics.registry()) {
            tracing::warn!(%error, "metrics cannot be published");
        }
    };
    let (mut next_beat, mut next_snapshot) = (Instant::now(), Instant::now());
    loop {
        let now = Instant::now();
        if now >= next_beat {
            child.status.alive(worker.heartbeat());
            next_beat = now + HEARTBEAT_INTERVAL;
        }
        if now >= next_snapshot {
            publish();
            next_snapshot = now + SNAPSHOT_INTERVAL;
        }
        match child.shutdown.phase() {
            Phase::Running => {}
            Phase::Draining if !worker.is_drained() => {}
            Phase::Draining | Phase::Stopping => break,
        }
        let handled = match inbox.recv_timeout(next_beat.saturating_duration_since(now)) {
            Ok(event) => worker.handle(event),
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => Err(Closed),
        };
        if handled.is_err() {
            break;
        }
    }
    worker.heartbeat();
    publish();
}
