//! Owns the truth about every request: what it asked, the ids received so far, and who waits. Every request ends
//! here exactly once, by its last row, by its client leaving, or by [`Registry::close`].

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use proto::link::SendError;
use proto::{
    AbortReq, BatchStrOutput, FinishReason, Front, Incarnation, RequestId, TextRow, ToScheduler,
    TokenizedGenerateReqInput,
};
use tokio::sync::watch;
use tracing::{debug, error, warn};

use crate::mailbox::{Delta, End, MAX_UNREAD_BYTES, Mailbox, Progress, Update};
use crate::metrics::{RequestClock, TokenizerMetrics};
use crate::refusal::Refusal;

/// Puts a message on the link to the scheduler; never blocks.
pub(crate) type Outbox = Box<dyn Fn(&ToScheduler) -> Result<u64, SendError> + Send + Sync>;

/// A scheduler's deaths during one request, at which it fails alone: a request that kills schedulers must not do so
/// for ever.
const FATAL_DEATHS: u32 = 2;

/// All requests that are alive.
pub(crate) struct Registry {
    state: Mutex<State>,
    outbox: OnceLock<Outbox>,
    front: Front,
    metrics: Arc<TokenizerMetrics>,
    /// Writes down what is counted.
    publish: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Counts text batches: proof that all three processes work.
    activity: watch::Sender<u64>,
    /// Requests that are alive.
    live: watch::Sender<usize>,
}

#[derive(Default)]
struct State {
    /// By the name on the links, which is never used twice, nor by another tokenizer process: a client may use its own again as soon as it has
    /// left, while rows of the first request are still on their way.
    live: HashMap<RequestId, Entry>,
    /// The clients' names of what is alive.
    names: HashSet<RequestId>,
    /// The number of the request registered last. Those of a later process begin above those of an earlier one: rows
    /// of its requests may still be on their way.
    registered: u64,
    /// Aborts that did not fit on the link yet.
    unsent_aborts: Vec<RequestId>,
    scheduler_up: bool,
    /// The present scheduler has its model, so that it could run requests. Stays while its link is down.
    scheduler_ran: bool,
    /// Set once by `close`: why nothing is registered any more.
    closed: Option<String>,
    /// Ends that are counted and not told yet, each with what came along.
    untold: Vec<(Arc<Mailbox>, Option<Delta>, End)>,
}

struct Entry {
    /// `output_ids` and `spec` grow with every row, so that it can be handed to a new scheduler as it is.
    input: TokenizedGenerateReqInput,
    /// The name the client knows.
    name: RequestId,
    /// The name that stands for all copies and prompts of one body.
    group: RequestId,
    text_len: u64,
    /// What the last row said.
    latest: Progress,
    has_input_logprobs: bool,
    mailbox: Arc<Mailbox>,
    clock: RequestClock,
    abort_requested: bool,
    /// Schedulers that died while they had it and could run it.
    deaths: u32,
}

/// One request to be registered, with the client's name for it.
pub(crate) struct Registration {
    pub input: TokenizedGenerateReqInput,
    pub group: RequestId,
}

/// A client's claim on one answer. Dropping it before the end aborts the request.
pub(crate) struct Ticket {
    /// On the links.
    rid: RequestId,
    /// For the client.
    name: RequestId,
    mailbox: Arc<Mailbox>,
    registry: Arc<Registry>,
    ended: bool,
}

impl Ticket {
    /// The client's name for the request.
    pub(crate) fn name(&self) -> &RequestId {
        &self.name
    }

    /// What is new; `None` after the end.
    pub(crate) async fn next(&mut self) -> Option<Update> {
        if self.ended {
            return None;
        }
        let update = self.mailbox.take().await;
        self.ended = update.end.is_some();
        Some(update)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.ended {
            self.registry.abandon(&self.rid);
        }
    }
}

