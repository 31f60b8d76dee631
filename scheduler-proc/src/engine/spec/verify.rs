//! Owns acceptance: the walk of a draft tree, node by node, as the rule decides. It is the only one; plain decoding
//! walks an empty tree.

use proto::{AcceptanceRule, SamplingParams};

use super::DraftDraw;
use super::rule::{self, Decision, Node};
use super::tree::DraftTree;
use crate::batch::ChosenToken;
use crate::engine::sample::{ChooseError, Chooser, Path};

/// Walks trees by one rule. Remembers nothing of a walk.
#[derive(Debug, Default)]
pub struct Verifier {
    rule: AcceptanceRule,
    chooser: Chooser,
}

/// What a row's step made.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Walk {
    /// Accepted draft nodes, from the root down.
    pub accepted: Vec<usize>,
    /// Their tokens, then the bonus: one more than `accepted`.
    pub tokens: Vec<ChosenToken>,
}

impl Verifier {
    pub fn new(rule: AcceptanceRule) -> Self {
        Self { rule, chooser: Chooser::default() }
    }

    /// How a draft for such a request must be drawn.
    pub fn draw(&self, sampling: &SamplingParams) -> DraftDraw {
        rule::draw(self.rule, sampling)
    }

    pub fn chooser(&mut self) -> &mut Chooser {
        &mut self.chooser
    }

