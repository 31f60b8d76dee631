//! Owns the log-probability columns of a batch: parallel lists, one entry per request id, named as SGLang's.

use serde::{Deserialize, Serialize};

use crate::ids::TokenId;

/// The alternatives at one position: (log-probability, token id), best first.
pub type TopLogprobs = Vec<(f32, TokenId)>;

/// Log-probabilities of one request's row. Input lists are sent once, after prefill; output lists are deltas
/// with one entry per id in `output_ids`. Empty when the request did not ask.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RowLogprobs {
    /// `None` at prompt position 0, which nothing predicts.
    #[serde(default)]
    pub input_token_logprobs_val: Vec<Option<f32>>,
    #[serde(default)]
    pub input_token_logprobs_idx: Vec<TokenId>,
    #[serde(default)]
    pub output_token_logprobs_val: Vec<f32>,
    #[serde(default)]
    pub output_token_logprobs_idx: Vec<TokenId>,
    /// `None` at prompt position 0.
    #[serde(default)]
    pub input_top_logprobs: Vec<Option<TopLogprobs>>,
    #[serde(default)]
    pub output_top_logprobs: Vec<TopLogprobs>,
    /// For the ids of `token_ids_logprob`; `None` at prompt position 0.
    #[serde(default)]
    pub input_token_ids_logprobs: Vec<Option<TopLogprobs>>,
    #[serde(default)]
    pub output_token_ids_logprobs: Vec<TopLogprobs>,
}

impl RowLogprobs {
    /// Appends a later row of the same request.
    pub fn extend(&mut self, later: Self) {
        self.input_token_logprobs_val.extend(later.input_token_logprobs_val);
        self.input_token_logprobs_idx.extend(later.input_token_logprobs_idx);
        self.output_token_logprobs_val.extend(later.output_token_logprobs_val);
        self.output_token_logprobs_idx.extend(later.output_token_logprobs_idx);
        self.input_top_logprobs.extend(later.input_top_logprobs);
        self.output_top_logprobs.extend(later.output_top_logprobs);
        self.input_token_ids_logprobs.extend(later.input_token_ids_logprobs);
        self.output_token_ids_logprobs.extend(later.output_token_ids_logprobs);
    }

    /// A row of the answer's tokens from index `from` on; with the prompt's columns if `prompt`.
    pub fn since(&self, from: usize, prompt: bool) -> Self {
        fn tail<T: Clone>(list: &[T], from: usize) -> Vec<T> {
            list.get(from..).unwrap_or_default().to_vec()
        }
        let rest = if prompt { self.clone() } else { Self::default() };
        Self {
            output_token_logprobs_val: tail(&self.output_token_logprobs_val, from),
            output_token_logprobs_idx: tail(&self.output_token_logprobs_idx, from),
            output_top_logprobs: tail(&self.output_top_logprobs, from),
            output_token_ids_logprobs: tail(&self.output_token_ids_logprobs, from),
            ..rest
        }
    }

    /// Forgets the first `count` tokens of the answer.
    pub fn drop_outputs(&mut self, count: usize) {
        fn front<T>(list: &mut Vec<T>, count: usize) {
            list.drain(..count.min(list.len()));
        }
        front(&mut self.output_token_logprobs_val, count);
        front(&mut self.output_token_logprobs_idx, count);
        front(&mut self.output_top_logprobs, count);
        front(&mut self.output_token_ids_logprobs, count);
    }

    /// Forgets the answer's tokens from index `len` on.
    pub fn truncate_outputs(&mut self, len: usize) {
        self.output_token_logprobs_val.truncate(len);
        self.output_token_logprobs_idx.truncate(len);
        self.output_top_logprobs.truncate(len);
        self.output_token_ids_logprobs.truncate(len);
    }

    /// Forgets the prompt's columns.
    pub fn drop_inputs(&mut self) {
        self.input_token_logprobs_val.clear();
        self.input_token_logprobs_idx.clear();
        self.input_top_logprobs.clear();
        self.input_token_ids_logprobs.clear();
    }
}
