//! Owns the life of one link on the link thread: connection after connection until it is closed.

use std::time::Duration;

use futures::StreamExt;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use zeromq::{Socket, SocketEvent, SocketRecv, SocketSend, ZmqMessage};

use super::drops::drop_frame;
use super::port::{Fresh, Port};
use super::session::{End, Peering, Session};
use super::{LinkEvent, Side};

/// Pause between attempts to connect, at first and at last.
const RETRY: Duration = Duration::from_millis(5);
const RETRY_MAX: Duration = Duration::from_millis(50);
/// Pause after a refusal: nothing changes until somebody is restarted.
const REFUSED: Duration = Duration::from_millis(500);
/// How long a link that is being closed waits for a peer that has hung up.
const CLOSING_GRACE: Duration = Duration::from_millis(500);

pub(super) struct Task {
    port: Port,
    peering: Peering,
    closing: watch::Receiver<bool>,
    retry: Duration,
    /// What was last logged as the reason for having no connection, so that it is logged once.
    complaint: Option<String>,
    give_up_at: Option<Instant>,
}

impl Task {
    pub(super) fn new(port: Port, peering: Peering, closing: watch::Receiver<bool>) -> Self {
        Self { port, peering, closing, retry: RETRY, complaint: None, give_up_at: None }
    }

    /// Returns when the link is being closed and all is said, or nobody is left to say it to.
    pub(super) async fn run(mut self) {
        while !(self.is_closing() && (self.peering.is_flushed() || self.gives_up())) {
            let end = match self.port.fresh().await {
                Ok(fresh) => self.connection(fresh).await,
                Err(error) => {
                    self.complain(format!("cannot open the socket: {error}"), self.port.side() == Side::Bind);
                    self.pause(self.retry).await;
                    self.retry = (2 * self.retry).min(RETRY_MAX);
                    continue;
                }
            };
            match end {
                End::Closed => return,
                End::Refused(reason) => {
                    self.complain(format!("refused: {reason}"), true);
                    self.pause(REFUSED).await;
                }
                end => {
                    tracing::debug!(link = self.peering.name, %end, "connection ended");
                    self.pause(RETRY).await;
                }
            }
        }
    }

    /// Whether a link that is being closed has waited long enough for a peer that has hung up: one that wanted the
    /// rest is back at once. A peer that was never there is waited for until the deadline of the closing.
    fn gives_up(&mut self) -> bool {
        let now = Instant::now();
        self.peering.peer.is_some() && now >= *self.give_up_at.get_or_insert(now + CLOSING_GRACE)
    }

    fn is_closing(&self) -> bool {
        *self.closing.borrow()
    }

    fn complain(&mut self, reason: String, is_news: bool) {
        if is_news && self.complaint.as_ref() != Some(&reason) {
            tracing::warn!(link = self.peering.name, reason, "no connection");
            self.complaint = Some(reason);
        }
    }

    async fn pause(&mut self, duration: Duration) {
        if self.is_closing() {
            return sleep(duration.min(RETRY_MAX)).await;
        }
        tokio::select! {
            () = sleep(duration) => {}
            _ = self.closing.changed() => {}
        }
    }

    /// One connection, from socket to socket.
    async fn connection(&mut self, mut fresh: Fresh) -> End {
        let mut session = Session::new();
        if self.port.side() == Side::Connect {
            session.connect(&self.peering, true);
        }
        let end = loop {
            if let Err(end) = self.step(&mut fresh, &mut session).await {
                break end;
            }
            if session.up {
                (self.retry, self.complaint) = (RETRY, None);
            }
        };
        // Last words, such as the reason of a refusal.
        for frame in session.control.drain(..) {
            let _ = fresh.socket.send(frame.into()).await;
        }
        if session.up {
            (self.peering.deliver)(LinkEvent::Down);
        }
        // Waits until the crate has stopped accepting, so that no peer gets into a socket that nobody reads.
        let _ = fresh.socket.close().await;
        end
    }

    /// Says all that can be said, then waits for the next thing to happen and takes it in. Nothing but the waiting
    /// may be cancelled: a cancelled `send` of the crate has sent nevertheless.
    async fn step(&mut self, fresh: &mut Fresh, session: &mut Session) -> Result<(), End> {
        let closing = self.is_closing();
        session.turn(&mut self.peering, Instant::now(), closing)?;
        for frame in session.control.drain(..) {
            fresh.socket.send(frame.into()).await.map_err(|_| End::Lost)?;
        }
        while session.up
            && let Some(frame) = self.peering.outbox.transmit()
        {
            fresh.socket.send(frame.into()).await.map_err(|_| End::Lost)?;
        }
        if closing && (self.peering.is_flushed() || (!session.up && self.gives_up())) {
            return Err(End::Closed);
        }
        let give_up_at = self.give_up_at.filter(|_| !session.up);
        let Fresh { socket, events } = fresh;
        tokio::select! {
            biased;
            event = events.next() => match event {
                Some(SocketEvent::Accepted(..)) if session.connected => Err(End::Superseded),
                Some(SocketEvent::Accepted(..)) => {
                    session.connect(&self.peering, false);
                    Ok(())
                }
                Some(SocketEvent::Disconnected(_)) | None => Err(End::Lost),
                Some(_) => Ok(()),
            },
            message = socket.recv() => match message {
                Ok(message) => self.receive(session, &message),
                Err(error) => {
                    tracing::debug!(link = self.peering.name, %error, "cannot receive");
                    Err(End::Lost)
                }
            },
            () = self.peering.outbox.changed() => Ok(()),
            () = sleep_until(session.next_turn(&self.peering)), if session.connected => Ok(()),
            _ = self.closing.changed(), if !closing => Ok(()),
            () = sleep_until(give_up_at.unwrap_or_else(Instant::now)), if give_up_at.is_some() => Ok(()),
        }
    }

    fn receive(&mut self, session: &mut Session, message: &ZmqMessage) -> Result<(), End> {
        match (message.get(0), message.len()) {
            (Some(frame), 1) => session.receive(&mut self.peering, frame),
            (_, parts) => {
                drop_frame(&self.peering.name, &format_args!("a message of {parts} parts is none of ours"));
                Ok(())
            }
        }
    }
}

impl Drop for Task {
    /// Also when a callback has panicked: whoever sends on the link hears that it is gone.
    fn drop(&mut self) {
        self.peering.outbox.close();
    }
}
