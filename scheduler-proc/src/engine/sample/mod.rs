//! Owns choosing: one token from one row of logits, for plain and speculative decoding alike.
//!
//! In order: the request's edits act on the logits ([`path`]), then either the argmax is taken (greedy) or,
//! over the tokens that the filters leave ([`filter`]), the winner of an exponential race ([`race`]), which is
//! a draw from the filtered law. Log-probabilities ([`logprobs`]) are those of the edited, temperature-scaled
//! logits before any filter, as SGLang reports them. Nothing here looks at another row.

mod filter;
mod logprobs;
mod mass;
mod path;
mod race;
mod scan;

#[cfg(test)]
pub(super) mod tests;

use proto::{SamplingParams, TokenId};

use self::filter::FilterScratch;
use self::mass::Scale;
pub use self::path::Path;
use self::scan::Scan;
use super::rng::Stream;
use crate::batch::{ChosenToken, LogprobParams, TokenLogprobs};

/// Below this a temperature is greedy: SGLang's limit.
const GREEDY_TEMPERATURE: f64 = 1e-6;

/// Why no token could be chosen. The request is failed alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChooseError {
    #[error("the model's logits are not finite")]
    NotFinite,
    #[error("every token of the vocabulary is masked")]
    AllMasked,
}

/// Chooses tokens. Holds scratch memory only: a choice never depends on an earlier one.
#[derive(Debug, Default)]
pub struct Chooser {
    edited: Vec<f32>,
    scan: Scan,
    filter: FilterScratch,
}

/// One row of edited logits, scanned, with the scale its request puts on them.
#[derive(Clone, Copy)]
struct Row<'a> {
    logits: &'a [f32],
    scan: &'a Scan,
    scale: Scale,
}

impl Chooser {
    /// Chooses the token at `path.position()` from the model's logits there.
    pub fn choose(&mut self, logits: &[f32], path: &Path<'_>) -> Result<ChosenToken, ChooseError> {
        let params = path.params();
        let row = prepare(&mut self.edited, &mut self.scan, logits, path)?;
        let id = pick(&row, path, &mut self.filter);
        let logprobs = params.logprobs.as_ref().map(|wanted| logprobs::of(&row, id, wanted));
        Ok(ChosenToken { id, logprobs })
    }

    /// The token that [`Self::choose`] would take, without its log-probabilities: a draft worker's guess, with the
    /// same edits, filters and noise as the target's choice at that position.
    pub fn guess(&mut self, logits: &[f32], path: &Path<'_>) -> Result<TokenId, ChooseError> {
        let row = prepare(&mut self.edited, &mut self.scan, logits, path)?;
        Ok(pick(&row, path, &mut self.filter))
    }

    /// A draw that knows nothing of [`Self::choose`]'s, for a draft worker whose tokens are weighed against the law
    /// they come from; and that law, which is [`Self::law`].
    pub fn draw(&mut self, logits: &[f32], path: &Path<'_>) -> Result<(TokenId, Vec<f64>), ChooseError> {
        let row = prepare(&mut self.edited, &mut self.scan, logits, path)?;
        let cutoff = filter::cutoff(&row, &path.params().sampling, &mut self.filter);
        let token = race::winner(&row, cutoff, path.noise(Stream::Draft));
        Ok((token, filter::law(&row, cutoff)))
    }

    /// The token with the largest edited logit.
    pub fn likeliest(&mut self, logits: &[f32], path: &Path<'_>) -> Result<TokenId, ChooseError> {
        let row = prepare(&mut self.edited, &mut self.scan, logits, path)?;
        Ok(row.scan.argmax(row.logits))
    }

    /// A token that was chosen by other means, with the log-probabilities that its request wants.
    pub fn report(
        &mut self,
        id: TokenId,
        logits: &[f32],
        path: &Path<'_>,
    ) -> Result<ChosenToken, ChooseError> {
        let Some(wanted) = &path.params().logprobs else { return Ok(ChosenToken { id, logprobs: None }) };
        let row = prepare(&mut self.edited, &mut self.scan, logits, path)?;
        Ok(ChosenToken { id, logprobs: Some(logprobs::of(&row, id, wanted)) })
    }

