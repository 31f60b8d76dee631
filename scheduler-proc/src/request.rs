//! Owns one request's state in the scheduler, and the words for its lengths.

use std::sync::Arc;
use std::time::Instant;

use proto::{
    FinishReason, Lane, RequestId, RowLogprobs, SpecCounters, TokenId, TokenizedGenerateReqInput, TopLogprobs,
};

use crate::batch::{EngineSlot, LogprobParams, RowParams, TokenLogprobs};
use crate::cache::Lease;
use crate::journal::Inheritance;
use crate::stop::{StopError, Stops, Vocabulary};
use crate::stream::Sent;

/// Where a request stands. Only the scheduler moves it on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// In the queue, holding nothing.
    Waiting,
    /// Tokens without keys and values are being run.
    Prefill,
    /// Only the last token has no keys and values yet.
    Decode,
    Done,
}

/// What a running request holds. Given back as a whole.
#[derive(Debug)]
pub struct Seat {
    pub slot: EngineSlot,
    pub lease: Lease,
}

/// Who made the tokens of an answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Made {
    pub by_prefill: usize,
    /// Bonuses of verify steps that reached the answer.
    pub bonuses: usize,
    /// By decoding without speculation.
    pub plain: usize,
}

/// A request and all that is known about it.
///
/// Lengths: `prompt_len` and `output_len` add up to `tokens.len()`; the first `computed_len` tokens have keys and
/// values in the pool; the first `resumed_len` answer tokens were made by an earlier scheduler.
#[derive(Debug)]
pub struct Request {
    pub rid: RequestId,
    /// The way its answer takes.
    pub lane: Lane,
    pub params: Arc<RowParams>,
    pub namespace: Option<String>,
    pub stream: bool,
    pub log_metrics: bool,
    tokens: Vec<TokenId>,
    prompt_len: usize,
    computed_len: usize,
    resumed_len: usize,
    phase: Phase,
    pub seat: Option<Seat>,
    pub stops: Stops,
    pub finish: Option<FinishReason>,
    pub arrived: Instant,
    /// Seconds between arrival and first admission.
    pub queue_time: Option<f64>,
    /// Prompt tokens found in the cache at first admission.
    pub cached_len: usize,
    pub retractions: u32,
    pub spec: SpecCounters,
    pub made: Made,
    /// Of every answer token since `resumed_len`, and of the prompt once it has run.
    pub logprobs: Option<RowLogprobs>,
    pub sent: Sent,
    /// Answer tokens that the journal has.
    pub noted_len: usize,
}

impl Request {
    /// On the first lane. `capacity` is how many tokens prompt and answer may have together.
    pub fn new(
        input: TokenizedGenerateReqInput,
        vocabulary: &Vocabulary,
        capacity: usize,
    ) -> Result<Self, StopError> {
        let prompt_len = input.input_ids.len();
        let resumed_len = input.output_ids.len();
        let limit = (input.sampling_params.max_new_tokens as usize).min(capacity.saturating_sub(prompt_len));
        let mut stops = Stops::new(&input.sampling_params, limit, vocabulary)?;
        stops.resume(&input.output_ids);
        let mut terminators = vocabulary.eos_token_ids.to_vec();
        terminators.extend(&input.sampling_params.stop_token_ids);
        let logprobs = input.return_logprob.then(|| LogprobParams {
            // A resumed request has told its prompt's already.
            start_len: input.logprob_start_len.filter(|_| resumed_len == 0).map(|len| len as usize),
            top_num: input.top_logprobs_num as usize,
            token_ids: input.token_ids_logprob,
        });
        let mut tokens = input.input_ids;
        tokens.extend(input.output_ids);
        Ok(Self {
            rid: input.rid,
            lane: Lane(0),
            logprobs: logprobs.as_ref().map(|_| RowLogprobs::default()),
            params: Arc::new(RowParams { sampling: input.sampling_params, terminators, logprobs }),
            namespace: input.extra_key,
            stream: input.stream,
            log_metrics: input.log_metrics,
            tokens,
            prompt_len,
            computed_len: 0,
            resumed_len,
            phase: Phase::Waiting,
            seat: None,
            stops,
            finish: None,
            arrived: Instant::now(),
            queue_time: None,
            cached_len: 0,
            retractions: 0,
            spec: input.spec,
            made: Made::default(),
            sent: Sent::from(resumed_len),
            noted_len: resumed_len,
        })
    }

    /// Takes what an earlier scheduler made of it, as if this one had.
    pub fn inherit(&mut self, inheritance: Inheritance) {
        let Inheritance { ids, spec, finish, logprobs } = inheritance;
        self.stops.resume(&ids);
        self.tokens.extend(ids);
        self.spec = spec;
        self.finish = finish;
        if let (Some(mine), Some(theirs)) = (&mut self.logprobs, logprobs) {
            *mine = theirs;
            let start = self.params.logprobs.as_ref().and_then(|wanted| wanted.start_len);
            if start.is_some_and(|start| start + mine.input_token_logprobs_idx.len() == self.prompt_len) {
                self.stop_wanting_prompt_logprobs();
            }
        }
    }

