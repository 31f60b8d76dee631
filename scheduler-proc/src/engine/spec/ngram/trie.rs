//! Owns the memory of the n-gram worker: a trie of every stretch of at most `max_depth` tokens, with how often
//! and how recently each was seen, bounded in nodes.
//!
//! Learning a token extends every suffix of what came before it, so each occurrence of a stretch counts once.
//! A request's [`Anchors`] remember where its suffixes stand, so a new token costs `max_depth` look-ups.
//!
//! Eviction takes the least recently used node. The order is a list in which every node stands before its
//! children (a touched node goes right behind its parent, a first-level node to the front), so the last one is
//! always a leaf. Nodes carry a generation, and whoever holds one can tell that it is gone.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use proto::TokenId;
use rustc_hash::FxHashMap;

type NodeId = u32;
/// The root is node 0. It heads the recency list, so no link to it means anything but "none".
const ROOT: NodeId = 0;
const NONE: NodeId = 0;

/// A node that may have been evicted since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NodeRef {
    id: NodeId,
    generation: u32,
}

/// The nodes that match a context's suffixes: entry `d` has length `d + 1`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Anchors(Vec<Option<NodeRef>>);

#[derive(Debug, Clone, Default)]
struct Node {
    token: TokenId,
    parent: NodeId,
    generation: u32,
    frequency: u32,
    newest_child: NodeId,
    /// Siblings, from newest to oldest.
    newer: NodeId,
    older: NodeId,
    /// All nodes, from hottest to coldest; the root comes first.
    hotter: NodeId,
    colder: NodeId,
}

/// Parent, frequency, token and node of a child, in the order in which frequent ones come first.
type RankedChild = (NodeId, Reverse<u32>, TokenId, NodeId);

#[derive(Debug)]
pub(super) struct Trie {
    max_depth: usize,
    capacity: usize,
    nodes: Vec<Node>,
    free: Vec<NodeId>,
    coldest: NodeId,
    children: FxHashMap<(NodeId, TokenId), NodeId>,
    /// Children by parent, most frequent first, then lower token; kept only where it is asked for.
    by_frequency: Option<BTreeSet<RankedChild>>,
}

impl Anchors {
    /// From the longest match to the shortest, with its length.
    pub(super) fn longest_first(&self) -> impl Iterator<Item = (NodeRef, usize)> + '_ {
        self.0.iter().enumerate().rev().filter_map(|(index, node)| node.map(|node| (node, index + 1)))
    }
}

impl Trie {
    pub(super) fn new(max_depth: usize, capacity: usize, by_frequency: bool) -> Self {
        assert!(max_depth > 0, "a trie of depth 0 remembers nothing");
        Self {
            max_depth,
            capacity: capacity.min(NodeId::MAX as usize - 1),
            nodes: vec![Node::default()],
            free: Vec::new(),
            coldest: ROOT,
            children: FxHashMap::default(),
            by_frequency: by_frequency.then(BTreeSet::new),
        }
    }

    pub(super) fn max_depth(&self) -> usize {
        self.max_depth
    }

