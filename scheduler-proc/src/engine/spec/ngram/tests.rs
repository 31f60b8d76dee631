//! SGLang's `test_ngram_corpus.py`, what it lists beyond, and random operations on the trie.

use super::*;
use crate::batch::RowParams;
use crate::engine::spec::DraftDraw;
use crate::engine::spec::tree::Parent;
use proptest::prelude::*;
use proto::SamplingParams;

const WIDTH: usize = 8;

fn config(match_type: NgramMatchType, max_trie_depth: u32, capacity: u64) -> NgramConfig {
    NgramConfig { min_bfs_breadth: 1, max_bfs_breadth: 8, match_type, max_trie_depth, capacity }
}

fn drafter(match_type: NgramMatchType) -> NgramDrafter {
    NgramDrafter::new(&config(match_type, 12, 10_000), WIDTH, 1)
}

const NO_LIMIT: DraftLimit = DraftLimit { enabled: true, nodes: usize::MAX, depth: usize::MAX };

fn guess(drafter: &NgramDrafter, context: &[TokenId]) -> DraftTree {
    drafter.guess(context, NO_LIMIT)
}

/// The form SGLang submits: the root, the nodes, then nodes of token 0 under the root, with the ancestor mask.
fn padded(context: &[TokenId], tree: &DraftTree) -> (Vec<TokenId>, Vec<[u8; WIDTH]>) {
    let mut tokens = vec![*context.last().unwrap()];
    tokens.extend(tree.tokens());
    tokens.resize(WIDTH, 0);
    let mut mask = vec![[0; WIDTH]; WIDTH];
    for (index, row) in mask.iter_mut().enumerate() {
        row[index] = 1;
        row[0] = 1;
        let mut at: Parent = if index <= tree.len() { index } else { 0 };
        while at > 0 {
            row[at] = 1;
            at = tree.parents()[at - 1];
        }
    }
    (tokens, mask)
}

