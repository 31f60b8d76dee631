//! Owns acceptance: the walk of a draft tree by the target's own choices. It is the only one; plain decoding
//! walks an empty tree.

use super::tree::DraftTree;
use crate::batch::ChosenToken;
use crate::engine::sample::{ChooseError, Chooser, Path};

/// What a row's step made.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Walk {
    /// Accepted draft nodes, from the root down.
    pub accepted: Vec<usize>,
    /// Their tokens, then the bonus: one more than `accepted`.
    pub tokens: Vec<ChosenToken>,
}

/// Chooses at the root, steps to the child that carries the chosen token, and stops where there is none; the
/// last choice is the bonus. `logits(0)` is the root's row, `logits(i + 1)` that of node `i`. `path` ends at the
/// root and is left at the bonus, so every choice saw just the tokens accepted before it.
pub fn walk<'l>(
    chooser: &mut Chooser,
    path: &mut Path<'_>,
    tree: &DraftTree,
    logits: impl Fn(usize) -> &'l [f32],
) -> Result<Walk, ChooseError> {
    let mut walk = Walk::default();
    let mut at = 0;
    loop {
        let chosen = chooser.choose(logits(at), path)?;
        path.push(chosen.id);
        let next = tree.child(at, chosen.id);
        walk.tokens.push(chosen);
        let Some(node) = next else { return Ok(walk) };
        walk.accepted.push(node);
        at = node + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::RowParams;
    use proto::{SamplingParams, TokenId};

    const VOCAB: usize = 20;

    fn peaked(at: TokenId) -> Vec<f32> {
        (0..VOCAB as TokenId).map(|token| if token == at { 10.0 } else { 1.0 }).collect()
    }

    fn run(tree: &DraftTree, peaks: &[TokenId], sampling: SamplingParams) -> (Vec<usize>, Vec<TokenId>) {
        let params = RowParams { sampling, terminators: vec![3], logprobs: None };
        let rows: Vec<_> = peaks.iter().map(|&peak| peaked(peak)).collect();
        let mut path = Path::new(&params, &[0, 1], 1);
        let walk = walk(&mut Chooser::default(), &mut path, tree, |row| &rows[row]).unwrap();
        (walk.accepted, walk.tokens.into_iter().map(|token| token.id).collect())
    }

    fn cold() -> SamplingParams {
        SamplingParams { temperature: 0.01, ..SamplingParams::default() }
    }

    fn greedy() -> SamplingParams {
        SamplingParams { temperature: 0.0, ..SamplingParams::default() }
    }

    /// The two trees of SGLang's `test_tree_speculative_sampling.py` at thresholds 1, where its rule and ours
    /// agree. Its nodes count the root.
    #[test]
    fn walks_to_the_targets_choice() {
        let mut first = DraftTree::new();
        for (parent, token) in [(0, 1), (1, 2), (0, 3), (3, 4), (4, 5)] {
            first.push(parent, token).unwrap();
        }
        let mut second = DraftTree::new();
        for (parent, token) in [(0, 8), (1, 9), (2, 10), (0, 11), (4, 12)] {
            second.push(parent, token).unwrap();
        }
        for sampling in [greedy(), cold()] {
            let peaks = [3, 18, 18, 4, 5, 18];
            assert_eq!(run(&first, &peaks, sampling.clone()), (vec![2, 3, 4], vec![3, 4, 5, 18]));
            let peaks = [11, 18, 18, 18, 12, 18];
            assert_eq!(run(&second, &peaks, sampling), (vec![3, 4], vec![11, 12, 18]));
        }
    }

    #[test]
    fn an_empty_tree_is_plain_decoding() {
        assert_eq!(run(&DraftTree::new(), &[7], greedy()), (vec![], vec![7]));
    }

    #[test]
    fn all_accepted_ends_with_the_bonus_of_the_last_node() {
        let chain = DraftTree::chain([4, 5]);
        assert_eq!(run(&chain, &[4, 5, 6], greedy()), (vec![0, 1], vec![4, 5, 6]));
    }

    /// Penalties and the minimum length see the tokens accepted earlier in the same step.
    #[test]
    fn edits_follow_the_accepted_path() {
        let mut sampling = greedy();
        sampling.presence_penalty = 20.0;
        // One token (1) is made already; 4 and 5 are accepted; then 4 is the peak again but penalised.
        let chain = DraftTree::chain([4, 5, 4]);
        assert_eq!(run(&chain, &[4, 5, 4, 9], sampling), (vec![0, 1], vec![4, 5, 0]));

        // Token 3 ends the answer and is masked until 3 tokens are made.
        let mut sampling = greedy();
        sampling.min_new_tokens = 3;
        let chain = DraftTree::chain([0, 0, 3]);
        assert_eq!(run(&chain, &[3, 3, 3, 9], sampling), (vec![0, 1, 2], vec![0, 0, 3, 9]));
    }
}