    /// The best `k` tokens, best first, with the logarithms of their plain softmax probabilities.
    pub fn best(&mut self, logits: &[f32], k: usize) -> Result<Vec<(TokenId, f64)>, ChooseError> {
        if !scan::all_finite(logits) {
            return Err(ChooseError::NotFinite);
        }
        self.scan.run(logits);
        let row = Row { logits, scan: &self.scan, scale: Scale::new(self.scan.max(), 1.0) };
        let log_total = mass::total(&row).ln();
        let entry = |key| {
            let token = scan::token_of(key);
            (token, row.scale.log_mass(logits[token as usize]) - log_total)
        };
        Ok(row.scan.top(logits, k).into_iter().map(entry).collect())
    }

    /// The probabilities that [`Self::choose`] draws from; all on the argmax when greedy.
    pub fn law(&mut self, logits: &[f32], path: &Path<'_>) -> Result<Vec<f64>, ChooseError> {
        let sampling = &path.params().sampling;
        let row = prepare(&mut self.edited, &mut self.scan, logits, path)?;
        if is_greedy(sampling) {
            let best = row.scan.argmax(row.logits) as usize;
            return Ok((0..logits.len()).map(|id| f64::from(u8::from(id == best))).collect());
        }
        let cutoff = filter::cutoff(&row, sampling, &mut self.filter);
        Ok(filter::law(&row, cutoff))
    }

    /// Log-probabilities of a known token under the model alone: raw logits, temperature 1.
    pub fn score(
        &mut self,
        logits: &[f32],
        token: TokenId,
        wanted: &LogprobParams,
    ) -> Result<TokenLogprobs, ChooseError> {
        if !scan::all_finite(logits) {
            return Err(ChooseError::NotFinite);
        }
        self.scan.run(logits);
        let row = Row { logits, scan: &self.scan, scale: Scale::new(self.scan.max(), 1.0) };
        Ok(logprobs::of(&row, token, wanted))
    }
}

/// A draw from weights that need not add up to 1, with the noise of [`Chooser::choose`]; `None` where all are 0.
pub fn draw_from(weights: &[f64], path: &Path<'_>) -> Option<TokenId> {
    race::winner_of(weights, path.noise(Stream::Choice))
}

fn pick(row: &Row<'_>, path: &Path<'_>, scratch: &mut FilterScratch) -> TokenId {
    let sampling = &path.params().sampling;
    if is_greedy(sampling) {
        return row.scan.argmax(row.logits);
    }
    let cutoff = filter::cutoff(row, sampling, scratch);
    race::winner(row, cutoff, path.noise(Stream::Choice))
}

fn prepare<'a>(
    edited: &'a mut Vec<f32>,
    scan: &'a mut Scan,
    logits: &'a [f32],
    path: &Path<'_>,
) -> Result<Row<'a>, ChooseError> {
    if !scan::all_finite(logits) {
        return Err(ChooseError::NotFinite);
    }
    let logits = if path.edits() {
        edited.clear();
        edited.extend_from_slice(logits);
        path.edit(edited);
        edited
    } else {
        logits
    };
    scan.run(logits);
    if scan.max() == f32::NEG_INFINITY {
        return Err(ChooseError::AllMasked);
    }
    let scale = Scale::new(scan.max(), temperature(&path.params().sampling));
    Ok(Row { logits, scan, scale })
}

/// Whether every choice is the largest edited logit.
pub fn is_greedy(sampling: &SamplingParams) -> bool {
    sampling.is_greedy() || sampling.temperature < GREEDY_TEMPERATURE
}

/// What the logits are divided by. SGLang turns greedy into temperature 1, so their log-probabilities are the
/// model's.
fn temperature(sampling: &SamplingParams) -> f64 {
    if is_greedy(sampling) { 1.0 } else { sampling.temperature }
}
