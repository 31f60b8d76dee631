//! Owns the n-gram draft worker: it drafts what followed the same tokens before, in any request, and needs no
//! model. [`trie`] remembers, [`matching`] turns memories into a tree.

mod matching;
mod trie;

#[cfg(test)]
mod tests;

use std::borrow::Cow;

use proto::{NgramConfig, NgramMatchType, TokenId};
use rustc_hash::FxHashMap;

use self::trie::{Anchors, Trie};
use super::plan::{BoxedDrafter, WorkerPlan};
use super::tree::DraftTree;
use super::{Commit, DraftInput, Drafter};
use crate::batch::{DraftLimit, DraftSource, EngineSlot};
use crate::engine::model::TargetModel;
use crate::engine::{DraftStatus, EngineError};

/// How memories become trees.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Breadth {
    min: usize,
    max: usize,
    match_type: NgramMatchType,
    /// Nothing follows from matches of fewer tokens.
    shortest_match: usize,
}

/// A draft with the length of the match it follows from.
pub(super) struct Recall {
    pub(super) tree: DraftTree,
    pub(super) match_len: usize,
}

/// Drafts from a trie of all prompts and answers. Shared by the requests, as SGLang's is: a draft is a guess, so
/// nothing of another request can reach an answer unless the target chooses it.
#[derive(Debug)]
pub struct NgramDrafter {
    trie: Trie,
    breadth: Breadth,
    status: DraftStatus,
    slots: FxHashMap<EngineSlot, SlotState>,
}

/// Where a request stands in the trie.
#[derive(Debug, Default)]
struct SlotState {
    /// Tokens of the request that the anchors reflect.
    len: usize,
    anchors: Anchors,
}

impl NgramDrafter {
    /// `num_draft_tokens` counts the root. `num_steps` is only reported: a draft is as deep as its memory, within
    /// the row's limit.
    pub fn new(config: &NgramConfig, num_draft_tokens: usize, num_steps: usize) -> Self {
        let breadth = Breadth {
            min: config.min_bfs_breadth as usize,
            max: config.max_bfs_breadth as usize,
            match_type: config.match_type,
            shortest_match: 1,
        };
        let by_frequency = config.match_type == NgramMatchType::Prob;
        Self {
            trie: Trie::new(config.max_trie_depth as usize, config.capacity as usize, by_frequency),
            breadth,
            status: DraftStatus { num_steps, num_draft_tokens },
            slots: FxHashMap::default(),
        }
    }

    /// Drafts only behind so many tokens that were seen before, one after the other.
    #[must_use]
    pub fn from_matches_of(mut self, tokens: usize) -> Self {
        self.breadth.shortest_match = tokens;
        self
    }

    /// Learns a sequence that belongs to no request.
    pub fn learn(&mut self, tokens: &[TokenId]) {
        let mut anchors = Anchors::default();
        self.trie.extend(&mut anchors, tokens);
    }

    /// The tree after a context that belongs to no request.
    pub fn guess(&self, context: &[TokenId], limit: DraftLimit) -> DraftTree {
        self.tree(&self.trie.anchors(context), limit)
    }

    fn tree(&self, anchors: &Anchors, limit: DraftLimit) -> DraftTree {
        let limit = DraftLimit { nodes: limit.nodes.min(self.status.max_nodes()), ..limit };
        matching::tree(&self.trie, anchors, self.breadth, limit).made_by(DraftSource::Ngram)
    }

    fn anchors(&self, input: &DraftInput<'_>) -> Cow<'_, Anchors> {
        match self.slots.get(&input.slot) {
            Some(state) if state.len == input.tokens.len() && self.trie.is_current(&state.anchors) => {
                Cow::Borrowed(&state.anchors)
            }
            // Nothing is known of the request, or eviction took a node it stood on.
            _ => Cow::Owned(self.trie.anchors(input.tokens)),
        }
    }

    /// What followed before, if the match is long enough.
    pub(super) fn recall(&self, input: &DraftInput<'_>) -> Option<Recall> {
        let anchors = self.anchors(input);
        let match_len = self.trie.longest_continued(&anchors)?;
        (match_len >= self.breadth.shortest_match)
            .then(|| Recall { tree: self.tree(&anchors, input.limit), match_len })
            .filter(|recall| !recall.tree.is_empty())
    }

    fn commit_one(&mut self, commit: &Commit<'_>) {
        let state = self.slots.entry(commit.slot).or_default();
        let known = commit.tokens.len() - commit.new_len;
        let (old, new) = commit.tokens.split_at(known);
        if state.len != known || !self.trie.is_current(&state.anchors) {
            state.anchors = self.trie.anchors(old);
        }
        self.trie.extend(&mut state.anchors, new);
        state.len = commit.tokens.len();
    }
}

impl<H> Drafter<H> for NgramDrafter {
    fn draft(&mut self, inputs: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError> {
        Ok(inputs.iter().map(|input| self.tree(&self.anchors(input), input.limit)).collect())
    }

    fn commit(&mut self, commits: &[Commit<'_>], _: Option<&H>) -> Result<(), EngineError> {
        commits.iter().for_each(|commit| self.commit_one(commit));
        Ok(())
    }

    fn release(&mut self, slot: EngineSlot) {
        self.slots.remove(&slot);
    }

    fn flush(&mut self) {
        self.trie.clear();
        self.slots.clear();
    }

    fn status(&self) -> DraftStatus {
        self.status
    }
}

/// There is nothing to load.
impl WorkerPlan for NgramDrafter {
    fn may_disagree(&self) -> bool {
        false
    }

    fn load(
        self: Box<Self>,
        _: &TargetModel,
        _: &mut dyn FnMut(u64, u64),
    ) -> Result<BoxedDrafter, EngineError> {
        Ok(self)
    }
}
