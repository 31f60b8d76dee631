//! Owns the prefix tree: which token sequences have their keys and values in which pages. Whole pages only; a
//! node's tokens always fill its pages. Says what may be evicted; never allocates or frees a page itself.

use std::collections::BTreeSet;

use proto::TokenId;
use rustc_hash::FxHashMap;

use super::slots::Page;

pub(super) type NodeId = u32;

#[derive(Debug)]
struct Node {
    /// Tokens of this edge, `pages.len() * page_size` of them; empty for a root.
    key: Vec<TokenId>,
    pages: Vec<Page>,
    parent: Option<NodeId>,
    /// By the first page of the child's key.
    children: FxHashMap<Box<[TokenId]>, NodeId>,
    /// Leases on this node or below it.
    locks: u32,
    last_used: u64,
}

/// Where a walk along a sequence ended.
struct Walk {
    /// Deepest node with at least one page in common; the root when there is none.
    node: NodeId,
    /// Pages of that node's key in common.
    in_node: usize,
    /// Pages in common altogether.
    pages: usize,
}

/// An arena of nodes, with one root per namespace.
#[derive(Debug)]
pub(super) struct RadixTree {
    page_size: usize,
    nodes: Vec<Option<Node>>,
    vacant: Vec<NodeId>,
    roots: FxHashMap<Option<String>, NodeId>,
    clock: u64,
    pages: usize,
    locked_pages: usize,
    /// Leaves that no lease needs, least recently used first.
    evictable: BTreeSet<(u64, NodeId)>,
}

impl RadixTree {
    pub(super) fn new(page_size: usize) -> Self {
        Self {
            page_size,
            nodes: Vec::new(),
            vacant: Vec::new(),
            roots: FxHashMap::default(),
            clock: 0,
            pages: 0,
            locked_pages: 0,
            evictable: BTreeSet::new(),
        }
    }

    /// Pages in the tree, locked or not.
    pub(super) fn pages(&self) -> usize {
        self.pages
    }

    pub(super) fn locked_pages(&self) -> usize {
        self.locked_pages
    }

    /// Pages of `tokens` that are in the tree, without touching it.
    pub(super) fn find(&self, namespace: &Option<String>, tokens: &[TokenId]) -> usize {
        self.roots.get(namespace).map_or(0, |&root| self.walk(root, tokens).pages)
    }

    /// Locks the longest prefix of `tokens` that is in the tree: its last node and its pages.
    pub(super) fn lock_prefix(
        &mut self,
        namespace: &Option<String>,
        tokens: &[TokenId],
    ) -> (NodeId, Vec<Page>) {
        let root = self.root(namespace);
        let walk = self.walk(root, tokens);
        let node = self.split(walk.node, walk.in_node);
        self.lock(node);
        self.touch(node);
        (node, self.path_pages(node))
    }

    /// Makes `tokens` (whole pages) known and locks the node that ends them. Where the tree has them already its
    /// own pages stay; the returned list says which page holds which part of `tokens` from now on.
    pub(super) fn insert_locked(
        &mut self,
        namespace: &Option<String>,
        tokens: &[TokenId],
        pages: &[Page],
    ) -> (NodeId, Vec<Page>) {
        assert_eq!(tokens.len(), pages.len() * self.page_size, "tokens fill their pages");
        let root = self.root(namespace);
        let walk = self.walk(root, tokens);
        let mut node = self.split(walk.node, walk.in_node);
        if walk.pages < pages.len() {
            let key = tokens[walk.pages * self.page_size..].to_vec();
            node = self.add_child(node, key, pages[walk.pages..].to_vec());
        }
        self.lock(node);
        self.touch(node);
        (node, self.path_pages(node))
    }

    pub(super) fn unlock(&mut self, node: NodeId) {
        let mut next = Some(node);
        while let Some(id) = next {
            let it = self.node_mut(id);
            assert!(it.locks > 0, "node {id} is unlocked more often than locked");
            it.locks -= 1;
            next = it.parent;
            if it.locks == 0 {
                let pages = it.pages.len();
                self.locked_pages -= pages;
                self.refresh(id);
            }
        }
        self.drop_empty_root(node);
    }

