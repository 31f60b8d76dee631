//! Owns the shape of a draft: nodes with parents. A chain is a tree of width 1.

use proto::TokenId;

use crate::batch::{DraftLimit, DraftSource};

/// A node's parent: 0 is the root, `i + 1` is node `i`.
pub type Parent = usize;

/// Draft nodes in an order where parents precede children. The root (the last committed token) is not a node.
/// Siblings carry different tokens, so a choice leads to one child at most.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DraftTree {
    tokens: Vec<TokenId>,
    /// 0 for a child of the root, `i + 1` for a child of node `i`.
    parents: Vec<Parent>,
    depths: Vec<usize>,
    laws: Vec<Option<Law>>,
    source: DraftSource,
}

/// The probabilities, by token, that a node's token was drawn with; a token beyond its end has none.
pub type Law = Vec<f64>;

/// A token that is tried at a position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sibling<'a> {
    pub node: usize,
    pub token: TokenId,
    /// What it was drawn from, given the siblings before it; `None` where it was sure to be tried.
    pub law: Option<&'a [f64]>,
}

/// Why a node cannot be added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TreeError {
    #[error("parent {parent} does not exist in a tree of {nodes} nodes")]
    NoSuchParent { parent: Parent, nodes: usize },
    #[error("parent {parent} already has a child with token {token}")]
    Twice { parent: Parent, token: TokenId },
}

impl DraftTree {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn chain(tokens: impl IntoIterator<Item = TokenId>) -> Self {
        let tokens: Vec<_> = tokens.into_iter().collect();
        let nodes = tokens.len();
        Self {
            tokens,
            parents: (0..nodes).collect(),
            depths: (1..=nodes).collect(),
            laws: vec![None; nodes],
            source: DraftSource::default(),
        }
    }

    /// The same nodes, made by someone else than a model.
    #[must_use]
    pub fn made_by(self, source: DraftSource) -> Self {
        Self { source, ..self }
    }

    pub fn source(&self) -> DraftSource {
        self.source
    }

    /// Adds a node; returns what its children name as their parent.
    pub fn push(&mut self, parent: Parent, token: TokenId) -> Result<Parent, TreeError> {
        self.push_drawn(parent, token, None)
    }

    /// Adds a node whose token was drawn from a law, given its siblings so far.
    pub fn push_drawn(
        &mut self,
        parent: Parent,
        token: TokenId,
        law: Option<Law>,
    ) -> Result<Parent, TreeError> {
        if parent > self.len() {
            return Err(TreeError::NoSuchParent { parent, nodes: self.len() });
        }
        if self.child(parent, token).is_some() {
            return Err(TreeError::Twice { parent, token });
        }
        self.depths.push(self.depth_of(parent) + 1);
        self.tokens.push(token);
        self.parents.push(parent);
        self.laws.push(law);
        Ok(self.len())
    }

