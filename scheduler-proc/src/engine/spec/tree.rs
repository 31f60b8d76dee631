//! Owns the shape of a draft: nodes with parents. A chain is a tree of width 1.

use proto::TokenId;

/// Draft nodes in an order where parents precede children. The root (the last committed token) is not a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DraftTree {
    tokens: Vec<TokenId>,
    /// 0 for a child of the root, `i + 1` for a child of node `i`.
    parents: Vec<usize>,
}
