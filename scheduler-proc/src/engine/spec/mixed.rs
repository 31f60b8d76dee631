//! Owns the mixed draft worker: the n-gram trie drafts where what it remembers is worth it, a model drafts the rest.
//!
//! Row by row, so a batch may be drafted by both. The model hears of every committed token, whoever drafted it: like
//! after a plain step it computes its own rows of them when it drafts again, so its state is the same in the end.

mod judge;
#[cfg(test)]
mod tests;

use std::time::Duration;

use rustc_hash::FxHashMap;
use tch::Tensor;

use self::judge::{Guess, Judge};
use super::ngram::NgramDrafter;
use super::plan::{BoxedDrafter, DraftMemory, WorkerPlan};
use super::tree::DraftTree;
use super::{Commit, DraftInput, Drafter};
use crate::batch::EngineSlot;
use crate::engine::model::{Features, TargetModel};
use crate::engine::{DraftStatus, EngineError};

/// The worker before its model is loaded.
pub struct MixedPlan {
    pub model: Box<dyn WorkerPlan>,
    pub ngram: NgramDrafter,
}

impl WorkerPlan for MixedPlan {
    fn features(&self) -> Features {
        self.model.features()
    }

    fn memory(&self) -> DraftMemory {
        self.model.memory()
    }

    fn may_disagree(&self) -> bool {
        self.model.may_disagree()
    }

    fn load(
        self: Box<Self>,
        target: &TargetModel,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<BoxedDrafter, EngineError> {
        let model: Box<dyn Drafter<Option<Tensor>>> = self.model.load(target, progress)?;
        Ok(Box::new(MixedDrafter::new(self.ngram, model)))
    }
}

/// `H` as in [`Drafter`].
pub struct MixedDrafter<H> {
    ngram: NgramDrafter,
    model: Box<dyn Drafter<H>>,
    judge: Judge,
    /// Who drafted for a request in the step that is not committed yet.
    drafted: FxHashMap<EngineSlot, Guess>,
}

impl<H> MixedDrafter<H> {
    pub fn new(ngram: NgramDrafter, model: Box<dyn Drafter<H>>) -> Self {
        Self { ngram, model, judge: Judge::default(), drafted: FxHashMap::default() }
    }

    /// The trie's draft, where it is to be tried.
    fn remembered(&mut self, input: &DraftInput<'_>) -> Option<DraftTree> {
        let recall = self.ngram.recall(input)?;
        self.judge.prefers_trie(recall.match_len).then(|| {
            self.drafted.insert(input.slot, Guess::Trie { match_len: recall.match_len });
            recall.tree
        })
    }

    /// Takes in what became of the last drafts.
    fn learn(&mut self, commits: &[Commit<'_>]) {
        for commit in commits {
            if let Some(guess) = self.drafted.remove(&commit.slot) {
                // Behind the accepted drafts there is one token of the target's own.
                self.judge.learn(guess, commit.new_len.saturating_sub(1));
            }
        }
    }
}

impl<H> Drafter<H> for MixedDrafter<H> {
    fn draft(&mut self, inputs: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError> {
        let mut trees: Vec<_> = inputs.iter().map(|input| self.remembered(input)).collect();
        let open: Vec<_> = (0..inputs.len()).filter(|&index| trees[index].is_none()).collect();
        if !open.is_empty() {
            let asked: Vec<_> = open.iter().map(|&index| inputs[index].clone()).collect();
            for (index, tree) in open.into_iter().zip(self.model.draft(&asked)?) {
                self.drafted.insert(inputs[index].slot, Guess::Model);
                trees[index] = Some(tree);
            }
        }
        Ok(trees.into_iter().flatten().collect())
    }

    fn commit(&mut self, commits: &[Commit<'_>], hidden: Option<&H>) -> Result<(), EngineError> {
        self.learn(commits);
        Drafter::<H>::commit(&mut self.ngram, commits, hidden)?;
        self.model.commit(commits, hidden)
    }

    fn release(&mut self, slot: EngineSlot) {
        self.drafted.remove(&slot);
        Drafter::<H>::release(&mut self.ngram, slot);
        self.model.release(slot);
    }

    fn flush(&mut self) {
        self.judge = Judge::default();
        Drafter::<H>::flush(&mut self.ngram);
        self.model.flush();
    }

    fn status(&self) -> DraftStatus {
        self.model.status()
    }

    fn caught_up(&self) -> Duration {
        self.model.caught_up()
    }
}
