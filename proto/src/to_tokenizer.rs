//! Owns the messages that the tokenizer process receives: text from a detokenizer, and from a scheduler the
//! replies that need no text. The two arrive over different links, so nothing may depend on their order.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::acceptance::SpecCounters;
use crate::finish::FinishReason;
use crate::ids::{RequestId, TokenId};
use crate::logprobs::RowLogprobs;
use crate::to_detokenizer::{RaggedBatch, RowProgress, check_lengths};
use crate::to_scheduler::AbortReq;

/// Detokenizer or scheduler → tokenizer process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
// `Text` is nearly all of the traffic; a box would cost it an allocation to save the others room.
#[allow(clippy::large_enum_variant)]
pub enum ToTokenizer {
    /// From the detokenizer.
    Text(BatchStrOutput),
    /// From the scheduler: it is ready (sent once per connection).
    SchedulerReady(SchedulerInfo),
    /// From the scheduler: a request that produced no token and never will.
    Refused {
        rid: RequestId,
        reason: FinishReason,
    },
    FlushCache(FlushCacheReqOutput),
    InternalState(GetInternalStateReqOutput),
    /// From another tokenizer process, by way of the scheduler: `rid` is a client's name.
    AbortFromElsewhere(AbortReq),
    /// From the scheduler: it was told to leave. What it holds goes to its successor, and was not the reason.
    Leaving,
}

/// [`crate::BatchTokenIDOutput`] with text: parallel lists, one entry per request id.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BatchStrOutput {
    pub rids: Vec<RequestId>,
    pub start: Vec<u32>,
    pub finished_reasons: Vec<Option<FinishReason>>,
    /// Text deltas; the parts of one answer joined are the whole answer.
    pub output_strs: Vec<String>,
    /// Byte offset of each delta in the whole text.
    pub text_start: Vec<u64>,
    pub output_ids: Vec<Vec<TokenId>>,
    pub prompt_tokens: Vec<u32>,
    pub completion_tokens: Vec<u32>,
    pub cached_tokens: Vec<u32>,
    pub retraction_counts: Vec<u32>,
    pub queue_time: Vec<f64>,
    pub logprobs: Vec<Option<RowLogprobs>>,
    pub spec_verify_ct: Vec<u64>,
    pub spec_accepted_drafts: Vec<u64>,
    pub spec_proposed_drafts: Vec<u64>,
    pub spec_delivered_drafts: Vec<u64>,
    pub spec_acceptance_histogram: Vec<Vec<u64>>,
}

/// One request's entry of a [`BatchStrOutput`].
#[derive(Debug, Clone, PartialEq)]
pub struct TextRow {
    pub text: String,
    pub text_start: u64,
    pub progress: RowProgress,
}

impl BatchStrOutput {
    pub fn from_rows(rows: impl IntoIterator<Item = TextRow>) -> Self {
        let mut batch = Self::default();
        for TextRow { text, text_start, progress } in rows {
            batch.rids.push(progress.rid);
            batch.start.push(progress.start);
            batch.finished_reasons.push(progress.finished_reason);
            batch.output_strs.push(text);
            batch.text_start.push(text_start);
            batch.output_ids.push(progress.output_ids);
            batch.prompt_tokens.push(progress.prompt_tokens);
            batch.completion_tokens.push(progress.completion_tokens);
            batch.cached_tokens.push(progress.cached_tokens);
            batch.retraction_counts.push(progress.retraction_count);
            batch.queue_time.push(progress.queue_time);
            batch.logprobs.push(progress.logprobs);
            batch.spec_verify_ct.push(progress.spec.verify_ct);
            batch.spec_accepted_drafts.push(progress.spec.accepted_drafts);
            batch.spec_proposed_drafts.push(progress.spec.proposed_drafts);
            batch.spec_delivered_drafts.push(progress.spec.delivered_drafts);
            batch.spec_acceptance_histogram.push(progress.spec.acceptance_histogram);
        }
        batch
    }

    pub fn into_rows(mut self) -> Result<Vec<TextRow>, RaggedBatch> {
        check_lengths!(
            self,
            start,
            finished_reasons,
            output_strs,
            text_start,
            output_ids,
            prompt_tokens,
            completion_tokens,
            cached_tokens,
            retraction_counts,
            queue_time,
            logprobs,
            spec_verify_ct,
            spec_accepted_drafts,
            spec_proposed_drafts,
            spec_delivered_drafts,
            spec_acceptance_histogram,
        );
        use std::mem::take;
        let rids = take(&mut self.rids);
        Ok(rids
            .into_iter()
            .enumerate()
            .map(|(i, rid)| TextRow {
                text: take(&mut self.output_strs[i]),
                text_start: self.text_start[i],
                progress: RowProgress {
                    rid,
                    start: self.start[i],
                    output_ids: take(&mut self.output_ids[i]),
                    finished_reason: self.finished_reasons[i].take(),
                    prompt_tokens: self.prompt_tokens[i],
                    completion_tokens: self.completion_tokens[i],
                    cached_tokens: self.cached_tokens[i],
                    retraction_count: self.retraction_counts[i],
                    queue_time: self.queue_time[i],
                    logprobs: self.logprobs[i].take(),
                    spec: SpecCounters {
                        verify_ct: self.spec_verify_ct[i],
                        proposed_drafts: self.spec_proposed_drafts[i],
                        accepted_drafts: self.spec_accepted_drafts[i],
                        delivered_drafts: self.spec_delivered_drafts[i],
                        acceptance_histogram: take(&mut self.spec_acceptance_histogram[i]),
                    },
                },
            })
            .collect())
    }
}

/// What the front end must know of a scheduler that is ready.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SchedulerInfo {
    /// KV slots.
    pub max_total_num_tokens: u64,
    /// Longest prompt that can ever be admitted.
    pub max_req_input_len: u32,
    pub max_running_requests: u32,
    /// Seconds from process start to ready.
    pub startup_time: f64,
    /// The draft worker's values in force; 0 without one.
    pub speculative_num_steps: u32,
    pub speculative_num_draft_tokens: u32,
    /// `"NONE"` or the name of the algorithm that really runs.
    pub effective_speculative_algorithm: String,
}

/// Reply to [`crate::FlushCacheReqInput`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlushCacheReqOutput {
    pub id: u64,
    pub success: bool,
    pub message: String,
}

/// Reply to [`crate::GetInternalStateReq`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GetInternalStateReqOutput {
    pub id: u64,
    pub internal_state: InternalState,
}

/// One scheduler's entry in `/server_info` `internal_states`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct InternalState {
    /// Tokens per second over the last log window.
    pub last_gen_throughput: f64,
    pub effective_max_running_requests_per_dp: u32,
    pub num_running_reqs: u32,
    pub num_queue_reqs: u32,
    pub speculative_num_steps: u32,
    pub speculative_num_draft_tokens: u32,
    /// Lifetime mean, bonus included; absent before the first verify step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub avg_spec_accept_length: Option<f64>,
    /// What depth is decided on, by batch-size slot; absent where it is fixed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speculative_adaptive_state: Option<Value>,
    /// Drafts by who made them, as in the metrics; absent without speculation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speculative_draft_sources: Option<Value>,
    /// Bytes by use: `weight`, `kvcache`, and tokens by state: `token_capacity`, `used`, `cached`, `free`.
    pub memory_usage: Value,
}
