//! Owns the one transformer layer of a draft head, from the input of its attention on.

use std::rc::Rc;

use tch::Tensor;

use crate::engine::EngineError;
use crate::engine::attention::AttentionBackend;
use crate::engine::attention::plan::AttentionPlan;
use crate::engine::hf_config::HfConfig;
use crate::engine::kv::{KvPool, KvShape};
use crate::engine::layers::linear::Linear;
use crate::engine::layers::mlp::GatedMlp;
use crate::engine::layers::norm::RmsNorm;
use crate::engine::layers::rope::{HeadRotation, RopeTables};
use crate::engine::weights::{Loader, Parameter, WeightSource};

const PREFIX: &str = "layers.0.";
const FUSED: [&[&str]; 4] = [
    &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    &["self_attn.o_proj"],
    &["mlp.gate_proj", "mlp.up_proj"],
    &["mlp.down_proj"],
];
const MLP_NORM: &str = "layers.0.post_attention_layernorm.weight";

/// Shape of a head's layer.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockSpec {
    pub shape: HfConfig,
    /// Width of what attention projects from.
    pub input: usize,
    /// Which projections have a bias.
    pub biased: Vec<&'static str>,
}

/// Attention and MLP of one layer, with the addition to the residual stream between them.
#[derive(Debug)]
pub(super) struct DraftBlock {
    qkv: Linear,
    rotation: HeadRotation,
    output: Linear,
    mlp_norm: RmsNorm,
    mlp: GatedMlp,
}

impl BlockSpec {
    /// Biases are those that the file has: configs of published heads do not tell.
    pub fn new(shape: &HfConfig, input: usize, source: &dyn WeightSource) -> Self {
        let has = |name: &&str| source.shape(&format!("{PREFIX}{name}.bias")).is_some();
        // Projections that become one have all their biases or none.
        let biased = FUSED.iter().filter(|group| group.iter().any(has)).flat_map(|group| group.iter());
        Self { shape: shape.clone(), input, biased: biased.copied().collect() }
    }

    /// Without biases, as new heads are.
    pub fn plain(shape: HfConfig, input: usize) -> Self {
        Self { shape, input, biased: Vec::new() }
    }

    pub fn kv_shape(&self) -> KvShape {
        KvShape { layers: 1, kv_heads: self.shape.kv_heads, head_dim: self.shape.head_dim }
    }

    pub fn parameters(&self) -> Vec<Parameter> {
        let mut all = vec![Parameter { name: MLP_NORM.into(), shape: vec![self.shape.hidden_size] }];
        for (name, shape) in self.projections() {
            all.push(Parameter { name: format!("{PREFIX}{name}.weight"), shape: shape.to_vec() });
            if self.is_biased(name) {
                all.push(Parameter { name: format!("{PREFIX}{name}.bias"), shape: vec![shape[0]] });
            }
        }
        all
    }

    fn is_biased(&self, name: &str) -> bool {
        self.biased.contains(&name)
    }

    fn projections(&self) -> [(&'static str, [usize; 2]); 7] {
        let HfConfig { hidden_size, intermediate_size, heads, kv_heads, head_dim, .. } = self.shape;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        [
            ("self_attn.q_proj", [q, self.input]),
            ("self_attn.k_proj", [kv, self.input]),
            ("self_attn.v_proj", [kv, self.input]),
            ("self_attn.o_proj", [hidden_size, q]),
            ("mlp.gate_proj", [intermediate_size, hidden_size]),
            ("mlp.up_proj", [intermediate_size, hidden_size]),
            ("mlp.down_proj", [hidden_size, intermediate_size]),
        ]
    }
}

impl DraftBlock {
    /// `positions` is the longest sequence the head will see.
    pub(super) fn load(
        spec: &BlockSpec,
        positions: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, EngineError> {
        let shape = &spec.shape;
        let tables = RopeTables::new(
            shape.rope_theta,
            &shape.rope_scaling,
            shape.head_dim,
            positions,
            loader.device(),
        );
        let mut parts = Vec::new();
        for (name, _) in spec.projections() {
            let weight = loader.load(&format!("{PREFIX}{name}.weight"))?;
            let bias =
                spec.is_biased(name).then(|| loader.load(&format!("{PREFIX}{name}.bias"))).transpose()?;
            parts.push((weight, bias));
        }
        Ok(Self {
            qkv: Linear::fused(&parts[0..3])?,
            rotation: HeadRotation { norms: None, tables: Rc::new(tables) },
            output: Linear::fused(&parts[3..4])?,
            mlp_norm: RmsNorm::new(loader.load(MLP_NORM)?, shape.norm_eps),
            mlp: GatedMlp { gate_up: Linear::fused(&parts[4..6])?, down: Linear::fused(&parts[6..7])? },
        })
    }

    /// Adds the layer's attention over `x` to `residual` in place; returns what its MLP would add to that.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        residual: &Tensor,
        plan: &AttentionPlan,
        kv: &KvPool,
        attention: &dyn AttentionBackend,
    ) -> Result<Tensor, EngineError> {
        let kv = kv.layer(0);
        let qkv = self.qkv.forward(x)?;
        let q = attention.rotate_store(&qkv, &self.rotation, kv, plan)?;
        let mixed = attention.attend(&q, kv, plan, None)?;
        let mixed = self.output.forward(&mixed.view([x.size()[0], -1]))?;
        let normed = self.mlp_norm.add_forward(residual, &mixed)?;
        self.mlp.forward(&normed)
    }
}