    /// Forgets up to `wanted` pages, least recently used leaves first, from their ends.
    pub(super) fn evict(&mut self, wanted: usize) -> Vec<Page> {
        let mut evicted = Vec::with_capacity(wanted.min(self.pages - self.locked_pages));
        while evicted.len() < wanted {
            let Some(&(_, id)) = self.evictable.first() else { break };
            let page_size = self.page_size;
            let leaf = self.node_mut(id);
            let kept = leaf.pages.len().saturating_sub(wanted - evicted.len());
            evicted.extend(leaf.pages.drain(kept..));
            leaf.key.truncate(kept * page_size);
            if kept == 0 {
                self.remove_leaf(id);
            }
        }
        self.pages -= evicted.len();
        evicted
    }

    fn root(&mut self, namespace: &Option<String>) -> NodeId {
        if let Some(&root) = self.roots.get(namespace) {
            return root;
        }
        let root = self.add_node(Node {
            key: Vec::new(),
            pages: Vec::new(),
            parent: None,
            children: FxHashMap::default(),
            locks: 0,
            last_used: 0,
        });
        self.roots.insert(namespace.clone(), root);
        root
    }

    fn walk(&self, root: NodeId, tokens: &[TokenId]) -> Walk {
        let mut walk = Walk { node: root, in_node: 0, pages: 0 };
        let mut rest = tokens;
        while let Some(first_page) = rest.get(..self.page_size) {
            let Some(&child) = self.node(walk.node).children.get(first_page) else { break };
            let node = self.node(child);
            let common = node
                .key
                .chunks_exact(self.page_size)
                .zip(rest.chunks_exact(self.page_size))
                .take_while(|(mine, theirs)| mine == theirs)
                .count();
            walk = Walk { node: child, in_node: common, pages: walk.pages + common };
            if common < node.pages.len() {
                break;
            }
            rest = &rest[node.key.len()..];
        }
        walk
    }

    /// Cuts `node` behind its first `kept` pages and returns the node that ends there. The lower half keeps the
    /// id, because leases below hold it.
    fn split(&mut self, lower: NodeId, kept: usize) -> NodeId {
        let node = self.node(lower);
        if node.parent.is_none() || kept == node.pages.len() {
            return lower;
        }
        let cut = kept * self.page_size;
        let (locks, last_used, parent) = (node.locks, node.last_used, node.parent);
        let old_first = self.first_page(lower);
        let node = self.node_mut(lower);
        let lower_key = node.key.split_off(cut);
        let lower_pages = node.pages.split_off(kept);
        let key = std::mem::replace(&mut node.key, lower_key);
        let pages = std::mem::replace(&mut node.pages, lower_pages);
        let children = FxHashMap::from_iter([(self.first_page(lower), lower)]);
        let upper = self.add_node(Node { key, pages, parent, children, locks, last_used });
        self.node_mut(lower).parent = Some(upper);
        let parent = parent.expect("roots are not split");
        self.node_mut(parent).children.insert(old_first, upper);
        upper
    }

    fn add_child(&mut self, parent: NodeId, key: Vec<TokenId>, pages: Vec<Page>) -> NodeId {
        self.pages += pages.len();
        let first = key[..self.page_size].into();
        let child = self.add_node(Node {
            key,
            pages,
            parent: Some(parent),
            children: FxHashMap::default(),
            locks: 0,
            last_used: 0,
        });
        self.node_mut(parent).children.insert(first, child);
        self.refresh(parent);
        child
    }

    fn lock(&mut self, node: NodeId) {
        let mut next = Some(node);
        while let Some(id) = next {
            let it = self.node_mut(id);
            it.locks += 1;
            next = it.parent;
            if it.locks == 1 {
                let pages = it.pages.len();
                self.locked_pages += pages;
                self.refresh(id);
            }
        }
    }

    fn touch(&mut self, node: NodeId) {
        self.clock += 1;
        let mut next = Some(node);
        while let Some(id) = next {
            let clock = self.clock;
            let it = self.node_mut(id);
            let before = std::mem::replace(&mut it.last_used, clock);
            next = it.parent;
            if self.evictable.remove(&(before, id)) {
                self.evictable.insert((clock, id));
            }
        }
    }

