//! Owns what has arrived of one direction: which number comes next, what the application has processed, and when an
//! acknowledgement is due.
//!
//! The sender's numbers start anew with each of its incarnations. The application sees numbers of this side, which
//! never do: an acknowledgement for a message of a peer that is gone cannot be taken for one of its successor's.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::AckMode;

/// Messages after which an acknowledgement is sent at once.
const ACK_EVERY: u64 = 32;
/// How long an acknowledgement may wait for company.
const ACK_DELAY: Duration = Duration::from_millis(20);

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// The next one, with its number on this side.
    Next(u64),
    /// Already here; sent again because its acknowledgement was lost.
    Duplicate,
    /// Something before it is missing.
    Gap,
}

pub(super) struct Inbox {
    mode: AckMode,
    /// The sender's number that comes next; `None` until a new peer has said where it starts.
    expected: Option<u64>,
    /// The sender's number of this side's number `base`.
    first: u64,
    base: u64,
    /// This side's number of the last message delivered.
    delivered: u64,
    /// This side's number up to which everything is processed, and of that what the peer has been told.
    processed: u64,
    told: u64,
    /// Delivered numbers that the application never saw because they made no sense; they count as processed as
    /// soon as all before them are.
    skipped: VecDeque<u64>,
    ack_due: Option<Instant>,
}

impl Inbox {
    pub(super) fn new(mode: AckMode) -> Self {
        Self {
            mode,
            expected: None,
            first: 0,
            base: 1,
            delivered: 0,
            processed: 0,
            told: 0,
            skipped: VecDeque::new(),
            ack_due: None,
        }
    }

    /// What follows comes from another incarnation.
    pub(super) fn new_peer(&mut self) {
        self.expected = None;
        self.base = self.delivered + 1;
        (self.processed, self.told) = (self.delivered, self.delivered);
        self.skipped.clear();
        self.ack_due = None;
    }

    /// The next number expected of the present incarnation; 0 if it has not yet said any.
    pub(super) fn expected(&self) -> u64 {
        self.expected.unwrap_or(0)
    }

    /// The peer will send nothing before `next`. `false` means that messages are lost for good.
    pub(super) fn start(&mut self, next: u64) -> bool {
        match self.expected {
            Some(expected) if next <= expected => true,
            Some(_) => {
                self.new_peer();
                (self.first, self.expected) = (next, Some(next));
                false
            }
            None => {
                (self.first, self.expected) = (next, Some(next));
                true
            }
        }
    }

    pub(super) fn arrive(&mut self, seq: u64) -> Arrival {
        match self.expected {
            Some(expected) if seq == expected => {
                self.expected = Some(expected.saturating_add(1));
                self.delivered += 1;
                Arrival::Next(self.delivered)
            }
            Some(expected) if seq < expected => Arrival::Duplicate,
            _ => Arrival::Gap,
        }
    }

    /// The application has returned from a message, or will never see it (`understood` is false).
    pub(super) fn handled(&mut self, seq: u64, understood: bool, now: Instant) {
        match self.mode {
            AckMode::Auto => self.advance(seq, now),
            AckMode::Manual if understood => {}
            AckMode::Manual => {
                self.skipped.push_back(seq);
                self.advance(self.processed, now);
            }
        }
    }

    /// The application says that it has processed everything up to `seq`; heard only if it was asked to.
    pub(super) fn advance_manual(&mut self, seq: u64, now: Instant) {
        if self.mode == AckMode::Manual {
            self.advance(seq, now);
        }
    }

    fn advance(&mut self, seq: u64, now: Instant) {
        self.processed = self.processed.max(seq.min(self.delivered));
        while self.skipped.front().is_some_and(|skipped| *skipped <= self.processed + 1) {
            self.processed = self.processed.max(self.skipped.pop_front().expect("a front was just seen"));
        }
        if self.processed > self.told && self.ack_due.is_none() {
            self.ack_due = Some(now + ACK_DELAY);
        }
    }

    /// When the next acknowledgement must go, if any is owed.
    pub(super) fn ack_due(&self) -> Option<Instant> {
        self.ack_due
    }

    pub(super) fn owes_ack(&self, now: Instant) -> bool {
        self.ack_due.is_some_and(|due| due <= now || self.processed - self.told >= ACK_EVERY)
    }

    /// The number to acknowledge, as the sender counts.
    pub(super) fn take_ack(&mut self) -> u64 {
        self.told = self.processed;
        self.ack_due = None;
        // Nothing of this incarnation is processed while `processed` is still before `base`.
        self.first.saturating_add(self.processed + 1 - self.base).saturating_sub(1)
    }
}
