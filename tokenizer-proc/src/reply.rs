//! Owns the making of answers: deltas of one request put together, and `meta_info` from them.

use proto::{FinishReason, RequestId, RowLogprobs, SpecCounters, TokenId, TopLogprobs};
use serde_json::{Map, Value, json};

use crate::mailbox::{Delta, End, Progress, Update};
use crate::refusal::Refusal;
use crate::registry::Ticket;
use crate::tokenize::Codec;

/// An answer as far as it has come, or one part of it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answer {
    pub rid: RequestId,
    pub text: String,
    pub output_ids: Vec<TokenId>,
    pub logprobs: RowLogprobs,
    pub progress: Progress,
    pub end: Option<End>,
}

/// How `meta_info` is written.
#[derive(Clone, Copy)]
pub(crate) struct MetaStyle<'a> {
    /// Whether a speculative algorithm runs; its keys are there exactly then.
    pub speculative: bool,
    pub return_logprob: bool,
    pub has_top_logprobs: bool,
    pub has_token_ids: bool,
    /// Writes each token's text into the log-probability lists.
    pub token_texts: Option<&'a Codec>,
}

impl Answer {
    pub(crate) fn new(rid: RequestId, prompt_tokens: usize) -> Self {
        Self {
            rid,
            text: String::new(),
            output_ids: Vec::new(),
            logprobs: RowLogprobs::default(),
            progress: Progress { prompt_tokens: prompt_tokens as u32, ..Progress::default() },
            end: None,
        }
    }

    /// Adds what came in.
    pub(crate) fn extend(&mut self, delta: Delta, end: Option<End>) {
        self.text.push_str(&delta.text);
        self.output_ids.extend(delta.output_ids);
        if let Some(columns) = delta.logprobs {
            self.logprobs.extend(columns);
        }
        if let Some(progress) = delta.progress {
            self.progress = progress;
        }
        if end.is_some() {
            self.end = end;
        }
    }

    /// Waits for the whole answer; one that ends in a failure is refused.
    pub(crate) async fn complete(&mut self, mut ticket: Ticket) -> Result<(), Refusal> {
        while let Some(Update { delta, end }) = ticket.next().await {
            self.extend(delta, end);
        }
        self.finish_reason().and_then(Refusal::from_finish).map_or(Ok(()), Err)
    }

    /// Forgets the parts that were handed out, for answers that go out as deltas.
    pub(crate) fn clear_parts(&mut self) {
        self.text.clear();
        self.output_ids.clear();
        self.logprobs = RowLogprobs::default();
    }

    pub(crate) fn finish_reason(&self) -> Option<&FinishReason> {
        self.end.as_ref().map(|end| &end.reason)
    }

    /// SGLang's `meta_info`.
    pub(crate) fn meta_info(&self, style: MetaStyle<'_>) -> Value {
        let progress = &self.progress;
        let mut meta = Map::new();
        let mut put = |key: &str, value: Value| meta.insert(key.to_owned(), value);
        put("id", json!(self.rid));
        put("finish_reason", self.finish_reason().map_or(Value::Null, FinishReason::to_json));
        put("prompt_tokens", json!(progress.prompt_tokens));
        put("weight_version", json!("default"));
        put("num_retractions", json!(progress.retraction_count));
        put("reasoning_tokens", json!(0));
        put("completion_tokens", json!(progress.completion_tokens));
        put("cached_tokens", json!(progress.cached_tokens));
        put("dp_rank", json!(0));
        put("queue_time", json!(progress.queue_time));
        if let Some(end) = &self.end {
            put("e2e_latency", json!(end.e2e_latency));
        }
        if style.return_logprob {
            meta.extend(logprob_lists(&self.logprobs, style));
        }
        if style.speculative {
            meta.extend(spec_details(&progress.spec, progress.completion_tokens));
        }
        Value::Object(meta)
    }
}

/// The acceptance numbers of one request. The rate is absent when nothing was proposed, the length when the
/// request took part in no verify step: absent is not zero.
pub(crate) fn spec_details(spec: &SpecCounters, completion_tokens: u32) -> Map<String, Value> {
    let mut details = Map::new();
    let mut put = |key: &str, value: Value| details.insert(key.to_owned(), value);
    put("spec_verify_ct", json!(spec.verify_ct));
    put("spec_accepted_drafts", json!(spec.accepted_drafts));
    put("spec_proposed_drafts", json!(spec.proposed_drafts));
    put("spec_delivered_drafts", json!(spec.delivered_drafts));
    put("spec_accept_histogram", json!(spec.acceptance_histogram));
    if let Some(rate) = spec.accept_rate() {
        put("spec_accept_rate", json!(rate));
    }
    if spec.verify_ct > 0 {
        put("spec_accept_length", json!(f64::from(completion_tokens) / spec.verify_ct as f64));
    }
    put("spec_num_correct_drafts", json!(spec.accepted_drafts));
    put("spec_num_proposed_drafts", json!(spec.proposed_drafts));
    put("spec_correct_drafts_histogram", json!(spec.acceptance_histogram));
    details
}

fn logprob_lists(columns: &RowLogprobs, style: MetaStyle<'_>) -> Map<String, Value> {
    let entry = |logprob: Option<f32>, id: TokenId| -> Value {
        json!([logprob, id, style.token_texts.map(|codec| codec.token_text(id))])
    };
    let top = |alternatives: &TopLogprobs| -> Value {
        alternatives.iter().map(|&(logprob, id)| entry(Some(logprob), id)).collect()
    };
    let maybe_tops = |positions: &[Option<TopLogprobs>]| -> Value {
        positions.iter().map(|position| position.as_ref().map_or(Value::Null, top)).collect()
    };
    let tops = |positions: &[TopLogprobs]| -> Value { positions.iter().map(top).collect() };
    let mut lists = Map::new();
    let mut put = |key: &str, value: Value| lists.insert(key.to_owned(), value);
    let inputs = columns.input_token_logprobs_val.iter().zip(&columns.input_token_logprobs_idx);
    put("input_token_logprobs", inputs.map(|(&logprob, &id)| entry(logprob, id)).collect());
    let outputs = columns.output_token_logprobs_val.iter().zip(&columns.output_token_logprobs_idx);
    put("output_token_logprobs", outputs.map(|(&logprob, &id)| entry(Some(logprob), id)).collect());
    put("output_token_logprobs_length", json!(columns.output_token_logprobs_idx.len()));
    if style.has_top_logprobs {
        put("input_top_logprobs", maybe_tops(&columns.input_top_logprobs));
        put("output_top_logprobs", tops(&columns.output_top_logprobs));
    }
    if style.has_token_ids {
        put("input_token_ids_logprobs", maybe_tops(&columns.input_token_ids_logprobs));
        put("output_token_ids_logprobs", tops(&columns.output_token_ids_logprobs));
    }
    lists
}
