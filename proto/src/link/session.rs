//! Owns the protocol of a link, without any socket: what a frame does, what is said in return, when the peer has
//! been silent for too long. [`Peering`] is what a link remembers from one connection to the next, [`Session`]
//! what it knows of the present one.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::LinkEvent;
use super::drops::drop_frame;
use super::frame::{Frame, FrameError, Hello};
use super::inbox::{Arrival, Inbox};
use super::outbox::Outbox;
use crate::ids::{Incarnation, Role};

/// How often a sign of life is sent.
pub(super) const HEARTBEAT: Duration = Duration::from_millis(200);
/// Heartbeats of our own without hearing anything, after which the connection is given up. Counted in turns of this
/// loop and not in time: a process that was itself kept from running blames nobody.
const QUIET_LIMIT: u32 = 6;
/// The limit when connection after connection brings nothing, as when one message takes long to arrive.
const QUIET_LIMIT_MAX: u32 = 48;
/// A life of the peer older than one heard this recently is a leftover. Beyond, its clock was set back.
const LEFTOVER: Duration = Duration::from_secs(5);

/// Takes events on the link thread; `false` means that a message made no sense.
pub(super) type Deliver = Box<dyn FnMut(LinkEvent<&[u8]>) -> bool + Send>;

/// Why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum End {
    #[error("the connection broke")]
    Lost,
    #[error("the peer is silent")]
    Silent,
    #[error("a newer connection took its place")]
    Superseded,
    #[error("a message is missing before {seq}: asking for it again")]
    Gap { seq: u64 },
    #[error("a frame out of turn")]
    OutOfTurn,
    #[error("refused: {0}")]
    Refused(String),
    #[error("closed")]
    Closed,
}

/// One end of a link, across connections.
pub(super) struct Peering {
    /// For logs.
    pub(super) name: String,
    pub(super) me: (Role, Incarnation),
    pub(super) peer_role: Role,
    pub(super) outbox: Arc<Outbox>,
    pub(super) inbox: Inbox,
    pub(super) deliver: Deliver,
    /// The last incarnation that said hello, and when it was last heard.
    pub(super) peer: Option<Incarnation>,
    pub(super) last_heard: Option<Instant>,
    pub(super) quiet_limit: u32,
}

/// One connection.
pub(super) struct Session {
    /// Control frames to be sent, before any data.
    pub(super) control: Vec<Bytes>,
    /// Somebody is at the other end.
    pub(super) connected: bool,
    said_hello: bool,
    /// The peer has said hello.
    pub(super) up: bool,
    /// The peer has said where its messages start.
    started: bool,
    quiet: u32,
    heartbeat_at: Instant,
}

impl Session {
    pub(super) fn new() -> Self {
        Self {
            control: Vec::new(),
            connected: false,
            said_hello: false,
            up: false,
            started: false,
            quiet: 0,
            heartbeat_at: Instant::now() + HEARTBEAT,
        }
    }

    /// A peer is there. The connecting side speaks first.
    pub(super) fn connect(&mut self, peering: &Peering, speaks_first: bool) {
        self.connected = true;
        self.heartbeat_at = Instant::now() + HEARTBEAT;
        if speaks_first {
            self.say_hello(peering);
        }
    }

    fn say_hello(&mut self, peering: &Peering) {
        if !std::mem::replace(&mut self.said_hello, true) {
            let (role, incarnation) = peering.me;
            let hello = Hello { role, incarnation, peer: peering.peer, expect: peering.inbox.expected() };
            self.control.push(Frame::Hello(hello).encode());
        }
    }

    pub(super) fn next_turn(&self, peering: &Peering) -> Instant {
        peering
            .inbox
            .ack_due()
            .filter(|_| self.up)
            .map_or(self.heartbeat_at, |due| due.min(self.heartbeat_at))
    }

    /// Says what is due at this time. `flush` says at once what could wait.
    pub(super) fn turn(&mut self, peering: &mut Peering, now: Instant, flush: bool) -> Result<(), End> {
        let mut owes_ack = false;
        if self.connected && now >= self.heartbeat_at {
            self.quiet += 1;
            self.heartbeat_at = now + HEARTBEAT;
            owes_ack = self.up;
            if self.quiet >= peering.quiet_limit {
                peering.quiet_limit = (2 * peering.quiet_limit).min(QUIET_LIMIT_MAX);
                return Err(End::Silent);
            }
        }
        peering.inbox.advance_manual(peering.outbox.processed(), now);
        owes_ack |= peering.inbox.owes_ack(now) || (flush && peering.inbox.ack_due().is_some());
        if owes_ack && self.up {
            self.control.push(Frame::Ack { up_to: peering.inbox.take_ack() }.encode());
        }
        Ok(())
    }

