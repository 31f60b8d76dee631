//! Owns delivery between two processes: a DEALER–DEALER pair with a protocol of ours on top (hello with
//! incarnation and version, sequence numbers, acknowledgement after processing, resend from the first
//! unacknowledged, a bounded window, heartbeats, a new socket per connection). The only place that knows ZeroMQ.
//!
//! A link is duplex: `Out` travels one way, `In` the other, each numbered and acknowledged on its own.

mod drops;
mod frame;
mod inbox;
mod outbox;
mod port;
mod session;
mod task;
mod thread;

use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;

use crate::ids::{Incarnation, Role};
use crate::wire::{self, MAX_MESSAGE_BYTES, WireError};
use outbox::Outbox;

pub use drops::dropped_frames;
pub use thread::LinkThread;

/// Who listens. The process that restarts least binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Bind,
    Connect,
}

/// One end of one link.
#[derive(Debug, Clone)]
pub struct LinkSpec {
    /// Path of the unix socket.
    pub path: PathBuf,
    pub side: Side,
    /// Who is expected at the other end.
    pub peer: Role,
    /// Whether the link acknowledges a message once the event callback has returned, or leaves it to
    /// [`LinkHandle::ack`].
    pub ack: AckMode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AckMode {
    Auto,
    Manual,
}

/// What happens on a link, in order, on the link thread: the callback must not block.
#[derive(Debug, Clone, PartialEq)]
pub enum LinkEvent<In> {
    /// A connection stands. `restarted` tells that the peer is a new incarnation, which remembers nothing: what
    /// was unacknowledged has been dropped, and the owner of the state sends again what still matters.
    Up {
        peer: Incarnation,
        restarted: bool,
    },
    Down,
    /// `seq` counts the messages of this link from 1, over all incarnations of the peer.
    Message {
        seq: u64,
        message: In,
    },
    /// The peer has processed everything this side sent, up to this number.
    Acked {
        up_to: u64,
    },
}

/// Sends on a link from any thread; cheap to clone.
pub struct LinkHandle<Out> {
    outbox: Arc<Outbox>,
    out: PhantomData<fn(Out)>,
}

impl<Out> LinkHandle<Out> {
    fn new(outbox: Arc<Outbox>) -> Self {
        Self { outbox, out: PhantomData }
    }
}

impl<Out> Clone for LinkHandle<Out> {
    fn clone(&self) -> Self {
        Self::new(Arc::clone(&self.outbox))
    }
}

/// What waits on a link: queued or sent, not yet acknowledged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Backlog {
    pub messages: usize,
    pub bytes: usize,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SendError {
    /// The peer does not keep up; the caller sheds load or waits for an `Acked` event.
    #[error("link is full: {} messages, {} bytes unacknowledged", .0.messages, .0.bytes)]
    Full(Backlog),
    #[error("message of {bytes} bytes is over the limit of {limit}")]
    TooLarge { bytes: usize, limit: usize },
    #[error("message cannot be encoded: {0}")]
    Unencodable(String),
    #[error("link is closed")]
    Closed,
}

impl<Out: Serialize> LinkHandle<Out> {
    /// Queues a message and returns its number. Never blocks, and needs no peer to be there.
    pub fn send(&self, message: &Out) -> Result<u64, SendError> {
        let frame = wire::encode_behind(&[0; frame::DATA_HEADER], message).map_err(|error| match error {
            WireError::TooLarge { bytes, .. } => SendError::TooLarge { bytes, limit: MAX_MESSAGE_BYTES },
            error => SendError::Unencodable(error.to_string()),
        })?;
        self.outbox.push(frame)
    }

    /// Tells the peer that everything up to `seq` is processed (`AckMode::Manual`).
    pub fn ack(&self, seq: u64) {
        self.outbox.set_processed(seq);
    }

    pub fn backlog(&self) -> Backlog {
        self.outbox.backlog()
    }
}

#[cfg(test)]
mod tests;
