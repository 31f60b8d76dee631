//! A row's logits are the same bits however its tokens come and whoever shares the batch.

use super::*;

const CASES: [&str; 6] =
    ["llama-tiny", "mistral-tiny-swa", "qwen2-tiny-tied", "qwen3-tiny", "qwen3-moe-tiny", "gemma3-text-tiny"];

fn tokens(count: usize, salt: u32) -> Vec<TokenId> {
    (0..count as u32).map(|index| (index * 97 + salt * 131 + 5) % 512).collect()
}

/// Every way to run the same 75 tokens.
fn check_ways(model: &mut TargetModel, what: &str) {
    let sequence = tokens(75, 0);
    let alone = run_chunks(model, &sequence, &scattered_slots(75, 0), 75);
    for chunk in [1, 2, 5, 16, 33, 64] {
        let chunked = run_chunks(model, &sequence, &scattered_slots(75, 1), chunk);
        assert_eq!(alone, chunked, "{what}: in chunks of {chunk}");
    }
}

/// The same tokens beside others of many lengths, some extending, some decoding.
fn check_batch(model: &mut TargetModel, what: &str) {
    let sequence = tokens(40, 0);
    let slots = scattered_slots(40, 2);
    let alone = run_chunks(model, &sequence, &slots, 40);
    let others: Vec<(Vec<TokenId>, Vec<KvSlot>)> = (1..6)
        .map(|salt| (tokens(salt as usize * 13, salt), (0..80).map(|slot| 1500 + salt * 80 + slot).collect()))
        .collect();
    let mut batch: Vec<ForwardRow<'_>> =
        others.iter().map(|(tokens, slots)| chain(tokens, 0, slots)).collect();
    batch.insert(2, ForwardRow { logits: LogitRows::Last, ..chain(&sequence[39..], 39, &slots) });
    let mixed = model.forward(&batch).unwrap();
    let before: usize = others[..2].iter().map(|(tokens, _)| tokens.len()).sum();
    assert_eq!(mixed.row(before), &alone[39 * 512..], "{what}: in a batch");
}

/// A tree below a context of every alignment: each path is a chain.
fn check_tree(model: &mut TargetModel, what: &str, context_len: usize) {
    let parents = [0, 0, 0, 1, 1, 2, 3, 3, 6, 8, 9, 10, 0, 12, 13, 14, 15, 16, 17, 5];
    let context = tokens(context_len, 3);
    let nodes = tokens(parents.len(), 4);
    let slots = scattered_slots(context_len + nodes.len(), 3);
    if !context.is_empty() {
        model.forward(&[chain(&context, 0, &slots)]).unwrap();
    }
    let row = ForwardRow { parents: Some(&parents), ..chain(&nodes, context_len, &slots) };
    let tree = model.forward(&[row]).unwrap();
    for node in 0..nodes.len() {
        let mut path = vec![nodes[node]];
        let mut at = node;
        while at != 0 {
            at = parents[at];
            path.push(nodes[at]);
        }
        path.reverse();
        let sequence: Vec<TokenId> = context.iter().chain(&path).copied().collect();
        let other = scattered_slots(sequence.len(), 1);
        let plain = run_chunks(model, &sequence, &other, sequence.len());
        let last = &plain[(sequence.len() - 1) * 512..];
        assert_eq!(tree.row(node), last, "{what}: node {node} after {context_len} tokens");
    }
}

#[test]
fn bits_do_not_depend_on_the_way() {
    for case in CASES {
        for dtype in [Dtype::Float32, Dtype::Bfloat16] {
            let mut model = tiny(case, dtype);
            let what = format!("{case} in {dtype:?}");
            check_ways(&mut model, &what);
            check_batch(&mut model, &what);
            for context_len in [0, 1, 15, 31, 32, 50] {
                check_tree(&mut model, &what, context_len);
            }
        }
    }
}

#[test]
fn moved_slots_go_on_as_if_nothing_happened() {
    let mut model = tiny("llama-tiny", Dtype::Float32);
    let sequence = tokens(20, 0);
    let (from, to) = (scattered_slots(20, 0), (200..220).collect::<Vec<KvSlot>>());
    let expected = run_chunks(&mut model, &sequence, &from, 20);
    let moves: Vec<(KvSlot, KvSlot)> = from[..19].iter().copied().zip(to.iter().copied()).collect();
    model.move_kv(&moves);
    let last = model.forward(&[chain(&sequence[19..], 19, &to)]).unwrap();
    assert_eq!(last.values, &expected[19 * 512..]);
}