impl Registry {
    pub(crate) fn new(metrics: Arc<TokenizerMetrics>, front: Front) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State { registered: Incarnation::now().0, ..State::default() }),
            outbox: OnceLock::new(),
            front,
            metrics,
            publish: OnceLock::new(),
            activity: watch::Sender::new(0),
            live: watch::Sender::new(0),
        })
    }

    /// Gives the registry its way out; before that nothing can be registered.
    pub(crate) fn connect(&self, outbox: Outbox) {
        // A second outbox would split the stream of messages; the first stays.
        let _ = self.outbox.set(outbox);
    }

    /// Gives the registry a way to write down what it has counted, used before clients are told of ends.
    pub(crate) fn publish_with(&self, publish: Box<dyn Fn() + Send + Sync>) {
        let _ = self.publish.set(publish);
    }

    /// Requests that are alive.
    pub(crate) fn len(&self) -> usize {
        *self.live.borrow()
    }

    /// Waits until no request is alive.
    pub(crate) async fn idle(&self) {
        // The sender is ours and lives as long as this borrow.
        let _ = self.live.subscribe().wait_for(|live| *live == 0).await;
    }

    /// Ticks with every batch of text.
    pub(crate) fn activity(&self) -> watch::Receiver<u64> {
        self.activity.subscribe()
    }

    /// Registers all requests and hands them to the scheduler, or none of them.
    pub(crate) fn register(self: &Arc<Self>, requests: Vec<Registration>) -> Result<Vec<Ticket>, Refusal> {
        let mut state = self.lock();
        if let Some(why) = &state.closed {
            return Err(Refusal::Unavailable(why.clone()));
        }
        refuse_duplicates(&state.names, &requests)?;
        let mut tickets = Vec::with_capacity(requests.len());
        let mut refusal = None;
        // Counted before the scheduler hears of them: in between, nobody may find the registry idle, or with room.
        self.live.send_replace(state.live.len() + requests.len());
        for Registration { mut input, group } in requests {
            input.attempt = u32::from(state.scheduler_up);
            state.registered += 1;
            let name = input.rid.clone();
            input.rid = RequestId(format!("{name}#{}.{:x}", self.front.0, state.registered));
            if let Err(why) = self.send(&ToScheduler::Generate(Box::new(input.clone()))) {
                refusal = Some(why);
                break;
            }
            let (rid, mailbox) = (input.rid.clone(), Arc::new(Mailbox::default()));
            let clock = RequestClock::start(input.stream, input.log_metrics);
            let entry = Entry {
                input,
                name: name.clone(),
                group,
                text_len: 0,
                latest: Progress::default(),
                has_input_logprobs: false,
                mailbox: Arc::clone(&mailbox),
                clock,
                abort_requested: false,
                deaths: 0,
            };
            state.names.insert(name.clone());
            state.live.insert(rid.clone(), entry);
            tickets.push(Ticket { rid, name, mailbox, registry: Arc::clone(self), ended: false });
        }
        self.live.send_replace(state.live.len());
        // The tickets' drop takes the lock again.
        drop(state);
        match refusal {
            None => Ok(tickets),
            Some(SendError::TooLarge { .. }) => Err(Refusal::invalid("The request is too large.")),
            Some(SendError::Unencodable(why)) => Err(Refusal::Internal(why.to_string())),
            Some(SendError::Full(_)) => Err(Refusal::Unavailable("The request queue is full.".to_owned())),
            Some(SendError::Closed) => Err(Refusal::Unavailable("The server is stopping.".to_owned())),
        }
    }

    /// Hands a batch's rows to those who wait.
    pub(crate) fn route(&self, batch: BatchStrOutput) {
        let rows = match batch.into_rows() {
            Ok(rows) => rows,
            Err(why) => return error!(%why, "dropped a batch"),
        };
        let mut state = self.lock();
        for row in rows {
            self.route_row(&mut state, row);
        }
        self.tell(state);
        self.activity.send_modify(|batches| *batches += 1);
    }

    fn route_row(&self, state: &mut State, mut row: TextRow) {
        let rid = row.progress.rid.clone();
        let Some(entry) = state.live.get_mut(&rid) else {
            // Its client left, or it was sent again after a restart.
            return debug!(%rid, "dropped a row of an unknown request");
        };
        let reason = row.progress.finished_reason.take();
        let delta = match entry.accept(row) {
            Ok(delta) => delta,
            Err(gap) => {
                error!(%rid, %gap, "failed a request");
                let reason = FinishReason::failed(500, "InternalServerError", gap);
                self.end(state, &rid, reason);
                return self.send_abort(state, rid);
            }
        };
        self.metrics.tokens(&mut entry.clock, delta.output_ids.len());
        if let Some(reason) = reason {
            self.end_with(state, &rid, Some(delta), reason);
            return;
        }
        let unread = entry.mailbox.deliver(delta);
        if unread > MAX_UNREAD_BYTES && entry.input.stream {
            warn!(%rid, unread, "aborted a request whose client does not read");
            self.end(state, &rid, FinishReason::failed(503, "SlowClient", "The client does not read."));
            self.send_abort(state, rid);
        }
    }

    /// Ends a request that the scheduler will not run.
    pub(crate) fn refuse(&self, rid: &RequestId, reason: FinishReason) {
        let mut state = self.lock();
        self.end(&mut state, rid, reason);
        self.tell(state);
    }

    /// Ends what `rid` names (a request, or all of a batch), or everything, by asking the scheduler: the answer
    /// so far still comes. Unknown names have no effect.
    pub(crate) fn abort(&self, rid: Option<&RequestId>) {
        let mut state = self.lock();
        let named = |entry: &Entry| rid.is_none_or(|rid| *rid == entry.name || *rid == entry.group);
        let mut hit = Vec::new();
        for (id, entry) in state.live.iter_mut().filter(|(_, entry)| named(entry)) {
            entry.abort_requested = true;
            hit.push(id.clone());
        }
        for rid in hit {
            self.send_abort(&mut state, rid);
        }
    }

    /// A client left.
    fn abandon(&self, rid: &RequestId) {
        let mut state = self.lock();
        if self.end(&mut state, rid, FinishReason::aborted("The client disconnected")) {
            self.send_abort(&mut state, rid.clone());
        }
        self.tell(state);
    }

    /// The link to the scheduler has room again.
    pub(crate) fn flush_aborts(&self) {
        let mut state = self.lock();
        for rid in std::mem::take(&mut state.unsent_aborts) {
            self.send_abort(&mut state, rid);
        }
    }

    pub(crate) fn scheduler_down(&self) {
        self.lock().scheduler_up = false;
    }

    /// The scheduler is there. One that `restarted` remembers nothing: it gets every unfinished request again,
    /// with the ids received so far.
    pub(crate) fn scheduler_up(&self, restarted: bool) {
        let mut state = self.lock();
        state.scheduler_up = true;
        if restarted {
            state.unsent_aborts.clear();
            // One that died while it loaded its model was killed by no request.
            let killed = std::mem::take(&mut state.scheduler_ran);
            let rids: Vec<_> = state.live.keys().cloned().collect();
            for rid in rids {
                self.resubmit(&mut state, &rid, killed);
            }
        }
        self.tell(state);
        self.flush_aborts();
    }

    /// The scheduler has its model.
    pub(crate) fn scheduler_ready(&self) {
        self.lock().scheduler_ran = true;
    }

    /// Its end is no request's doing.
    pub(crate) fn scheduler_leaves(&self) {
        self.lock().scheduler_ran = false;
    }

    fn resubmit(&self, state: &mut State, rid: &RequestId, killed: bool) {
        let Some(entry) = state.live.get_mut(rid) else { return };
        if entry.abort_requested {
            self.end(state, rid, FinishReason::aborted("Aborted"));
            return;
        }
        entry.input.attempt += 1;
        entry.deaths += u32::from(killed);
        let reason = if entry.deaths >= FATAL_DEATHS {
            Some("the scheduler died twice while it ran this request".to_owned())
        } else {
            let message = ToScheduler::Generate(Box::new(entry.input.clone()));
            self.send(&message).err().map(|why| format!("cannot hand it to the new scheduler: {why}"))
        };
        if let Some(reason) = reason {
            self.end(state, rid, FinishReason::failed(500, "InternalServerError", reason));
        }
    }

    /// Ends everything that is alive with an error, and refuses everything later.
    pub(crate) fn close(&self, why: &str) {
        let mut state = self.lock();
        state.closed = Some(why.to_owned());
        let rids: Vec<_> = state.live.keys().cloned().collect();
        for rid in rids {
            self.end(&mut state, &rid, FinishReason::failed(503, "ServiceUnavailable", why));
        }
        self.tell(state);
    }

    /// Tells the clients of those that ended, once that is written down: whatever a client was told is in the
    /// totals, also when this process is killed in the next moment.
    fn tell(&self, mut state: MutexGuard<'_, State>) {
        let untold = std::mem::take(&mut state.untold);
        drop(state);
        if untold.is_empty() {
            return;
        }
        if let Some(publish) = self.publish.get() {
            publish();
        }
        untold.into_iter().for_each(|(mailbox, last, end)| mailbox.end(last, end));
    }

    /// See [`Self::end_with`].
    fn end(&self, state: &mut State, rid: &RequestId, reason: FinishReason) -> bool {
        self.end_with(state, rid, None, reason)
    }

    /// The one place where a request ends; its client is told by [`Self::tell`]. False when it already had.
    fn end_with(
        &self,
        state: &mut State,
        rid: &RequestId,
        last: Option<Delta>,
        reason: FinishReason,
    ) -> bool {
        let Some(entry) = state.live.remove(rid) else { return false };
        state.names.remove(&entry.name);
        self.live.send_replace(state.live.len());
        self.metrics.finished(&entry.clock, &entry.input, &entry.latest, &reason);
        state.untold.push((entry.mailbox, last, End { reason, e2e_latency: entry.clock.elapsed() }));
        true
    }

    fn send_abort(&self, state: &mut State, rid: RequestId) {
        let message = ToScheduler::Abort(AbortReq { rid: Some(rid.clone()), abort_all: false });
        if let Err(SendError::Full(_)) = self.send(&message) {
            state.unsent_aborts.push(rid);
        }
    }

    fn send(&self, message: &ToScheduler) -> Result<u64, SendError> {
        self.outbox.get().map_or(Err(SendError::Closed), |outbox| outbox(message))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refuse_duplicates(names: &HashSet<RequestId>, requests: &[Registration]) -> Result<(), Refusal> {
    let mut seen = HashSet::new();
    for rid in requests.iter().map(|request| &request.input.rid) {
        if names.contains(rid) || !seen.insert(rid) {
            return Err(Refusal::Invalid(format!("Duplicate request ID {rid}")));
        }
    }
    Ok(())
}

impl Entry {
    /// Takes what is new of a row: after a restart rows begin earlier than what was received. The error is a
    /// hole, which no later row could fill.
    fn accept(&mut self, row: TextRow) -> Result<Delta, String> {
        let TextRow { mut text, text_start, progress } = row;
        let have = self.input.output_ids.len();
        let known = have.checked_sub(progress.start as usize);
        let known_text = self.text_len.checked_sub(text_start);
        let (Some(known), Some(known_text)) = (known, known_text) else {
            return Err(format!(
                "a row starts at token {} and byte {text_start}, behind the {have} tokens and {} bytes received",
                progress.start, self.text_len
            ));
        };
        let mut output_ids = progress.output_ids;
        let known = known.min(output_ids.len());
        output_ids.drain(..known);
        // The same tokens make the same text, so the cut falls between characters.
        let cut = usize::try_from(known_text).unwrap_or(usize::MAX).min(text.len());
        text = text.get(cut..).unwrap_or_default().to_owned();
        self.text_len += text.len() as u64;
        self.input.output_ids.extend_from_slice(&output_ids);
        let logprobs = progress.logprobs.map(|mut columns| {
            self.drop_known(&mut columns, known);
            columns
        });
        if progress.completion_tokens as usize >= have {
            self.input.spec = progress.spec.clone();
        }
        let progress = Progress {
            prompt_tokens: progress.prompt_tokens,
            completion_tokens: self.input.output_ids.len() as u32,
            cached_tokens: progress.cached_tokens,
            retraction_count: progress.retraction_count,
            queue_time: progress.queue_time,
            spec: self.input.spec.clone(),
        };
        self.latest = progress.clone();
        Ok(Delta { text, output_ids, logprobs, progress: Some(progress) })
    }

    fn drop_known(&mut self, columns: &mut proto::RowLogprobs, known: usize) {
        columns.drop_outputs(known);
        if self.has_input_logprobs {
            columns.drop_inputs();
        }
        self.has_input_logprobs |= !columns.input_token_logprobs_idx.is_empty();
    }
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;
