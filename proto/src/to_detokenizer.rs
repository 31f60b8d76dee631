//! Owns the messages that a detokenizer receives (from a scheduler).

use serde::{Deserialize, Serialize};

use crate::acceptance::SpecCounters;
use crate::finish::FinishReason;
use crate::ids::{RequestId, TokenId};
use crate::logprobs::RowLogprobs;

/// Scheduler → detokenizer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToDetokenizer {
    TokenIds(BatchTokenIDOutput),
}

/// New tokens of several requests: parallel lists, one entry per request id (SGLang's struct, see
/// docs/messages.md for the names that differ). Build it with [`BatchTokenIDOutput::from_rows`], read it with
/// [`BatchTokenIDOutput::into_rows`], which refuses lists of unequal length.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BatchTokenIDOutput {
    pub rids: Vec<RequestId>,
    pub start: Vec<u32>,
    pub finished_reasons: Vec<Option<FinishReason>>,
    pub decode_ids: Vec<Vec<TokenId>>,
    pub read_offsets: Vec<u32>,
    pub output_ids: Vec<Vec<TokenId>>,
    pub skip_special_tokens: Vec<bool>,
    pub spaces_between_special_tokens: Vec<bool>,
    pub no_stop_trim: Vec<bool>,
    pub stop_strs: Vec<Vec<String>>,
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

/// One request's entry of a [`BatchTokenIDOutput`].
#[derive(Debug, Clone, PartialEq)]
pub struct TokenRow {
    /// How the tokens are to be decoded. Repeated in every row, so that any row can be a request's first.
    pub decode: DecodeRow,
    pub progress: RowProgress,
}

/// What the detokenizer needs of a row.
#[derive(Debug, Clone, PartialEq)]
pub struct DecodeRow {
    /// On a request's first row to this detokenizer: up to 5 prompt ids, then every output id so far.
    /// Afterwards: the new output ids.
    pub decode_ids: Vec<TokenId>,
    /// Prompt ids at the front of `decode_ids`; only used on the first row.
    pub read_offset: u32,
    pub skip_special_tokens: bool,
    pub spaces_between_special_tokens: bool,
    pub no_stop_trim: bool,
    /// The request's stop strings; only used on the first row, empty afterwards.
    pub stop_strs: Vec<String>,
}

/// What passes through the detokenizer unchanged, on its way to the client's reply.
#[derive(Debug, Clone, PartialEq)]
pub struct RowProgress {
    pub rid: RequestId,
    /// Index of the first id of `output_ids` in the whole answer.
    pub start: u32,
    /// New output ids, through the one that ended the request.
    pub output_ids: Vec<TokenId>,
    pub finished_reason: Option<FinishReason>,
    pub prompt_tokens: u32,
    /// Output length so far, always `start + output_ids.len()`.
    pub completion_tokens: u32,
    /// Prompt tokens found in the prefix cache at first admission.
    pub cached_tokens: u32,
    pub retraction_count: u32,
    /// Seconds between arrival and first admission.
    pub queue_time: f64,
    pub logprobs: Option<RowLogprobs>,
    /// Cumulative.
    pub spec: SpecCounters,
}

/// A batch whose lists have unequal lengths: a broken or hostile peer.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("ragged batch: {list} has {len} entries for {rids} request ids")]
pub struct RaggedBatch {
    pub list: &'static str,
    pub len: usize,
    pub rids: usize,
}

/// Checks that every named list has one entry per request id.
macro_rules! check_lengths {
    ($batch:expr, $($list:ident),+ $(,)?) => {
        $(if $batch.$list.len() != $batch.rids.len() {
            return Err($crate::to_detokenizer::RaggedBatch {
                list: stringify!($list), len: $batch.$list.len(), rids: $batch.rids.len(),
            });
        })+
    };
}
pub(crate) use check_lengths;

impl BatchTokenIDOutput {
    pub fn from_rows(rows: impl IntoIterator<Item = TokenRow>) -> Self {
        let mut batch = Self::default();
        for TokenRow { decode, progress } in rows {
            batch.rids.push(progress.rid);
            batch.start.push(progress.start);
            batch.finished_reasons.push(progress.finished_reason);
            batch.decode_ids.push(decode.decode_ids);
            batch.read_offsets.push(decode.read_offset);
            batch.output_ids.push(progress.output_ids);
            batch.skip_special_tokens.push(decode.skip_special_tokens);
            batch.spaces_between_special_tokens.push(decode.spaces_between_special_tokens);
            batch.no_stop_trim.push(decode.no_stop_trim);
            batch.stop_strs.push(decode.stop_strs);
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

    pub fn into_rows(mut self) -> Result<Vec<TokenRow>, RaggedBatch> {
        check_lengths!(
            self,
            start,
            finished_reasons,
            decode_ids,
            read_offsets,
            output_ids,
            skip_special_tokens,
            spaces_between_special_tokens,
            no_stop_trim,
            stop_strs,
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
            .map(|(i, rid)| TokenRow {
                decode: DecodeRow {
                    decode_ids: take(&mut self.decode_ids[i]),
                    read_offset: self.read_offsets[i],
                    skip_special_tokens: self.skip_special_tokens[i],
                    spaces_between_special_tokens: self.spaces_between_special_tokens[i],
                    no_stop_trim: self.no_stop_trim[i],
                    stop_strs: take(&mut self.stop_strs[i]),
                },
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
