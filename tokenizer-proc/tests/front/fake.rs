//! Owns the fake peers: a scheduler and a detokenizer in one thread, with real links to the process under test.

use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use proto::link::{AckMode, LinkEvent, LinkHandle, LinkSpec, LinkThread, Side};
use proto::{
    BatchStrOutput, Endpoints, FinishReason, FlushCacheReqOutput, Front, GetInternalStateReqOutput,
    Incarnation, InternalState, Lane, RequestId, Role, RowLogprobs, RowProgress, SchedulerInfo, SpecCounters,
    TextRow, ToScheduler, ToTokenizer, TokenId, TokenizedGenerateReqInput,
};

/// What the fake does with a request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Mode {
    /// Answers with all tokens, `row` of them at a time.
    Echo { row: usize },
    /// Sends one token, then waits for an abort or for `release`.
    Hold,
    /// Says nothing.
    Silent,
    /// Refuses with this status.
    Refuse(u16),
    /// Answers with these texts, one token each; empty texts are held back ones.
    Say(Vec<&'static str>),
}

/// Every answer's token `i`.
pub(crate) fn token(i: usize) -> TokenId {
    1000 + i as TokenId
}

/// The text of every answer's token `i`.
pub(crate) fn text(i: usize) -> String {
    format!(" w{i}")
}

pub(crate) struct Fake {
    shared: Arc<Shared>,
    stop: mpsc::Sender<Event>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    mode: Mutex<Mode>,
    seen: Mutex<Vec<ToScheduler>>,
    news: Condvar,
}

enum Event {
    Message(ToScheduler),
    Up,
    Release,
    Stop,
}

pub(crate) const INFO: SchedulerInfo = SchedulerInfo {
    max_total_num_tokens: 4096,
    max_req_input_len: 200,
    max_running_requests: 16,
    startup_time: 1.5,
    speculative_num_steps: 3,
    speculative_num_draft_tokens: 4,
    effective_speculative_algorithm: String::new(),
};

impl Fake {
    pub(crate) fn start(endpoints: &Endpoints) -> Self {
        let shared = Arc::new(Shared {
            mode: Mutex::new(Mode::Echo { row: 1 }),
            seen: Mutex::default(),
            news: Condvar::new(),
        });
        let (events, inbox) = mpsc::channel();
        let scheduler_links = LinkThread::start(Role::Scheduler, Incarnation::now()).unwrap();
        let detokenizer_links = LinkThread::start(Role::Detokenizer, Incarnation::now()).unwrap();
        let sender = events.clone();
        let spec = |path, side| LinkSpec { path, side, peer: Role::Tokenizer, ack: AckMode::Auto };
        let control = scheduler_links.open::<ToTokenizer, ToScheduler>(
            spec(endpoints.scheduler(Front(0)), Side::Bind),
            move |event| {
                let event = match event {
                    LinkEvent::Message { message, .. } => Event::Message(message),
                    LinkEvent::Up { .. } => Event::Up,
                    LinkEvent::Down | LinkEvent::Acked { .. } => return,
                };
                // The thread may have ended already.
                let _ = sender.send(event);
            },
        );
        let text =
            detokenizer_links.open::<ToTokenizer, ()>(spec(endpoints.text(Lane(0)), Side::Connect), |_| {});
        let peers = Peers { control, text, shared: Arc::clone(&shared), held: Vec::new() };
        let thread = std::thread::spawn(move || {
            peers.run(&inbox);
            scheduler_links.close(Duration::ZERO);
            detokenizer_links.close(Duration::ZERO);
        });
        Self { shared, stop: events, thread: Some(thread) }
    }

    pub(crate) fn mode(&self, mode: Mode) {
        *self.shared.mode.lock().unwrap() = mode;
    }

    /// Lets held requests finish.
    pub(crate) fn release(&self) {
        self.stop.send(Event::Release).unwrap();
    }

    pub(crate) fn seen(&self) -> Vec<ToScheduler> {
        self.shared.seen.lock().unwrap().clone()
    }

