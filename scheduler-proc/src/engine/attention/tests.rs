//! The kernels against plain tensor operations, and against themselves: bits must not depend on the way.

use proto::TokenId;
use tch::{Device, Kind};

use super::cpu::CpuAttention;
use super::torch::TorchAttention;
use super::*;
use crate::engine::kv::{KvPool, KvShape};
use crate::engine::layers::norm::RmsNorm;
use crate::engine::layers::rope::{HeadNorms, RopeScaling, RopeTables};
use crate::engine::target::{ForwardRow, LogitRows};

const SLOTS: usize = 512;

#[derive(Debug, Clone, Copy)]
struct Case {
    head_dim: i64,
    kv_heads: i64,
    group: i64,
    window: Option<usize>,
    kind: Kind,
}

/// A request of random queries, its keys and values scattered over a pool.
struct Request {
    case: Case,
    kv: KvPool,
    /// One per position.
    q: Tensor,
    slots: Vec<u32>,
}

fn cases() -> Vec<Case> {
    let shapes = [(64, 3, 3), (128, 1, 8), (20, 2, 2), (16, 2, 1), (80, 1, 5)];
    let mut cases = Vec::new();
    for (head_dim, kv_heads, group) in shapes {
        for window in [None, Some(1), Some(12), Some(40)] {
            for kind in [Kind::Float, Kind::BFloat16] {
                cases.push(Case { head_dim, kv_heads, group, window, kind });
            }
        }
    }
    cases
}

impl Request {
    fn new(case: Case, length: usize) -> Self {
        let shape = KvShape { layers: 1, kv_heads: case.kv_heads as usize, head_dim: case.head_dim as usize };
        let kv = KvPool::new(shape, SLOTS, case.kind, Device::Cpu).unwrap();
        for tensor in [&kv.layer(0).k, &kv.layer(0).v] {
            tensor.shallow_clone().copy_(&Tensor::randn(tensor.size(), (Kind::Float, Device::Cpu)));
        }
        let q = Tensor::randn(
            [length as i64, case.kv_heads * case.group, case.head_dim],
            (Kind::Float, Device::Cpu),
        );
        let slots = (0..length).map(|position| (position * 37 + 11) as u32 % SLOTS as u32).collect();
        Self { case, kv, q: (q * 2).to_kind(case.kind), slots }
    }

    fn plan(&self, from: usize, to: usize) -> AttentionPlan {
        let tokens: Vec<TokenId> = vec![0; to - from];
        AttentionPlan::new(&[row(&tokens, from, &self.slots, None)])
    }

    fn attend(&self, backend: &dyn AttentionBackend, plan: &AttentionPlan, q: &Tensor) -> Tensor {
        backend.attend(q, self.kv.layer(0), plan, self.case.window).unwrap()
    }

    fn attend_range(&self, backend: &dyn AttentionBackend, from: usize, to: usize) -> Tensor {
        let q = self.q.narrow(0, from as i64, (to - from) as i64);
        self.attend(backend, &self.plan(from, to), &q)
    }
}

fn row<'a>(
    tokens: &'a [TokenId],
    context_len: usize,
    kv_slots: &'a [u32],
    parents: Option<&'a [usize]>,
) -> ForwardRow<'a> {
    ForwardRow { tokens, context_len, kv_slots, parents, logits: LogitRows::None }
}

#[test]
fn kernels_agree_with_plain_operations() {
    for case in cases() {
        let request = Request::new(case, 150);
        for (from, to) in [(0, 150), (100, 150), (149, 150)] {
            let kernel = request.attend_range(&CpuAttention, from, to).to_kind(Kind::Float);
            let plain = request.attend_range(&TorchAttention, from, to).to_kind(Kind::Float);
            let tolerance = if case.kind == Kind::Float { 1e-5 } else { 1e-2 };
            let difference = f64::try_from((kernel - plain).abs().max()).unwrap();
            assert!(difference < tolerance, "{case:?} {from}..{to}: {difference:e}");
        }
    }
}

