//! Owns one lane of the detokenizer, what its two links report, and the order: rows are decoded, their text is sent,
//! and only when it has arrived is the scheduler told that the tokens are processed.

use std::sync::Arc;

use proto::link::{LinkEvent, LinkHandle, SendError};
use proto::{Heartbeat, TextRow, ToDetokenizer, ToTokenizer, TokenBytes};

use crate::metrics::{DetokenizerMetrics, Dropped};
use crate::outbox::{Closed, Outbox, SendText};
use crate::states::{Decoded, States};

/// Everything that can happen to a lane.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "nearly all events are of the large kind")]
pub(crate) enum Event {
    Scheduler(LinkEvent<ToDetokenizer>),
    /// The tokenizer process sends nothing on this link but acknowledgements.
    Tokenizer(LinkEvent<()>),
}

/// Acknowledges token messages on the link to the scheduler.
pub(crate) trait AckTokens {
    fn ack(&self, seq: u64);
}

impl AckTokens for LinkHandle<()> {
    fn ack(&self, seq: u64) {
        LinkHandle::ack(self, seq);
    }
}

impl SendText for LinkHandle<ToTokenizer> {
    fn send(&self, message: &ToTokenizer) -> Result<u64, SendError> {
        LinkHandle::send(self, message)
    }
}

/// One lane between its two links.
pub(crate) struct Worker<S, T> {
    scheduler: S,
    tokenizer: T,
    states: States,
    outbox: Outbox,
    metrics: DetokenizerMetrics,
    scheduler_is_up: bool,
    progress: u64,
}

impl<S: AckTokens, T: SendText> Worker<S, T> {
    pub(crate) fn new(
        tokens: Option<Arc<TokenBytes>>,
        scheduler: S,
        tokenizer: T,
        metrics: DetokenizerMetrics,
    ) -> Self {
        Self {
            scheduler,
            tokenizer,
            states: States::new(tokens),
            outbox: Outbox::default(),
            metrics,
            scheduler_is_up: false,
            progress: 0,
        }
    }

    /// Takes in what happened on either link.
    pub(crate) fn handle(&mut self, event: Event) -> Result<(), Closed> {
        match event {
            Event::Scheduler(LinkEvent::Message { seq, message: ToDetokenizer::TokenIds(batch) }) => {
                let rows = match batch.into_rows() {
                    Ok(rows) => rows.into_iter().filter_map(|row| self.decode(row)).collect(),
                    Err(error) => {
                        tracing::warn!(%error, "token message dropped");
                        self.metrics.dropped(Dropped::Ragged, error.rids);
                        Vec::new()
                    }
                };
                self.outbox.push(rows, seq);
                self.progress += 1;
            }
            Event::Scheduler(LinkEvent::Up { restarted, .. }) => {
                self.scheduler_is_up = true;
                if restarted {
                    self.states.clear();
                }
            }
            Event::Scheduler(LinkEvent::Down) => self.scheduler_is_up = false,
            Event::Tokenizer(LinkEvent::Up { restarted: true, .. }) => self.outbox.send_again(),
            Event::Tokenizer(LinkEvent::Acked { up_to }) => {
                self.outbox.acknowledged(up_to);
                self.progress += 1;
            }
            Event::Scheduler(LinkEvent::Acked { .. })
            | Event::Tokenizer(LinkEvent::Up { .. } | LinkEvent::Down | LinkEvent::Message { .. }) => {}
        }
        self.outbox.flush(&self.tokenizer)?;
        if let Some(seq) = self.outbox.take_done() {
            self.scheduler.ack(seq);
        }
        Ok(())
    }

    /// Whether nothing can come any more and nothing is left to hand over.
    pub(crate) fn is_drained(&self) -> bool {
        !self.scheduler_is_up && self.outbox.len() == 0
    }

    /// How the lane is doing.
    pub(crate) fn heartbeat(&self) -> Heartbeat {
        Heartbeat {
            in_flight: self.states.len() as u64,
            queued: self.outbox.len() as u64,
            progress: self.progress,
        }
    }

    fn decode(&mut self, row: proto::TokenRow) -> Option<TextRow> {
        let tokens = row.progress.output_ids.len();
        match self.states.decode(row) {
            Decoded::Text(row) => {
                self.metrics.decoded(tokens);
                Some(row)
            }
            Decoded::Orphan(rid) => {
                tracing::warn!(%rid, "row of an unknown request dropped");
                self.metrics.dropped(Dropped::Orphan, 1);
                None
            }
            Decoded::Lost(row) => {
                tracing::error!(rid = %row.progress.rid, "request failed: earlier tokens are missing");
                self.metrics.dropped(Dropped::Lost, 1);
                Some(row)
            }
        }
    }
}

#[cfg(test)]
mod tests;
