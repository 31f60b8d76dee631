//! Owns the resolved settings of adaptive depth: which depths may be chosen at which batch size, and what makes one
//! depth give way to another. SGLang's settings have its names and meanings; the rest is marked "Drafthorse".

use serde::{Deserialize, Serialize};

/// Depths by batch size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AdaptiveConfig {
    /// What the flags ask for, or what stands in for it: the depth a slot starts with, where it has it.
    pub initial: DraftTier,
    /// By rising batch size; at least one.
    pub slots: Vec<AdaptiveSlot>,
}

/// The shape of a draft: one candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftTier {
    /// Depth; 0 is plain decoding.
    pub num_steps: u32,
    /// Width of a verify step, the root included.
    pub num_draft_tokens: u32,
}

/// What holds from one batch size up to the next slot's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AdaptiveSlot {
    /// Rows that decode, at least; the first slot takes smaller batches too.
    pub batch_size: u32,
    /// The candidates, by rising depth; at least one.
    pub tiers: Vec<DraftTier>,
    /// One of the candidates.
    pub initial_steps: u32,
    /// Weight of the newest step in the mean of accepted drafts.
    pub ema_alpha: f64,
    /// Steps between decisions.
    pub update_interval: u32,
    /// Steps before the first decision.
    pub warmup_batches: u32,
    pub down_hysteresis: f64,
    pub up_hysteresis: f64,
    /// A depth is at most this many times the mean of accepted drafts, rounded up; 0 for no ceiling.
    pub ceiling_coeff: f64,
    /// Drafthorse: steps that a depth is kept at least.
    pub min_dwell: u32,
    /// Drafthorse: steps after which a depth that was left is tried again at the latest; 0 for at once.
    pub max_backoff: u32,
    /// Drafthorse: how much faster than the present depth another one must be measured to replace it, as a share;
    /// `None` decides by acceptance alone, as SGLang does.
    pub cost_margin: Option<f64>,
    /// Drafthorse: the mean of accepted drafts begins anew at every depth, so that what one depth showed never
    /// decides about another; SGLang's goes on.
    pub isolate_depths: bool,
}

impl DraftTier {
    /// Draft nodes, the root not counted.
    pub const fn nodes(&self) -> u32 {
        self.num_draft_tokens.saturating_sub(1)
    }
}