    /// Keeps `evictable` true for a node whose children or locks changed.
    fn refresh(&mut self, id: NodeId) {
        let node = self.node(id);
        let entry = (node.last_used, id);
        if node.parent.is_some() && node.children.is_empty() && node.locks == 0 {
            self.evictable.insert(entry);
        } else {
            self.evictable.remove(&entry);
        }
    }

    fn remove_leaf(&mut self, id: NodeId) {
        let leaf = self.node(id);
        let parent = leaf.parent.expect("roots are not evictable");
        self.evictable.remove(&(leaf.last_used, id));
        self.node_mut(parent).children.retain(|_, child| *child != id);
        self.free_node(id);
        self.refresh(parent);
        self.drop_empty_root(parent);
    }

    /// A namespace that holds nothing and is held by nobody costs nothing.
    fn drop_empty_root(&mut self, id: NodeId) {
        let Some(node) = &self.nodes[id as usize] else { return };
        if node.parent.is_none() && node.children.is_empty() && node.locks == 0 {
            self.roots.retain(|_, root| *root != id);
            self.free_node(id);
        }
    }

    fn path_pages(&self, node: NodeId) -> Vec<Page> {
        let mut parts = Vec::new();
        let mut next = Some(node);
        while let Some(id) = next {
            let it = self.node(id);
            parts.push(&it.pages);
            next = it.parent;
        }
        parts.into_iter().rev().flatten().copied().collect()
    }

    fn first_page(&self, id: NodeId) -> Box<[TokenId]> {
        self.node(id).key[..self.page_size].into()
    }

    fn add_node(&mut self, node: Node) -> NodeId {
        if let Some(id) = self.vacant.pop() {
            self.nodes[id as usize] = Some(node);
            return id;
        }
        self.nodes.push(Some(node));
        (self.nodes.len() - 1) as NodeId
    }

    fn free_node(&mut self, id: NodeId) {
        self.nodes[id as usize] = None;
        self.vacant.push(id);
    }

    fn node(&self, id: NodeId) -> &Node {
        self.nodes[id as usize].as_ref().expect("ids in the tree and in leases are alive")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id as usize].as_mut().expect("ids in the tree and in leases are alive")
    }

    /// Every page in the tree, once per mention.
    pub(super) fn all_pages(&self) -> impl Iterator<Item = Page> + '_ {
        self.nodes.iter().flatten().flat_map(|node| node.pages.iter().copied())
    }

    /// Checks the tree against itself; the error names what is broken.
    pub(super) fn check(&self) -> Result<(), String> {
        let (mut pages, mut locked, mut evictable) = (0, 0, 0);
        for (id, node) in self.nodes.iter().enumerate().filter_map(|(id, node)| Some((id, node.as_ref()?))) {
            pages += node.pages.len();
            locked += if node.locks > 0 { node.pages.len() } else { 0 };
            self.check_node(id as NodeId, node)?;
            let may_go = node.parent.is_some() && node.children.is_empty() && node.locks == 0;
            evictable += usize::from(may_go);
            if may_go != self.evictable.contains(&(node.last_used, id as NodeId)) {
                return Err(format!("node {id}: evictable {may_go}, but the list of leaves disagrees"));
            }
        }
        if (pages, locked, evictable) != (self.pages, self.locked_pages, self.evictable.len()) {
            return Err(format!(
                "tree counts {} pages, {} locked, {} leaves; it has {pages}, {locked}, {evictable}",
                self.pages,
                self.locked_pages,
                self.evictable.len()
            ));
        }
        Ok(())
    }

    fn check_node(&self, id: NodeId, node: &Node) -> Result<(), String> {
        if node.key.len() != node.pages.len() * self.page_size {
            return Err(format!("node {id}: {} tokens in {} pages", node.key.len(), node.pages.len()));
        }
        if node.parent.is_some() == node.key.is_empty() {
            return Err(format!("node {id}: only roots have no tokens"));
        }
        let mut below = 0;
        for (first, &child) in &node.children {
            let it =
                self.nodes[child as usize].as_ref().ok_or(format!("node {id}: child {child} is gone"))?;
            if it.parent != Some(id) || !it.key.starts_with(first) {
                return Err(format!("node {id}: child {child} does not belong to it"));
            }
            below += it.locks;
        }
        if below > node.locks {
            return Err(format!("node {id}: {} locks, {below} below it", node.locks));
        }
        Ok(())
    }
}
