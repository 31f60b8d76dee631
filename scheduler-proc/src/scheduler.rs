//! Owns the loop: drain inbox → admit → pick → `engine.step` → commit → send. The only place that moves requests
//! from one phase to the next; nothing calls back into it.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use proto::child::{Phase as ShutdownPhase, Shutdown, StatusReporter};
use proto::link::LinkEvent;
use proto::{FinishReason, Front, Heartbeat, Lane, ServeConfig, ToScheduler, ToTokenizer, TokenBytes};

use crate::accounting::{Origin, count_block};
use crate::adaptive::AdaptiveDepth;
use crate::admission::{Admission, Budgets, RowPlan};
use crate::batch::{Batch, BatchRow, RowKind, RowOutput, StepOutput};
use crate::cache::PrefixCache;
use crate::engine::{Engine, EngineError};
use crate::journal::Journal;
use crate::metrics::{Load, PrefillReport, SchedulerMetrics, StepReport};
use crate::outbox::{Outbox, Peers};
use crate::request::{Phase, Request};
use crate::stop::Vocabulary;

mod control;
mod drafting;
#[cfg(test)]
mod tests;

use self::control::PendingFlush;

/// The longest sleep of an idle scheduler, so that its heartbeat goes on.
const IDLE_WAIT: Duration = Duration::from_millis(50);

/// Everything that can happen to a scheduler from outside.
#[derive(Debug)]
pub enum Event {
    Tokenizer(Front, LinkEvent<ToScheduler>),
    /// Of a lane's detokenizer, which sends nothing; what matters is that it comes, goes and acknowledges.
    Detokenizer(Lane, LinkEvent<()>),
}

/// One scheduler with its engine.
pub struct Scheduler<E, P> {
    config: Arc<ServeConfig>,
    engine: E,
    admission: Admission,
    /// `None` where the depth of drafts is fixed.
    depth: Option<AdaptiveDepth>,
    outbox: Outbox<P>,
    vocabulary: Vocabulary,
    metrics: SchedulerMetrics,
    /// `None` where no counts are shown.
    journal: Option<Journal>,
    pending_flushes: Vec<PendingFlush>,
    /// Admit nothing more; what is queued or running still ends.
    draining: bool,
    started: Instant,
    /// Steps and messages so far, for the heartbeat.
    progress: u64,
}

impl<E: Engine, P: Peers> Scheduler<E, P> {
    pub fn new(
        config: Arc<ServeConfig>,
        engine: E,
        peers: P,
        bytes: Option<Arc<TokenBytes>>,
        metrics: SchedulerMetrics,
    ) -> Self {
        let schedule = &config.schedule;
        let limits = engine.limits().clone();
        let cache = PrefixCache::new(
            limits.kv_slots,
            schedule.page_size.max(1) as usize,
            !schedule.disable_radix_cache,
        );
        let vocabulary = Vocabulary {
            size: limits.vocab_size,
            eos_token_ids: config.model.eos_token_ids.as_slice().into(),
            bytes,
        };
        let admission = Admission::new(cache, Budgets::new(schedule, limits.context_len));
        let mut scheduler = Self {
            engine,
            admission,
            depth: config.spec.as_ref().and_then(|spec| spec.adaptive.as_ref()).map(AdaptiveDepth::new),
            outbox: Outbox::new(peers, config.topology),
            vocabulary,
            metrics,
            journal: None,
            pending_flushes: Vec::new(),
            draining: false,
            started: Instant::now(),
            progress: 0,
            config,
        };
        scheduler.metrics.constants(&limits, &scheduler.config, scheduler.admission.cache.capacity());
        scheduler
    }

    /// Measures start-up from when the process began, not from when the scheduler was made.
    pub fn started_at(&mut self, started: Instant) {
        self.started = started;
    }

    /// Takes over from earlier schedulers, and leaves to later ones.
    pub fn keep(&mut self, journal: Journal) {
        // The counts in the journal bring up those of a snapshot, so there must be one.
        self.metrics.publish(true);
        self.journal = Some(journal);
    }