#[test]
fn a_row_is_the_same_in_any_chunk() {
    for case in cases() {
        let request = Request::new(case, 150);
        let whole = request.attend_range(&CpuAttention, 0, 150);
        for size in [1, 7, 16, 33] {
            let parts: Vec<Tensor> = (0..150)
                .step_by(size)
                .map(|from| request.attend_range(&CpuAttention, from, (from + size).min(150)))
                .collect();
            assert!(Tensor::cat(&parts, 0).equal(&whole), "{case:?} in chunks of {size}");
        }
    }
}

#[test]
fn a_path_of_a_tree_is_the_same_as_a_chain() {
    // Two interleaved branches below the root: nodes 1, 3, 5, … and 2, 4, 6, ….
    let parents: Vec<usize> = (0..35usize).map(|node| node.saturating_sub(2)).collect();
    for case in cases() {
        for context_len in [0, 20, 32, 63, 70] {
            let request = Request::new(case, context_len + parents.len());
            let tokens = vec![0; parents.len()];
            let plan = AttentionPlan::new(&[row(&tokens, context_len, &request.slots, Some(&parents))]);
            let q = request.q.narrow(0, context_len as i64, parents.len() as i64);
            let tree = request.attend(&CpuAttention, &plan, &q);
            let branch: Vec<usize> = std::iter::once(0).chain((1..parents.len()).step_by(2)).collect();
            let mut slots = request.slots[..context_len].to_vec();
            slots.extend(branch.iter().map(|node| request.slots[context_len + node]));
            let plan = AttentionPlan::new(&[row(&tokens[..branch.len()], context_len, &slots, None)]);
            let nodes: Vec<i64> = branch.iter().map(|&node| node as i64).collect();
            let nodes = Tensor::from_slice(&nodes);
            let chain = request.attend(&CpuAttention, &plan, &q.index_select(0, &nodes));
            assert!(tree.index_select(0, &nodes).equal(&chain), "{case:?} after {context_len}");
        }
    }
}

#[test]
fn a_row_is_the_same_beside_any_others() {
    for case in cases() {
        let request = Request::new(case, 150);
        let alone = request.attend_range(&CpuAttention, 90, 91);
        let tokens = vec![0; 40];
        let plan = AttentionPlan::new(&[
            row(&tokens[..1], 149, &request.slots, None),
            row(&tokens[..1], 90, &request.slots, None),
            row(&tokens, 3, &request.slots, None),
        ]);
        let rows: Vec<i64> = [149, 90].into_iter().chain(3..43).collect();
        let batch =
            request.attend(&CpuAttention, &plan, &request.q.index_select(0, &Tensor::from_slice(&rows)));
        assert!(batch.narrow(0, 1, 1).equal(&alone), "{case:?}");
    }
}

/// A token of a block sees what the last one does, whatever the block's place and length.
#[test]
fn a_block_sees_its_context_and_all_of_itself() {
    for case in cases().into_iter().filter(|case| case.window.is_none()) {
        for (context_len, length) in [(0, 5), (31, 8), (64, 16), (70, 40)] {
            let end = context_len + length;
            let request = Request::new(case, end);
            let tokens = vec![0; length];
            let plan = AttentionPlan::of_blocks(&[row(&tokens, context_len, &request.slots, None)], None);
            let q = request.q.narrow(0, context_len as i64, length as i64);
            let block = request.attend(&CpuAttention, &plan, &q);
            for token in 0..length as i64 {
                let last = request.attend(&CpuAttention, &request.plan(end - 1, end), &q.narrow(0, token, 1));
                assert!(
                    block.narrow(0, token, 1).equal(&last),
                    "{case:?}: {token} of {context_len}+{length}"
                );
            }
        }
    }
}

#[test]
fn a_window_over_a_block_reaches_both_ways() {
    let case = Case { head_dim: 20, kv_heads: 2, group: 2, window: None, kind: Kind::Float };
    let (context_len, length, window) = (40, 20, 12);
    let request = Request::new(case, context_len + length);
    let tokens = vec![0; length];
    let plan = AttentionPlan::of_blocks(&[row(&tokens, context_len, &request.slots, None)], Some(window));
    let q = request.q.narrow(0, context_len as i64, length as i64);
    for backend in [&CpuAttention as &dyn AttentionBackend, &TorchAttention] {
        let block = request.attend(backend, &plan, &q);
        for token in 0..length {
            let position = context_len + token;
            let seen = &request.slots[position + 1 - window..(position + window).min(context_len + length)];
            let chain = AttentionPlan::new(&[row(&tokens[..1], seen.len() - 1, seen, None)]);
            let alone = request.attend(backend, &chain, &q.narrow(0, token as i64, 1));
            assert!(block.narrow(0, token as i64, 1).allclose(&alone, 1e-5, 1e-5, false), "token {token}");
        }
    }
}