    /// Draft nodes, the root not counted.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    pub fn parents(&self) -> &[Parent] {
        &self.parents
    }

    /// Whether every node is the child of the one before it.
    pub fn is_chain(&self) -> bool {
        self.parents.iter().enumerate().all(|(node, &parent)| node == parent)
    }

    /// Distance of a node from the root, at least 1.
    pub fn depth(&self, node: usize) -> usize {
        self.depths[node]
    }

    /// Depth of what a child may name as its parent; 0 for the root.
    fn depth_of(&self, parent: Parent) -> usize {
        parent.checked_sub(1).map_or(0, |node| self.depths[node])
    }

    /// Nodes by depth, index 0 for depth 1.
    pub fn nodes_at(&self) -> Vec<u32> {
        let mut counts = vec![0; self.depths.iter().copied().max().unwrap_or(0)];
        self.depths.iter().for_each(|&depth| counts[depth - 1] += 1);
        counts
    }

    /// Nodes under a parent, in order.
    pub fn children(&self, parent: Parent) -> impl Iterator<Item = usize> + '_ {
        // A child comes after its parent, and node `parent - 1` is the parent itself.
        (parent..self.len()).filter(move |&node| self.parents[node] == parent)
    }

    /// What is tried after a parent, in order.
    pub fn siblings(&self, parent: Parent) -> impl Iterator<Item = Sibling<'_>> + '_ {
        self.children(parent).map(|node| Sibling {
            node,
            token: self.tokens[node],
            law: self.laws[node].as_deref(),
        })
    }

    /// The node under a parent that carries a token.
    pub fn child(&self, parent: Parent, token: TokenId) -> Option<usize> {
        self.children(parent).find(|&node| self.tokens[node] == token)
    }

    /// The tree inside a limit: first what is too deep goes, then what comes last. Parents stay.
    #[must_use]
    pub fn truncated(mut self, limit: DraftLimit) -> Self {
        if self.len() <= limit.nodes && self.depths.iter().all(|&depth| depth <= limit.depth) {
            return self;
        }
        let mut kept = Self::default().made_by(self.source);
        // What a child names as its parent, after the cut; a kept node's parent is kept, being shallower and earlier.
        let mut renamed = vec![0; self.len() + 1];
        for node in 0..self.len() {
            if self.depths[node] <= limit.depth && kept.len() < limit.nodes {
                kept.tokens.push(self.tokens[node]);
                kept.parents.push(renamed[self.parents[node]]);
                kept.depths.push(self.depths[node]);
                kept.laws.push(self.laws[node].take());
                renamed[node + 1] = kept.len();
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(nodes: &[(Parent, TokenId)]) -> DraftTree {
        let mut tree = DraftTree::new();
        for &(parent, token) in nodes {
            tree.push(parent, token).unwrap();
        }
        tree
    }

    fn limit(nodes: usize, depth: usize) -> DraftLimit {
        DraftLimit { enabled: true, nodes, depth }
    }

    #[test]
    fn malformed_nodes_are_refused() {
        let mut tree = tree(&[(0, 5), (1, 6)]);
        assert_eq!(tree.push(3, 7), Err(TreeError::NoSuchParent { parent: 3, nodes: 2 }));
        assert_eq!(tree.push(1, 6), Err(TreeError::Twice { parent: 1, token: 6 }));
        assert_eq!(tree.push(2, 6), Ok(3));
    }

    #[test]
    fn a_chain_is_a_tree_of_width_one() {
        let chain = DraftTree::chain([4, 5, 6]);
        assert_eq!(chain, tree(&[(0, 4), (1, 5), (2, 6)]));
        assert!(chain.is_chain());
        assert_eq!(chain.nodes_at(), [1, 1, 1]);
        assert!(!tree(&[(0, 4), (0, 5)]).is_chain());
        assert!(DraftTree::new().is_chain());
        assert_eq!(DraftTree::new().nodes_at(), [0u32; 0]);
    }

    /// The two trees of SGLang's `test_build_eagle_tree.py`: links and positions from parents.
    #[test]
    fn links_and_positions() {
        type Links<'a> = (&'a [Parent], &'a [i32], &'a [i32], &'a [usize]);
        let check = |(parents, next, sibling, depths): Links<'_>| {
            let nodes: Vec<_> = parents.iter().copied().zip(100..).collect();
            let tree = tree(&nodes);
            let node_or = |node: Option<usize>| node.map_or(-1, |node| node as i32 + 1);
            let firsts: Vec<_> = (0..=tree.len()).map(|p| node_or(tree.children(p).next())).collect();
            let siblings: Vec<_> = std::iter::once(-1)
                .chain(
                    (0..tree.len())
                        .map(|node| node_or(tree.children(tree.parents()[node]).find(|&other| other > node))),
                )
                .collect();
            assert_eq!(firsts, next);
            assert_eq!(siblings, sibling);
            assert_eq!((0..tree.len()).map(|node| tree.depth(node)).collect::<Vec<_>>(), depths);
        };
        check((
            &[0, 0, 1, 2, 3, 4, 5],
            &[1, 3, 4, 5, 6, 7, -1, -1],
            &[-1, 2, -1, -1, -1, -1, -1, -1],
            &[1, 1, 2, 2, 3, 3, 4],
        ));
        check((
            &[0, 1, 1, 1, 1, 3, 6],
            &[1, 2, -1, 6, -1, -1, 7, -1],
            &[-1, -1, 3, 4, 5, -1, -1, -1],
            &[1, 2, 2, 2, 2, 3, 4],
        ));
    }

    #[test]
    fn truncation_keeps_parents() {
        let full = tree(&[(0, 1), (0, 2), (1, 3), (2, 4), (4, 5), (0, 6)]);
        assert_eq!(full.clone().truncated(limit(6, 3)), full);
        assert_eq!(full.clone().truncated(limit(3, 3)), tree(&[(0, 1), (0, 2), (1, 3)]));
        assert_eq!(full.clone().truncated(limit(9, 1)), tree(&[(0, 1), (0, 2), (0, 6)]));
        assert_eq!(full.clone().truncated(limit(9, 2)).nodes_at(), [3, 2]);
        assert_eq!(full.clone().truncated(limit(9, 0)), DraftTree::new());
        assert_eq!(full.truncated(limit(0, 9)), DraftTree::new());
    }
}
