//! Owns the differentiable forward of a head's layer over whole sequences: the same mathematics as the serving
//! [`DraftBlock`](crate::engine::models::draft_block), whose kernels have no gradients, in plain operations. The two
//! are kept equal by the tests of [`super::net`].

use tch::{Kind, Tensor};

use super::params::Params;
use crate::engine::hf_config::HfConfig;
use crate::engine::layers::rope::RopeTables;

const QKV: [&str; 3] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
const GATE_UP: [&str; 2] = ["mlp.gate_proj", "mlp.up_proj"];
const MLP_NORM: &str = "post_attention_layernorm.weight";

/// Keys and values of the draft steps so far, each `[sequences * kv_heads, tokens, head_dim]`.
///
/// A row of draft step `s` at position `t` stands for a draft whose root is `s` positions back: it sees the first
/// step's rows up to the root's, made from the target's hidden states, then one row of each later step, its own last.
#[derive(Debug, Default)]
pub(super) struct Past {
    steps: Vec<(Tensor, Tensor)>,
    /// Rows of the first step before this one are none: nothing but they themselves sees them.
    first: i64,
}

/// The layer's shape with its tables.
pub(super) struct DenseBlock<'a> {
    pub shape: &'a HfConfig,
    pub tables: &'a RopeTables,
    /// What the names of its parameters begin with.
    pub prefix: &'a str,
}

/// `[out, in]` of `x`'s last dimension.
pub(super) fn linear(x: &Tensor, params: &Params, name: &str) -> Tensor {
    x.linear(params.get(&format!("{name}.weight")), params.find(&format!("{name}.bias")))
}

pub(super) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32) -> Tensor {
    let wide = x.to_kind(Kind::Float);
    let scale = (wide.square().mean_dim(-1, true, Kind::Float) + f64::from(eps)).rsqrt();
    (wide * scale * weight.to_kind(Kind::Float)).to_kind(x.kind())
}

/// Each position's predecessor `by` back, zero before the first.
pub(super) fn delayed(x: &Tensor, by: i64) -> Tensor {
    match by {
        0 => x.shallow_clone(),
        by => {
            let tokens = x.size()[1];
            let kept = x.narrow(1, 0, (tokens - by).max(0));
            kept.constant_pad_nd([0, 0, tokens - kept.size()[1], 0])
        }
    }
}

impl DenseBlock<'_> {
    /// The residual stream behind the layer: `residual` with attention over `x`, then the MLP, added. Only of `rows`,
    /// the others are only attended to.
    pub(super) fn forward(
        &self,
        params: &Params,
        x: &Tensor,
        residual: &Tensor,
        past: &mut Past,
        rows: &Tensor,
    ) -> Tensor {
        let of_rows = |x: &Tensor| x.reshape([-1, x.size()[2]]).index_select(0, rows);
        let attended = of_rows(&self.attend(params, x, past));
        self.add(params, &of_rows(residual), &attended)
    }

    /// `residual` with the output of attention, then the MLP, added.
    pub(super) fn add(&self, params: &Params, residual: &Tensor, attended: &Tensor) -> Tensor {
        let residual = residual + linear(attended, params, &self.name("self_attn.o_proj"));
        let normed = rms_norm(&residual, params.get(&self.name(MLP_NORM)), self.shape.norm_eps);
        let gate_up = self.fused(&normed, params, &GATE_UP).chunk(2, -1);
        let delta = linear(&(gate_up[0].silu() * &gate_up[1]), params, &self.name("mlp.down_proj"));
        residual + delta
    }

    pub(super) fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn attend(&self, params: &Params, x: &Tensor, past: &mut Past) -> Tensor {
        let HfConfig { heads, kv_heads, head_dim, .. } = *self.shape;
        let (heads, kv_heads, head_dim) = (heads as i64, kv_heads as i64, head_dim as i64);
        let group = heads / kv_heads;
        let (sequences, tokens) = (x.size()[0], x.size()[1]);
        let qkv = self.fused(x, params, &QKV).view([sequences * tokens, heads + 2 * kv_heads, head_dim]);
        let positions = Tensor::arange(tokens, (Kind::Int64, x.device())).repeat([sequences]);
        let q = self.tables.rotate(&qkv.narrow(1, 0, heads), &positions);
        let k = self.tables.rotate(&qkv.narrow(1, heads, kv_heads), &positions);
        let v = qkv.narrow(1, heads + kv_heads, kv_heads);
        // All query heads of a key head as rows of one product.
        let q = q.view([sequences, tokens, kv_heads, group, head_dim]).permute([0, 2, 3, 1, 4]);
        let q = q.reshape([sequences * kv_heads, group * tokens, head_dim]);
        let by_head = |rows: &Tensor| {
            let rows = rows.reshape([sequences, tokens, kv_heads, head_dim]).permute([0, 2, 1, 3]);
            rows.reshape([sequences * kv_heads, tokens, head_dim])
        };
        let mixed = past.attend(&q, by_head(&k), by_head(&v), group);
        let mixed = mixed.view([sequences, kv_heads, group, tokens, head_dim]).permute([0, 3, 1, 2, 4]);
        mixed.reshape([sequences, tokens, heads * head_dim])
    }

    /// Several projections of the layer at once.
    pub(super) fn fused(&self, x: &Tensor, params: &Params, names: &[&str]) -> Tensor {
        let named = |ending: &str| -> Vec<String> {
            names.iter().map(|name| format!("{}{name}.{ending}", self.prefix)).collect()
        };
        let (weights, biases) = (named("weight"), named("bias"));
        let weights: Vec<&str> = weights.iter().map(String::as_str).collect();
        let biases: Vec<&str> = biases.iter().map(String::as_str).collect();
        x.linear(&params.fused(&weights), params.fused_bias(&biases))
    }
}

