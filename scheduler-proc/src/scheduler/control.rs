//! Owns what neighbours ask of a scheduler: new requests, aborts, cache flushes, its state, and what their
//! restarts mean.

use std::time::{Duration, Instant};

use proto::{
    AbortReq, FinishReason, FlushCacheReqInput, FlushCacheReqOutput, Front, GetInternalStateReqOutput,
    InternalState, Lane, RequestId, SchedulerInfo, SpecConfig, ToScheduler, ToTokenizer,
    TokenizedGenerateReqInput,
};
use serde_json::json;

use super::Scheduler;
use crate::adaptive::AdaptiveDepth;
use crate::engine::Engine;
use crate::outbox::Peers;
use crate::request::{Phase, Request};
use crate::stream;

/// A flush waits no longer than a day.
const MAX_FLUSH_WAIT_S: f64 = 86_400.0;

/// A flush that waits for the scheduler to become idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PendingFlush {
    front: Front,
    id: u64,
    deadline: Instant,
}

impl<E: Engine, P: Peers> Scheduler<E, P> {
    pub(super) fn receive(&mut self, front: Front, message: ToScheduler) {
        match message {
            ToScheduler::Generate(input) => self.generate(front, *input),
            ToScheduler::Abort(abort) => self.abort(&abort),
            ToScheduler::AbortElsewhere(abort) => {
                for other in self.config.topology.fronts().filter(|other| *other != front) {
                    self.outbox.reply(other, ToTokenizer::AbortFromElsewhere(abort.clone()));
                }
            }
            ToScheduler::FlushCache(flush) => self.flush_cache(front, &flush),
            ToScheduler::GetInternalState(get) => {
                let internal_state = self.internal_state();
                let reply = GetInternalStateReqOutput { id: get.id, internal_state };
                self.outbox.reply(front, ToTokenizer::InternalState(reply));
            }
        }
    }

    /// A connection to a tokenizer process stands. A new one knows none of the requests of the old one, and
    /// nobody reads their answers any more.
    pub(super) fn tokenizer_up(&mut self, front: Front, restarted: bool) {
        if restarted {
            self.outbox.tokenizer_restarted(front);
            self.pending_flushes.retain(|flush| flush.front != front);
            let topology = self.config.topology;
            let is_its = move |lane| topology.front_of(lane) == front;
            if let Some(journal) = &mut self.journal {
                journal.forget_inherited(is_its);
            }
            let aborted = self.end_all(|request| is_its(request.lane), false);
            tracing::info!(
                front = front.0,
                aborted,
                "a tokenizer process restarted; its requests are aborted"
            );
        }
        let info = self.info();
        self.outbox.reply(front, ToTokenizer::SchedulerReady(info));
    }

    pub(super) fn detokenizer_restarted(&mut self, lane: Lane) {
        self.outbox.detokenizer_restarted(lane);
        let running = self.admission.running_mut().iter_mut();
        running.filter(|request| request.lane == lane).for_each(stream::forget_sent);
        self.admission.waiting_mut().filter(|request| request.lane == lane).for_each(stream::forget_sent);
    }

    fn generate(&mut self, front: Front, input: TokenizedGenerateReqInput) {
        if self.knows(&input.rid) {
            // The same message again, after a reconnection.
            tracing::debug!(rid = %input.rid, "duplicate request is ignored");
            return;
        }
        let lane = self.outbox.lane_for(front, &input.rid);
        if let Some(reason) = self.refusal(lane, &input) {
            self.refuse(front, input.rid, reason);
            return;
        }
        let rid = input.rid.clone();
        let inheritance = self.journal.as_mut().and_then(|journal| journal.claim(&input));
        match Request::new(input, &self.vocabulary, self.admission.request_capacity()) {
            Ok(mut request) => {
                request.lane = lane;
                if let Some(inheritance) = inheritance {
                    request.inherit(inheritance);
                    self.note(&mut request);
                }
                match request.finish.is_some() {
                    // Only its end was not told.
                    true => self.end(request),
                    false => self.admission.enqueue(request),
                };
            }
            Err(error) => {
                self.refuse(front, rid, FinishReason::failed(400, "BadRequestError", error.to_string()));
            }
        }
    }

    /// What was inherited is left to the next scheduler in turn.
    fn note(&mut self, request: &mut Request) {
        if let Some(journal) = &mut self.journal {
            journal.note(request);
            journal.commit(&self.metrics.live_counts());
        }
    }

    fn refusal(&self, lane: Lane, input: &TokenizedGenerateReqInput) -> Option<FinishReason> {
        let unavailable = |message| Some(FinishReason::failed(503, "ServiceUnavailableError", message));
        if input.input_ids.is_empty() {
            return Some(FinishReason::failed(400, "BadRequestError", "input_ids cannot be empty."));
        }
        if let Some(reason) = self.admission.refusal(input.input_ids.len() + input.output_ids.len()) {
            return Some(reason);
        }
        // A request that comes back was admitted before: it is never turned away for lack of room.
        if input.attempt > 1 || !input.output_ids.is_empty() {
            return None;
        }
        if self.draining {
            return unavailable("The server is shutting down.");
        }
        if self.admission.waiting().len() >= self.config.server.max_queued_requests as usize {
            return unavailable("The request queue is full.");
        }
        if self.outbox.is_lane_congested(lane) {
            return unavailable("The detokenizer does not keep up; try again later.");
        }
        None
    }