    /// Prompt, then the answer so far.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    pub fn prompt(&self) -> &[TokenId] {
        &self.tokens[..self.prompt_len]
    }

    pub fn output(&self) -> &[TokenId] {
        &self.tokens[self.prompt_len..]
    }

    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    pub fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    pub fn computed_len(&self) -> usize {
        self.computed_len
    }

    pub fn resumed_len(&self) -> usize {
        self.resumed_len
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Tokens still to run before one can be chosen.
    pub fn missing_len(&self) -> usize {
        self.tokens.len() - self.computed_len
    }

    /// Answer tokens it may still make.
    pub fn budget(&self) -> usize {
        self.stops.limit().saturating_sub(self.output_len())
    }

    /// Tokens at the front whose keys and values may come from the cache: the last must run to choose the next,
    /// and log-probabilities of the prompt need the token before the first one wanted.
    pub fn reusable_len(&self) -> usize {
        let start = self.params.logprobs.as_ref().and_then(|wanted| wanted.start_len);
        let most = self.tokens.len() - 1;
        start.map_or(most, |start| most.min(start.saturating_sub(1)))
    }

    /// Leaves the queue with a seat whose lease holds the first tokens already.
    pub fn seat(&mut self, seat: Seat) {
        assert!(self.phase == Phase::Waiting && self.seat.is_none(), "only waiting requests are seated");
        self.computed_len = seat.lease.shared_len();
        assert!(self.computed_len <= self.reusable_len(), "the cache gave more than may be reused");
        if self.queue_time.is_none() {
            self.queue_time = Some(self.arrived.elapsed().as_secs_f64());
            self.cached_len = self.computed_len.min(self.prompt_len);
        }
        self.seat = Some(seat);
        self.phase = Phase::Prefill;
    }

    /// Gives its seat back, to be computed again later from the tokens it has.
    pub fn unseat(&mut self, phase: Phase) -> Option<Seat> {
        self.phase = phase;
        if phase == Phase::Waiting {
            self.retractions += 1;
            self.computed_len = 0;
            self.forget_partial_prompt_logprobs();
        }
        self.seat.take()
    }

    /// `count` tokens more have keys and values.
    pub fn ran(&mut self, count: usize) {
        self.computed_len += count;
        assert!(self.computed_len <= self.tokens.len(), "no more is computed than there is");
    }

    /// Takes new answer tokens. All tokens but the last have keys and values then.
    pub fn append(&mut self, block: &[TokenId]) {
        self.tokens.extend_from_slice(block);
        self.computed_len = self.tokens.len() - 1;
        self.phase = Phase::Decode;
    }

    /// Records log-probabilities of prompt positions that were run.
    pub fn add_input_logprobs(&mut self, positions: Vec<Option<TokenLogprobs>>) {
        let Some(first) = self.params.logprobs.as_ref().and_then(|wanted| wanted.start_len) else { return };
        let Some(log) = &mut self.logprobs else { return };
        for position in positions {
            let index = first + log.input_token_logprobs_idx.len();
            let Some(&id) = self.tokens[..self.prompt_len].get(index) else { return };
            log.input_token_logprobs_idx.push(id);
            log.input_token_logprobs_val.push(position.as_ref().map(|it| it.logprob));
            let wanted = self.params.logprobs.as_ref().expect("checked above");
            push_if(wanted.top_num > 0, &mut log.input_top_logprobs, &position, |it| it.top.clone());
            let ids = !wanted.token_ids.is_empty();
            push_if(ids, &mut log.input_token_ids_logprobs, &position, |it| it.token_ids.clone());
        }
        if first + log.input_token_logprobs_idx.len() == self.prompt_len {
            self.stop_wanting_prompt_logprobs();
        }
    }

    /// Records log-probabilities of one answer token.
    pub fn add_output_logprobs(&mut self, id: TokenId, logprobs: TokenLogprobs) {
        let (Some(wanted), Some(log)) = (&self.params.logprobs, &mut self.logprobs) else { return };
        log.output_token_logprobs_idx.push(id);
        log.output_token_logprobs_val.push(logprobs.logprob);
        if wanted.top_num > 0 {
            log.output_top_logprobs.push(logprobs.top);
        }
        if !wanted.token_ids.is_empty() {
            log.output_token_ids_logprobs.push(logprobs.token_ids);
        }
    }

    /// The prompt's are complete: a retraction must not collect them again, nor run the prompt for them.
    fn stop_wanting_prompt_logprobs(&mut self) {
        if let Some(wanted) = &mut Arc::make_mut(&mut self.params).logprobs {
            wanted.start_len = None;
        }
    }

    fn forget_partial_prompt_logprobs(&mut self) {
        let partial = self.params.logprobs.as_ref().is_some_and(|wanted| wanted.start_len.is_some());
        if let Some(log) = self.logprobs.as_mut().filter(|_| partial) {
            log.input_token_logprobs_idx.clear();
            log.input_token_logprobs_val.clear();
            log.input_top_logprobs.clear();
            log.input_token_ids_logprobs.clear();
        }
    }
}

fn push_if(
    wanted: bool,
    list: &mut Vec<Option<TopLogprobs>>,
    position: &Option<TokenLogprobs>,
    part: impl Fn(&TokenLogprobs) -> TopLogprobs,
) {
    if wanted {
        list.push(position.as_ref().map(part));
    }
}
