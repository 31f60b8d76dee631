//! Draft workers for tests. None of them may change an answer, whatever it drafts.

use super::*;

/// Wraps a worker and adds up what it proposed.
pub(super) struct Counted<D> {
    pub(super) inner: D,
    pub(super) proposed: Rc<RefCell<u64>>,
}

impl<D: Drafter> Drafter for Counted<D> {
    fn draft(&mut self, inputs: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError> {
        let trees = self.inner.draft(inputs)?;
        *self.proposed.borrow_mut() += trees.iter().map(|tree| tree.len() as u64).sum::<u64>();
        Ok(trees)
    }

    fn commit(&mut self, commits: &[Commit<'_>], hidden: Option<&()>) -> Result<(), EngineError> {
        self.inner.commit(commits, hidden)
    }

    fn release(&mut self, slot: EngineSlot) {
        self.inner.release(slot);
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn status(&self) -> DraftStatus {
        self.inner.status()
    }
}

/// Drafts by a function of the input. Checks that commits tell the whole story, once.
pub(super) struct Scripted<F> {
    pub(super) width: usize,
    pub(super) script: F,
    pub(super) told: rustc_hash::FxHashMap<EngineSlot, Vec<TokenId>>,
}

impl<F> Scripted<F> {
    pub(super) fn new(width: usize, script: F) -> Self {
        Self { width, script, told: Default::default() }
    }
}

impl<F: Fn(&DraftInput<'_>) -> DraftTree> Drafter for Scripted<F> {
    fn draft(&mut self, inputs: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError> {
        for input in inputs {
            assert_eq!(self.told[&input.slot], input.tokens, "every token was committed before it is a root");
        }
        Ok(inputs.iter().map(|input| (self.script)(input)).collect())
    }

    fn commit(&mut self, commits: &[Commit<'_>], _: Option<&()>) -> Result<(), EngineError> {
        for commit in commits {
            let told = self.told.entry(commit.slot).or_default();
            let known = commit.tokens.len() - commit.new_len;
            assert_eq!(told[..], commit.tokens[..known], "nothing is told twice or left out");
            told.extend(&commit.tokens[known..]);
        }
        Ok(())
    }

    fn release(&mut self, slot: EngineSlot) {
        self.told.remove(&slot);
    }

    fn flush(&mut self) {}

    fn status(&self) -> DraftStatus {
        DraftStatus { num_steps: 1, num_draft_tokens: self.width }
    }
}

fn draw(input: &DraftInput<'_>, token: u32, below: usize) -> usize {
    let last = *input.tokens.last().expect("there is a root");
    (uniform(u64::from(last) + 77, input.tokens.len() as u64, token) * below as f64) as usize
}

/// Random trees of favourites and rarities, duplicates left out. Takes no notice of limits.
pub(super) fn random(input: &DraftInput<'_>) -> DraftTree {
    let mut tree = DraftTree::new();
    for node in 0..draw(input, 99, 16) as u32 {
        let parent = draw(input, 100 + node, tree.len() + 1);
        let token = draw(input, 200 + node, 7) as TokenId;
        _ = tree.push(parent, token);
    }
    tree
}

/// The true continuation with a decoy before it at every level, so that accepted nodes lie apart.
pub(super) fn oracle(truth: &[Vec<TokenId>], input: &DraftInput<'_>, levels: usize) -> DraftTree {
    let mut tree = DraftTree::new();
    let mut parent = 0;
    for &token in rest(truth, input).iter().take(levels) {
        let decoy = (token + 1) % VOCAB as TokenId;
        let off = tree.push(parent, decoy).unwrap();
        tree.push(off, token).unwrap();
        parent = tree.push(parent, token).unwrap();
    }
    tree
}

/// A chain of the true continuation that goes wrong somewhere.
pub(super) fn chain(truth: &[Vec<TokenId>], input: &DraftInput<'_>) -> DraftTree {
    let wrong_at = draw(input, 0, 8);
    let tokens = rest(truth, input).iter().take(7).enumerate();
    DraftTree::chain(tokens.map(|(i, &token)| if i == wrong_at { (token + 3) % 7 } else { token }))
}

/// What the request goes on with. `truth` holds prompts and answers.
fn rest<'t>(truth: &'t [Vec<TokenId>], input: &DraftInput<'_>) -> &'t [TokenId] {
    truth[input.slot.0 as usize].get(input.tokens.len()..).unwrap_or_default()
}
