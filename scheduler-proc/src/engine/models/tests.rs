//! Draft heads of every published variant, filled at random, against a plain computation of what they should do: whole
//! sequences in one go, without pools, plans or packed weights.

mod dflash;
mod eagle3;
mod mtp;

pub(in crate::engine) use mtp::mtp_checkpoint;

use std::collections::BTreeMap;
use std::path::Path;

use proto::{Dtype, TokenId, Weights};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::draft::{DraftModel, Inherited};
use super::draft_config::DraftFiles;
use crate::batch::KvSlot;
use crate::engine::hf_config::HfConfig;
use crate::engine::model::TargetModel;
use crate::engine::model::tests::{config, fixtures};
use crate::engine::target::{ForwardRow, LogitRows};

const SLOTS: usize = 64;

fn target_dir(case: &str) -> std::path::PathBuf {
    fixtures().join(case).join("target")
}

fn load_target(dir: &Path) -> TargetModel {
    let config = config(Weights::Safetensors(dir.to_owned()), Dtype::Float32);
    TargetModel::load(&config, &mut |_, _| {}).unwrap()
}

/// Tensors by name.
#[derive(Default)]
struct Tensors(BTreeMap<String, Tensor>);

impl Tensors {
    fn read(dir: &Path) -> Self {
        Self(Tensor::read_safetensors(dir.join("model.safetensors")).unwrap().into_iter().collect())
    }

    /// Adds one with values around 0, or around 1 for a norm.
    fn random(&mut self, name: &str, size: &[i64]) {
        let values = Tensor::randn(size, (Kind::Float, Device::Cpu));
        let scale = (*size.last().unwrap() as f64).powf(-0.5);
        let values = if name.contains("norm") { values * 0.4 + 1.0 } else { values * scale };
        self.0.insert(name.to_owned(), values);
    }

    /// The weights of a layer whose attention projects from `input` values.
    fn random_layer(&mut self, prefix: &str, shape: &HfConfig, input: usize) {
        let size = |a: usize, b: usize| [a as i64, b as i64];
        let (hidden, inner) = (shape.hidden_size, shape.intermediate_size);
        let (q, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        for (name, size) in [
            ("self_attn.q_proj", size(q, input)),
            ("self_attn.k_proj", size(kv, input)),
            ("self_attn.v_proj", size(kv, input)),
            ("self_attn.o_proj", size(hidden, q)),
            ("mlp.gate_proj", size(inner, hidden)),
            ("mlp.up_proj", size(inner, hidden)),
            ("mlp.down_proj", size(hidden, inner)),
        ] {
            self.random(&format!("{prefix}{name}.weight"), &size);
        }
        self.random(&format!("{prefix}post_attention_layernorm.weight"), &[hidden as i64]);
    }

    fn get(&self, name: &str) -> &Tensor {
        self.0.get(name).unwrap_or_else(|| panic!("no {name}"))
    }

    fn find(&self, name: &str) -> Option<&Tensor> {
        self.0.get(name)
    }

    fn norm(&self, name: &str, x: &Tensor, eps: f64) -> Tensor {
        let mean = (x * x).mean_dim([-1i64].as_slice(), true, Kind::Float);
        x * (mean + eps).rsqrt() * self.get(name)
    }

    fn project(&self, name: &str, x: &Tensor) -> Tensor {
        let bias = self.find(&format!("{name}.bias"));
        x.linear(self.get(&format!("{name}.weight")), bias)
    }

    /// A folder with these tensors and a config.
    fn store(&self, config: &Value) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        self.store_in(dir.path(), config);
        dir
    }

    fn store_in(&self, dir: &Path, config: &Value) {
        std::fs::create_dir_all(dir).unwrap();
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        let all: Vec<_> = self.0.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        Tensor::write_safetensors(&all, dir.join("model.safetensors")).unwrap();
    }
}

