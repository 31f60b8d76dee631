//! Owns which tokens a head is taught about: the most frequent of the corpus, and for EAGLE3 that is all it can say.

use proto::TokenId;
use rustc_hash::FxHashSet;
use tch::Tensor;

use super::corpus::Sequence;
use super::generate::hash;

/// Tokens outside the frequent ones that each step looks at as well, so that none is said by accident.
const OTHERS: usize = 512;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Vocabulary {
    /// Ascending.
    ids: Vec<TokenId>,
    size: usize,
}

/// The tokens one step looks at.
pub(super) struct Look {
    pub ids: Tensor,
    /// Per label 1 if it is among them, else 0: what it cannot say a head need not learn.
    pub known: Tensor,
}

impl Vocabulary {
    /// The `count` most frequent tokens of the answers; ties by number.
    pub(super) fn of(sequences: &[Sequence], count: usize, size: usize) -> Self {
        let mut counts = vec![0u64; size];
        for sequence in sequences {
            for &(from, to) in &sequence.answers {
                sequence.tokens[from..to].iter().for_each(|&id| counts[id as usize] += 1);
            }
        }
        let mut ids: Vec<TokenId> = (0..size as TokenId).collect();
        ids.sort_by_key(|&id| std::cmp::Reverse(counts[id as usize]));
        ids.truncate(count.min(size));
        ids.sort_unstable();
        Self { ids, size }
    }

    /// A token that stands for nothing: of those that conversations have least often, the lowest.
    pub(super) fn rarest(sequences: &[Sequence], size: usize) -> TokenId {
        let mut counts = vec![0u64; size];
        sequences.iter().flat_map(|sequence| &sequence.tokens).for_each(|&id| counts[id as usize] += 1);
        (0..size as TokenId).min_by_key(|&id| counts[id as usize]).unwrap_or(0)
    }

    pub(super) fn ids(&self) -> &[TokenId] {
        &self.ids
    }

    /// Only the vocabulary itself where it is `closed`, else what `labels` need and some others beside it.
    pub(super) fn look(&self, labels: &[TokenId], closed: bool, seed: u64) -> Look {
        let mut ids = self.ids.clone();
        if !closed {
            let mut more: Vec<TokenId> = labels.to_vec();
            let other = |at: usize| (hash(seed, [30, at as u64]) % self.size as u64) as TokenId;
            more.extend((0..OTHERS).map(other));
            more.sort_unstable();
            more.dedup();
            ids.extend(more.iter().filter(|id| self.ids.binary_search(id).is_err()));
        }
        let places: FxHashSet<TokenId> = ids.iter().copied().collect();
        let known: Vec<f32> = labels.iter().map(|id| f32::from(u8::from(places.contains(id)))).collect();
        let ids: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
        Look { ids: Tensor::from_slice(&ids), known: Tensor::from_slice(&known) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::train::prompts::Split;

    fn vocabulary() -> Vocabulary {
        let sequence = Sequence {
            job: 0,
            prompt: String::new(),
            split: Split::Train,
            answers: vec![(1, 7)],
            temperatures: vec![0.0],
            tokens: vec![9, 5, 5, 2, 7, 2, 5],
        };
        Vocabulary::of(&[sequence], 3, 10)
    }

    #[test]
    fn it_has_the_most_frequent_tokens_of_answers() {
        assert_eq!(vocabulary().ids(), [2, 5, 7]);
    }

    #[test]
    fn the_rarest_token_is_the_lowest_unused() {
        let sequences = [Sequence {
            job: 0,
            prompt: String::new(),
            split: Split::Train,
            answers: vec![],
            temperatures: vec![],
            tokens: vec![0, 1, 3, 1],
        }];
        assert_eq!(Vocabulary::rarest(&sequences, 5), 2);
    }

    #[test]
    fn an_open_look_has_every_label_and_a_closed_one_masks() {
        let numbers = |tensor: &Tensor| Vec::<f64>::try_from(tensor).unwrap();
        let closed = vocabulary().look(&[5, 9, 7], true, 0);
        assert_eq!((numbers(&closed.ids), numbers(&closed.known)), (vec![2., 5., 7.], vec![1., 0., 1.]));
        let open = vocabulary().look(&[5, 9, 7], false, 0);
        assert_eq!(numbers(&open.known), [1., 1., 1.]);
        let ids = numbers(&open.ids);
        assert!(ids.contains(&9.0) && ids[..3] == [2., 5., 7.]);
    }
}