/// Rotation, head norms and stores of both backends, over two requests with a tree.
#[test]
fn backends_rotate_and_store_alike() {
    for (case, with_norms) in cases().into_iter().zip([false, true].into_iter().cycle()) {
        let norm = || {
            RmsNorm::new(Tensor::rand([case.head_dim], (Kind::Float, Device::Cpu)).to_kind(case.kind), 1e-6)
        };
        let heads = HeadRotation {
            norms: with_norms.then(|| HeadNorms { q: norm(), k: norm() }),
            tables: RopeTables::new(
                10_000.0,
                &RopeScaling::Default,
                case.head_dim as usize,
                256,
                Device::Cpu,
            )
            .into(),
        };
        let (one, other) = (Request::new(case, 60), Request::new(case, 60));
        let tokens = vec![0; 12];
        let parents = [0, 0, 1, 1, 0, 4, 5];
        let tail: Vec<u32> = (0..60).map(|slot| slot * 3 + 1).collect();
        let plan = AttentionPlan::new(&[
            row(&tokens, 48, &one.slots, None),
            row(&tokens[..7], 20, &tail, Some(&parents)),
        ]);
        let width = case.kv_heads * (case.group + 2) * case.head_dim;
        let qkv = Tensor::randn([19, width], (Kind::Float, Device::Cpu)).to_kind(case.kind);
        let kernel = CpuAttention.rotate_store(&qkv, &heads, one.kv.layer(0), &plan).unwrap();
        let plain = TorchAttention.rotate_store(&qkv, &heads, other.kv.layer(0), &plan).unwrap();
        let new =
            Tensor::from_slice(&plan.new_slots().iter().map(|&slot| i64::from(slot)).collect::<Vec<_>>());
        let stored = |request: &Request, tensor: fn(&LayerKv) -> &Tensor| {
            tensor(request.kv.layer(0)).index_select(1, &new).to_kind(Kind::Float)
        };
        let (relative, absolute) = if case.kind == Kind::Float { (1e-5, 1e-5) } else { (2e-2, 1e-2) };
        let close = |a: &Tensor, b: &Tensor| a.allclose(b, relative, absolute, false);
        assert!(close(&kernel.to_kind(Kind::Float), &plain.to_kind(Kind::Float)), "{case:?}: queries");
        assert!(close(&stored(&one, |kv| &kv.k), &stored(&other, |kv| &kv.k)), "{case:?}: keys");
        assert!(stored(&one, |kv| &kv.v).equal(&stored(&other, |kv| &kv.v)), "{case:?}: values");

        // Rows that ask nothing store the same.
        let asking = case.kv_heads * case.group * case.head_dim;
        let silent = qkv.narrow(1, asking, width - asking).contiguous();
        for backend in [&CpuAttention as &dyn AttentionBackend, &TorchAttention] {
            let third = Request::new(case, 60);
            let q = backend.rotate_store(&silent, &heads, third.kv.layer(0), &plan).unwrap();
            assert_eq!(q.size(), [19, 0, case.head_dim]);
            assert!(close(&stored(&third, |kv| &kv.k), &stored(&one, |kv| &kv.k)), "{case:?}: keys alone");
            assert!(stored(&third, |kv| &kv.v).equal(&stored(&one, |kv| &kv.v)), "{case:?}: values alone");
        }
    }
}

#[test]
fn a_plan_that_leaves_the_pool_is_refused() {
    let case = Case { head_dim: 16, kv_heads: 1, group: 1, window: None, kind: Kind::Float };
    let mut request = Request::new(case, 10);
    request.slots[4] = SLOTS as u32;
    let refused = CpuAttention.attend(&request.q, request.kv.layer(0), &request.plan(0, 10), None);
    assert!(refused.is_err());
}
