//! Owns the sampling parameters of one request, validated: whoever holds one need not check it again.
//! Names and meanings are SGLang's; the HTTP side builds it, the scheduler and the chooser read it.

use serde::{Deserialize, Serialize};

use crate::ids::TokenId;

/// Validated sampling parameters. Ranges are those of `docs/http.md`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Tokens to make at most; already limited to what the context leaves.
    pub max_new_tokens: u32,
    /// End tokens and stop tokens are masked until this many tokens are made.
    pub min_new_tokens: u32,
    /// 0 means greedy.
    pub temperature: f64,
    /// `None` means the whole vocabulary.
    pub top_k: Option<u32>,
    /// In (0, 1].
    pub top_p: f64,
    /// In [0, 1].
    pub min_p: f64,
    pub frequency_penalty: f64,
    pub presence_penalty: f64,
    /// In (0, 2]; 1 is off.
    pub repetition_penalty: f64,
    /// Added to the logits; ids lie inside the vocabulary, each at most once.
    pub logit_bias: Vec<(TokenId, f64)>,
    /// Stop strings, none empty.
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<TokenId>,
    /// Stop patterns in the syntax of the `regex` crate.
    pub stop_regex: Vec<String>,
    /// Ignores the model's end tokens, not `stop_token_ids`.
    pub ignore_eos: bool,
    pub skip_special_tokens: bool,
    pub spaces_between_special_tokens: bool,
    /// Keeps the matched stop string or token in the text.
    pub no_stop_trim: bool,
    /// Tokens per streamed chunk; `None` takes the server's setting.
    pub stream_interval: Option<u32>,
    /// Always set: a request without a seed is given one, so that a restart continues with the same draws.
    pub sampling_seed: u64,
    /// Draft tokens allowed per verify step; `None` is the server's setting, 0 turns speculation off.
    #[serde(default)]
    pub max_draft_tokens: Option<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            max_new_tokens: 128,
            min_new_tokens: 0,
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            stop_regex: Vec::new(),
            ignore_eos: false,
            skip_special_tokens: true,
            spaces_between_special_tokens: true,
            no_stop_trim: false,
            stream_interval: None,
            sampling_seed: 0,
            max_draft_tokens: None,
        }
    }
}

impl SamplingParams {
    /// Whether every choice is the argmax.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == Some(1)
    }

    /// Whether any penalty looks at the tokens made so far.
    pub fn has_penalties(&self) -> bool {
        self.frequency_penalty != 0.0 || self.presence_penalty != 0.0 || self.repetition_penalty != 1.0
    }
}
