//! Owns the messages of one direction that are queued or sent and not yet acknowledged, and how many of them may be
//! on their way at once. Shared between the threads that send and the link thread that transmits.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::Notify;

use super::frame;
use super::{Backlog, SendError};
use crate::wire::MAX_MESSAGE_BYTES;

/// Messages on their way at once. Far below the 100 000 at which a ZeroMQ socket of this crate starts to block.
const WINDOW_MESSAGES: usize = 1024;
/// Bytes on their way at once; a single message may always go.
const WINDOW_BYTES: usize = 64 << 20;
/// Bytes queued and on their way. Room for one window and one message of the largest size.
pub(super) const BACKLOG_BYTES: usize = WINDOW_BYTES + MAX_MESSAGE_BYTES + (1 << 20);
/// What a queued message costs beyond its bytes, so that many tiny ones are bounded too.
const ENTRY_BYTES: usize = 64;

pub(super) struct Outbox {
    state: Mutex<State>,
    wake: Notify,
}

struct State {
    /// In order of their numbers, which have no holes; the front is the first unacknowledged.
    entries: VecDeque<Entry>,
    /// How many entries from the front the peer has, or were transmitted on the present connection.
    sent: usize,
    sent_bytes: usize,
    bytes: usize,
    /// The number that the next message gets.
    next: u64,
    /// What the application has acknowledged of the other direction; kept here because it shares the wake-up.
    processed: u64,
    closed: bool,
}

struct Entry {
    seq: u64,
    frame: Bytes,
}

impl Entry {
    fn cost(&self) -> usize {
        self.frame.len() + ENTRY_BYTES
    }
}

impl Outbox {
    pub(super) fn new() -> Self {
        let state = State {
            entries: VecDeque::new(),
            sent: 0,
            sent_bytes: 0,
            bytes: 0,
            next: 1,
            processed: 0,
            closed: false,
        };
        Self { state: Mutex::new(state), wake: Notify::new() }
    }

    /// Every change of the state is complete before its lock is let go, so a panic elsewhere leaves it whole.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a data frame whose header is still blank, and wakes the link thread.
    pub(super) fn push(&self, blank: Vec<u8>) -> Result<u64, SendError> {
        let mut state = self.lock();
        if state.closed {
            return Err(SendError::Closed);
        }
        if state.bytes + blank.len() + ENTRY_BYTES > BACKLOG_BYTES {
            return Err(SendError::Full(state.backlog()));
        }
        let seq = state.next;
        state.next += 1;
        let entry = Entry { seq, frame: frame::stamp(blank, seq) };
        state.bytes += entry.cost();
        state.entries.push_back(entry);
        drop(state);
        self.wake.notify_one();
        Ok(seq)
    }

    /// Waits for a push, an acknowledgement by the application, or the end. Loses no wake-up.
    pub(super) async fn changed(&self) {
        self.wake.notified().await;
    }

    /// The next frame to transmit, if the window has room.
    pub(super) fn transmit(&self) -> Option<Bytes> {
        let mut state = self.lock();
        let entry = state.entries.get(state.sent)?;
        let (cost, frame) = (entry.cost(), entry.frame.clone());
        let fits = state.sent == 0
            || (state.sent < WINDOW_MESSAGES && state.sent_bytes + cost <= WINDOW_BYTES + ENTRY_BYTES);
        fits.then(|| {
            state.sent += 1;
            state.sent_bytes += cost;
            frame
        })
    }

    /// A new connection to a peer that has everything before `expect`; returns the number that goes first.
    pub(super) fn resume(&self, expect: u64) -> u64 {
        let mut state = self.lock();
        state.sent = state.entries.partition_point(|entry| entry.seq < expect);
        state.sent_bytes = state.entries.iter().take(state.sent).map(Entry::cost).sum();
        state.entries.get(state.sent).map_or(state.next, |entry| entry.seq)
    }

    /// Forgets everything: the peer that it was meant for is gone for ever.
    pub(super) fn clear(&self) {
        let mut state = self.lock();
        state.entries.clear();
        (state.sent, state.sent_bytes, state.bytes) = (0, 0, 0);
    }

    /// Lets go of what the peer has processed; returns whether that was anything. What was never transmitted cannot
    /// have been processed, whatever the peer says.
    pub(super) fn acknowledge(&self, up_to: u64) -> Option<u64> {
        let mut state = self.lock();
        let mut last = None;
        while state.sent > 0 && state.entries.front().is_some_and(|entry| entry.seq <= up_to) {
            let entry = state.entries.pop_front().expect("a front was just seen");
            state.sent -= 1;
            state.sent_bytes -= entry.cost();
            state.bytes -= entry.cost();
            last = Some(entry.seq);
        }
        last
    }

    pub(super) fn backlog(&self) -> Backlog {
        self.lock().backlog()
    }

    pub(super) fn set_processed(&self, seq: u64) {
        let mut state = self.lock();
        state.processed = state.processed.max(seq);
        drop(state);
        self.wake.notify_one();
    }

    pub(super) fn processed(&self) -> u64 {
        self.lock().processed
    }

    /// Takes no more messages; what is queued stays.
    pub(super) fn close(&self) {
        self.lock().closed = true;
    }
}

impl State {
    fn backlog(&self) -> Backlog {
        Backlog { messages: self.entries.len(), bytes: self.bytes }
    }
}
