//! Owns one transformer layer of a draft head, from the input of its attention on, with its keys and values.

use std::rc::Rc;

use tch::{Device, Tensor};

use crate::engine::EngineError;
use crate::engine::attention::AttentionBackend;
use crate::engine::attention::plan::AttentionPlan;
use crate::engine::hf_config::HfConfig;
use crate::engine::kv::{KvPool, KvShape};
use crate::engine::layers::linear::Linear;
use crate::engine::layers::mlp::GatedMlp;
use crate::engine::layers::norm::{NormFormat, RmsNorm};
use crate::engine::layers::rope::{HeadNorms, HeadRotation, RopeTables};
use crate::engine::matrix::Matrix;
use crate::engine::model::attention_for;
use crate::engine::weights::{Loader, Parameter, WeightSource};

/// What the layer's tensors are called in a head's own folder.
pub const PREFIX: &str = "layers.0.";
const FUSED: [&[&str]; 4] = [
    &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    &["self_attn.o_proj"],
    &["mlp.gate_proj", "mlp.up_proj"],
    &["mlp.down_proj"],
];
pub const MLP_NORM: &str = "post_attention_layernorm.weight";
const HEAD_NORMS: [&str; 2] = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"];

/// Shape of a head's layer.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockSpec {
    pub shape: HfConfig,
    /// What the names of its tensors begin with.
    pub prefix: String,
    /// Width of what attention projects from.
    pub input: usize,
    /// Which projections have a bias.
    pub biased: Vec<&'static str>,
    /// A norm over each head of queries and keys, before rotation.
    pub qk_norm: bool,
    /// What the norm before the MLP is called.
    pub mlp_norm: &'static str,
    pub norms_from_one: bool,
}

/// Attention and MLP of one layer, with their additions to the residual stream.
pub(super) struct DraftBlock {
    inputs: Inputs,
    rotation: HeadRotation,
    output: Linear,
    mlp_norm: RmsNorm,
    mlp: GatedMlp,
    kv: KvPool,
    attention: Box<dyn AttentionBackend>,
}

/// The projections to queries, keys and values.
enum Inputs {
    Fused(Linear),
    /// For layers that also store keys and values of rows that ask nothing.
    Apart {
        q: Linear,
        kv: Linear,
    },
}

impl BlockSpec {
    /// Biases and norms over heads are those that the file has: configs of published heads do not tell.
    pub fn new(shape: &HfConfig, prefix: &str, input: usize, source: &dyn WeightSource) -> Self {
        let has = |name: &str| source.shape(&format!("{prefix}{name}")).is_some();
        let has_bias = |name: &&str| has(&format!("{name}.bias"));
        // Projections that become one have all their biases or none.
        let biased = FUSED.iter().filter(|group| group.iter().any(has_bias)).flat_map(|group| group.iter());
        Self {
            shape: shape.clone(),
            prefix: prefix.to_owned(),
            input,
            biased: biased.copied().collect(),
            qk_norm: HEAD_NORMS.into_iter().any(has),
            mlp_norm: MLP_NORM,
            norms_from_one: false,
        }
    }

