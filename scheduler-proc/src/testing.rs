//! Owns what the tests of several modules share: a configuration, neighbours that record, and a reader that joins
//! rows to answers as the tokenizer process does.

use std::collections::HashMap;
use std::sync::Arc;

use proto::link::{Backlog, LinkEvent, SendError};
use proto::*;

use crate::engine::scripted::{Script, ScriptedEngine};
use crate::metrics::SchedulerMetrics;
use crate::outbox::Peers;
use crate::scheduler::{Event, Scheduler};

pub(crate) fn config() -> ServeConfig {
    ServeConfig {
        run_dir: "/nonexistent".into(),
        topology: Topology::default(),
        server: ServerConfig {
            host: "127.0.0.1".to_owned(),
            port: 0,
            served_model_name: "scripted".to_owned(),
            api_key: None,
            enable_metrics: true,
            enable_cache_report: false,
            stream_interval: 1,
            incremental_streaming_output: false,
            skip_tokenizer_init: false,
            max_queued_requests: 1000,
            log_level: "info".to_owned(),
        },
        model: ModelConfig {
            model_path: "scripted".to_owned(),
            weights: Weights::Dummy { dir: "/nonexistent".into(), seed: 0 },
            tokenizer_dir: None,
            architectures: Vec::new(),
            model_type: "scripted".to_owned(),
            vocab_size: 64,
            context_length: 1024,
            eos_token_ids: vec![EOS],
            bos_token_id: None,
            dtype: Dtype::Float32,
            device: DeviceKind::Cpu,
            quantization: proto::Quantization::default(),
            generation_defaults: serde_json::Map::new(),
        },
        schedule: ScheduleConfig {
            max_running_requests: 8,
            max_total_tokens: None,
            mem_fraction_static: 0.9,
            page_size: 1,
            chunked_prefill_size: 64,
            max_prefill_tokens: 256,
            policy: SchedulePolicy::Fcfs,
            disable_radix_cache: false,
            decode_log_interval: 40,
            random_seed: 0,
            num_threads: 1,
            watchdog_timeout_s: 300.0,
        },
        spec: None,
        server_args: serde_json::Map::new(),
    }
}

/// The only end token of the test vocabulary.
pub(crate) const EOS: TokenId = 63;

/// Letters a..h over and over; 56 and above are special, spelled like tags.
pub(crate) fn token_bytes() -> Arc<TokenBytes> {
    let pieces = (0..64).map(|id| {
        let special = id >= 56;
        let text = if special { format!("<{id}>") } else { char::from(b'a' + (id % 8) as u8).to_string() };
        TokenPiece { id, bytes: text.into_bytes(), special }
    });
    Arc::new(TokenBytes::from_pieces(TokenKind::ByteLevel, false, pieces))
}

pub(crate) fn request(rid: &str, input_ids: Vec<TokenId>, max_new_tokens: u32) -> TokenizedGenerateReqInput {
    TokenizedGenerateReqInput {
        rid: rid.into(),
        input_ids,
        output_ids: Vec::new(),
        spec: SpecCounters::default(),
        sampling_params: SamplingParams { max_new_tokens, ignore_eos: true, ..SamplingParams::default() },
        stream: true,
        return_logprob: false,
        logprob_start_len: None,
        top_logprobs_num: 0,
        token_ids_logprob: Vec::new(),
        extra_key: None,
        log_metrics: true,
        attempt: 1,
    }
}

/// Neighbours that keep what they are sent.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    pub(crate) rows: Vec<TokenRow>,
    /// The lane of each row.
    pub(crate) lanes: Vec<Lane>,
    pub(crate) messages: u64,
    pub(crate) replies: Vec<ToTokenizer>,
    /// Whom each reply went to.
    pub(crate) replied_to: Vec<Front>,
    /// The detokenizers do not read.
    pub(crate) full: bool,
    /// This lane's detokenizer does not read.
    pub(crate) full_lane: Option<Lane>,
    /// Rows per message at most; more are too large.
    pub(crate) max_rows: Option<usize>,
}

impl Peers for Recorder {
    fn to_detokenizer(&mut self, lane: Lane, message: &ToDetokenizer) -> Result<u64, SendError> {
        if self.full || self.full_lane == Some(lane) {
            return Err(SendError::Full(Backlog::default()));
        }
        let ToDetokenizer::TokenIds(batch) = message.clone();
        if self.max_rows.is_some_and(|most| batch.rids.len() > most) {
            return Err(SendError::TooLarge { bytes: 2, limit: 1 });
        }
        self.lanes.extend(batch.rids.iter().map(|_| lane));
        self.rows.extend(batch.into_rows().expect("columns are even"));
        self.messages += 1;
        Ok(self.messages)
    }

    fn to_tokenizer(&mut self, front: Front, message: &ToTokenizer) -> Result<u64, SendError> {
        self.replies.push(message.clone());
        self.replied_to.push(front);
        Ok(self.replies.len() as u64)
    }

