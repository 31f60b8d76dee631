//! Builds messages with every field filled: the struct literals name all fields, so a field added later has to be
//! added here. Values differ from their neighbours and from the defaults, so one that is lost or swapped shows.
#![allow(clippy::unwrap_used, clippy::wrong_self_convention)] // `to_scheduler` is a message's name, no conversion.

use proto::{
    AbortReq, BatchStrOutput, BatchTokenIDOutput, Command, DecodeRow, FinishReason, FlushCacheReqInput,
    FlushCacheReqOutput, GetInternalStateReq, GetInternalStateReqOutput, Heartbeat, InternalState, Matched,
    Member, ProcessHealth, RequestId, Role, RowLogprobs, RowProgress, SamplingParams, SchedulerInfo,
    ServerHealth, SpecCounters, Status, TextRow, ToDetokenizer, ToScheduler, ToTokenizer, TokenRow,
    TokenizedGenerateReqInput, TopLogprobs,
};

/// A stream of values that a seed determines.
pub(crate) struct Filler {
    state: u64,
}

impl Filler {
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// SplitMix64.
    fn u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        // All widths of msgpack's integers come up. Never 0, the default.
        ((mixed ^ (mixed >> 31)) >> (self.state % 60)).max(1)
    }

    fn u32(&mut self) -> u32 {
        (self.u64() as u32).max(1)
    }

    fn f64(&mut self) -> f64 {
        self.u64() as f64 / 3.0
    }

    fn f32(&mut self) -> f32 {
        -(self.u32() as f32) / 7.0
    }

    fn bool(&mut self) -> bool {
        self.u64() & 1 == 1
    }

    fn text(&mut self) -> String {
        let tail = ["", "é", "日本", "\u{1F600}", "\0\"\\\n"][self.u32() as usize % 5];
        format!("{:x}{tail}", self.u64())
    }

    fn some<T>(&mut self, make: impl FnOnce(&mut Self) -> T) -> Option<T> {
        (self.u64() & 3 != 0).then(|| make(self))
    }

    /// One to three.
    fn list<T>(&mut self, mut make: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..=self.u32() % 3).map(|_| make(self)).collect()
    }

    fn rid(&mut self) -> RequestId {
        RequestId(self.text())
    }

    fn finish(&mut self) -> FinishReason {
        match self.u64() % 5 {
            0 => FinishReason::Stop { matched: Matched::Token(self.u32()) },
            1 => FinishReason::Stop { matched: Matched::Str(self.text()) },
            2 => FinishReason::Stop { matched: Matched::Regex(self.text()) },
            3 => FinishReason::Length { length: self.u32() },
            _ => FinishReason::Abort {
                message: self.text(),
                status_code: self.some(|filler| filler.u32() as u16),
                err_type: self.some(Self::text),
            },
        }
    }

    fn counters(&mut self) -> SpecCounters {
        SpecCounters {
            verify_ct: self.u64(),
            proposed_drafts: self.u64(),
            accepted_drafts: self.u64(),
            delivered_drafts: self.u64(),
            acceptance_histogram: self.list(Self::u64),
        }
    }

    fn top(&mut self) -> TopLogprobs {
        self.list(|filler| (filler.f32(), filler.u32()))
    }

    fn logprobs(&mut self) -> RowLogprobs {
        RowLogprobs {
            input_token_logprobs_val: self.list(|filler| filler.some(Self::f32)),
            input_token_logprobs_idx: self.list(Self::u32),
            output_token_logprobs_val: self.list(Self::f32),
            output_token_logprobs_idx: self.list(Self::u32),
            input_top_logprobs: self.list(|filler| filler.some(Self::top)),
            output_top_logprobs: self.list(Self::top),
            input_token_ids_logprobs: self.list(|filler| filler.some(Self::top)),
            output_token_ids_logprobs: self.list(Self::top),
        }
    }

    fn sampling(&mut self) -> SamplingParams {
        SamplingParams {
            max_new_tokens: self.u32(),
            min_new_tokens: self.u32(),
            temperature: self.f64(),
            top_k: self.some(Self::u32),
            top_p: self.f64(),
            min_p: self.f64(),
            frequency_penalty: self.f64(),
            presence_penalty: self.f64(),
            repetition_penalty: self.f64(),
            logit_bias: self.list(|filler| (filler.u32(), filler.f64())),
            stop: self.list(Self::text),
            stop_token_ids: self.list(Self::u32),
            stop_regex: self.list(Self::text),
            ignore_eos: self.bool(),
            skip_special_tokens: self.bool(),
            spaces_between_special_tokens: self.bool(),
            no_stop_trim: self.bool(),
            stream_interval: self.some(Self::u32),
            sampling_seed: self.u64(),
            max_draft_tokens: self.some(Self::u32),
        }
    }

    fn progress(&mut self) -> RowProgress {
        RowProgress {
            rid: self.rid(),
            start: self.u32(),
            output_ids: self.list(Self::u32),
            finished_reason: self.some(Self::finish),
            prompt_tokens: self.u32(),
            completion_tokens: self.u32(),
            cached_tokens: self.u32(),
            retraction_count: self.u32(),
            queue_time: self.f64(),
            logprobs: self.some(Self::logprobs),
            spec: self.counters(),
        }
    }

    pub(crate) fn token_rows(&mut self) -> Vec<TokenRow> {
        self.list(|filler| TokenRow {
            decode: DecodeRow {
                decode_ids: filler.list(Self::u32),
                read_offset: filler.u32(),
                skip_special_tokens: filler.bool(),
                spaces_between_special_tokens: filler.bool(),
                no_stop_trim: filler.bool(),
                stop_strs: filler.list(Self::text),
            },
            progress: filler.progress(),
        })
    }

    pub(crate) fn text_rows(&mut self) -> Vec<TextRow> {
        self.list(|filler| TextRow {
            text: filler.text(),
            text_start: filler.u64(),
            progress: filler.progress(),
        })
    }

    /// One of every variant, with its name.
    pub(crate) fn to_scheduler(&mut self) -> Vec<(&'static str, ToScheduler)> {
        let generate = TokenizedGenerateReqInput {
            rid: self.rid(),
            input_ids: self.list(Self::u32),
            output_ids: self.list(Self::u32),
            spec: self.counters(),
            sampling_params: self.sampling(),
            stream: self.bool(),
            return_logprob: self.bool(),
            logprob_start_len: self.some(Self::u32),
            top_logprobs_num: self.u32(),
            token_ids_logprob: self.list(Self::u32),
            extra_key: self.some(Self::text),
            log_metrics: self.bool(),
            attempt: self.u32(),
        };
        let abort = AbortReq { rid: self.some(Self::rid), abort_all: self.bool() };
        let flush = FlushCacheReqInput { id: self.u64(), timeout_s: self.f64() };
        vec![
            ("generate", ToScheduler::Generate(Box::new(generate))),
            ("abort", ToScheduler::Abort(abort)),
            ("flush_cache", ToScheduler::FlushCache(flush)),
            ("get_internal_state", ToScheduler::GetInternalState(GetInternalStateReq { id: self.u64() })),
            ("abort_elsewhere", ToScheduler::AbortElsewhere(abort_by_name())),
        ]
    }

    pub(crate) fn to_detokenizer(&mut self) -> Vec<(&'static str, ToDetokenizer)> {
        vec![("token_ids", ToDetokenizer::TokenIds(BatchTokenIDOutput::from_rows(self.token_rows())))]
    }

    pub(crate) fn to_tokenizer(&mut self) -> Vec<(&'static str, ToTokenizer)> {
        let ready = SchedulerInfo {
            max_total_num_tokens: self.u64(),
            max_req_input_len: self.u32(),
            max_running_requests: self.u32(),
            startup_time: self.f64(),
            speculative_num_steps: self.u32(),
            speculative_num_draft_tokens: self.u32(),
            effective_speculative_algorithm: self.text(),
        };
        let state = InternalState {
            last_gen_throughput: self.f64(),
            effective_max_running_requests_per_dp: self.u32(),
            num_running_reqs: self.u32(),
            num_queue_reqs: self.u32(),
            speculative_num_steps: self.u32(),
            speculative_num_draft_tokens: self.u32(),
            avg_spec_accept_length: self.some(Self::f64),
            speculative_adaptive_state: Some(serde_json::json!([{"num_steps": self.u32(), "rate": null}])),
            speculative_draft_sources: Some(serde_json::json!({"model": {"proposed_drafts": self.u32()}})),
            memory_usage: serde_json::json!({"weight": self.u64(), "used": [self.f64(), null_or_text(self)]}),
        };
        let flush = FlushCacheReqOutput { id: self.u64(), success: self.bool(), message: self.text() };
        let internal = GetInternalStateReqOutput { id: self.u64(), internal_state: state };
        vec![
            ("text", ToTokenizer::Text(BatchStrOutput::from_rows(self.text_rows()))),
            ("scheduler_ready", ToTokenizer::SchedulerReady(ready)),
            ("refused", ToTokenizer::Refused { rid: self.rid(), reason: self.finish() }),
            ("flush_cache", ToTokenizer::FlushCache(flush)),
            ("internal_state", ToTokenizer::InternalState(internal)),
            ("abort", ToTokenizer::AbortFromElsewhere(abort_by_name())),
            ("leaving", ToTokenizer::Leaving),
        ]
    }

    pub(crate) fn status(&mut self) -> Vec<(&'static str, Status)> {
        let heartbeat = Heartbeat { in_flight: self.u64(), queued: self.u64(), progress: self.u64() };
        vec![
            ("progress", Status::Progress { stage: self.text(), done: self.u64(), total: self.u64() }),
            ("ready", Status::Ready { detail: self.text() }),
            ("heartbeat", Status::Heartbeat(heartbeat)),
            ("failed", Status::Failed { reason: self.text() }),
        ]
    }

    pub(crate) fn command(&mut self) -> Vec<(&'static str, Command)> {
        let heartbeat = Heartbeat { in_flight: self.u64(), queued: self.u64(), progress: self.u64() };
        let process = ProcessHealth {
            process: Member::nth(Role::Tokenizer, 3),
            alive: self.bool(),
            ready: self.bool(),
            restarts: self.u64(),
            heartbeat_age_ms: self.u64(),
            heartbeat,
        };
        let health = ServerHealth { processes: vec![process] };
        vec![
            ("drain", Command::Drain),
            ("retire", Command::Retire),
            ("stop", Command::Stop),
            ("health", Command::Health(health)),
        ]
    }
}

fn abort_by_name() -> AbortReq {
    AbortReq { rid: Some("a client's".into()), abort_all: true }
}

fn null_or_text(filler: &mut Filler) -> serde_json::Value {
    filler.some(Filler::text).into()
}

/// Runs a generic check over all five enums.
#[macro_export]
macro_rules! for_all_messages {
    ($filler:expr, $check:ident) => {{
        let mut filler = $filler;
        $check("to_scheduler", filler.to_scheduler());
        $check("to_detokenizer", filler.to_detokenizer());
        $check("to_tokenizer", filler.to_tokenizer());
        $check("status", filler.status());
        $check("command", filler.command());
    }};
}
