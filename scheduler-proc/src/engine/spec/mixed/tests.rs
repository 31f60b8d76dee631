//! Which worker drafts for a row, and that both hear of everything.

use proto::{NgramConfig, NgramMatchType, SamplingParams, TokenId};

use super::*;
use crate::batch::{DraftLimit, DraftSource, RowParams};
use crate::engine::spec::DraftDraw;

/// What the model drafts, whatever it is asked.
const MODEL: [TokenId; 2] = [90, 91];
const LIMIT: DraftLimit = DraftLimit { enabled: true, nodes: 4, depth: 4 };

struct Model;

impl Drafter for Model {
    fn draft(&mut self, inputs: &[DraftInput<'_>]) -> Result<Vec<DraftTree>, EngineError> {
        Ok(inputs.iter().map(|_| DraftTree::chain(MODEL)).collect())
    }

    fn commit(&mut self, _: &[Commit<'_>], _: Option<&()>) -> Result<(), EngineError> {
        Ok(())
    }

    fn release(&mut self, _: EngineSlot) {}

    fn flush(&mut self) {}

    fn status(&self) -> DraftStatus {
        DraftStatus { num_steps: 4, num_draft_tokens: 5 }
    }
}

/// Knows 1 2 3 … 9.
fn drafter() -> MixedDrafter<()> {
    let config = NgramConfig {
        min_bfs_breadth: 1,
        max_bfs_breadth: 1,
        match_type: NgramMatchType::Bfs,
        max_trie_depth: 12,
        capacity: 10_000,
    };
    let mut ngram = NgramDrafter::new(&config, 5, 4).from_matches_of(3);
    ngram.learn(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    MixedDrafter::new(ngram, Box::new(Model))
}

fn draft(drafter: &mut MixedDrafter<()>, rows: &[&[TokenId]]) -> Vec<DraftTree> {
    let params = RowParams { sampling: SamplingParams::default(), terminators: Vec::new(), logprobs: None };
    let input = |(slot, tokens)| DraftInput {
        slot: EngineSlot(slot),
        tokens,
        prompt_len: 1,
        params: &params,
        kv_slots: &[],
        limit: LIMIT,
        draw: DraftDraw::Shared,
    };
    drafter.draft(&(0..).zip(rows.iter().copied()).map(input).collect::<Vec<_>>()).unwrap()
}

fn commit(drafter: &mut MixedDrafter<()>, slot: u32, tokens: &[TokenId], new_len: usize) {
    let commit = Commit {
        slot: EngineSlot(slot),
        tokens,
        new_len,
        kv_slots: &[],
        computed: 0..0,
        hidden_rows: Vec::new(),
        shares: false,
    };
    drafter.commit(&[commit], Some(&())).unwrap();
}

#[test]
fn each_row_is_drafted_by_whoever_knows_it() {
    let mut drafter = drafter();
    let rows: [&[TokenId]; 4] = [&[50, 51], &[7, 2, 3, 4], &[50, 3, 4], &[4, 5, 6]];
    let trees = draft(&mut drafter, &rows);
    let made: Vec<_> = trees.iter().map(|tree| (tree.tokens(), tree.source())).collect();
    assert_eq!(
        made,
        [
            (&MODEL[..], DraftSource::Model),
            (&[5, 6, 7, 8], DraftSource::Ngram),
            // Two tokens that were seen before are too few.
            (&MODEL[..], DraftSource::Model),
            (&[7, 8, 9], DraftSource::Ngram),
        ]
    );
}

/// What is remembered gives way where it is never right, and the model hears of the tokens all the same.
#[test]
fn a_trie_that_is_never_right_gives_way_to_the_model() {
    let mut drafter = drafter();
    let mut by_trie = 0;
    for step in 0..100u32 {
        let tokens = [60 + step, 3, 4, 5];
        let tree = draft(&mut drafter, &[&tokens, &[70 + step]]).remove(0);
        by_trie += usize::from(tree.source() == DraftSource::Ngram);
        commit(&mut drafter, 0, &[60 + step, 3, 4, 5, 80 + step], 1);
        commit(&mut drafter, 1, &[70 + step, 90, 91, 1], 3);
        drafter.release(EngineSlot(0));
        drafter.release(EngineSlot(1));
    }
    assert!((2..8).contains(&by_trie), "{by_trie} of 100");
}

#[test]
fn nothing_is_remembered_across_a_flush() {
    let mut drafter = drafter();
    drafter.flush();
    assert_eq!(draft(&mut drafter, &[&[1, 2, 3]])[0].tokens(), MODEL);
}