    fn detokenizer_backlog(&self, _lane: Lane) -> Backlog {
        Backlog::default()
    }
}

/// One answer, joined from rows.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Answer {
    pub(crate) ids: Vec<TokenId>,
    pub(crate) logprobs: RowLogprobs,
    pub(crate) finish: Option<FinishReason>,
    /// Index of the first id, above 0 when an earlier scheduler made some.
    pub(crate) base: usize,
    pub(crate) rows: usize,
    pub(crate) last: Option<RowProgress>,
}

/// Joins rows by offset, and checks what must hold for every one of them.
pub(crate) fn join(rows: &[TokenRow]) -> HashMap<String, Answer> {
    let mut answers: HashMap<String, Answer> = HashMap::new();
    for row in rows {
        let progress = &row.progress;
        let answer = answers.entry(progress.rid.0.clone()).or_default();
        assert_eq!(answer.finish, None, "{}: a row after the end", progress.rid);
        let start = progress.start as usize;
        if answer.rows == 0 {
            answer.base = start;
        }
        let from = start - answer.base;
        assert!(from <= answer.ids.len(), "{}: a gap before {start}", progress.rid);
        let known = (answer.ids.len() - from).min(progress.output_ids.len());
        assert_eq!(answer.ids[from..from + known], progress.output_ids[..known], "ids change");
        answer.ids.extend(&progress.output_ids[known..]);
        assert_eq!(progress.completion_tokens as usize, start + progress.output_ids.len());
        assert!(progress.cached_tokens <= progress.prompt_tokens, "cached <= prompt");
        assert_eq!(progress.spec.check(), Ok(()));
        if let Some(logprobs) = &progress.logprobs {
            assert_eq!(logprobs.output_token_logprobs_idx, progress.output_ids, "one entry per id");
            answer.logprobs.extend(logprobs.clone());
        }
        answer.finish = progress.finished_reason.clone();
        answer.last = Some(progress.clone());
        answer.rows += 1;
    }
    answers
}

pub(crate) type TestScheduler = Scheduler<ScriptedEngine, Recorder>;

pub(crate) fn scheduler(config: ServeConfig, script: Script) -> TestScheduler {
    let config = Arc::new(config);
    let metrics = SchedulerMetrics::new(&config, None).expect("names are distinct");
    Scheduler::new(config, ScriptedEngine::new(script), Recorder::default(), Some(token_bytes()), metrics)
}

impl TestScheduler {
    pub(crate) fn tell(&mut self, message: ToScheduler) {
        self.tell_from(Front(0), message);
    }

    pub(crate) fn tell_from(&mut self, front: Front, message: ToScheduler) {
        self.handle(Event::Tokenizer(front, LinkEvent::Message { seq: 0, message }));
    }

    pub(crate) fn submit(&mut self, input: TokenizedGenerateReqInput) {
        self.tell(ToScheduler::Generate(Box::new(input)));
    }

    pub(crate) fn abort_rid(&mut self, rid: &str) {
        self.tell(ToScheduler::Abort(AbortReq { rid: Some(rid.into()), abort_all: false }));
    }

    /// One step with the invariants checked after it.
    pub(crate) fn turn(&mut self) -> bool {
        let worked = self.step().expect("the script does not break");
        assert_eq!(self.check(), Ok(()));
        worked
    }

    pub(crate) fn turns(&mut self, count: usize) {
        (0..count).for_each(|_| {
            self.turn();
        });
    }

    /// Turns until nothing is left to do.
    pub(crate) fn settle(&mut self) {
        let mut turns = 0;
        while self.turn() {
            turns += 1;
            assert!(turns < 100_000, "the scheduler makes no end");
        }
    }

    pub(crate) fn answers(&self) -> HashMap<String, Answer> {
        join(&self.recorder().rows)
    }

    pub(crate) fn answer(&self, rid: &str) -> Answer {
        self.answers().remove(rid).unwrap_or_default()
    }

    /// Why a request was refused, if it was.
    pub(crate) fn refused(&self, rid: &str) -> Option<FinishReason> {
        self.recorder().replies.iter().find_map(|reply| match reply {
            ToTokenizer::Refused { rid: refused, reason } if refused.0 == rid => Some(reason.clone()),
            _ => None,
        })
    }
}

/// What a request answers alone, without speculation, cache or pressure, in a context as long as `context_len`.
pub(crate) fn solo(input: &TokenizedGenerateReqInput, context_len: usize) -> Answer {
    let mut config = config();
    config.schedule.disable_radix_cache = true;
    config.schedule.chunked_prefill_size = 0;
    let mut scheduler = scheduler(config, Script { context_len, ..Script::default() });
    scheduler.submit(input.clone());
    scheduler.settle();
    scheduler.answer(&input.rid.0)
}
