//! Owns the differentiable forward of a DFLASH draft model over many blocks of many sequences at once: the same
//! mathematics as [`crate::engine::models::dflash_head`].

use tch::{Kind, Tensor};

use super::dense::{DenseBlock, delayed, linear, rms_norm};
use super::params::Params;
use crate::engine::layers::rope::RopeTables;
use crate::engine::models::dflash_spec::DflashSpec;

/// Blocks of `drafts` mask tokens behind an anchor.
pub(super) struct Denoiser<'a> {
    pub spec: &'a DflashSpec,
    pub tables: &'a RopeTables,
    /// The mask token's row of the embedding.
    pub mask: &'a Tensor,
    pub drafts: i64,
}

/// Where the blocks of a batch begin.
struct Anchors {
    sequences: i64,
    /// Blocks of a sequence.
    blocks: i64,
    /// Tokens of a block.
    length: i64,
    /// Per block the last position of its context.
    contexts: Tensor,
}

impl Denoiser<'_> {
    /// What a block whose anchor is the token after each of `rows` says, before the table of logits: its draft `s`
    /// stands `s` rows further on, where the token it guesses is the one that the row's label names. `rows` are as many
    /// of each sequence, one after the other.
    pub(super) fn drafts(
        &self,
        params: &Params,
        embedded: &Tensor,
        features: &Tensor,
        rows: &Tensor,
    ) -> Vec<Tensor> {
        let eps = self.spec.shape().norm_eps;
        let (sequences, hidden) = (embedded.size()[0], embedded.size()[2]);
        let anchors = Anchors {
            sequences,
            blocks: rows.size()[0] / sequences,
            length: self.drafts + 1,
            contexts: rows.remainder(embedded.size()[1]),
        };
        let context = rms_norm(&linear(features, params, "fc"), params.get("hidden_norm.weight"), eps);
        let first = embedded.reshape([-1, hidden]).index_select(0, rows).unsqueeze(1);
        let masks = self.mask.to_kind(first.kind()).view([1, 1, hidden]);
        let masks = masks.expand([rows.size()[0], self.drafts, hidden], false);
        let mut residual = Tensor::cat(&[first, masks], 1).view([-1, hidden]);
        for index in 0..self.spec.shape().layers {
            let prefix = format!("layers.{index}.");
            let block = DenseBlock { shape: self.spec.shape(), tables: self.tables, prefix: &prefix };
            let x = rms_norm(&residual, params.get(&block.name("input_layernorm.weight")), eps);
            let attended = attend(&block, params, &x, &context, &anchors);
            residual = block.add(params, &residual, &attended);
        }
        let out = rms_norm(&residual, params.get("norm.weight"), eps);
        let out = out.view([sequences, anchors.blocks, anchors.length, hidden]);
        let draft = |at: i64| delayed(&out.select(2, at + 1), at).reshape([-1, hidden]);
        (0..self.drafts).map(draft).collect()
    }
}

/// Every token of a block sees the context before the anchor and the whole block.
fn attend(
    block: &DenseBlock<'_>,
    params: &Params,
    x: &Tensor,
    context: &Tensor,
    anchors: &Anchors,
) -> Tensor {
    let (heads, kv_heads) = (block.shape.heads as i64, block.shape.kv_heads as i64);
    let (head_dim, group) = (block.shape.head_dim as i64, heads / kv_heads);
    let Anchors { sequences, blocks, length, contexts } = anchors;
    let (sequences, blocks, length) = (*sequences, *blocks, *length);
    let tokens = context.size()[1];
    let inside = Tensor::arange(length, (Kind::Int64, x.device())) + 1;
    let positions = (contexts.unsqueeze(1) + inside).view([-1]);
    let q = rotated(block, params, "q", x, &positions);
    let (k, v) = keys_and_values(block, params, x, &positions);
    let in_context = Tensor::arange(tokens, (Kind::Int64, x.device())).repeat([sequences]);
    let (context_k, context_v) =
        keys_and_values(block, params, &context.reshape([sequences * tokens, -1]), &in_context);

    // Per key head its query heads, with the tokens of all blocks of a sequence as rows of one product.
    let q = q.view([sequences, blocks, length, kv_heads, group, head_dim]).permute([0, 3, 1, 4, 2, 5]);
    let of_block = |rows: &Tensor| {
        let rows = rows.view([sequences, blocks, length, kv_heads, head_dim]).permute([0, 3, 1, 2, 4]);
        rows.reshape([sequences * kv_heads * blocks, length, head_dim])
    };
    let of_context = |rows: &Tensor| {
        let rows = rows.view([sequences, tokens, kv_heads, head_dim]).permute([0, 2, 1, 3]);
        rows.reshape([sequences * kv_heads, tokens, head_dim])
    };
    let per_sequence = [sequences * kv_heads, blocks * group * length, -1];
    let per_block = [sequences * kv_heads * blocks, group * length, -1];
    let scale = 1.0 / (head_dim as f64).sqrt();
    let scores = |rows: Tensor, keys: &Tensor| {
        (rows.bmm(&keys.transpose(1, 2)).to_kind(Kind::Float) * scale).view([
            sequences,
            kv_heads,
            blocks,
            -1,
            keys.size()[1],
        ])
    };
    let q = q.reshape(per_sequence);
    let before = scores(q.shallow_clone(), &of_context(&context_k));
    let columns = Tensor::arange(tokens, (Kind::Int64, x.device()));
    let behind = columns.unsqueeze(0).gt_tensor(&contexts.unsqueeze(1));
    let before = before.masked_fill(&behind.view([sequences, 1, blocks, 1, tokens]), f64::NEG_INFINITY);
    let among = scores(q.reshape(per_block), &of_block(&k));
    let weights = Tensor::cat(&[before, among], -1).softmax(-1, Kind::Float).to_kind(x.kind());
    let parts = weights.split_with_sizes([tokens, length], -1);
    let mixed = parts[0].reshape(per_sequence).bmm(&of_context(&context_v)).view_(per_block);
    let mixed = mixed + parts[1].reshape(per_block).bmm(&of_block(&v));
    let mixed =
        mixed.view([sequences, kv_heads, blocks, group, length, head_dim]).permute([0, 2, 4, 1, 3, 5]);
    mixed.reshape([sequences * blocks * length, heads * head_dim])
}

/// Queries or keys of rows, `[rows, heads, head_dim]`.
fn rotated(block: &DenseBlock<'_>, params: &Params, which: &str, x: &Tensor, positions: &Tensor) -> Tensor {
    let head_dim = block.shape.head_dim as i64;
    let projected = linear(x, params, &block.name(&format!("self_attn.{which}_proj")));
    let norm = params.get(&block.name(&format!("self_attn.{which}_norm.weight")));
    let normed = rms_norm(&projected.view([x.size()[0], -1, head_dim]), norm, block.shape.norm_eps);
    block.tables.rotate(&normed, positions)
}

fn keys_and_values(
    block: &DenseBlock<'_>,
    params: &Params,
    x: &Tensor,
    positions: &Tensor,
) -> (Tensor, Tensor) {
    let values = linear(x, params, &block.name("self_attn.v_proj"));
    (rotated(block, params, "k", x, positions), values)
}
