//! Owns the text messages that the tokenizer process has not acknowledged, and with them the acknowledgements
//! that the scheduler still waits for: a message of tokens counts as processed only when its text has arrived,
//! so that whichever process dies in between, the tokens are sent again.

use std::collections::VecDeque;

use proto::link::SendError;
use proto::{BatchStrOutput, FinishReason, TextRow, ToTokenizer};

/// Sends one message on the link to the tokenizer process.
pub(crate) trait SendText {
    fn send(&self, message: &ToTokenizer) -> Result<u64, SendError>;
}

/// Messages on their way, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    waiting: VecDeque<Entry>,
    /// How many of `waiting`, from the front, are with the link.
    sent: usize,
    /// The last token message that needs no further text to be done.
    done: Option<u64>,
}

#[derive(Debug)]
struct Entry {
    message: ToTokenizer,
    /// The link's number for it, once sent.
    number: u64,
    /// The token message that is processed once this has arrived.
    completes: Option<u64>,
}

/// The link is closed: the process is ending.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Closed;

impl Outbox {
    /// Queues the text made from the token message `seq`. Without rows it is done when all before it are.
    pub(crate) fn push(&mut self, rows: Vec<TextRow>, seq: u64) {
        if !rows.is_empty() {
            self.waiting.push_back(Entry::new(rows, Some(seq)));
        } else if let Some(last) = self.waiting.back_mut() {
            last.completes = Some(seq);
        } else {
            self.done = Some(seq);
        }
    }

    /// Hands as much as possible to the link, in order. A full link takes the rest after its next
    /// acknowledgement.
    pub(crate) fn flush(&mut self, link: &impl SendText) -> Result<(), Closed> {
        while let Some(entry) = self.waiting.get_mut(self.sent) {
            match link.send(&entry.message) {
                Ok(number) => {
                    entry.number = number;
                    self.sent += 1;
                }
                Err(SendError::Full(_)) => return Ok(()),
                Err(SendError::TooLarge { bytes, limit }) => {
                    tracing::warn!(bytes, limit, "text message is too large");
                    self.split(self.sent);
                }
                Err(SendError::Unencodable(reason)) => {
                    tracing::error!(%reason, "text message dropped");
                    self.discard(self.sent);
                }
                Err(SendError::Closed) => return Err(Closed),
            }
        }
        Ok(())
    }

    /// The tokenizer process has everything up to `number`.
    pub(crate) fn acknowledged(&mut self, number: u64) {
        while self.sent > 0 && self.waiting[0].number <= number {
            self.sent -= 1;
            let entry = self.waiting.pop_front();
            self.done = entry.and_then(|entry| entry.completes).or(self.done);
        }
    }

    /// A new tokenizer process has none of it. What it does not ask for, it ignores.
    pub(crate) fn send_again(&mut self) {
        self.sent = 0;
    }

    /// The last token message that is processed, if there is news.
    pub(crate) fn take_done(&mut self) -> Option<u64> {
        self.done.take()
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Gives a message up; the token message that it completes is done with the one before it.
    fn discard(&mut self, at: usize) {
        let completes = self.waiting.remove(at).and_then(|entry| entry.completes);
        match at.checked_sub(1).and_then(|before| self.waiting.get_mut(before)) {
            Some(before) => before.completes = completes.or(before.completes),
            None => self.done = completes.or(self.done),
        }
    }

    /// Replaces a message that is too large by two halves, or a single row by its request's failure.
    fn split(&mut self, at: usize) {
        let Some(Entry { message, completes, .. }) = self.waiting.remove(at) else { return };
        let ToTokenizer::Text(batch) = message else { return };
        let mut rows = batch.into_rows().expect("the batch was built from rows");
        let second = rows.split_off(rows.len() / 2);
        let parts = if rows.is_empty() {
            vec![Entry::new(second.into_iter().map(too_large).collect(), completes)]
        } else {
            vec![Entry::new(rows, None), Entry::new(second, completes)]
        };
        for part in parts.into_iter().rev() {
            self.waiting.insert(at, part);
        }
    }
}

impl Entry {
    fn new(rows: Vec<TextRow>, completes: Option<u64>) -> Self {
        Self { message: ToTokenizer::Text(BatchStrOutput::from_rows(rows)), number: 0, completes }
    }
}

/// The row without what can be large: its request fails alone.
fn too_large(mut row: TextRow) -> TextRow {
    row.text = String::new();
    row.progress.logprobs = None;
    row.progress.output_ids = Vec::new();
    let message = "the reply is too large for one message";
    row.progress.finished_reason = Some(FinishReason::failed(500, "InternalServerError", message));
    row
}

#[cfg(test)]
mod tests;
