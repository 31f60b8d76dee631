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
}
