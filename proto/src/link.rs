//! Owns delivery between two processes: a DEALER–DEALER pair with a protocol of ours on top (hello with
//! incarnation and version, sequence numbers, acknowledgement after processing, resend from the first
//! unacknowledged, a bounded window, heartbeats, a new socket per connection). The only place that knows ZeroMQ.
//!
//! A link is duplex: `Out` travels one way, `In` the other, each numbered and acknowledged on its own.

use std::marker::PhantomData;
use std::path::PathBuf;

use serde::{Serialize, de::DeserializeOwned};

use crate::ids::{Incarnation, Role};

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
    Up { peer: Incarnation, restarted: bool },
    Down,
    Message { seq: u64, message: In },
    /// The peer has processed everything this side sent, up to this number.
    Acked { up_to: u64 },
}

/// The thread that runs all links of a process.
pub struct LinkThread {}

impl LinkThread {
    /// `role` and `incarnation` are said in every hello.
    pub fn start(_role: Role, _incarnation: Incarnation) -> std::io::Result<Self> {
        todo!()
    }

    pub fn open<Out, In>(
        &self,
        _spec: LinkSpec,
        _on_event: impl FnMut(LinkEvent<In>) + Send + 'static,
    ) -> LinkHandle<Out>
    where
        Out: Serialize + Send + 'static,
        In: DeserializeOwned + Send + 'static,
    {
        todo!()
    }

    /// Waits until the peers have acknowledged everything, at most `deadline`; then closes all links.
    pub fn close(self, _deadline: std::time::Duration) {}
}

/// Sends on a link from any thread; cheap to clone.
pub struct LinkHandle<Out> {
    _out: PhantomData<fn(Out)>,
}

impl<Out> Clone for LinkHandle<Out> {
    fn clone(&self) -> Self {
        Self { _out: PhantomData }
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
    #[error("link is closed")]
    Closed,
}

impl<Out: Serialize> LinkHandle<Out> {
    /// Queues a message and returns its number. Never blocks, and needs no peer to be there.
    pub fn send(&self, _message: &Out) -> Result<u64, SendError> {
        todo!()
    }

    /// Tells the peer that everything up to `seq` is processed (`AckMode::Manual`).
    pub fn ack(&self, _seq: u64) {}

    pub fn backlog(&self) -> Backlog {
        todo!()
    }
}