    /// Turns until told to stop, or until a drain has nothing left to end.
    pub fn run(
        &mut self,
        inbox: &Receiver<Event>,
        shutdown: &Shutdown,
        status: &StatusReporter,
    ) -> Result<(), EngineError> {
        loop {
            inbox.try_iter().for_each(|event| self.handle(event));
            match shutdown.phase() {
                ShutdownPhase::Running | ShutdownPhase::Retiring => {}
                ShutdownPhase::Draining => self.draining = true,
                ShutdownPhase::Stopping => {
                    self.tell_all(&ToTokenizer::Leaving);
                    return Ok(());
                }
            }
            let worked = self.step()?;
            status.alive(self.heartbeat());
            if self.draining && self.admission.is_idle() && !self.outbox.has_unsent() {
                return Ok(());
            }
            if !worked {
                match inbox.recv_timeout(IDLE_WAIT) {
                    Ok(event) => self.handle(event),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return Ok(()),
                }
            }
        }
    }

    /// Takes in what happened. Never runs the engine.
    pub fn handle(&mut self, event: Event) {
        self.progress += 1;
        match event {
            Event::Tokenizer(front, LinkEvent::Up { restarted, .. }) => self.tokenizer_up(front, restarted),
            Event::Tokenizer(front, LinkEvent::Message { message, .. }) => self.receive(front, message),
            Event::Tokenizer(_, LinkEvent::Down | LinkEvent::Acked { .. }) => {}
            Event::Detokenizer(lane, LinkEvent::Up { restarted: true, .. }) => {
                self.detokenizer_restarted(lane);
            }
            Event::Detokenizer(lane, LinkEvent::Acked { up_to }) => self.outbox.acked(lane, up_to),
            Event::Detokenizer(
                _,
                LinkEvent::Up { restarted: false, .. } | LinkEvent::Down | LinkEvent::Message { .. },
            ) => {}
        }
    }

    /// One turn: admit, pick, run, commit, send. Says whether the engine ran.
    pub fn step(&mut self) -> Result<bool, EngineError> {
        let draft = self.choose_draft();
        let seated = self.admission.running().len();
        if !self.outbox.is_congested() {
            self.admission.admit(draft.nodes);
        }
        let mut report = StepReport { prefill: self.new_seats(seated), ..StepReport::default() };
        let plans = self.admission.pick(draft);
        self.release_vacated();
        if !plans.is_empty() {
            let output = self.run_batch(&plans)?;
            report.timing = output.timing;
            self.observe_drafts(draft, &plans, &output, &mut report);
            self.progress += 1;
            self.commit(&plans, output, &mut report);
            self.release_vacated();
        }
        self.settle_flushes();
        report.load = self.load();
        report.retracted = self.admission.take_retracted();
        self.metrics.step(&report);
        if !plans.is_empty() {
            self.write_journal();
        }
        self.send();
        Ok(!plans.is_empty())
    }

    pub fn heartbeat(&self) -> Heartbeat {
        Heartbeat {
            in_flight: self.admission.running().len() as u64,
            queued: self.admission.waiting().len() as u64,
            progress: self.progress,
        }
    }

    /// Checks that no KV slot is lost, and that an idle scheduler holds none.
    pub fn check(&self) -> Result<(), String> {
        let running = self.admission.running();
        self.admission.cache.check(running.iter().filter_map(|r| r.seat.as_ref()).map(|seat| &seat.lease))?;
        let used = self.admission.cache.usage().used;
        if running.is_empty() && used > 0 {
            return Err(format!("{used} slots are in use while nothing runs"));
        }
        Ok(())
    }

    fn run_batch(&mut self, plans: &[RowPlan]) -> Result<StepOutput, EngineError> {
        let running = self.admission.running();
        let rows = plans.iter().map(|plan| {
            let request = &running[plan.index];
            let seat = request.seat.as_ref().expect("picked requests have seats");
            BatchRow {
                slot: seat.slot,
                kind: plan.kind,
                params: &request.params,
                tokens: request.tokens(),
                prompt_len: request.prompt_len(),
                computed_len: request.computed_len(),
                extend_len: plan.extend_len,
                kv_slots: seat.lease.slots(),
            }
        });
        let batch = Batch { rows: rows.collect() };
        let output = self.engine.step(&batch)?;
        assert_eq!(output.rows.len(), plans.len(), "an engine answers every row");
        Ok(output)
    }