fn two_sequences(match_type: NgramMatchType) -> NgramDrafter {
    let mut drafter = drafter(match_type);
    drafter.learn(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    drafter.learn(&[1, 2, 3, 44, 55, 66, 77, 88, 99, 100]);
    drafter
}

fn rows(text: &[&str]) -> Vec<[u8; WIDTH]> {
    text.iter().map(|row| std::array::from_fn(|i| row.as_bytes()[i] - b'0')).collect()
}

#[test]
fn golden_vectors() {
    let check = |match_type, context: &[TokenId], expect: [TokenId; WIDTH], mask: &[&str]| {
        let tree = guess(&two_sequences(match_type), context);
        assert_eq!(padded(context, &tree), (expect.to_vec(), rows(mask)), "{match_type:?} {context:?}");
    };
    let alone =
        ["10000000", "11000000", "10100000", "10010000", "10001000", "10000100", "10000010", "10000001"];
    let chain =
        ["10000000", "11000000", "11100000", "11110000", "11111000", "11111100", "11111110", "10000001"];
    for match_type in [NgramMatchType::Bfs, NgramMatchType::Prob] {
        check(match_type, &[3, 44], [44, 55, 66, 77, 88, 99, 100, 0], &chain);
        check(match_type, &[3, 6, 999], [999, 0, 0, 0, 0, 0, 0, 0], &alone);
    }
    check(
        NgramMatchType::Bfs,
        &[1, 2, 3],
        [3, 4, 44, 5, 55, 6, 66, 77],
        &["10000000", "11000000", "10100000", "11010000", "10101000", "11010100", "10101010", "10101011"],
    );
    check(
        NgramMatchType::Prob,
        &[1, 2, 3],
        [3, 44, 4, 55, 5, 66, 6, 7],
        &["10000000", "11000000", "10100000", "11010000", "10101000", "11010100", "10101010", "10101011"],
    );
}

#[test]
fn nothing_is_padded_in_production() {
    assert_eq!(guess(&two_sequences(NgramMatchType::Bfs), &[3, 44]).tokens(), [55, 66, 77, 88, 99, 100]);
    assert!(guess(&two_sequences(NgramMatchType::Bfs), &[3, 6, 999]).is_empty());
}

#[test]
fn flush_empties() {
    for match_type in [NgramMatchType::Bfs, NgramMatchType::Prob] {
        let mut drafter = two_sequences(match_type);
        Drafter::<()>::flush(&mut drafter);
        assert_eq!(drafter.trie.len(), 0);
        assert!(guess(&drafter, &[1, 2, 3]).is_empty());
        drafter.learn(&[7, 8, 9]);
        assert_eq!(guess(&drafter, &[7]).tokens(), [8, 9]);
        drafter.trie.check();
    }
}

#[test]
fn sequences_accumulate() {
    let mut drafter = drafter(NgramMatchType::Bfs);
    for start in [10, 20, 30] {
        drafter.learn(&[start, start + 1, start + 2]);
    }
    for start in [10, 20, 30] {
        assert_eq!(guess(&drafter, &[start]).tokens(), [start + 1, start + 2]);
    }
}

#[test]
fn eviction_keeps_the_recent_and_drops_the_old() {
    for capacity in [150, 200, 500] {
        for match_type in [NgramMatchType::Bfs, NgramMatchType::Prob] {
            let mut drafter = NgramDrafter::new(&config(match_type, 6, capacity), WIDTH, 1);
            for sequence in 0..50 {
                let tokens: Vec<_> = (0..12).map(|i| sequence * 100 + i).collect();
                drafter.learn(&tokens);
                drafter.trie.check();
            }
            assert_eq!(drafter.trie.len() as u64, capacity);
            assert!(guess(&drafter, &[0, 1, 2]).is_empty(), "the oldest is gone");
            let recent = guess(&drafter, &[4900, 4901, 4902]);
            assert_eq!(recent.tokens()[..3], [4903, 4904, 4905]);
        }
    }
}

#[test]
fn what_is_used_again_survives_eviction() {
    let mut drafter = NgramDrafter::new(&config(NgramMatchType::Bfs, 4, 120), WIDTH, 1);
    for sequence in 1..60 {
        drafter.learn(&[7, 8, 9]);
        drafter.learn(&(0..10).map(|i| sequence * 100 + i).collect::<Vec<_>>());
    }
    assert_eq!(guess(&drafter, &[7]).tokens(), [8, 9]);
}

#[test]
fn a_trie_smaller_than_one_path_still_works() {
    for capacity in 0..8 {
        let mut drafter = NgramDrafter::new(&config(NgramMatchType::Prob, 12, capacity), WIDTH, 1);
        drafter.learn(&(0..100).map(|i| i % 13).collect::<Vec<_>>());
        drafter.trie.check();
        guess(&drafter, &[1, 2, 3]);
    }
}

#[test]
fn repetition_promotes_by_probability() {
    let mut drafter = drafter(NgramMatchType::Prob);
    drafter.learn(&[1, 2, 10]);
    (0..10).for_each(|_| drafter.learn(&[1, 2, 20]));
    drafter.learn(&[1, 2, 10]);
    let one = drafter.guess(&[1, 2], DraftLimit { nodes: 1, ..NO_LIMIT });
    assert_eq!(one.tokens(), [20]);
}

#[test]
fn breadth_first_prefers_the_most_recent() {
    let mut drafter = drafter(NgramMatchType::Bfs);
    (0..10).for_each(|_| drafter.learn(&[1, 2, 20]));
    drafter.learn(&[1, 2, 10]);
    let one = drafter.guess(&[1, 2], DraftLimit { nodes: 1, ..NO_LIMIT });
    assert_eq!(one.tokens(), [10]);
}

#[test]
fn every_suffix_contributes() {
    for match_type in [NgramMatchType::Bfs, NgramMatchType::Prob] {
        let mut drafter = drafter(match_type);
        drafter.learn(&[1, 2, 3, 50]);
        drafter.learn(&[9, 2, 3, 60]);
        drafter.learn(&[8, 7, 3, 70]);
        let mut tokens = guess(&drafter, &[1, 2, 3]).tokens().to_vec();
        tokens.sort_unstable();
        assert_eq!(tokens, [50, 60, 70]);
    }
}

#[test]
fn a_context_longer_than_the_trie_matches_by_its_end() {
    let mut drafter = NgramDrafter::new(&config(NgramMatchType::Bfs, 4, 1000), WIDTH, 1);
    drafter.learn(&(0..40).collect::<Vec<_>>());
    let context: Vec<_> = (500..600).chain(17..20).collect();
    assert_eq!(guess(&drafter, &context).tokens(), [20, 21, 22]);
}

#[test]
fn limits_are_kept_and_spent_on_breadth() {
    for match_type in [NgramMatchType::Bfs, NgramMatchType::Prob] {
        let drafter = two_sequences(match_type);
        for nodes in 0..9 {
            for depth in 0..9 {
                let tree = drafter.guess(&[1, 2, 3], DraftLimit { enabled: true, nodes, depth });
                assert!(tree.len() <= nodes.min(WIDTH - 1));
                assert!(tree.nodes_at().len() <= depth);
                assert_eq!(tree.len(), nodes.min(2 * depth).min(WIDTH - 1), "{nodes} {depth}");
            }
        }
    }
}

fn params() -> RowParams {
    RowParams { sampling: SamplingParams::default(), terminators: Vec::new(), logprobs: None }
}

fn input<'a>(slot: EngineSlot, tokens: &'a [TokenId], params: &'a RowParams) -> DraftInput<'a> {
    DraftInput {
        slot,
        tokens,
        prompt_len: tokens.len(),
        params,
        kv_slots: &[],
        limit: NO_LIMIT,
        draw: DraftDraw::Shared,
    }
}

fn draft(drafter: &mut NgramDrafter, slot: EngineSlot, tokens: &[TokenId]) -> DraftTree {
    let params = params();
    let inputs = [input(slot, tokens, &params)];
    Drafter::<()>::draft(drafter, &inputs).unwrap().remove(0)
}

fn commit(drafter: &mut NgramDrafter, slot: EngineSlot, tokens: &[TokenId], new_len: usize) {
    let commit = Commit {
        slot,
        tokens,
        new_len,
        kv_slots: &[],
        computed: 0..0,
        hidden_rows: Vec::new(),
        shares: false,
    };
    Drafter::<()>::commit(drafter, &[commit], None).unwrap();
}

#[test]
fn each_occurrence_counts_once_however_it_is_committed() {
    let tokens: Vec<_> = (0..60u32).map(|i| i * i % 7).collect();
    let mut whole = drafter(NgramMatchType::Prob);
    whole.learn(&tokens);
    let mut pieces = drafter(NgramMatchType::Prob);
    let mut end = 0;
    for size in [20, 1, 1, 5, 3, 12, 1, 17] {
        end += size;
        commit(&mut pieces, EngineSlot(3), &tokens[..end], size);
    }
    assert_eq!(end, tokens.len());
    assert_eq!(whole.trie.len(), pieces.trie.len());
    for at in 1..tokens.len() {
        assert_eq!(guess(&whole, &tokens[..at]), guess(&pieces, &tokens[..at]));
    }
}

#[test]
fn a_released_or_rewound_request_is_looked_up_anew() {
    let mut drafter = drafter(NgramMatchType::Bfs);
    drafter.learn(&[1, 2, 3, 4, 5]);
    let slot = EngineSlot(0);
    commit(&mut drafter, slot, &[9, 1, 2], 3);
    assert_eq!(draft(&mut drafter, slot, &[9, 1, 2]).tokens(), [3, 4, 5]);
    assert_eq!(draft(&mut drafter, slot, &[9, 1, 2, 3]).tokens(), [4, 5], "not what was committed");
    Drafter::<()>::release(&mut drafter, slot);
    assert_eq!(draft(&mut drafter, slot, &[4]).tokens(), [5]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// After any run of commits, also under eviction: the trie is sound, and a request's remembered anchors
    /// draft what a fresh look-up drafts.
    #[test]
    fn remembered_equals_looked_up(
        frequency in any::<bool>(),
        depth in 1u32..6,
        capacity in 0u64..120,
        steps in prop::collection::vec((0u32..3, prop::collection::vec(0u32..5, 1..6)), 1..60),
    ) {
        let match_type = if frequency { NgramMatchType::Prob } else { NgramMatchType::Bfs };
        let mut drafter = NgramDrafter::new(&config(match_type, depth, capacity), WIDTH, 1);
        let mut texts = vec![Vec::new(); 3];
        for (slot, new) in steps {
            let text = &mut texts[slot as usize];
            text.extend(&new);
            commit(&mut drafter, EngineSlot(slot), text, new.len());
            drafter.trie.check();
            for (slot, text) in (0..).zip(&texts).filter(|(_, text)| !text.is_empty()) {
                let fresh = guess(&drafter, text);
                prop_assert_eq!(draft(&mut drafter, EngineSlot(slot), text), fresh);
            }
        }
    }
}

/// Prints microseconds per step of 32 rows: `cargo test --release -p scheduler-proc ngram_speed -- --ignored
/// --nocapture`.
#[test]
#[ignore = "a measurement"]
fn ngram_speed() {
    use crate::engine::rng::uniform;
    const ROWS: u32 = 32;
    for match_type in [NgramMatchType::Bfs, NgramMatchType::Prob] {
        let config = NgramConfig { max_bfs_breadth: 10, ..config(match_type, 18, 10_000_000) };
        let mut drafter = NgramDrafter::new(&config, 12, 1);
        // Each text walks a ring of words, now and then jumping: much is seen again.
        let word = |row: u32, at: u64| {
            let jump = (uniform(u64::from(row), at / 40, 0) * 4000.0) as u32;
            (jump + at as u32 % 40) % 5000
        };
        let mut texts: Vec<Vec<_>> =
            (0..ROWS).map(|row| (0..1000).map(|at| word(row, at)).collect()).collect();
        let start = std::time::Instant::now();
        for (slot, text) in (0..).zip(&texts) {
            commit(&mut drafter, EngineSlot(slot), text, text.len());
        }
        let prompts = start.elapsed();
        let params = params();
        let (mut drafting, mut committing, mut nodes) = (0.0, 0.0, 0);
        let steps = 200;
        for at in 1000..1000 + steps {
            let inputs: Vec<_> =
                (0..).zip(&texts).map(|(slot, text)| input(EngineSlot(slot), text, &params)).collect();
            let start = std::time::Instant::now();
            nodes += Drafter::<()>::draft(&mut drafter, &inputs)
                .unwrap()
                .iter()
                .map(DraftTree::len)
                .sum::<usize>();
            drafting += start.elapsed().as_secs_f64();
            (0..).zip(&mut texts).for_each(|(row, text)| text.push(word(row, at)));
            let start = std::time::Instant::now();
            for (slot, text) in (0..).zip(&texts) {
                commit(&mut drafter, EngineSlot(slot), text, 1);
            }
            committing += start.elapsed().as_secs_f64();
        }
        let per_step = |seconds: f64| seconds / steps as f64 * 1e6;
        println!(
            "{match_type:?}: draft {:.0} us, commit {:.0} us, {} nodes a step; prompts {:.2} us a token; {} nodes",
            per_step(drafting),
            per_step(committing),
            nodes / steps as usize,
            prompts.as_secs_f64() * 1e6 / 32_000.0,
            drafter.trie.len(),
        );
    }
}
