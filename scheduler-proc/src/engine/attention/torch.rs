//! Owns nothing: attention by plain tensor operations, on any device. The reference the kernels are tested against.

use tch::{Device, Kind, Tensor};

use super::AttentionBackend;
use super::plan::{AttentionPlan, Tile};
use crate::engine::EngineError;
use crate::engine::kv::LayerKv;
use crate::engine::layers::rope::HeadRotation;

#[derive(Debug, Clone, Copy, Default)]
pub struct TorchAttention;

impl AttentionBackend for TorchAttention {
    fn rotate_store(
        &self,
        qkv: &Tensor,
        heads: &HeadRotation,
        kv: &LayerKv,
        plan: &AttentionPlan,
    ) -> Result<Tensor, EngineError> {
        let (rows, kv_heads, head_dim) = (plan.rows() as i64, kv.k.size()[0], kv.k.size()[2]);
        let qkv = qkv.reshape([rows, -1, head_dim]);
        let q_heads = qkv.size()[1] - 2 * kv_heads;
        let (mut q, mut k) = (qkv.narrow(1, 0, q_heads), qkv.narrow(1, q_heads, kv_heads));
        if let Some(norms) = &heads.norms {
            q = norms.q.forward_nd(&q)?;
            k = norms.k.forward_nd(&k)?;
        }
        let positions = indices(plan.positions(), qkv.device());
        let slots = indices(plan.new_slots(), qkv.device());
        let k = heads.tables.rotate(&k, &positions);
        let v = qkv.narrow(1, q_heads + kv_heads, kv_heads);
        // The pool is [heads, slots, dim]; what comes back is an alias of it.
        let _ = kv.k.shallow_clone().index_copy_(1, &slots, &k.transpose(0, 1));
        let _ = kv.v.shallow_clone().index_copy_(1, &slots, &v.transpose(0, 1));
        Ok(heads.tables.rotate(&q, &positions))
    }

    fn attend(
        &self,
        q: &Tensor,
        kv: &LayerKv,
        plan: &AttentionPlan,
        window: Option<usize>,
    ) -> Result<Tensor, EngineError> {
        let tiles: Vec<Tensor> =
            plan.tiles().iter().map(|tile| attend_tile(q, kv, plan, tile, window)).collect();
        Ok(Tensor::cat(&tiles, 0))
    }
}

/// The rows of one tile: gathers each row's keys, padded to the longest, and masks what a row must not see.
fn attend_tile(q: &Tensor, kv: &LayerKv, plan: &AttentionPlan, tile: &Tile, window: Option<usize>) -> Tensor {
    let (first, rows) = (tile.first_row as usize, tile.rows as usize);
    let keys: Vec<Vec<u32>> = (first..first + rows).map(|row| plan.keys_of(tile, row).collect()).collect();
    let longest = keys.iter().map(Vec::len).max().unwrap_or(0);
    let mut slots = vec![0; rows * longest];
    let mut unseen = vec![true; rows * longest];
    for (row, keys) in keys.iter().enumerate() {
        let start = window.map_or(0, |window| keys.len().saturating_sub(window));
        // Padding repeats the row's own slot: unwritten slots may hold anything.
        slots[row * longest..][..longest].fill(keys.last().copied().unwrap_or(0));
        slots[row * longest..][..keys.len()].copy_from_slice(keys);
        unseen[row * longest..][start..keys.len()].fill(false);
    }
    let (kv_heads, head_dim) = (kv.k.size()[0], kv.k.size()[2]);
    let (rows, longest) = (rows as i64, longest as i64);
    let index = indices(&slots, q.device());
    let gather = |pool: &Tensor| {
        pool.index_select(1, &index).to_kind(Kind::Float).view([kv_heads, rows, longest, head_dim])
    };
    let unseen = Tensor::from_slice(&unseen).view([1, rows, 1, longest]).to_device(q.device());
    // [kv_heads, rows, group, head_dim]
    let queries = q.narrow(0, first as i64, rows).to_kind(Kind::Float);
    let queries = queries.reshape([rows, kv_heads, -1, head_dim]).transpose(0, 1) / (head_dim as f64).sqrt();
    let scores = queries.matmul(&gather(&kv.k).transpose(2, 3)).masked_fill(&unseen, f64::NEG_INFINITY);
    let mixed = scores.softmax(-1, Kind::Float).matmul(&gather(&kv.v));
    mixed.transpose(0, 1).reshape([rows, -1, head_dim]).to_kind(q.kind())
}

fn indices(values: &[u32], device: Device) -> Tensor {
    let values: Vec<i64> = values.iter().map(|&value| i64::from(value)).collect();
    Tensor::from_slice(&values).to_device(device)
}
