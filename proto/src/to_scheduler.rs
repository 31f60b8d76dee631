//! Owns the messages that a scheduler receives (from the tokenizer processes).

use serde::{Deserialize, Serialize};

use crate::acceptance::SpecCounters;
use crate::ids::{RequestId, TokenId};
use crate::sampling::SamplingParams;

/// Tokenizer process → scheduler.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToScheduler {
    Generate(Box<TokenizedGenerateReqInput>),
    Abort(AbortReq),
    FlushCache(FlushCacheReqInput),
    GetInternalState(GetInternalStateReq),
    /// To be passed on to every other tokenizer process: `rid` is a client's name, and only they know what it means.
    AbortElsewhere(AbortReq),
}

/// One request, tokenised and validated. `output_ids` and `spec` are empty for a new request; after a restart
/// of the scheduler they carry what the client already has, and generation goes on behind it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenizedGenerateReqInput {
    pub rid: RequestId,
    /// Never empty, every id inside the vocabulary.
    pub input_ids: Vec<TokenId>,
    #[serde(default)]
    pub output_ids: Vec<TokenId>,
    #[serde(default)]
    pub spec: SpecCounters,
    pub sampling_params: SamplingParams,
    pub stream: bool,
    pub return_logprob: bool,
    /// First prompt position whose log-probability is wanted; `None` for output tokens only.
    pub logprob_start_len: Option<u32>,
    pub top_logprobs_num: u32,
    pub token_ids_logprob: Vec<TokenId>,
    /// Namespace of the prefix cache.
    #[serde(default)]
    pub extra_key: Option<String>,
    /// Health probes are not counted.
    pub log_metrics: bool,
    /// How often this request was handed to a scheduler, from 1.
    #[serde(default)]
    pub attempt: u32,
}

/// Ends one request, or all of them. Matching is exact, unlike SGLang's prefix match: "job-1" never hits
/// "job-10".
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AbortReq {
    pub rid: Option<RequestId>,
    pub abort_all: bool,
}

/// Empties the prefix cache and the n-gram trie. Refused while requests run, after waiting `timeout_s`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FlushCacheReqInput {
    pub id: u64,
    pub timeout_s: f64,
}

/// Asks for [`crate::InternalState`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetInternalStateReq {
    pub id: u64,
}
