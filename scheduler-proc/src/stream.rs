//! Owns what of an answer has been sent: when a row is due, and what is in it. The only place that fills wire rows.

use proto::{DecodeRow, RowProgress, TokenRow};

use crate::request::Request;

#[cfg(test)]
mod tests;

/// Prompt ids in front of a first row, so that the first token is decoded with what precedes it.
const PROMPT_CONTEXT: usize = 5;

/// A request that does not stream still reports every so many tokens, so that a restart repeats little.
const NON_STREAM_INTERVAL: usize = 50;

/// How far the detokenizer knows a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    /// Answer tokens sent.
    pub len: usize,
    /// The detokenizer has a row of this request.
    pub known: bool,
    /// The row with the end is sent.
    pub finished: bool,
}

impl Sent {
    /// Nothing is sent; the tokenizer process has the first `resumed_len` tokens from an earlier scheduler.
    pub fn from(resumed_len: usize) -> Self {
        Self { len: resumed_len, known: false, finished: false }
    }
}

/// Whether a row must go out now.
pub fn is_due(request: &Request, server_interval: u32) -> bool {
    if request.finish.is_some() {
        return !request.sent.finished;
    }
    let unsent = request.output_len() - request.sent.len;
    if !request.stream {
        return unsent >= NON_STREAM_INTERVAL;
    }
    let interval = request.params.sampling.stream_interval.unwrap_or(server_interval).max(1) as usize;
    let first = request.sent.len == request.resumed_len();
    unsent >= if first { 1 } else { interval }
}

/// The request's next row. Nothing is marked as sent: see [`mark_sent`].
pub fn row(request: &Request) -> TokenRow {
    // A detokenizer that does not know the request gets all that this scheduler ever made of it; whoever has
    // some of it already drops it by `start`.
    let first = !request.sent.known;
    let start = if first { request.resumed_len() } else { request.sent.len };
    TokenRow { decode: decode_row(request, first, start), progress: progress(request, first, start) }
}

/// The row made last is on its way.
pub fn mark_sent(request: &mut Request) {
    request.sent = Sent { len: request.output_len(), known: true, finished: request.finish.is_some() };
}

/// A new detokenizer knows nothing: the next row is a first one, and an end that was sent is sent again.
pub fn forget_sent(request: &mut Request) {
    request.sent = Sent { known: false, finished: false, ..request.sent };
}

fn decode_row(request: &Request, first: bool, start: usize) -> DecodeRow {
    let sampling = &request.params.sampling;
    let read_offset = if first { request.prompt_len().min(PROMPT_CONTEXT) } else { 0 };
    let from = if first { request.prompt_len() - read_offset } else { request.prompt_len() + start };
    DecodeRow {
        decode_ids: request.tokens()[from..].to_vec(),
        read_offset: read_offset as u32,
        skip_special_tokens: sampling.skip_special_tokens,
        spaces_between_special_tokens: sampling.spaces_between_special_tokens,
        no_stop_trim: sampling.no_stop_trim,
        stop_strs: if first { sampling.stop.clone() } else { Vec::new() },
    }
}

fn progress(request: &Request, first: bool, start: usize) -> RowProgress {
    RowProgress {
        rid: request.rid.clone(),
        start: start as u32,
        output_ids: request.output()[start..].to_vec(),
        finished_reason: request.finish.clone(),
        prompt_tokens: request.prompt_len() as u32,
        completion_tokens: request.output_len() as u32,
        cached_tokens: request.cached_len as u32,
        retraction_count: request.retractions,
        queue_time: request.queue_time.unwrap_or_else(|| request.arrived.elapsed().as_secs_f64()),
        logprobs: request.logprobs.as_ref().map(|all| all.since(start - request.resumed_len(), first)),
        spec: request.spec.clone(),
    }
}