    /// Takes what the engine made into the requests, and ends those that are done.
    fn commit(&mut self, plans: &[RowPlan], output: StepOutput, report: &mut StepReport) {
        let mut ended = Vec::new();
        for (plan, row) in plans.iter().zip(output.rows) {
            let request = &mut self.admission.running_mut()[plan.index];
            commit_row(request, plan, row, report);
            if let Some(journal) = &mut self.journal {
                journal.note(request);
            }
            if request.finish.is_some() {
                ended.push(plan.index);
            } else if plan.kind == RowKind::Extend {
                self.admission.share_prefix(plan.index);
            }
        }
        // From the back, so that earlier indexes stay true.
        ended.sort_unstable();
        for index in ended.into_iter().rev() {
            let request = self.admission.finish(index);
            self.end(request);
        }
    }

    /// Everything that is told to a client is in here first.
    fn write_journal(&mut self) {
        let Some(journal) = &mut self.journal else { return };
        let counts = self.metrics.live_counts();
        journal.commit(&counts);
        if journal.is_long() {
            let held = self.admission.running().iter().chain(self.admission.waiting());
            journal.rewrite(held.chain(self.outbox.ended()), &counts);
        }
    }

    /// Hands over a request that left queue and seats.
    fn end(&mut self, request: Request) {
        self.outbox.finish(request);
    }

    fn send(&mut self) {
        self.outbox.send_replies();
        // What a client is told must be in the totals already.
        self.metrics.publish(self.outbox.has_ends());
        let interval = self.config.server.stream_interval;
        self.outbox.send_rows(self.admission.running_mut(), interval);
        // A row may have turned out impossible to send.
        while let Some(index) = self.admission.running().iter().position(|r| r.finish.is_some()) {
            let request = self.admission.finish(index);
            self.outbox.finish(request);
        }
        self.release_vacated();
    }

    fn release_vacated(&mut self) {
        self.admission.take_vacated().into_iter().for_each(|slot| self.engine.release(slot));
    }

    fn new_seats(&self, already: usize) -> PrefillReport {
        let mut report = PrefillReport::default();
        for request in &self.admission.running()[already..] {
            report.new_seqs += 1;
            report.cached_tokens += request.computed_len();
            if request.retractions == 0 && request.log_metrics {
                report.queue_times.extend(request.queue_time);
                report.first_cached_tokens += request.cached_len;
            }
        }
        report
    }

    fn load(&self) -> Load {
        let running = self.admission.running();
        Load {
            running: running.len(),
            waiting: self.admission.waiting().len(),
            decode_tokens: running
                .iter()
                .filter(|r| r.phase() == Phase::Decode)
                .map(|r| r.tokens().len())
                .sum(),
            pending_tokens: running
                .iter()
                .filter(|r| r.phase() == Phase::Prefill)
                .chain(self.admission.waiting())
                .map(Request::missing_len)
                .sum(),
            usage: self.admission.cache.usage(),
            draft: self.draft_status(),
        }
    }

    fn refuse(&mut self, front: Front, rid: proto::RequestId, reason: FinishReason) {
        self.outbox.reply(front, ToTokenizer::Refused { rid, reason });
    }

    fn tell_all(&mut self, message: &ToTokenizer) {
        self.config.topology.fronts().for_each(|front| self.outbox.reply(front, message.clone()));
    }
}

/// Takes one row's result into its request.
fn commit_row(request: &mut Request, plan: &RowPlan, row: RowOutput, report: &mut StepReport) {
    if let Some(error) = row.error {
        tracing::error!(rid = %request.rid, %error, "request failed in the engine");
        request.finish = Some(FinishReason::failed(500, "InternalServerError", error));
        return;
    }
    request.add_input_logprobs(row.input_logprobs);
    request.ran(plan.extend_len);
    let origin = match (&row.verify, plan.kind) {
        (Some(verify), _) => Origin::Verify(verify),
        (None, RowKind::Decode { .. }) => Origin::Plain,
        (None, RowKind::Extend) => Origin::Prefill,
    };
    report.row(request.log_metrics, origin, plan.extend_len, row.tokens.len());
    if row.tokens.is_empty() {
        return;
    }
    let ids: Vec<_> = row.tokens.iter().map(|token| token.id).collect();
    let scan = request.stops.scan(&ids, request.output_len());
    let delivered = count_block(request, origin, scan.kept);
    report.delivered(request.log_metrics, delivered);
    if scan.kept > 0 {
        request.append(&ids[..scan.kept]);
    }
    for token in row.tokens.into_iter().take(scan.kept) {
        if let Some(logprobs) = token.logprobs {
            request.add_output_logprobs(token.id, logprobs);
        }
    }
    request.finish = scan.reason;
}
