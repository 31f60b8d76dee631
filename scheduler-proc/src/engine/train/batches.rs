//! Owns which sequences are trained on in which step, and their tensors.

use anyhow::Result;
use proto::TokenId;
use tch::{Kind, Tensor};

use super::corpus::{Corpus, Feature};
use super::generate::hash;

/// Sequences are filled up to a multiple of this, and rows, with ones that count for nothing, to a multiple of the
/// other: every shape that products of matrices have not seen yet costs them time and memory for good.
pub(super) const TOKENS_MULTIPLE: usize = 32;
const ROWS_MULTIPLE: usize = 256;
/// Batches whose sequences are sorted together by length, so that a batch's are alike and little is filling.
const SORTED_TOGETHER: usize = 24;

/// Indices of sequences per batch, for one pass over all of them; the same for the same seed and pass.
pub(super) fn plan(lengths: &[(usize, usize)], batch_size: usize, seed: u64, pass: u64) -> Vec<Vec<usize>> {
    let mut order: Vec<(usize, usize)> = lengths.to_vec();
    order.sort_by_key(|&(index, _)| hash(seed, [10, pass, index as u64]));
    let mut batches = Vec::new();
    for group in order.chunks_mut(batch_size * SORTED_TOGETHER) {
        group.sort_by_key(|&(_, length)| length);
        batches.extend(group.chunks(batch_size).map(|batch| batch.iter().map(|&(index, _)| index).collect()));
    }
    let mut order: Vec<(u64, Vec<usize>)> =
        (0..).zip(batches).map(|(at, batch)| (hash(seed, [11, pass, at]), batch)).collect();
    order.sort_by_key(|&(key, _)| key);
    order.into_iter().map(|(_, batch)| batch).collect()
}

/// The tensors of one batch. A row is a position of a sequence; sequences are filled up to the longest.
#[derive(Debug)]
pub(super) struct TrainBatch {
    /// The token after each position, `[sequences, tokens]`.
    pub next_tokens: Tensor,
    /// What the target left at each position, `[sequences, tokens, width]`.
    pub features: Tensor,
    /// Which positions are drafted from, as indices into `sequences * tokens`.
    pub rows: Tensor,
    /// The target's final hidden states one position on from each of `rows`: what a draft of them should say.
    pub targets: Tensor,
    /// The tokens drafted for, one per row.
    pub labels: Vec<TokenId>,
    /// Which rows count, per draft step, `[steps, rows]`: 1 or 0, and 0 for all that fill up.
    pub counts: Tensor,
}

/// How batches are made.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchShape {
    pub feature: Feature,
    /// Longer sequences are cut.
    pub seq_len: usize,
    pub steps: usize,
    pub kind: Kind,
    /// So many rows of every sequence, in one piece, and not all of them.
    pub rows: Option<usize>,
    /// Decides which.
    pub seed: u64,
}

/// A row of a sequence that is drafted from.
#[derive(Clone, Copy)]
struct Row {
    position: usize,
    /// Positions since the first that an answer is drafted from: as many draft steps have their root inside.
    since_root: usize,
}

impl TrainBatch {
    pub(super) fn load(corpus: &Corpus, indices: &[usize], shape: &BatchShape) -> Result<Self> {
        let lengths = indices.iter().map(|&index| positions(corpus, index, shape.seq_len));
        let tokens = lengths.clone().max().unwrap_or(0).next_multiple_of(TOKENS_MULTIPLE);
        let width = corpus.width(shape.feature);
        let hidden = corpus.width(Feature::Final);
        let mut features = vec![0u8; indices.len() * tokens * width * 2];
        let mut next_tokens = vec![0i64; indices.len() * tokens];
        let (mut rows, mut targets, mut labels) = (Vec::new(), Vec::new(), Vec::new());
        let mut counts = vec![Vec::new(); shape.steps];
        for ((at, &index), length) in indices.iter().enumerate().zip(lengths) {
            let sequence = &corpus.sequences()[index];
            let first = at * tokens;
            let bytes = corpus.hidden(index, length, shape.feature)?;
            features[first * width * 2..][..bytes.len()].copy_from_slice(&bytes);
            let last = match shape.feature {
                Feature::Final => bytes,
                Feature::Layers => corpus.hidden(index, length, Feature::Final)?,
            };
            let following = sequence.tokens[1..=length].iter().map(|&id| i64::from(id));
            next_tokens[first..first + length].iter_mut().zip(following).for_each(|(to, id)| *to = id);
            let drafted = drafted_rows(&sequence.answers, length);
            let drafted = match shape.rows {
                None => drafted,
                Some(count) => piece(&drafted, count, hash(shape.seed, [12, index as u64])),
            };
            for row in &drafted {
                rows.push((first + row.position) as i64);
                targets.extend_from_slice(&last[(row.position + 1) * hidden * 2..][..hidden * 2]);
                labels.push(sequence.tokens[row.position + 2]);
                for (step, counts) in counts.iter_mut().enumerate() {
                    counts.push(f32::from(u8::from(step <= row.since_root)));
                }
            }
            let missing = shape.rows.unwrap_or(0).saturating_sub(drafted.len());
            rows.extend(std::iter::repeat_n(first as i64, missing));
            targets.extend(std::iter::repeat_n(0, missing * hidden * 2));
            labels.extend(std::iter::repeat_n(sequence.tokens[0], missing));
            counts.iter_mut().for_each(|counts| counts.extend(std::iter::repeat_n(0.0, missing)));
        }
        let filled = match shape.rows {
            None => rows.len().next_multiple_of(ROWS_MULTIPLE),
            Some(_) => rows.len(),
        };
        rows.resize(filled, 0);
        targets.resize(filled * hidden * 2, 0);
        labels.resize(filled, labels.first().copied().unwrap_or(0));
        counts.iter_mut().for_each(|counts| counts.resize(filled, 0.0));
        let size = [indices.len() as i64, tokens as i64];
        let bfloat16 = |bytes: &[u8], size: &[i64]| {
            Tensor::from_data_size(bytes, size, Kind::BFloat16).to_kind(shape.kind)
        };
        Ok(Self {
            next_tokens: Tensor::from_slice(&next_tokens).view(size),
            features: bfloat16(&features, &[size[0], size[1], width as i64]),
            targets: bfloat16(&targets, &[rows.len() as i64, hidden as i64]),
            counts: Tensor::from_slice(&counts.concat()).view([shape.steps as i64, rows.len() as i64]),
            rows: Tensor::from_slice(&rows),
            labels,
        })
    }
}