    /// Requests as the scheduler got them, health probes left out.
    pub(crate) fn requests(&self) -> Vec<TokenizedGenerateReqInput> {
        let seen = self.seen().into_iter();
        let requests = seen.filter_map(|message| match message {
            ToScheduler::Generate(input) if input.log_metrics => Some(*input),
            _ => None,
        });
        requests.collect()
    }

    /// Waits for a message that satisfies `wanted`.
    pub(crate) fn wait_for(&self, what: &str, wanted: impl Fn(&ToScheduler) -> bool) -> ToScheduler {
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut seen = self.shared.seen.lock().unwrap();
        loop {
            if let Some(message) = seen.iter().find(|message| wanted(message)) {
                return message.clone();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "the scheduler never saw {what}; it saw {seen:?}");
            seen = self.shared.news.wait_timeout(seen, left).unwrap().0;
        }
    }

    pub(crate) fn wait_for_request(&self, rid: &str) {
        self.wait_for(
            rid,
            |message| matches!(message, ToScheduler::Generate(input) if client_name(&input.rid) == rid),
        );
    }

    pub(crate) fn wait_for_abort(&self, rid: &str) {
        self.wait_for(
            "an abort",
            |message| matches!(message, ToScheduler::Abort(abort) if abort.rid.as_ref().map(client_name) == Some(rid)),
        );
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.stop.send(Event::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Peers {
    control: LinkHandle<ToTokenizer>,
    text: LinkHandle<ToTokenizer>,
    shared: Arc<Shared>,
    held: Vec<TokenizedGenerateReqInput>,
}

impl Peers {
    fn run(mut self, inbox: &mpsc::Receiver<Event>) {
        while let Ok(event) = inbox.recv() {
            match event {
                Event::Stop => return,
                Event::Up => {
                    let info = SchedulerInfo { effective_speculative_algorithm: "NGRAM".to_owned(), ..INFO };
                    self.control.send(&ToTokenizer::SchedulerReady(info)).unwrap();
                }
                Event::Release => {
                    for input in std::mem::take(&mut self.held) {
                        let made = answer(&input);
                        self.rows(
                            &input,
                            &made[1..],
                            1,
                            Some(FinishReason::Length { length: made.len() as u32 }),
                        );
                    }
                }
                Event::Message(message) => self.message(message),
            }
        }
    }

    fn message(&mut self, message: ToScheduler) {
        match &message {
            ToScheduler::Generate(input) => self.generate(input),
            ToScheduler::Abort(abort) => {
                let (hit, kept) =
                    std::mem::take(&mut self.held).into_iter().partition::<Vec<_>, _>(|input| {
                        abort.abort_all || abort.rid.as_ref() == Some(&input.rid)
                    });
                self.held = kept;
                for input in hit {
                    self.rows(&input, &[], 1, Some(FinishReason::aborted("Aborted")));
                }
            }
            // There is nobody else.
            ToScheduler::AbortElsewhere(_) => {}
            ToScheduler::FlushCache(flush) => {
                let success = self.held.is_empty();
                let message = if success { "" } else { "Cache not flushed: requests are running." };
                let reply = FlushCacheReqOutput { id: flush.id, success, message: message.to_owned() };
                self.control.send(&ToTokenizer::FlushCache(reply)).unwrap();
            }
            ToScheduler::GetInternalState(ask) => {
                let internal_state = InternalState {
                    avg_spec_accept_length: Some(2.5),
                    speculative_num_steps: 3,
                    ..InternalState::default()
                };
                let reply = GetInternalStateReqOutput { id: ask.id, internal_state };
                self.control.send(&ToTokenizer::InternalState(reply)).unwrap();
            }
        }
        self.shared.seen.lock().unwrap().push(message);
        self.shared.news.notify_all();
    }

    fn generate(&mut self, input: &TokenizedGenerateReqInput) {
        let mode = self.shared.mode.lock().unwrap().clone();
        let mode = if input.log_metrics || mode == Mode::Silent { mode } else { Mode::Echo { row: 1 } };
        match mode {
            Mode::Echo { row } => {
                let made = answer(input);
                let reason = FinishReason::Length { length: made.len() as u32 };
                self.rows(input, &made, row, Some(reason));
            }
            Mode::Say(texts) => {
                let made: Vec<_> =
                    texts.iter().enumerate().map(|(i, text)| (token(i), (*text).to_owned())).collect();
                let reason = FinishReason::Length { length: made.len() as u32 };
                self.rows(input, &made, 1, Some(reason));
            }
            Mode::Hold => {
                self.rows(input, &answer(input)[..1], 1, None);
                self.held.push(input.clone());
            }
            Mode::Refuse(status) => {
                let reason = FinishReason::failed(status, "Refused", "The scheduler refused.");
                self.control.send(&ToTokenizer::Refused { rid: input.rid.clone(), reason }).unwrap();
            }
            Mode::Silent => {}
        }
    }

    /// Sends tokens in rows, behind what the request has; every row is a message of its own.
    fn rows(
        &self,
        input: &TokenizedGenerateReqInput,
        made: &[(TokenId, String)],
        row: usize,
        reason: Option<FinishReason>,
    ) {
        let all = answer(input);
        // Without tokens it is the end of a held request, which has one, or of one that wants none.
        let behind = made.first().map_or(all.len().min(1), |(id, _)| (id - token(0)) as usize);
        let mut text_start: u64 = all.iter().take(behind).map(|(_, text)| text.len() as u64).sum();
        let parts: Vec<&[(TokenId, String)]> =
            if made.is_empty() { vec![&[]] } else { made.chunks(row).collect() };
        let (mut start, last) = (behind, parts.len() - 1);
        for (index, part) in parts.into_iter().enumerate() {
            let text: String = part.iter().map(|(_, text)| text.as_str()).collect();
            let spoken = text.len() as u64;
            let output_ids: Vec<TokenId> = part.iter().map(|(id, _)| *id).collect();
            let completion_tokens = (start + output_ids.len()) as u32;
            let progress = RowProgress {
                rid: input.rid.clone(),
                start: start as u32,
                finished_reason: reason.clone().filter(|_| index == last),
                prompt_tokens: input.input_ids.len() as u32,
                completion_tokens,
                cached_tokens: 2,
                retraction_count: 0,
                queue_time: 0.001,
                logprobs: input.return_logprob.then(|| logprobs(input, &output_ids, start == 0)),
                spec: spec(input, completion_tokens),
                output_ids,
            };
            start = completion_tokens as usize;
            let batch = BatchStrOutput::from_rows([TextRow { text, text_start, progress }]);
            text_start += spoken;
            self.text.send(&ToTokenizer::Text(batch)).unwrap();
        }
    }
}

fn answer(input: &TokenizedGenerateReqInput) -> Vec<(TokenId, String)> {
    (0..input.sampling_params.max_new_tokens as usize).map(|i| (token(i), text(i))).collect()
}

/// One draft proposed and accepted per token after the first, unless the request wants none.
fn spec(input: &TokenizedGenerateReqInput, completion_tokens: u32) -> SpecCounters {
    let mut spec = SpecCounters::default();
    if input.sampling_params.max_draft_tokens != Some(0) {
        (0..completion_tokens / 2).for_each(|_| spec.record(3, 1, 1));
    }
    spec
}

fn logprobs(input: &TokenizedGenerateReqInput, output_ids: &[TokenId], first: bool) -> RowLogprobs {
    let tops =
        |id: TokenId| (0..input.top_logprobs_num).map(|k| (-0.5 - k as f32, id + k)).collect::<Vec<_>>();
    let mut columns = RowLogprobs {
        output_token_logprobs_val: vec![-0.5; output_ids.len()],
        output_token_logprobs_idx: output_ids.to_vec(),
        output_top_logprobs: output_ids.iter().map(|&id| tops(id)).collect(),
        ..RowLogprobs::default()
    };
    if let (true, Some(from)) = (first, input.logprob_start_len) {
        for (position, &id) in input.input_ids.iter().enumerate().skip(from as usize) {
            columns.input_token_logprobs_idx.push(id);
            columns.input_token_logprobs_val.push((position > 0).then_some(-1.0));
            columns.input_top_logprobs.push((position > 0).then(|| tops(id)));
        }
    }
    columns
}

/// A request's name for its client; on the links a number follows.
fn client_name(rid: &RequestId) -> &str {
    rid.0.split('#').next().unwrap_or_default()
}