    /// Decides at the root, steps to the accepted child, and stops where there is none; the last token is the
    /// bonus. `logits(0)` is the root's row, `logits(i + 1)` that of node `i`. `path` ends at the root and is left
    /// at the bonus, so every decision saw just the tokens accepted before it.
    pub fn walk<'l>(
        &mut self,
        path: &mut Path<'_>,
        tree: &DraftTree,
        logits: impl Fn(usize) -> &'l [f32],
    ) -> Result<Walk, ChooseError> {
        let mut walk = Walk::default();
        let mut at = 0;
        loop {
            let node = Node { logits: logits(at), path, tree, at };
            let Decision { token, accepted } = rule::decide(self.rule, &mut self.chooser, node)?;
            path.push(token.id);
            walk.tokens.push(token);
            let Some(node) = accepted else { return Ok(walk) };
            walk.accepted.push(node);
            at = node + 1;
        }
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
        run_by(AcceptanceRule::Equality, tree, peaks, sampling)
    }

    fn run_by(
        rule: AcceptanceRule,
        tree: &DraftTree,
        peaks: &[TokenId],
        sampling: SamplingParams,
    ) -> (Vec<usize>, Vec<TokenId>) {
        let params = RowParams { sampling, terminators: vec![3], logprobs: None };
        let rows: Vec<_> = peaks.iter().map(|&peak| peaked(peak)).collect();
        let mut path = Path::new(&params, &[0, 1], 1);
        let walk = Verifier::new(rule).walk(&mut path, tree, |row| &rows[row]).unwrap();
        (walk.accepted, walk.tokens.into_iter().map(|token| token.id).collect())
    }

    fn cold() -> SamplingParams {
        SamplingParams { temperature: 0.01, ..SamplingParams::default() }
    }

    fn greedy() -> SamplingParams {
        SamplingParams { temperature: 0.0, ..SamplingParams::default() }
    }

    /// The two trees of SGLang's `test_tree_speculative_sampling.py`, with its peaks. Its nodes count the root.
    fn sglangs_trees() -> [(DraftTree, [TokenId; 6]); 2] {
        let mut first = DraftTree::new();
        for (parent, token) in [(0, 1), (1, 2), (0, 3), (3, 4), (4, 5)] {
            first.push(parent, token).unwrap();
        }
        let mut second = DraftTree::new();
        for (parent, token) in [(0, 8), (1, 9), (2, 10), (0, 11), (4, 12)] {
            second.push(parent, token).unwrap();
        }
        [(first, [3, 18, 18, 4, 5, 18]), (second, [11, 18, 18, 18, 12, 18])]
    }

    const EXACT: AcceptanceRule = AcceptanceRule::Thresholds { single: 1.0, acc: 1.0 };

    /// Where one token has all the probability, all exact rules agree.
    #[test]
    fn walks_to_the_targets_choice() {
        let [(first, first_peaks), (second, second_peaks)] = sglangs_trees();
        for rule in [AcceptanceRule::Equality, AcceptanceRule::Rejection, EXACT] {
            for sampling in [greedy(), cold()] {
                let got = run_by(rule, &first, &first_peaks, sampling.clone());
                assert_eq!(got, (vec![2, 3, 4], vec![3, 4, 5, 18]), "{rule:?}");
                let got = run_by(rule, &second, &second_peaks, sampling);
                assert_eq!(got, (vec![3, 4], vec![11, 12, 18]), "{rule:?}");
            }
        }
    }

    /// Thresholds of 0 accept the first child that has a chance at all, and greedy requests take no notice.
    #[test]
    fn thresholds_of_nothing_accept_the_first_child() {
        let none = AcceptanceRule::Thresholds { single: 0.0, acc: 0.0 };
        let [(first, peaks), (second, second_peaks)] = sglangs_trees();
        let warm = SamplingParams { temperature: 0.5, ..SamplingParams::default() };
        let (accepted, tokens) = run_by(none, &first, &peaks, warm.clone());
        assert_eq!((accepted, &tokens[..2]), (vec![0, 1], &[1, 2][..]));
        let (accepted, tokens) = run_by(none, &second, &second_peaks, warm.clone());
        assert_eq!((accepted, &tokens[..3]), (vec![0, 1, 2], &[8, 9, 10][..]));
        assert_eq!(run_by(none, &first, &peaks, greedy()), (vec![2, 3, 4], vec![3, 4, 5, 18]));
        let filtered = SamplingParams { min_p: 0.5, ..warm };
        assert_eq!(run_by(none, &first, &peaks, filtered).0, [2, 3, 4]);
    }

    /// Laws that no honest worker hands along: not a number, too short, without the token they are said to have
    /// made. Such a token is refused where the ratio cannot be taken, and another one drawn.
    #[test]
    fn a_law_that_cannot_be_is_no_reason_to_accept() {
        for law in [vec![f64::NAN; VOCAB], vec![0.5; 4], vec![0.0; VOCAB], Vec::new()] {
            let mut tree = DraftTree::new();
            tree.push_drawn(0, 7, Some(law.clone())).unwrap();
            let (accepted, tokens) = run_by(AcceptanceRule::Rejection, &tree, &[7, 9], cold());
            assert_eq!((accepted, tokens), (vec![], vec![7]), "{law:?}");
        }
    }

    /// Every token has its log-probability, whoever decided on it, and it is the one that choosing it would give.
    #[test]
    fn weighed_tokens_have_their_log_probabilities() {
        let logprobs = Some(crate::batch::LogprobParams { start_len: None, top_num: 1, token_ids: vec![5] });
        let warm = SamplingParams { temperature: 3.0, ..SamplingParams::default() };
        let mut params = RowParams { sampling: warm, terminators: vec![], logprobs };
        let rows = [peaked(4), peaked(5), peaked(6)];
        let total = (10.0f64 / 3.0).exp() + 19.0 * (1.0f64 / 3.0).exp();
        for rule in [AcceptanceRule::Equality, AcceptanceRule::Rejection, EXACT] {
            let mut accepted = 0;
            for seed in 0..50 {
                params.sampling.sampling_seed = seed;
                let mut path = Path::new(&params, &[0, 1], 1);
                let tree = DraftTree::chain([4, 5]);
                let walk = Verifier::new(rule).walk(&mut path, &tree, |row| &rows[row]).unwrap();
                accepted += walk.accepted.len();
                for (token, peak) in walk.tokens.iter().zip([4, 5, 6]) {
                    let logit = if token.id == peak { 10.0 } else { 1.0 };
                    let got = token.logprobs.as_ref().unwrap();
                    assert!((f64::from(got.logprob) - (logit / 3.0 - total.ln())).abs() < 1e-5);
                    assert_eq!((got.top[0].1, got.token_ids[0].1), (peak, 5));
                }
            }
            assert!((20..100).contains(&accepted), "{rule:?} accepted {accepted}");
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