    /// Takes one frame off the wire.
    pub(super) fn receive(&mut self, peering: &mut Peering, bytes: &Bytes) -> Result<(), End> {
        self.quiet = 0;
        if self.up {
            peering.last_heard = Some(Instant::now());
        }
        match Frame::decode(bytes) {
            Ok(Frame::Hello(hello)) if !self.up => self.hello(peering, &hello),
            Ok(Frame::Start { next }) if self.up && !self.started => {
                self.started = true;
                if !peering.inbox.start(next) {
                    tracing::error!(
                        link = peering.name,
                        next,
                        "the peer has dropped messages for this process"
                    );
                }
                Ok(())
            }
            Ok(Frame::Data { seq, payload }) if self.started => self.data(peering, seq, &payload),
            Ok(Frame::Ack { up_to }) if self.up => {
                self.acknowledged(peering, up_to);
                Ok(())
            }
            Ok(Frame::Refuse { reason }) => Err(End::Refused(reason)),
            Ok(_) => Err(End::OutOfTurn),
            Err(error @ FrameError::Version { .. }) => {
                drop_frame(&peering.name, &error);
                Err(self.refuse(error.to_string()))
            }
            Err(error) => {
                drop_frame(&peering.name, &error);
                Ok(())
            }
        }
    }

    fn hello(&mut self, peering: &mut Peering, hello: &Hello) -> Result<(), End> {
        let now = Instant::now();
        if let Some(reason) = peering.objection(hello, now) {
            return Err(self.refuse(reason));
        }
        peering.last_heard = Some(now);
        let known = peering.peer == Some(hello.incarnation);
        let restarted = !known && peering.peer.is_some();
        if !known {
            peering.peer = Some(hello.incarnation);
            peering.inbox.new_peer();
            peering.quiet_limit = QUIET_LIMIT;
        }
        if restarted {
            peering.outbox.clear();
        }
        // A peer that remembers another life of ours, or none, has nothing of what waits.
        let has = if hello.peer == Some(peering.me.1) { hello.expect } else { 0 };
        let next = peering.outbox.resume(has);
        self.say_hello(peering);
        self.control.push(Frame::Start { next }.encode());
        self.up = true;
        tracing::info!(link = peering.name, peer = %hello.incarnation, restarted, "link is up");
        (peering.deliver)(LinkEvent::Up { peer: hello.incarnation, restarted });
        Ok(())
    }

    /// Tells the peer why before hanging up.
    fn refuse(&mut self, reason: String) -> End {
        self.control.push(Frame::Refuse { reason: reason.clone() }.encode());
        End::Refused(reason)
    }

    fn data(&mut self, peering: &mut Peering, seq: u64, payload: &[u8]) -> Result<(), End> {
        match peering.inbox.arrive(seq) {
            Arrival::Next(seq) => {
                let understood = (peering.deliver)(LinkEvent::Message { seq, message: payload });
                peering.inbox.handled(seq, understood, Instant::now());
                peering.quiet_limit = QUIET_LIMIT;
                Ok(())
            }
            Arrival::Duplicate => Ok(()),
            Arrival::Gap => Err(End::Gap { seq }),
        }
    }

    fn acknowledged(&mut self, peering: &mut Peering, up_to: u64) {
        if let Some(up_to) = peering.outbox.acknowledge(up_to) {
            peering.quiet_limit = QUIET_LIMIT;
            (peering.deliver)(LinkEvent::Acked { up_to });
        }
    }
}

impl Peering {
    pub(super) fn new(
        name: String,
        me: (Role, Incarnation),
        peer_role: Role,
        outbox: Arc<Outbox>,
        inbox: Inbox,
        deliver: Deliver,
    ) -> Self {
        Self {
            name,
            me,
            peer_role,
            outbox,
            inbox,
            deliver,
            peer: None,
            last_heard: None,
            quiet_limit: QUIET_LIMIT,
        }
    }

    /// Why this peer is not wanted.
    fn objection(&self, hello: &Hello, now: Instant) -> Option<String> {
        if hello.role != self.peer_role {
            return Some(format!("a {} is expected here, not a {}", self.peer_role, hello.role));
        }
        let newer_is_alive = self.last_heard.is_some_and(|heard| now.duration_since(heard) < LEFTOVER);
        match self.peer {
            Some(newer) if hello.incarnation < newer && newer_is_alive => {
                Some(format!("incarnation {} has been followed by {newer}", hello.incarnation))
            }
            _ => None,
        }
    }

    /// Nothing waits to be sent or acknowledged, in either direction.
    pub(super) fn is_flushed(&self) -> bool {
        self.outbox.backlog().messages == 0 && self.inbox.ack_due().is_none()
    }
}
