//! Owns what waits between the link thread and one client: a single coalesced delta, never a queue, so that a
//! client that reads slowly costs at most the bound below.

use std::sync::{Mutex, MutexGuard, PoisonError};

use proto::{FinishReason, RowLogprobs, SpecCounters, TokenId};
use tokio::sync::Notify;

/// Unread bytes a streaming client may have waiting before its request is aborted.
pub(crate) const MAX_UNREAD_BYTES: usize = 4 << 20;

/// What came in since the client last looked.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Delta {
    pub text: String,
    pub output_ids: Vec<TokenId>,
    pub logprobs: Option<RowLogprobs>,
    /// Where the request stands; `None` before the first row.
    pub progress: Option<Progress>,
}

/// The cumulative facts of a request's latest row.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Progress {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    pub cached_tokens: u32,
    pub retraction_count: u32,
    pub queue_time: f64,
    pub spec: SpecCounters,
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct End {
    pub reason: FinishReason,
    /// Seconds from arrival.
    pub e2e_latency: f64,
}

/// What a reader takes out: everything new, and the end if it has come.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Update {
    pub delta: Delta,
    pub end: Option<End>,
}

#[derive(Default)]
struct Slot {
    delta: Delta,
    unread: usize,
    fresh: bool,
    end: Option<End>,
}

/// One request's place of exchange: many writers, one reader.
#[derive(Default)]
pub(crate) struct Mailbox {
    slot: Mutex<Slot>,
    wake: Notify,
}

impl Mailbox {
    /// Adds a delta and returns how many bytes now wait.
    pub(crate) fn deliver(&self, delta: Delta) -> usize {
        let mut slot = self.lock();
        slot.unread += delta.bytes();
        slot.delta.extend(delta);
        slot.fresh = true;
        let unread = slot.unread;
        drop(slot);
        self.wake.notify_one();
        unread
    }

    /// Ends the exchange with what came last, which a reader gets together. Only the first end counts.
    pub(crate) fn end(&self, last: Option<Delta>, end: End) {
        let mut slot = self.lock();
        if slot.end.is_none() {
            if let Some(last) = last {
                slot.delta.extend(last);
                slot.fresh = true;
            }
            slot.end = Some(end);
        }
        drop(slot);
        self.wake.notify_one();
    }

    /// Waits for something new. After an update with an end, there is nothing more.
    pub(crate) async fn take(&self) -> Update {
        loop {
            if let Some(update) = self.try_take() {
                return update;
            }
            self.wake.notified().await;
        }
    }

    fn try_take(&self) -> Option<Update> {
        let mut slot = self.lock();
        if !slot.fresh && slot.end.is_none() {
            return None;
        }
        let Slot { delta, end, .. } = std::mem::take(&mut *slot);
        Some(Update { delta, end })
    }

    fn lock(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Delta {
    /// Appends a later delta of the same request.
    pub(crate) fn extend(&mut self, later: Self) {
        self.text.push_str(&later.text);
        self.output_ids.extend(later.output_ids);
        match (&mut self.logprobs, later.logprobs) {
            (Some(mine), Some(later)) => mine.extend(later),
            (mine @ None, later) => *mine = later,
            (Some(_), None) => {}
        }
        if later.progress.is_some() {
            self.progress = later.progress;
        }
    }

    fn bytes(&self) -> usize {
        let logprobs = self.logprobs.as_ref().map_or(0, logprob_bytes);
        self.text.len() + size_of::<TokenId>() * self.output_ids.len() + logprobs
    }
}

fn logprob_bytes(columns: &RowLogprobs) -> usize {
    const ENTRY: usize = size_of::<(f32, TokenId)>();
    let tops = columns.output_top_logprobs.iter().chain(&columns.output_token_ids_logprobs);
    let input_tops = columns.input_top_logprobs.iter().chain(&columns.input_token_ids_logprobs).flatten();
    let entries: usize = tops.chain(input_tops).map(Vec::len).sum();
    let chosen = columns.output_token_logprobs_idx.len() + columns.input_token_logprobs_idx.len();
    ENTRY * (entries + chosen)
}