    pub(super) fn norm_format(&self) -> NormFormat {
        NormFormat { eps: self.shape.norm_eps, from_one: self.norms_from_one }
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Without biases, as new heads are.
    pub fn plain(shape: HfConfig, input: usize) -> Self {
        Self {
            shape,
            prefix: PREFIX.into(),
            input,
            biased: Vec::new(),
            qk_norm: false,
            mlp_norm: MLP_NORM,
            norms_from_one: false,
        }
    }

    /// The angles of `positions` positions, which layers of one shape share.
    pub fn rope_tables(&self, positions: usize, device: Device) -> Rc<RopeTables> {
        let HfConfig { rope_theta, rope_scaling, head_dim, .. } = &self.shape;
        Rc::new(RopeTables::new(*rope_theta, rope_scaling, *head_dim, positions, device))
    }

    /// Numbers it keeps per slot.
    pub fn slot_values(&self) -> usize {
        2 * self.shape.kv_heads * self.shape.head_dim
    }

    pub fn kv_shape(&self) -> KvShape {
        KvShape { layers: 1, kv_heads: self.shape.kv_heads, head_dim: self.shape.head_dim }
    }

    pub fn parameters(&self) -> Vec<Parameter> {
        let mut all = Vec::new();
        let mut add = |name: &str, shape: &[usize]| {
            all.push(Parameter { name: self.name(name), shape: shape.to_vec() });
        };
        add(self.mlp_norm, &[self.shape.hidden_size]);
        for norm in HEAD_NORMS.into_iter().filter(|_| self.qk_norm) {
            add(norm, &[self.shape.head_dim]);
        }
        for (name, shape) in self.projections() {
            add(&format!("{name}.weight"), &shape);
            if self.is_biased(name) {
                add(&format!("{name}.bias"), &shape[..1]);
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
    /// `slots` is what the layer's pool must hold.
    pub(super) fn load(
        spec: &BlockSpec,
        slots: usize,
        tables: &Rc<RopeTables>,
        loader: &mut Loader<'_>,
    ) -> Result<Self, EngineError> {
        let fused = |parts: &[_]| Ok(Inputs::Fused(Linear::fused(parts)?));
        Self::load_with(spec, slots, tables, loader, fused)
    }

    /// A layer that can [`Self::store`].
    pub(super) fn load_storing(
        spec: &BlockSpec,
        slots: usize,
        tables: &Rc<RopeTables>,
        loader: &mut Loader<'_>,
    ) -> Result<Self, EngineError> {
        let apart = |parts: &[_]| {
            Ok(Inputs::Apart { q: Linear::fused(&parts[..1])?, kv: Linear::fused(&parts[1..])? })
        };
        Self::load_with(spec, slots, tables, loader, apart)
    }

    fn load_with(
        spec: &BlockSpec,
        slots: usize,
        tables: &Rc<RopeTables>,
        loader: &mut Loader<'_>,
        inputs: impl Fn(&[(Matrix, Option<Tensor>)]) -> Result<Inputs, EngineError>,
    ) -> Result<Self, EngineError> {
        let mut parts = Vec::new();
        for (name, _) in spec.projections() {
            let weight = loader.load_matrix(&spec.name(&format!("{name}.weight")))?;
            let biased = spec.is_biased(name);
            let bias = biased.then(|| loader.load(&spec.name(&format!("{name}.bias")))).transpose()?;
            parts.push((weight, bias));
        }
        let mut norm = |name: &str| spec.norm_format().load(&spec.name(name), loader);
        let [q, k] = HEAD_NORMS;
        let norms = match spec.qk_norm {
            false => None,
            true => Some(HeadNorms { q: norm(q)?, k: norm(k)? }),
        };
        Ok(Self {
            inputs: inputs(&parts[0..3])?,
            rotation: HeadRotation { norms, tables: Rc::clone(tables) },
            output: Linear::fused(&parts[3..4])?,
            mlp_norm: norm(spec.mlp_norm)?,
            mlp: GatedMlp::new(&parts[4..7], spec.shape.activation)?,
            kv: KvPool::new(spec.kv_shape(), slots, loader.kind(), loader.device())?,
            attention: attention_for(loader.device()),
        })
    }

    /// Stores the keys and values of `x` and adds to `residual`, in place, what the layer makes of it.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        residual: &mut Tensor,
        plan: &AttentionPlan,
    ) -> Result<(), EngineError> {
        self.forward_within(x, residual, plan, None)
    }

    /// As [`Self::forward`], with attention to the last `window` keys of each row's.
    pub(super) fn forward_within(
        &self,
        x: &Tensor,
        residual: &mut Tensor,
        plan: &AttentionPlan,
        window: Option<usize>,
    ) -> Result<(), EngineError> {
        let kv = self.kv.layer(0);
        let qkv = match &self.inputs {
            Inputs::Fused(qkv) => qkv.forward(x)?,
            Inputs::Apart { q, kv } => Tensor::cat(&[q.forward(x)?, kv.forward(x)?], 1),
        };
        let q = self.attention.rotate_store(&qkv, &self.rotation, kv, plan)?;
        let mixed = self.attention.attend(&q, kv, plan, window)?;
        let mixed = self.output.forward(&mixed.view([x.size()[0], -1]))?;
        let normed = self.mlp_norm.add_forward(residual, &mixed)?;
        let _ = residual.g_add_(&self.mlp.forward(&normed)?);
        Ok(())
    }

    /// Stores the keys and values of rows that ask nothing.
    pub(super) fn store(&self, x: &Tensor, plan: &AttentionPlan) -> Result<(), EngineError> {
        let kv = match &self.inputs {
            Inputs::Fused(qkv) => qkv.forward(x)?,
            Inputs::Apart { kv, .. } => kv.forward(x)?,
        };
        self.attention.rotate_store(&kv, &self.rotation, self.kv.layer(0), plan).map(|_| ())
    }
}
