//! Owns the log-probabilities of one position: of the token itself, of the best ones, of wanted ids.

use proto::{TokenId, TopLogprobs};

use super::{Row, mass, scan};
use crate::batch::{LogprobParams, TokenLogprobs};

/// Negative infinity for a masked token, and for an id outside the vocabulary.
pub(super) fn of(row: &Row<'_>, token: TokenId, wanted: &LogprobParams) -> TokenLogprobs {
    let log_total = mass::total(row).ln();
    let logprob = |token: TokenId| {
        let logit = row.logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        (row.scale.log_mass(logit) - log_total) as f32
    };
    let entry = |token| (logprob(token), token);
    let top: TopLogprobs = match wanted.top_num {
        0 => Vec::new(),
        n => row.scan.top(row.logits, n).into_iter().map(|key| entry(scan::token_of(key))).collect(),
    };
    let token_ids = wanted.token_ids.iter().map(|&token| entry(token)).collect();
    TokenLogprobs { logprob: logprob(token), top, token_ids }
}
