//! Owns the step from memories to a tree: which continuations of which matches, within a number of nodes.
//!
//! Matches are used from the longest to the shortest until the nodes are spent; continuations that agree share
//! nodes. Breadth-first matching takes the most recent continuations, and more of them after a short match than
//! after a long one; probability matching takes the likeliest path next, wherever it is.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};

use proto::{NgramMatchType, TokenId};

use super::Breadth;
use super::trie::{Anchors, NodeRef, Trie};
use crate::batch::DraftLimit;
use crate::engine::spec::tree::{DraftTree, Parent};

/// The tree of at most `limit.nodes` nodes and `limit.depth` levels, in the order of [`Sketch::levels`].
pub(super) fn tree(trie: &Trie, anchors: &Anchors, breadth: Breadth, limit: DraftLimit) -> DraftTree {
    let mut sketch = Sketch { tree: DraftTree::new(), limit };
    for (anchor, len) in anchors.longest_first() {
        if sketch.is_full() || len < breadth.shortest_match {
            break;
        }
        match breadth.match_type {
            NgramMatchType::Bfs => by_recency(trie, anchor, len, breadth, &mut sketch),
            NgramMatchType::Prob => by_frequency(trie, anchor, breadth.max, &mut sketch),
        }
    }
    sketch.levels()
}

/// A tree in the making, its nodes in the order they were found.
struct Sketch {
    tree: DraftTree,
    limit: DraftLimit,
}

impl Sketch {
    fn is_full(&self) -> bool {
        self.tree.len() >= self.limit.nodes
    }

    /// The node for a token under a parent, found or made; `None` when the limit forbids it.
    fn place(&mut self, parent: Parent, token: TokenId) -> Option<Parent> {
        if let Some(node) = self.tree.child(parent, token) {
            return Some(node + 1);
        }
        let depth = parent.checked_sub(1).map_or(0, |node| self.tree.depth(node));
        if self.is_full() || depth >= self.limit.depth {
            return None;
        }
        Some(self.tree.push(parent, token).expect("the parent exists and has no such child"))
    }

    /// The tree level by level, siblings from the last found to the first: the order SGLang submits.
    fn levels(&self) -> DraftTree {
        let mut tree = DraftTree::new();
        let mut queue = VecDeque::from([(0, 0)]);
        while let Some((old, new)) = queue.pop_front() {
            let children: Vec<_> = self.tree.children(old).collect();
            for node in children.into_iter().rev() {
                let token = self.tree.tokens()[node];
                let placed = tree.push(new, token).expect("a copy of a tree is a tree");
                queue.push_back((node + 1, placed));
            }
        }
        tree
    }
}

fn by_recency(trie: &Trie, anchor: NodeRef, len: usize, breadth: Breadth, sketch: &mut Sketch) {
    let levels = trie.max_depth().saturating_sub(1).max(1);
    let slope = (breadth.max as f64 - breadth.min as f64) / levels as f64;
    let width = levels.saturating_sub(len) as f64 * slope + breadth.min as f64;
    let mut queue = VecDeque::from([(0, anchor, width)]);
    while let Some((parent, node, width)) = queue.pop_front() {
        if sketch.is_full() {
            return;
        }
        for (child, token) in trie.newest_children(node).take((width as usize).max(1)) {
            if let Some(placed) = sketch.place(parent, token) {
                queue.push_back((placed, child, width - slope));
            }
        }
    }
}

fn by_frequency(trie: &Trie, anchor: NodeRef, width: usize, sketch: &mut Sketch) {
    let mut heap = BinaryHeap::new();
    let mut found = 0;
    let mut expand = |heap: &mut BinaryHeap<Candidate>, parent, node, probability: f64| {
        let children = trie.frequent_children(node, width);
        let total: f64 = children.iter().map(|&(_, _, frequency)| f64::from(frequency)).sum();
        for (child, token, frequency) in children {
            let probability = probability * f64::from(frequency) / total;
            heap.push(Candidate { probability, found, parent, child, token });
            found += 1;
        }
    };
    expand(&mut heap, 0, anchor, 1.0);
    while let Some(Candidate { probability, parent, child, token, .. }) = heap.pop() {
        if sketch.is_full() {
            return;
        }
        if let Some(placed) = sketch.place(parent, token) {
            expand(&mut heap, placed, child, probability);
        }
    }
}

/// A continuation that may be placed next: the likelier first, then the one found first.
struct Candidate {
    probability: f64,
    found: usize,
    parent: Parent,
    child: NodeRef,
    token: TokenId,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.probability.total_cmp(&other.probability).then(other.found.cmp(&self.found))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Candidate {}
