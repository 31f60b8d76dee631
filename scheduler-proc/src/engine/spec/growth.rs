//! Owns how one row's draft grows, level by level, from a draft model's logits: which tokens it tries, which of them
//! it goes on from, and the tree that comes of it. Knows no tensors.
//!
//! A chain takes the token that the request itself would take from the draft's logits: the same edits, filters and
//! noise as the target's choice at that position, so that two similar models choose alike at any temperature; or
//! takes it another way where the acceptance rule asks for that ([`DraftDraw`]). A tree tries the likeliest tokens,
//! ranked by the product of plain softmax probabilities along their path.

use proto::TokenId;

use crate::batch::DraftLimit;
use crate::engine::sample::{Chooser, Path};
use crate::engine::spec::DraftDraw;
use crate::engine::spec::tree::{DraftTree, Law};

/// A token to go on from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Leaf {
    pub token: TokenId,
    /// Which of the leaves of the level before it continues.
    pub parent: usize,
}

/// The target's token for each of the draft's.
pub(super) type Vocabulary<'a> = Option<&'a [TokenId]>;

pub(super) enum Growth<'a> {
    Chain(Chain<'a>),
    Tree(Tree),
}

impl Growth<'_> {
    /// Adds a level from one row of logits per leaf; gives the leaves of the next.
    pub(super) fn grow(
        &mut self,
        chooser: &mut Chooser,
        logits: &[&[f32]],
        vocabulary: Vocabulary<'_>,
    ) -> Vec<Leaf> {
        match self {
            Self::Chain(chain) => chain.grow(chooser, logits[0], vocabulary).into_iter().collect(),
            Self::Tree(tree) => tree.grow(chooser, logits, vocabulary),
        }
    }

    /// The draft inside a limit.
    pub(super) fn finish(self, limit: DraftLimit) -> DraftTree {
        match self {
            Self::Chain(chain) => chain.finish(limit),
            Self::Tree(tree) => tree.finish(limit.nodes),
        }
    }
}

pub(super) struct Chain<'a> {
    path: Path<'a>,
    draw: DraftDraw,
    tree: DraftTree,
    /// Logits over the target's vocabulary, where the draft's is smaller.
    whole: Vec<f32>,
}

impl<'a> Chain<'a> {
    /// `path` ends at the root.
    pub(super) fn new(path: Path<'a>, draw: DraftDraw) -> Self {
        Self { path, draw, tree: DraftTree::new(), whole: Vec::new() }
    }

    /// Logits that are not finite end the draft.
    pub(super) fn grow(
        &mut self,
        chooser: &mut Chooser,
        logits: &[f32],
        vocabulary: Vocabulary<'_>,
    ) -> Option<Leaf> {
        let (token, law) = match vocabulary {
            None => self.take(chooser, logits)?,
            // The best of the few is the best of all.
            Some(ids) if self.path.is_argmax() => {
                (ids[chooser.guess(logits, &self.path).ok()? as usize], None)
            }
            Some(ids) => {
                self.spread(logits, ids);
                self.take(chooser, &self.whole)?
            }
        };
        self.path.push(token);
        let end = self.tree.len();
        self.tree.push_drawn(end, token, law).expect("the last node has no child yet");
        Some(Leaf { token, parent: 0 })
    }

    /// The draft inside a limit.
    pub(super) fn finish(self, limit: DraftLimit) -> DraftTree {
        self.tree.truncated(limit)
    }

    fn take(&self, chooser: &mut Chooser, logits: &[f32]) -> Option<(TokenId, Option<Law>)> {
        match self.draw {
            DraftDraw::Shared => Some((chooser.guess(logits, &self.path).ok()?, None)),
            DraftDraw::Likeliest => Some((chooser.likeliest(logits, &self.path).ok()?, None)),
            DraftDraw::Own => {
                let (token, law) = chooser.draw(logits, &self.path).ok()?;
                Some((token, Some(law)))
            }
        }
    }

    /// Tokens that the draft does not know get the least finite logit.
    fn spread(&mut self, logits: &[f32], ids: &[TokenId]) {
        let size = ids.iter().max().map_or(0, |&id| id as usize + 1);
        self.whole.clear();
        self.whole.resize(size, f32::MIN);
        for (&logit, &id) in logits.iter().zip(ids) {
            self.whole[id as usize] = logit;
        }
    }
}

/// All tokens tried so far, level by level: `topk` after the root, then `topk` after each leaf.
pub(super) struct Tree {
    topk: usize,
    tried: Vec<Tried>,
    /// The leaves as indices into `tried`; `None` is the root.
    leaves: Vec<Option<usize>>,
}