    /// Live requests only: an id may be used again as soon as its end is told, acknowledged or not.
    fn knows(&self, rid: &RequestId) -> bool {
        let mut live = self.admission.running().iter().chain(self.admission.waiting());
        live.any(|request| request.rid == *rid)
    }

    /// Ends what is named. Ids that are unknown, or have ended, have no effect.
    fn abort(&mut self, abort: &AbortReq) {
        match &abort.rid {
            _ if abort.abort_all => {
                self.end_all(|_| true, true);
            }
            Some(rid) => self.abort_one(rid),
            None => {}
        }
    }

    fn abort_one(&mut self, rid: &RequestId) {
        if let Some(request) = self.admission.withdraw(|waiting| waiting.rid == *rid) {
            self.abort_waiting(request, true);
        } else if let Some(index) = self.admission.running().iter().position(|r| r.rid == *rid) {
            self.abort_running(index);
        }
    }

    /// Ends every request that is `named`; `tell` says whether those that wait are to be answered.
    fn end_all(&mut self, named: impl Fn(&Request) -> bool, tell: bool) -> usize {
        let mut count = 0;
        while let Some(request) = self.admission.withdraw(&named) {
            self.abort_waiting(request, tell);
            count += 1;
        }
        while let Some(index) = self.admission.running().iter().position(&named) {
            self.abort_running(index);
            count += 1;
        }
        count
    }

    fn abort_running(&mut self, index: usize) {
        let mut request = self.admission.finish(index);
        request.finish = Some(FinishReason::aborted("Aborted"));
        self.release_vacated();
        self.end(request);
    }

    fn abort_waiting(&mut self, mut request: Request, tell: bool) {
        let reason = FinishReason::aborted("Abort in waiting queue");
        // One that the detokenizer knows, or that has output, ends there, with what it has.
        if request.output_len() > 0 || request.sent.known {
            request.unseat(Phase::Done);
            request.finish = Some(reason);
            self.end(request);
        } else if tell {
            self.refuse(self.outbox.front_of(request.lane), request.rid, reason);
        }
    }

    fn flush_cache(&mut self, front: Front, flush: &FlushCacheReqInput) {
        let timeout = Duration::try_from_secs_f64(flush.timeout_s.clamp(0.0, MAX_FLUSH_WAIT_S));
        // What is no number of seconds waits for none.
        let deadline = Instant::now() + timeout.unwrap_or_default();
        self.pending_flushes.push(PendingFlush { front, id: flush.id, deadline });
        self.settle_flushes();
    }

    /// Answers flushes: all alike once idle, and each at its deadline otherwise.
    pub(super) fn settle_flushes(&mut self) {
        if self.pending_flushes.is_empty() {
            return;
        }
        if self.admission.is_idle() {
            self.admission.cache.flush();
            self.engine.flush();
            for flush in std::mem::take(&mut self.pending_flushes) {
                self.reply_flush(flush, true, "Cache flushed.".to_owned());
            }
            return;
        }
        let now = Instant::now();
        let (due, pending): (Vec<_>, Vec<_>) =
            self.pending_flushes.drain(..).partition(|flush| flush.deadline <= now);
        self.pending_flushes = pending;
        for flush in due {
            let (running, waiting) = (self.admission.running().len(), self.admission.waiting().len());
            let message =
                format!("Cache not flushed: {running} requests are running, {waiting} are waiting.");
            self.reply_flush(flush, false, message);
        }
    }

    fn reply_flush(&mut self, flush: PendingFlush, success: bool, message: String) {
        let reply = FlushCacheReqOutput { id: flush.id, success, message };
        self.outbox.reply(flush.front, ToTokenizer::FlushCache(reply));
    }

    /// What the front end must know.
    pub fn info(&self) -> SchedulerInfo {
        let draft = self.draft_status();
        SchedulerInfo {
            max_total_num_tokens: self.admission.cache.capacity() as u64,
            max_req_input_len: self.admission.max_prompt_len() as u32,
            max_running_requests: self.config.schedule.max_running_requests,
            startup_time: self.started.elapsed().as_secs_f64(),
            speculative_num_steps: draft.num_steps as u32,
            speculative_num_draft_tokens: draft.num_draft_tokens as u32,
            effective_speculative_algorithm: self
                .config
                .spec
                .as_ref()
                .map_or_else(|| "NONE".to_owned(), SpecConfig::name),
        }
    }

    fn internal_state(&self) -> InternalState {
        let draft = self.draft_status();
        let limits = self.engine.limits();
        let usage = self.admission.cache.usage();
        InternalState {
            last_gen_throughput: self.metrics.last_gen_throughput(),
            effective_max_running_requests_per_dp: self.config.schedule.max_running_requests,
            num_running_reqs: self.admission.running().len() as u32,
            num_queue_reqs: self.admission.waiting().len() as u32,
            speculative_num_steps: draft.num_steps as u32,
            speculative_num_draft_tokens: draft.num_draft_tokens as u32,
            avg_spec_accept_length: self.metrics.totals().accept_length(),
            speculative_draft_sources: self.metrics.draft_sources(),
            speculative_adaptive_state: self.depth.as_ref().map(AdaptiveDepth::report),
            memory_usage: json!({
                "weight": limits.weight_bytes,
                "weight_types": limits.weight_types,
                "weight_gathered": limits.gathered_bytes,
                "kvcache": limits.kv_bytes,
                "token_capacity": usage.total,
                "used": usage.used,
                "cached": usage.cached,
                "free": usage.free,
            }),
        }
    }
}
