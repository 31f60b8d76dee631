//! Owns the decoder stack that all families share: embedding, layers, final norm, head.

use std::rc::Rc;

use proto::TokenId;
use tch::Tensor;

use crate::engine::EngineError;
use crate::engine::attention::AttentionBackend;
use crate::engine::attention::plan::AttentionPlan;
use crate::engine::hf_config::HfConfig;
use crate::engine::kv::{KvPool, KvShape, LayerKv};
use crate::engine::layers::embedding::Embedding;
use crate::engine::layers::linear::Linear;
use crate::engine::layers::mlp::GatedMlp;
use crate::engine::layers::norm::RmsNorm;
use crate::engine::layers::rope::{HeadNorms, HeadRotation, RopeTables};
use crate::engine::weights::{Loader, Parameter};

/// What sets one family apart from another.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderSpec {
    pub shape: HfConfig,
    pub biases: Biases,
    /// A norm over each head of queries and keys, before rotation.
    pub qk_norm: bool,
    /// Sliding window of every layer.
    pub windows: Vec<Option<usize>>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Biases {
    pub qkv: bool,
    pub output: bool,
    pub mlp: bool,
}

/// A projection of a layer: name, rows and columns, bias.
struct Projection {
    name: &'static str,
    shape: [usize; 2],
    bias: bool,
}

impl DecoderSpec {
    /// No biases, no norms over heads, no windows.
    pub fn plain(config: &HfConfig) -> Self {
        Self {
            shape: config.clone(),
            biases: Biases::default(),
            qk_norm: false,
            windows: vec![None; config.layers],
        }
    }

    pub fn kv_shape(&self) -> KvShape {
        KvShape { layers: self.shape.layers, kv_heads: self.shape.kv_heads, head_dim: self.shape.head_dim }
    }

    /// Every parameter of the model.
    pub fn parameters(&self) -> Vec<Parameter> {
        let shape = &self.shape;
        let table = vec![shape.vocab_size, shape.hidden_size];
        let mut all = vec![
            Parameter { name: EMBEDDING.into(), shape: table.clone() },
            Parameter { name: FINAL_NORM.into(), shape: vec![shape.hidden_size] },
        ];
        if !shape.tied {
            all.push(Parameter { name: HEAD.into(), shape: table });
        }
        (0..shape.layers).for_each(|layer| self.add_layer(layer, &mut all));
        all
    }

    fn add_layer(&self, layer: usize, all: &mut Vec<Parameter>) {
        let mut add = |name: &str, shape: &[usize]| {
            all.push(Parameter { name: layer_name(layer, name), shape: shape.to_vec() });
        };
        for norm in ["input_layernorm.weight", "post_attention_layernorm.weight"] {
            add(norm, &[self.shape.hidden_size]);
        }
        if self.qk_norm {
            for norm in ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] {
                add(norm, &[self.shape.head_dim]);
            }
        }
        for Projection { name, shape, bias } in self.projections() {
            add(&format!("{name}.weight"), &shape);
            if bias {
                add(&format!("{name}.bias"), &shape[..1]);
            }
        }
    }

    fn projections(&self) -> [Projection; 7] {
        let HfConfig { hidden_size, intermediate_size, heads, kv_heads, head_dim, .. } = self.shape;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let Biases { qkv, output, mlp } = self.biases;
        [
            Projection { name: "self_attn.q_proj", shape: [q, hidden_size], bias: qkv },
            Projection { name: "self_attn.k_proj", shape: [kv, hidden_size], bias: qkv },
            Projection { name: "self_attn.v_proj", shape: [kv, hidden_size], bias: qkv },
            Projection { name: "self_attn.o_proj", shape: [hidden_size, q], bias: output },
            Projection { name: "mlp.gate_proj", shape: [intermediate_size, hidden_size], bias: mlp },
            Projection { name: "mlp.up_proj", shape: [intermediate_size, hidden_size], bias: mlp },
            Projection { name: "mlp.down_proj", shape: [hidden_size, intermediate_size], bias: mlp },
        ]
    }
}

const EMBEDDING: &str = "model.embed_tokens.weight";
const FINAL_NORM: &str = "model.norm.weight";
/// The head's matrix, where it is not tied to the embedding.
pub const HEAD: &str = "lm_head.weight";

fn layer_name(layer: usize, name: &str) -> String {
    format!("model.layers.{layer}.{name}")
}

/// The input of one pass, one entry per row.
pub struct DecoderInput<'a> {
    pub tokens: Vec<TokenId>,
    pub plan: AttentionPlan,
    pub kv: &'a KvPool,
    pub attention: &'a dyn AttentionBackend,
}

/// What a pass leaves behind.
#[derive(Debug)]
pub struct DecoderOutput {
    /// After the final norm, `[rows, hidden]`.
    pub hidden: Tensor,
    /// Of the captured layers, in ascending order: what goes into layer `i`, or, for `i` = layers, what comes
    /// out of the last before the final norm.
    pub captured: Vec<Tensor>,
}

#[derive(Debug)]
struct Layer {
    input_norm: RmsNorm,
    qkv: Linear,
    rotation: HeadRotation,
    window: Option<usize>,
    output: Linear,
    mlp_norm: RmsNorm,
    mlp: GatedMlp,
}