/// One transformer layer from the input of its attention on, over a whole sequence: what its residual stream becomes.
fn layer(t: &Tensors, prefix: &str, shape: &HfConfig, x: &Tensor, residual: &Tensor) -> Tensor {
    let (rows, dim, eps) = (x.size()[0], shape.head_dim as i64, f64::from(shape.norm_eps));
    let name = |part: &str| format!("{prefix}{part}");
    let heads = |part: &str, count: usize| {
        t.project(&name(&format!("self_attn.{part}_proj")), x).view([rows, count as i64, dim])
    };
    let normed = |part: &str, heads: Tensor| match t.find(&name(&format!("self_attn.{part}_norm.weight"))) {
        Some(_) => t.norm(&name(&format!("self_attn.{part}_norm.weight")), &heads, eps),
        None => heads,
    };
    let q = rotated(&normed("q", heads("q", shape.heads)), shape.rope_theta);
    let k = rotated(&normed("k", heads("k", shape.kv_heads)), shape.rope_theta);
    let group = (shape.heads / shape.kv_heads) as i64;
    let spread = |x: &Tensor| x.repeat_interleave_self_int(group, 1, None).transpose(0, 1);
    let (q, k, v) = (q.transpose(0, 1), spread(&k), spread(&heads("v", shape.kv_heads)));
    let unseen = Tensor::ones([rows, rows], (Kind::Float, Device::Cpu)).triu(1).to_kind(Kind::Bool);
    let scores = q.matmul(&k.transpose(1, 2)) / (dim as f64).sqrt();
    let shares = scores.masked_fill(&unseen, f64::NEG_INFINITY).softmax(-1, Kind::Float);
    let mixed = shares.matmul(&v).transpose(0, 1).reshape([rows, -1]);
    let residual = residual + t.project(&name("self_attn.o_proj"), &mixed);
    let inner = t.norm(&name("post_attention_layernorm.weight"), &residual, eps);
    let gated = t.project(&name("mlp.gate_proj"), &inner).silu() * t.project(&name("mlp.up_proj"), &inner);
    residual + t.project(&name("mlp.down_proj"), &gated)
}

/// `[rows, heads, dim]` turned by the angles of positions from 0 on.
fn rotated(x: &Tensor, theta: f64) -> Tensor {
    let (rows, half) = (x.size()[0], x.size()[2] / 2);
    let exponents = Tensor::arange(half, (Kind::Double, Device::Cpu)) * (-1.0 / half as f64);
    let frequencies = (exponents * theta.ln()).exp();
    let angles = Tensor::arange(rows, (Kind::Double, Device::Cpu)).unsqueeze(1) * frequencies.unsqueeze(0);
    let (cos, sin) = (angles.cos().to_kind(Kind::Float), angles.sin().to_kind(Kind::Float));
    let (cos, sin) = (cos.unsqueeze(1), sin.unsqueeze(1));
    let (low, high) = (x.narrow(2, 0, half), x.narrow(2, half, half));
    Tensor::cat(&[&low * &cos - &high * &sin, &high * &cos + &low * &sin], 2)
}

fn embedded(table: &Tensor, tokens: &[TokenId]) -> Tensor {
    let ids: Vec<i64> = tokens.iter().map(|&token| i64::from(token)).collect();
    table.index_select(0, &Tensor::from_slice(&ids))
}

/// What a head leaves for each token and makes of it, the last token drafted on from the head's own state.
fn run(head: &mut dyn DraftModel, tokens: &[TokenId], features: &Tensor) -> (Tensor, Tensor) {
    let slots: Vec<KvSlot> = (0..tokens.len()).map(|at| ((at * 7) % SLOTS) as KvSlot).collect();
    let row = |from: usize, to: usize| ForwardRow {
        tokens: &tokens[from..to],
        context_len: from,
        kv_slots: &slots,
        parents: None,
        logits: LogitRows::None,
    };
    let known = features.size()[0] as usize;
    let first = head.forward(&[row(0, known)], Some(Inherited::Target(features))).unwrap();
    let last = first.narrow(0, known as i64 - 1, 1);
    let drafted = head.forward(&[row(known, known + 1)], Some(Inherited::Own(&last))).unwrap();
    let states = Tensor::cat(&[first, drafted], 0);
    let logits = head.logits(&states).unwrap();
    (states, Tensor::from_slice(&logits.values).view([tokens.len() as i64, -1]))
}

/// The largest difference, in units of the largest value expected.
fn distance(actual: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(actual.size(), expected.size());
    let scale = f64::try_from(expected.abs().max()).unwrap();
    f64::try_from((actual - expected).abs().max()).unwrap() / scale
}

/// As near as two orders of summation are, and as far as a forgotten norm is not.
const SAME: f64 = 2e-5;
const OTHER: f64 = 1e-2;

fn files(dir: &tempfile::TempDir) -> DraftFiles {
    DraftFiles::open(dir.path()).unwrap()
}
