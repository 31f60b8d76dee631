//! What every process of Drafthorse shares, and nothing that only one of them needs.
//!
//! ```text
//! client ─HTTP→ tokenizer-proc ─ToScheduler→ scheduler-proc ─ToDetokenizer→ detokenizer-proc ─ToTokenizer→ tokenizer-proc ─SSE→ client
//!                    ↑────────────── ToTokenizer (refusals, control replies) ──┘
//! every child ─Status→ launcher ─Command→ every child
//! ```
//!
//! Layers, bottom up: `ids`, `topology`; the values (`sampling`, `finish`, `logprobs`, `acceptance`); the messages, one file
//! per receiver (`to_scheduler`, `to_detokenizer`, `to_tokenizer`, `control`); `config`; `token_bytes` (what an id
//! stands for) and, for who asks, `text` (what messages stand for); `wire` (bytes) and `link` (delivery).

mod acceptance;
mod adaptive;
pub mod child;
mod config;
mod control;
mod endpoints;
mod finish;
mod ids;
pub mod link;
mod logprobs;
pub mod metrics;
mod sampling;
#[cfg(feature = "text")]
pub mod text;
mod to_detokenizer;
mod to_scheduler;
mod to_tokenizer;
mod token_bytes;
mod topology;
pub mod wire;

pub use acceptance::SpecCounters;
pub use adaptive::{AdaptiveConfig, AdaptiveSlot, DraftTier};
pub use config::{
    AcceptanceRule, ConfigError, DeviceKind, DflashConfig, DraftModelConfig, Dtype, ModelConfig, NgramConfig,
    NgramFirst, NgramMatchType, Quantization, ScheduleConfig, SchedulePolicy, ServeConfig, ServerConfig,
    SpecAlgorithm, SpecConfig, Weights,
};
pub use control::{
    Command, HEALTH_INTERVAL, HEARTBEAT_INTERVAL, Heartbeat, ProcessHealth, ServerHealth, Status,
};
pub use endpoints::Endpoints;
pub use finish::{FinishReason, Matched};
pub use ids::{Incarnation, RequestId, Role, TokenId};
pub use logprobs::{RowLogprobs, TopLogprobs};
pub use sampling::SamplingParams;
pub use to_detokenizer::{BatchTokenIDOutput, DecodeRow, RaggedBatch, RowProgress, ToDetokenizer, TokenRow};
pub use to_scheduler::{
    AbortReq, FlushCacheReqInput, GetInternalStateReq, ToScheduler, TokenizedGenerateReqInput,
};
pub use to_tokenizer::{
    BatchStrOutput, FlushCacheReqOutput, GetInternalStateReqOutput, InternalState, SchedulerInfo, TextRow,
    ToTokenizer,
};
pub use token_bytes::{TokenBytes, TokenBytesError, TokenKind, TokenPiece};
pub use topology::{Front, Lane, Member, Topology, UnknownMember};