/// Positions of a sequence that have hidden states and a token behind them, as far as sequences go.
fn positions(corpus: &Corpus, index: usize, seq_len: usize) -> usize {
    corpus.sequences()[index].rows().min(seq_len)
}

/// Position `t` sees token `t + 1`, which must be part of an answer to be a draft's root, and drafts token `t + 2`,
/// for which the target's say is its hidden state at `t + 1`.
fn drafted_rows(answers: &[(usize, usize)], positions: usize) -> Vec<Row> {
    let mut rows = Vec::new();
    for &(from, to) in answers {
        let first = from.saturating_sub(1);
        let end = to.saturating_sub(2).min(positions.saturating_sub(1));
        rows.extend((first..end).map(|position| Row { position, since_root: position - first }));
    }
    rows
}

/// `count` rows that follow one another, from where `seed` says; all where there are no more. Roots before them are not
/// there.
fn piece(rows: &[Row], count: usize, seed: u64) -> Vec<Row> {
    let spare = rows.len().saturating_sub(count) as u64;
    let from = (seed % (spare + 1)) as usize;
    let rows = rows[from..].iter().take(count);
    rows.enumerate().map(|(at, row)| Row { since_root: row.since_root.min(at), ..*row }).collect()
}

/// The sequences that have anything to train on, with their lengths.
pub(super) fn usable(corpus: &Corpus, seq_len: usize, wanted: super::prompts::Split) -> Vec<(usize, usize)> {
    let has_rows = |index: &usize| {
        let sequence = &corpus.sequences()[*index];
        let positions = positions(corpus, *index, seq_len);
        sequence.split == wanted && !drafted_rows(&sequence.answers, positions).is_empty()
    };
    let lengths = (0..corpus.sequences().len()).filter(has_rows);
    lengths.map(|index| (index, positions(corpus, index, seq_len))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_has_every_sequence_once_and_alike_ones_together() {
        let lengths: Vec<(usize, usize)> = (0..100).map(|index| (index, (index * 37) % 50)).collect();
        let batches = plan(&lengths, 8, 3, 0);
        let mut all: Vec<usize> = batches.concat();
        all.sort_unstable();
        assert_eq!(all, (0..100).collect::<Vec<_>>());
        let spread = |batch: &Vec<usize>| {
            let length = |&index: &usize| lengths[index].1;
            batch.iter().map(length).max().unwrap() - batch.iter().map(length).min().unwrap()
        };
        assert!(batches.iter().map(spread).max().unwrap() < 10);
        assert_eq!(batches, plan(&lengths, 8, 3, 0));
        assert_ne!(batches, plan(&lengths, 8, 3, 1));
        assert_ne!(batches, plan(&lengths, 8, 4, 0));
    }

    #[test]
    fn rows_are_those_a_server_would_draft_from() {
        let rows = |answers: &[(usize, usize)], positions| -> Vec<(usize, usize)> {
            drafted_rows(answers, positions).iter().map(|row| (row.position, row.since_root)).collect()
        };
        // Prompt of 3, answer of tokens 3..7: the first root is token 3, seen from position 2; the last draft is token 6.
        assert_eq!(rows(&[(3, 7)], 6), [(2, 0), (3, 1), (4, 2)]);
        // Cut in the middle: the target's say must be inside.
        assert_eq!(rows(&[(3, 7)], 4), [(2, 0)]);
        assert_eq!(rows(&[(2, 3), (5, 8)], 7), [(4, 0), (5, 1)]);
        assert_eq!(rows(&[(2, 3)], 2), []);
    }

    #[test]
    fn a_piece_has_no_roots_outside_itself() {
        let rows = drafted_rows(&[(3, 30)], 29);
        for seed in 0..50 {
            let piece: Vec<_> =
                piece(&rows, 4, seed).iter().map(|row| (row.position, row.since_root)).collect();
            let first = piece[0].0;
            assert_eq!(piece, [(first, 0), (first + 1, 1), (first + 2, 2), (first + 3, 3)]);
        }
        assert_eq!(piece(&rows, 100, 3).len(), rows.len());
    }
}