    /// Nodes in use, the root not counted.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.nodes.len() - 1 - self.free.len()
    }

    /// Forgets all. Generations go on, so that older anchors are seen to be stale.
    pub(super) fn clear(&mut self) {
        self.children.clear();
        self.by_frequency.iter_mut().for_each(BTreeSet::clear);
        self.coldest = ROOT;
        for node in &mut self.nodes {
            *node = Node { generation: node.generation + 1, ..Node::default() };
        }
        self.free = (1..self.nodes.len() as NodeId).rev().collect();
    }

    /// Looks up where a context's suffixes stand.
    pub(super) fn anchors(&self, context: &[TokenId]) -> Anchors {
        let deepest = context.len().min(self.max_depth);
        let find = |len: usize| {
            let suffix = &context[context.len() - len..];
            let node = suffix.iter().try_fold(ROOT, |node, &token| self.child(node, token))?;
            Some(self.reference(node))
        };
        Anchors((1..=deepest).map(find).collect())
    }

    /// Length of the longest suffix that something followed.
    pub(super) fn longest_continued(&self, anchors: &Anchors) -> Option<usize> {
        let continued = |&(node, _): &(NodeRef, usize)| {
            self.resolve(node).is_some_and(|id| self.node(id).newest_child != NONE)
        };
        anchors.longest_first().find(continued).map(|(_, len)| len)
    }

    /// Whether every suffix has a node and none was evicted; otherwise a fresh look-up may know more.
    pub(super) fn is_current(&self, anchors: &Anchors) -> bool {
        anchors.0.iter().all(|node| node.is_some_and(|node| self.resolve(node).is_some()))
    }

    /// Learns that `tokens` follow the context that `anchors` stand for, and moves these to their end.
    pub(super) fn extend(&mut self, anchors: &mut Anchors, tokens: &[TokenId]) {
        for &token in tokens {
            let grown = (anchors.0.len() + 1).min(self.max_depth);
            let mut next = Vec::with_capacity(grown);
            next.push(self.see(ROOT, token));
            for &anchor in &anchors.0[..grown - 1] {
                let parent = anchor.and_then(|anchor| self.resolve(anchor));
                next.push(parent.and_then(|parent| self.see(parent, token)));
            }
            anchors.0 = next;
        }
    }

    /// A node's children, the most recently seen first.
    pub(super) fn newest_children(&self, node: NodeRef) -> impl Iterator<Item = (NodeRef, TokenId)> + '_ {
        let first = self.resolve(node).map_or(NONE, |id| self.node(id).newest_child);
        std::iter::successors(Some(first), |&id| Some(self.node(id).older))
            .take_while(|&id| id != NONE)
            .map(|id| (self.reference(id), self.node(id).token))
    }

    /// At most `width` of a node's children, the most frequent first, then by token, each with its frequency.
    pub(super) fn frequent_children(&self, node: NodeRef, width: usize) -> Vec<(NodeRef, TokenId, u32)> {
        let (Some(parent), Some(index)) = (self.resolve(node), &self.by_frequency) else { return Vec::new() };
        let entry = |id: NodeId| (self.reference(id), self.node(id).token, self.node(id).frequency);
        let newest = self.node(parent).newest_child;
        if newest == NONE {
            return Vec::new();
        }
        if self.node(newest).older == NONE {
            // An only child, as most are, needs no order.
            return vec![entry(newest)];
        }
        let first = (parent, Reverse(u32::MAX), TokenId::MIN, NodeId::MIN);
        let children = index.range(first..).take_while(|&&(owner, ..)| owner == parent);
        children.take(width).map(|&(.., id)| entry(id)).collect()
    }

    fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id as usize]
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id as usize]
    }

    fn child(&self, parent: NodeId, token: TokenId) -> Option<NodeId> {
        self.children.get(&(parent, token)).copied()
    }

    fn reference(&self, id: NodeId) -> NodeRef {
        NodeRef { id, generation: self.node(id).generation }
    }

    fn resolve(&self, node: NodeRef) -> Option<NodeId> {
        (self.node(node.id).generation == node.generation).then_some(node.id)
    }

    /// Counts one occurrence of a child. `None` when the trie is too small to hold it beside its own parent.
    fn see(&mut self, parent: NodeId, token: TokenId) -> Option<NodeRef> {
        let id = match self.child(parent, token) {
            Some(id) => {
                self.unlink_sibling(id);
                self.unlink_recency(id);
                id
            }
            None => self.create(parent, token)?,
        };
        self.link_sibling(id);
        self.link_recency(id);
        self.count(id);
        Some(self.reference(id))
    }

    fn create(&mut self, parent: NodeId, token: TokenId) -> Option<NodeId> {
        if self.children.len() >= self.capacity {
            if self.coldest == parent {
                return None;
            }
            self.evict(self.coldest);
        }
        let id = self.free.pop().unwrap_or_else(|| {
            self.nodes.push(Node::default());
            (self.nodes.len() - 1) as NodeId
        });
        let node = self.node_mut(id);
        *node = Node { token, parent, generation: node.generation, ..Node::default() };
        self.children.insert((parent, token), id);
        Some(id)
    }

    fn evict(&mut self, id: NodeId) {
        debug_assert_eq!(self.node(id).newest_child, NONE, "the coldest node is a leaf");
        self.unlink_sibling(id);
        self.unlink_recency(id);
        let node = self.node_mut(id);
        node.generation += 1;
        let (parent, token, frequency) = (node.parent, node.token, node.frequency);
        self.children.remove(&(parent, token));
        if let Some(index) = &mut self.by_frequency {
            index.remove(&(parent, Reverse(frequency), token, id));
        }
        self.free.push(id);
    }

    fn count(&mut self, id: NodeId) {
        let node = &mut self.nodes[id as usize];
        let old = node.frequency;
        node.frequency = old.saturating_add(1);
        if let Some(index) = &mut self.by_frequency {
            index.remove(&(node.parent, Reverse(old), node.token, id));
            index.insert((node.parent, Reverse(node.frequency), node.token, id));
        }
    }

    /// Makes a node its parent's newest child.
    fn link_sibling(&mut self, id: NodeId) {
        let parent = self.node(id).parent;
        let older = std::mem::replace(&mut self.node_mut(parent).newest_child, id);
        let node = self.node_mut(id);
        (node.newer, node.older) = (NONE, older);
        if older != NONE {
            self.node_mut(older).newer = id;
        }
    }

    fn unlink_sibling(&mut self, id: NodeId) {
        let &Node { parent, newer, older, .. } = self.node(id);
        if newer == NONE {
            self.node_mut(parent).newest_child = older;
        } else {
            self.node_mut(newer).older = older;
        }
        if older != NONE {
            self.node_mut(older).newer = newer;
        }
    }

    /// Puts a node right behind its parent.
    fn link_recency(&mut self, id: NodeId) {
        let hotter = self.node(id).parent;
        let colder = std::mem::replace(&mut self.node_mut(hotter).colder, id);
        let node = self.node_mut(id);
        (node.hotter, node.colder) = (hotter, colder);
        if colder == NONE {
            self.coldest = id;
        } else {
            self.node_mut(colder).hotter = id;
        }
    }

    fn unlink_recency(&mut self, id: NodeId) {
        let &Node { hotter, colder, .. } = self.node(id);
        self.node_mut(hotter).colder = colder;
        if colder == NONE {
            self.coldest = hotter;
        } else {
            self.node_mut(colder).hotter = hotter;
        }
    }

    /// What must hold at any time: lists, look-up and index describe the same tree, parents are hotter.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let mut heat = FxHashMap::default();
        let mut at = ROOT;
        loop {
            heat.insert(at, heat.len());
            if self.node(at).colder == NONE {
                break;
            }
            assert_eq!(self.node(self.node(at).colder).hotter, at);
            at = self.node(at).colder;
        }
        assert_eq!(self.coldest, at);
        assert_eq!(heat.len() - 1, self.len());
        assert_eq!(self.children.len(), self.len());
        assert!(self.len() <= self.capacity);
        for (&(parent, token), &id) in &self.children {
            assert_eq!((self.node(id).parent, self.node(id).token), (parent, token));
            assert!(heat[&parent] < heat[&id], "parents are hotter");
            assert!(self.newest_children(self.reference(parent)).any(|(_, other)| other == token));
            if let Some(index) = &self.by_frequency {
                assert!(index.contains(&(parent, Reverse(self.node(id).frequency), token, id)));
            }
        }
        if let Some(index) = &self.by_frequency {
            assert_eq!(index.len(), self.len());
        }
    }
}
