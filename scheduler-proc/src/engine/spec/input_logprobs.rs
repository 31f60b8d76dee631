//! Owns the log-probabilities of prompt tokens: which logits a chunk needs for them, and the one that is due
//! across a chunk boundary.
//!
//! Position `i` is scored by the logits at `i - 1`. The last logits of a chunk therefore score the first token
//! of the next; that token is known already, so its score is taken at once and held for a step. A prefix cache
//! must not cover position `start_len - 1` or later of a request that asks, since nothing then runs it.

use std::ops::Range;

use crate::batch::{BatchRow, LogprobParams, TokenLogprobs};
use crate::engine::sample::{ChooseError, Chooser};

/// A score made at the end of a chunk for the token that opens the next.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Due {
    position: usize,
    score: TokenLogprobs,
}

/// Why a prompt could not be scored.
#[derive(Debug, thiserror::Error)]
pub(super) enum ScoreError {
    #[error(transparent)]
    Logits(#[from] ChooseError),
    #[error("the logits that score prompt position {0} were not computed")]
    Missing(usize),
}

fn wanted<'a>(row: &BatchRow<'a>) -> Option<(&'a LogprobParams, usize)> {
    let params = row.params.logprobs.as_ref()?;
    Some((params, params.start_len?))
}

/// Positions whose tokens this step's logits score.
fn scored(row: &BatchRow<'_>, start: usize) -> Range<usize> {
    let end = (row.computed_len + row.extend_len + 1).min(row.prompt_len);
    start.max(row.computed_len + 1)..end
}

/// The first of the row's run tokens whose logits score a wanted prompt position.
pub(super) fn first_logits(row: &BatchRow<'_>) -> Option<usize> {
    let (_, start) = wanted(row)?;
    let scored = scored(row, start);
    (!scored.is_empty()).then(|| scored.start - 1 - row.computed_len)
}

/// Scores the wanted prompt positions that this step runs. `logits(i)` is the row of the row's `i`-th run
/// token; `due` is what the chunk before left, and becomes what the next one needs.
pub(super) fn score<'l>(
    chooser: &mut Chooser,
    row: &BatchRow<'_>,
    due: &mut Option<Due>,
    logits: impl Fn(usize) -> &'l [f32],
) -> Result<Vec<Option<TokenLogprobs>>, ScoreError> {
    let Some((params, start)) = wanted(row) else { return Ok(Vec::new()) };
    let run = row.computed_len..(row.computed_len + row.extend_len).min(row.prompt_len);
    let mut scores = Vec::new();
    if run.contains(&run.start) && start <= run.start {
        scores.push(opening(run.start, due.take())?);
    }
    for position in scored(row, start) {
        let score = chooser.score(logits(position - 1 - row.computed_len), row.tokens[position], params)?;
        if position < run.end {
            scores.push(Some(score));
        } else {
            *due = Some(Due { position, score });
        }
    }
    Ok(scores)
}

/// The score of the first token of a chunk, which nothing in the chunk scores.
fn opening(position: usize, due: Option<Due>) -> Result<Option<TokenLogprobs>, ScoreError> {
    match due {
        _ if position == 0 => Ok(None),
        Some(due) if due.position == position => Ok(Some(due.score)),
        _ => Err(ScoreError::Missing(position)),
    }
}