impl Past {
    pub(super) fn without_the_first(rows: i64) -> Self {
        Self { steps: Vec::new(), first: rows }
    }

    /// Adds this step's keys and values, and attends with its queries, `[.., group * tokens, head_dim]`.
    fn attend(&mut self, q: &Tensor, k: Tensor, v: Tensor, group: i64) -> Tensor {
        let (tokens, head_dim) = (k.size()[1], k.size()[2]);
        self.steps.push((k, v));
        let step = self.steps.len() as i64 - 1;
        let scale = 1.0 / (head_dim as f64).sqrt();
        let (first_k, first_v) = &self.steps[0];
        let mask = hidden_from(tokens, step, self.first).repeat([group, 1]);
        let scores = q.bmm(&first_k.transpose(1, 2)).to_kind(Kind::Float) * scale;
        let mut all = vec![scores.masked_fill(&mask, f64::NEG_INFINITY)];
        // One row of each later step: no product of matrices, only of rows.
        let of_query = |rows: &Tensor, at: i64| {
            let rows = delayed(rows, step - at).unsqueeze(1);
            rows.expand([-1, group, -1, -1], false).reshape_as(q)
        };
        for (at, (k, _)) in (1..).zip(&self.steps[1..]) {
            let scores = (q * of_query(k, at)).sum_dim_intlist(-1, true, Kind::Float) * scale;
            all.push(scores);
        }
        let weights = Tensor::cat(&all, -1).softmax(-1, Kind::Float).to_kind(q.kind());
        let mut mixed = weights.narrow(2, 0, tokens).bmm(first_v);
        for (at, (_, v)) in (1..).zip(&self.steps[1..]) {
            mixed += weights.narrow(2, tokens + at - 1, 1) * of_query(v, at);
        }
        mixed
    }
}

/// Which of the first step's rows a row of draft step `step` does not see: those behind its root, and those before
/// `first`. A row before that sees itself: a softmax over nothing has no gradient.
fn hidden_from(tokens: i64, step: i64, first: i64) -> Tensor {
    let all = || Tensor::ones([tokens, tokens], (Kind::Bool, tch::Device::Cpu));
    let behind = all().triu(1 - step);
    match first {
        0 => behind,
        first => {
            let columns = Tensor::arange(tokens, (Kind::Int64, tch::Device::Cpu));
            let others = all().triu(1).logical_or(&all().tril(-1));
            behind.logical_or(&others.logical_and(&columns.lt(first).unsqueeze(0)))
        }
    }
}