#[derive(Debug)]
pub struct Decoder {
    embedding: Rc<Embedding>,
    layers: Vec<Layer>,
    final_norm: RmsNorm,
    head: Rc<Linear>,
    gathered_bytes: u64,
}

impl Decoder {
    /// `positions` is the longest sequence the model will see.
    pub fn load(spec: &DecoderSpec, positions: usize, loader: &mut Loader<'_>) -> Result<Self, EngineError> {
        let shape = &spec.shape;
        let tables = Rc::new(RopeTables::new(
            shape.rope_theta,
            &shape.rope_scaling,
            shape.head_dim,
            positions,
            loader.device(),
        ));
        let embedding = Rc::new(Embedding::of(loader.load_matrix(EMBEDDING)?)?);
        let layers = (0..shape.layers)
            .map(|index| load_layer(spec, index, &tables, loader))
            .collect::<Result<_, EngineError>>()?;
        let final_norm = RmsNorm::load(FINAL_NORM, shape.norm_eps, loader)?;
        let (head, gathered_bytes) = match shape.tied {
            true => (embedding.head()?, embedding.bytes_beside_head()),
            false => (Linear::fused(&[(loader.load_matrix(HEAD)?, None)])?, embedding.bytes()),
        };
        Ok(Self { embedding, layers, final_norm, head: Rc::new(head), gathered_bytes })
    }

    /// For a draft head that has none of its own.
    pub fn embedding(&self) -> Rc<Embedding> {
        Rc::clone(&self.embedding)
    }

    /// For a draft head that has none of its own.
    pub fn head(&self) -> Rc<Linear> {
        Rc::clone(&self.head)
    }

    /// Runs the rows through all layers, keeping the hidden states of the layers in `capture` (ascending).
    pub fn forward(&self, input: &DecoderInput<'_>, capture: &[usize]) -> Result<DecoderOutput, EngineError> {
        let residual = self.embedding.forward(&input.tokens)?;
        let mut captured = Vec::with_capacity(capture.len());
        let mut keep = |layer: usize, residual: &Tensor| {
            if capture.contains(&layer) {
                captured.push(residual.copy());
            }
        };
        // Each block's output waits here until the next norm adds it to the stream.
        let mut delta: Option<Tensor> = None;
        for (index, layer) in self.layers.iter().enumerate() {
            let normed = match &delta {
                None => layer.input_norm.forward(&residual)?,
                Some(delta) => layer.input_norm.add_forward(&residual, delta)?,
            };
            keep(index, &residual);
            let mixed = layer.attend(&normed, input, input.kv.layer(index))?;
            let normed = layer.mlp_norm.add_forward(&residual, &mixed)?;
            delta = Some(layer.mlp.forward(&normed)?);
        }
        let hidden = match &delta {
            None => self.final_norm.forward(&residual)?,
            Some(delta) => self.final_norm.add_forward(&residual, delta)?,
        };
        keep(self.layers.len(), &residual);
        Ok(DecoderOutput { hidden, captured })
    }

    /// Bytes of weights that are gathered only, never multiplied.
    pub fn gathered_bytes(&self) -> u64 {
        self.gathered_bytes
    }

    /// Logits of hidden states that went through the final norm.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor, EngineError> {
        self.head.forward_wide(hidden)
    }
}

impl Layer {
    fn attend(&self, x: &Tensor, input: &DecoderInput<'_>, kv: &LayerKv) -> Result<Tensor, EngineError> {
        let qkv = self.qkv.forward(x)?;
        let q = input.attention.rotate_store(&qkv, &self.rotation, kv, &input.plan)?;
        let mixed = input.attention.attend(&q, kv, &input.plan, self.window)?;
        self.output.forward(&mixed.view([x.size()[0], -1]))
    }
}

fn load_layer(
    spec: &DecoderSpec,
    index: usize,
    tables: &Rc<RopeTables>,
    loader: &mut Loader<'_>,
) -> Result<Layer, EngineError> {
    let eps = spec.shape.norm_eps;
    let mut norm = |name: &str| RmsNorm::load(&layer_name(index, name), eps, loader);
    let input_norm = norm("input_layernorm.weight")?;
    let mlp_norm = norm("post_attention_layernorm.weight")?;
    let norms = match spec.qk_norm {
        false => None,
        true => Some(HeadNorms { q: norm("self_attn.q_norm.weight")?, k: norm("self_attn.k_norm.weight")? }),
    };
    let mut parts = Vec::new();
    for Projection { name, bias, .. } in spec.projections() {
        let weight = loader.load_matrix(&layer_name(index, &format!("{name}.weight")))?;
        let bias = bias.then(|| loader.load(&layer_name(index, &format!("{name}.bias")))).transpose()?;
        parts.push((weight, bias));
    }
    Ok(Layer {
        input_norm,
        qkv: Linear::fused(&parts[0..3])?,
        rotation: HeadRotation { norms, tables: Rc::clone(tables) },
        window: spec.windows[index],
        output: Linear::fused(&parts[3..4])?,
        mlp_norm,
        mlp: GatedMlp { gate_up: Linear::fused(&parts[4..6])?, down: Linear::fused(&parts[6..7])? },
    })
}