#[derive(Debug, Clone, Copy)]
struct Tried {
    token: TokenId,
    /// Log of the product of probabilities from the root on.
    score: f64,
    parent: Option<usize>,
}

impl Tree {
    pub(super) fn new(topk: usize) -> Self {
        Self { topk, tried: Vec::new(), leaves: vec![None] }
    }

    fn grow(&mut self, chooser: &mut Chooser, logits: &[&[f32]], vocabulary: Vocabulary<'_>) -> Vec<Leaf> {
        let first = self.tried.len();
        // Per token tried, which leaf it follows.
        let mut follows = Vec::with_capacity(self.topk * self.leaves.len());
        for (at, (&leaf, logits)) in self.leaves.iter().zip(logits).enumerate() {
            let so_far = leaf.map_or(0.0, |leaf| self.tried[leaf].score);
            // Logits that are not finite have no best tokens, and the leaf no children.
            for (token, logprob) in chooser.best(logits, self.topk).unwrap_or_default() {
                let token = vocabulary.map_or(token, |ids| ids[token as usize]);
                self.tried.push(Tried { token, score: so_far + logprob, parent: leaf });
                follows.push(at);
            }
        }
        let chosen = best_of(&self.tried[first..], self.topk);
        self.leaves = chosen.iter().map(|&index| Some(first + index)).collect();
        chosen.iter().map(|&i| Leaf { token: self.tried[first + i].token, parent: follows[i] }).collect()
    }

    /// The best `nodes` of all that was tried, in the order they were tried. A child is never better than its parent
    /// and comes after it, so parents are kept.
    fn finish(self, nodes: usize) -> DraftTree {
        let mut kept = best_of(&self.tried, nodes);
        kept.sort_unstable();
        let mut tree = DraftTree::new();
        let mut names = vec![None; self.tried.len()];
        for index in kept {
            let Tried { token, parent, .. } = self.tried[index];
            let parent = match parent {
                None => Some(0),
                Some(parent) => names[parent],
            };
            // A vocabulary that maps two draft tokens to one of the target's makes a twin, which adds nothing.
            names[index] = parent.and_then(|parent| tree.push(parent, token).ok());
        }
        tree
    }
}

/// Indices of the best `count`, best first, ties in order.
fn best_of(tried: &[Tried], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..tried.len()).collect();
    order.sort_by(|&a, &b| tried[b].score.total_cmp(&tried[a].score));
    order.truncate(count);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Logits whose softmax is `probabilities`.
    fn row(probabilities: &[f32]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln()).collect()
    }

    fn grow(tree: &mut Tree, rows: &[Vec<f32>]) -> Vec<Leaf> {
        let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        tree.grow(&mut Chooser::default(), &rows, None)
    }

    #[test]
    fn a_tree_keeps_the_likeliest_paths_in_the_order_they_were_tried() {
        let mut tree = Tree::new(2);
        let leaves = grow(&mut tree, &[row(&[0.6, 0.3, 0.05, 0.05])]);
        assert_eq!(leaves, [Leaf { token: 0, parent: 0 }, Leaf { token: 1, parent: 0 }]);
        // After 0: 0.6 * (0.2, 0.1); after 1: 0.3 * (0.9, 0.05).
        let leaves = grow(&mut tree, &[row(&[0.2, 0.1, 0.65, 0.05]), row(&[0.02, 0.03, 0.05, 0.9])]);
        assert_eq!(leaves, [Leaf { token: 2, parent: 0 }, Leaf { token: 3, parent: 1 }]);
        let leaves = grow(&mut tree, &[row(&[0.97, 0.01, 0.01, 0.01]), row(&[0.4, 0.3, 0.2, 0.1])]);
        assert_eq!(leaves, [Leaf { token: 0, parent: 0 }, Leaf { token: 0, parent: 1 }]);
        // Best five: 0 (0.6), 2 after 0 (0.39), then its child 0 (0.378), 1 (0.3), 3 after 1 (0.27).
        let tree = tree.finish(5);
        assert_eq!(tree.tokens(), [0, 1, 2, 3, 0]);
        assert_eq!(tree.parents(), [0, 0, 1, 2, 3]);
    }

    #[test]
    fn a_parent_that_is_certain_of_its_child_stays() {
        let mut tree = Tree::new(1);
        for _ in 0..4 {
            grow(&mut tree, &[vec![100.0, 0.0]]);
        }
        assert_eq!(tree.finish(2).parents(), [0, 1]);
    }

    #[test]
    fn logits_that_are_not_finite_end_a_draft() {
        let mut tree = Tree::new(2);
        assert_eq!(grow(&mut tree, &[vec![f32::NAN, 0.0]]), []);
        assert!(tree.finish(3).is_empty());
    }
}
