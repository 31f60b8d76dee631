//! Owns the counting of one row's step: what was proposed, accepted and delivered, and who made each token.

use crate::batch::VerifyCount;
use crate::request::Request;

#[cfg(test)]
mod tests;

/// How a row's new tokens came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin<'a> {
    /// The end of a prefill.
    Prefill,
    /// A decode step without speculation.
    Plain,
    /// A verify step.
    Verify(&'a VerifyCount),
}

/// Counts a block of which the answer keeps the first `kept` tokens: accepted drafts first, then the bonus.
/// Returns how many drafts were delivered.
pub fn count_block(request: &mut Request, origin: Origin<'_>, kept: usize) -> usize {
    match origin {
        Origin::Prefill => request.made.by_prefill += kept,
        Origin::Plain => request.made.plain += kept,
        Origin::Verify(verify) => {
            let delivered = kept.min(verify.accepted);
            request.spec.record(verify.proposed(), verify.accepted, delivered);
            request.made.bonuses += kept - delivered;
            return delivered;
        }
    }
    0
}
