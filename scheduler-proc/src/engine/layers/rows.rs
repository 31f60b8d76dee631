//! Owns how many rows a packed projection runs at once. Matrix kernels pick their order of sums by the number of
//! rows, so that a token's bits could depend on its batch; the sizes allowed here are those that were seen to agree.

use std::cell::RefCell;

use rustc_hash::FxHashMap;
use tch::{Device, Kind, Tensor};

use crate::engine::{EngineError, shim};

/// The size all others are compared with.
const REFERENCE: i64 = 32;

/// Sizes that stand for all others: if they agree, so does every size from two rows to the largest block.
const PROBED: [i64; 13] = [2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 128, 256];

/// Sizes to choose from where sizes disagree, ascending.
const BLOCKS: [i64; 5] = [16, 32, 64, 128, LARGEST];

/// Rows to run at once at most: no larger size is tried out.
const LARGEST: i64 = 256;

/// How rows are cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RowPolicy {
    /// As they come, at least two: a single row may take another kernel.
    Free,
    /// Into blocks of these sizes only, ascending; the last is filled up.
    Blocks(Vec<i64>),
}

/// Rows to take, and the size to run them at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    pub rows: i64,
    pub size: i64,
}

/// What decides which kernel runs: type, rows and columns of the weight, threads.
type Key = (i32, Vec<i64>, i32);

thread_local! {
    static KNOWN: RefCell<FxHashMap<Key, RowPolicy>> = RefCell::default();
}

impl RowPolicy {
    /// The policy for weights of `size` `[out, in]`, found by trying once per shape.
    pub fn find(kind: Kind, size: Vec<i64>) -> Result<Self, EngineError> {
        let key = (kind as i32, size, tch::get_num_threads());
        if let Some(policy) = KNOWN.with_borrow(|known| known.get(&key).cloned()) {
            return Ok(policy);
        }
        let policy = probe(kind, key.1[0], key.1[1])?;
        tracing::debug!(?key, ?policy, "rows a projection runs at once");
        KNOWN.with_borrow_mut(|known| known.insert(key, policy.clone()));
        Ok(policy)
    }

    /// How to run `rows` rows.
    pub fn cuts(&self, rows: i64) -> Vec<Cut> {
        let mut cuts = Vec::new();
        let mut left = rows;
        while left > 0 {
            let size = match self {
                Self::Free => left.clamp(2, LARGEST),
                Self::Blocks(sizes) => block_for(sizes, left),
            };
            cuts.push(Cut { rows: size.min(left), size });
            left -= size.min(left);
        }
        cuts
    }
}

/// The block to run next: the one that covers all that is left if little of it is filling, else the largest full one.
fn block_for(sizes: &[i64], left: i64) -> i64 {
    let full = sizes.iter().copied().rfind(|&size| size <= left);
    let covering = sizes.iter().copied().find(|&size| size >= left);
    match (full, covering) {
        (Some(_), Some(covering)) if covering <= left + left / 2 => covering,
        (Some(full), _) => full,
        (None, covering) => covering.unwrap_or(REFERENCE),
    }
}

fn probe(kind: Kind, out: i64, input: i64) -> Result<RowPolicy, EngineError> {
    let (x, weight) = cancelling(kind, out, input);
    let packed = shim::linear_pack(&weight)?;
    let run = |from: i64, rows: i64| shim::linear(&x.narrow(0, from, rows), &packed, None);
    let parts = (0..LARGEST / REFERENCE).map(|part| run(part * REFERENCE, REFERENCE));
    let expected = Tensor::cat(&parts.collect::<Result<Vec<_>, _>>()?, 0);
    let agrees = |size: i64| Ok(run(0, size)?.equal(&expected.narrow(0, 0, size)));
    let mut free = true;
    for size in PROBED {
        free = free && agrees(size)?;
    }
    if free {
        return Ok(RowPolicy::Free);
    }
    let mut blocks = Vec::new();
    for size in BLOCKS {
        if size == REFERENCE || agrees(size)? {
            blocks.push(size);
        }
    }
    Ok(RowPolicy::Blocks(blocks))
}

/// Rows and a weight whose products cancel, half against half: what is left is rounding alone, so that any other
/// order of sums shows in nearly every element. With plain random numbers a bfloat16 result hides it.
fn cancelling(kind: Kind, out: i64, input: i64) -> (Tensor, Tensor) {
    let random = |size: [i64; 2]| Tensor::randn(size, (Kind::Float, Device::Cpu)).to_kind(kind);
    let half = (input + 1) / 2;
    let (x, weight) = (random([LARGEST, half]), random([out, half]));
    let negative = -&x;
    let join = |a: &Tensor, b: &Tensor| Tensor::cat(&[a, b], 1).narrow(1, 0, input).contiguous();
    (join(&x, &negative), join(&weight, &weight))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::layers::linear::Linear;

    /// Rows of one batch against the same rows in batches of other sizes, on numbers that hide nothing.
    fn check(kind: Kind, out: i64, input: i64) {
        let (x, weight) = cancelling(kind, out, input);
        let linear = Linear::new(&weight, None).unwrap();
        let x = Tensor::cat(&[&x, &x.narrow(0, 0, 44)], 0);
        let all = linear.forward(&x).unwrap();
        for rows in [1, 2, 3, 4, 7, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100, 128, 200, 256] {
            let part = linear.forward(&x.narrow(0, 300 - rows, rows)).unwrap();
            assert!(part.equal(&all.narrow(0, 300 - rows, rows)), "{kind:?} {out}x{input}, {rows} rows");
        }
    }

    #[test]
    fn rows_do_not_depend_on_their_number() {
        let shapes = [(960, 576), (576, 576), (3072, 576), (576, 1536), (2048, 2048), (128, 64), (112, 48)];
        for (out, input) in shapes {
            check(Kind::Float, out, input);
            if shim::cpu_has_bf16() {
                check(Kind::BFloat16, out, input);
            }
        }
    }

    #[test]
    fn blocks_cover_all_rows_with_little_filling() {
        let check = |sizes: &[i64], rows: i64, expected: &[(i64, i64)]| {
            let cuts = RowPolicy::Blocks(sizes.to_vec()).cuts(rows);
            let cuts: Vec<(i64, i64)> = cuts.iter().map(|cut| (cut.rows, cut.size)).collect();
            assert_eq!(cuts, expected, "{rows} rows in {sizes:?}");
        };
        check(&[32], 1, &[(1, 32)]);
        check(&[32], 70, &[(32, 32), (32, 32), (6, 32)]);
        check(&[16, 32, 256], 3, &[(3, 16)]);
        check(&[16, 32, 256], 20, &[(16, 16), (4, 16)]);
        check(&[16, 32, 256], 24, &[(24, 32)]);
        check(&[16, 32, 256], 512, &[(256, 256), (256, 256)]);
        check(&[16, 32, 256], 300, &[(256, 256), (32, 32), (12, 16)]);
        check(&[32, 64], 0, &[]);
    }

    #[test]
    fn free_rows_run_as_they_come_but_never_alone() {
        assert_eq!(RowPolicy::Free.cuts(1), [Cut { rows: 1, size: 2 }]);
        assert_eq!(RowPolicy::Free.cuts(77), [Cut { rows: 77, size: 77 }]);
        assert_eq!(RowPolicy::Free.cuts(257), [Cut { rows: 256, size: 256 }, Cut { rows: 1, size: 2 }]);
    }
}
