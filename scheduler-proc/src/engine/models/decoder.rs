//! Owns the decoder stack that all families share: embedding, layers, final norm, head.

use std::rc::Rc;

use proto::TokenId;
use tch::Tensor;

use crate::engine::attention::AttentionBackend;
use crate::engine::attention::plan::AttentionPlan;
use crate::engine::hf_config::HfConfig;
use crate::engine::kv::{KvPool, KvShape, LayerKv};
use crate::engine::layers::embedding::Embedding;
use crate::engine::layers::experts::Experts;
use crate::engine::layers::linear::Linear;
use crate::engine::layers::mlp::GatedMlp;
use crate::engine::layers::norm::{NormFormat, RmsNorm};
use crate::engine::layers::rope::{HeadNorms, HeadRotation, RopeScaling, RopeTables};
use crate::engine::matrix::Matrix;
use crate::engine::weights::{Loader, Parameter};
use crate::engine::{EngineError, shim};

/// What sets one family apart from another.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderSpec {
    pub shape: HfConfig,
    pub biases: Biases,
    /// A norm over each head of queries and keys, before rotation.
    pub qk_norm: bool,
    /// Sliding window of every layer.
    pub windows: Vec<Option<usize>>,
    /// The mixture of experts that a layer has for its feed-forward block.
    pub experts: Vec<Option<ExpertsSpec>>,
    pub style: Style,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertsSpec {
    pub count: usize,
    pub per_token: usize,
    pub intermediate_size: usize,
    pub normalised: bool,
}

/// What Gemma does otherwise than all others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Style {
    /// Norms store what is added to 1.
    pub norms_from_one: bool,
    /// Attention and feed-forward block each have a norm behind them, too.
    pub norms_behind: bool,
    pub embedding_scale: Option<f64>,
    /// Of queries, beside the root of the head's width; needs norms over heads, which carry it.
    pub query_scale: f64,
    /// Rotation of layers with a window.
    pub local_rope_theta: Option<f64>,
    /// Logits are squeezed between this and its negative.
    pub logit_softcap: Option<f32>,
}

impl Default for Style {
    fn default() -> Self {
        Self {
            norms_from_one: false,
            norms_behind: false,
            embedding_scale: None,
            query_scale: 1.0,
            local_rope_theta: None,
            logit_softcap: None,
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Biases {
    pub qkv: bool,
    pub output: bool,
    pub mlp: bool,
}

/// A projection of a layer: name, rows and columns, bias.
struct Projection {
    name: String,
    shape: [usize; 2],
    bias: bool,
}

impl DecoderSpec {
    /// No biases, no norms over heads, no windows, no experts.
    pub fn plain(config: &HfConfig) -> Self {
        Self {
            shape: config.clone(),
            biases: Biases::default(),
            qk_norm: false,
            windows: vec![None; config.layers],
            experts: vec![None; config.layers],
            style: Style::default(),
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
        for norm in self.norms() {
            add(norm, &[self.shape.hidden_size]);
        }
        if self.qk_norm {
            for norm in ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] {
                add(norm, &[self.shape.head_dim]);
            }
        }
        if let Some(experts) = self.experts[layer] {
            add(ROUTER, &[experts.count, self.shape.hidden_size]);
        }
        for Projection { name, shape, bias } in self.attention().into_iter().chain(self.mlp(layer)) {
            add(&format!("{name}.weight"), &shape);
            if bias {
                add(&format!("{name}.bias"), &shape[..1]);
            }
        }
    }

    fn norm_format(&self) -> NormFormat {
        NormFormat { eps: self.shape.norm_eps, from_one: self.style.norms_from_one }
    }

    /// Norms over the stream: before attention, before the feed-forward block, then those behind both.
    fn norms(&self) -> &'static [&'static str] {
        match self.style.norms_behind {
            false => &["input_layernorm.weight", "post_attention_layernorm.weight"],
            true => &[
                "input_layernorm.weight",
                "pre_feedforward_layernorm.weight",
                "post_attention_layernorm.weight",
                "post_feedforward_layernorm.weight",
            ],
        }
    }

    fn attention(&self) -> [Projection; 4] {
        let HfConfig { hidden_size, heads, kv_heads, head_dim, .. } = self.shape;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let Biases { qkv, output, .. } = self.biases;
        let project = |name: &str, shape, bias| Projection { name: name.into(), shape, bias };
        [
            project("self_attn.q_proj", [q, hidden_size], qkv),
            project("self_attn.k_proj", [kv, hidden_size], qkv),
            project("self_attn.v_proj", [kv, hidden_size], qkv),
            project("self_attn.o_proj", [hidden_size, q], output),
        ]
    }

    /// Gate, up and down of a layer's block, or of each of its experts.
    fn mlp(&self, layer: usize) -> Vec<Projection> {
        let hidden = self.shape.hidden_size;
        let block = |prefix: String, width: usize, bias| {
            [("gate_proj", [width, hidden]), ("up_proj", [width, hidden]), ("down_proj", [hidden, width])]
                .map(|(name, shape)| Projection { name: format!("{prefix}{name}"), shape, bias })
        };
        match self.experts[layer] {
            None => block("mlp.".into(), self.shape.intermediate_size, self.biases.mlp).into(),
            Some(experts) => (0..experts.count)
                .flat_map(|index| block(format!("mlp.experts.{index}."), experts.intermediate_size, false))
                .collect(),
        }
    }
}

const EMBEDDING: &str = "model.embed_tokens.weight";
const FINAL_NORM: &str = "model.norm.weight";
const ROUTER: &str = "mlp.gate.weight";
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
    mlp: FeedForward,
    /// Behind attention and behind the feed-forward block.
    norms_behind: Option<[RmsNorm; 2]>,
}

#[derive(Debug)]
enum FeedForward {
    Gated(GatedMlp),
    Experts(Experts),
}

#[derive(Debug)]
pub struct Decoder {
    embedding: Rc<Embedding>,
    layers: Vec<Layer>,
    final_norm: RmsNorm,
    head: Rc<Linear>,
    logit_softcap: Option<f32>,
    gathered_bytes: u64,
}

impl Decoder {
    /// `positions` is the longest sequence the model will see.
    pub fn load(spec: &DecoderSpec, positions: usize, loader: &mut Loader<'_>) -> Result<Self, EngineError> {
        let shape = &spec.shape;
        let device = loader.device();
        let table =
            |theta, scaling| Rc::new(RopeTables::new(theta, scaling, shape.head_dim, positions, device));
        let tables = table(shape.rope_theta, &shape.rope_scaling);
        let local = spec.style.local_rope_theta.map(|theta| table(theta, &RopeScaling::Default));
        let embedding = Embedding::of(loader.load_matrix(EMBEDDING)?)?;
        let embedding = Rc::new(match spec.style.embedding_scale {
            None => embedding,
            Some(scale) => embedding.scaled(scale, loader.kind()),
        });
        let layers = (0..shape.layers)
            .map(|index| {
                let windowed = spec.windows[index].and(local.as_ref());
                load_layer(spec, index, windowed.unwrap_or(&tables), loader)
            })
            .collect::<Result<_, EngineError>>()?;
        let final_norm = spec.norm_format().load(FINAL_NORM, loader)?;
        let (head, gathered_bytes) = match shape.tied {
            true => (embedding.head()?, embedding.bytes_beside_head()),
            false => (Linear::fused(&[(loader.load_matrix(HEAD)?, None)])?, embedding.bytes()),
        };
        let logit_softcap = spec.style.logit_softcap;
        Ok(Self { embedding, layers, final_norm, head: Rc::new(head), logit_softcap, gathered_bytes })
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
            delta = Some(layer.feed(&normed)?);
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

    /// Logits of hidden states that went through the final norm, on the host.
    pub fn logits(&self, hidden: &Tensor) -> Result<Vec<f32>, EngineError> {
        let mut logits = shim::to_host(&self.head.forward_wide(hidden)?)?;
        if let Some(cap) = self.logit_softcap {
            squeeze(&mut logits, cap);
        }
        Ok(logits)
    }
}

/// One by one: torch's tanh gives other bits at the end of a tensor than in its middle.
fn squeeze(logits: &mut [f32], cap: f32) {
    logits.iter_mut().for_each(|logit| *logit = cap * (*logit / cap).tanh());
}

impl Layer {
    fn attend(&self, x: &Tensor, input: &DecoderInput<'_>, kv: &LayerKv) -> Result<Tensor, EngineError> {
        let qkv = self.qkv.forward(x)?;
        let q = input.attention.rotate_store(&qkv, &self.rotation, kv, &input.plan)?;
        let mixed = input.attention.attend(&q, kv, &input.plan, self.window)?;
        let mixed = self.output.forward(&mixed.view([x.size()[0], -1]))?;
        match &self.norms_behind {
            None => Ok(mixed),
            Some([norm, _]) => norm.forward(&mixed),
        }
    }

    fn feed(&self, x: &Tensor) -> Result<Tensor, EngineError> {
        let fed = match &self.mlp {
            FeedForward::Gated(mlp) => mlp.forward(x),
            FeedForward::Experts(experts) => experts.forward(x),
        }?;
        match &self.norms_behind {
            None => Ok(fed),
            Some([_, norm]) => norm.forward(&fed),
        }
    }
}

fn load_layer(
    spec: &DecoderSpec,
    index: usize,
    tables: &Rc<RopeTables>,
    loader: &mut Loader<'_>,
) -> Result<Layer, EngineError> {
    let format = spec.norm_format();
    let mut norm = |name: &str, times| format.load_times(times, &layer_name(index, name), loader);
    let names = spec.norms();
    let (input_norm, mlp_norm) = (norm(names[0], 1.0)?, norm(names[1], 1.0)?);
    let norms_behind = match names.get(2..4) {
        Some([attention, mlp]) => Some([norm(attention, 1.0)?, norm(mlp, 1.0)?]),
        _ => None,
    };
    let norms = match spec.qk_norm {
        false => None,
        true => Some(HeadNorms {
            q: norm("self_attn.q_norm.weight", spec.style.query_scale)?,
            k: norm("self_attn.k_norm.weight", 1.0)?,
        }),
    };
    let parts = load_parts(index, spec.attention(), loader)?;
    Ok(Layer {
        input_norm,
        qkv: Linear::fused(&parts[0..3])?,
        rotation: HeadRotation { norms, tables: Rc::clone(tables) },
        window: spec.windows[index],
        output: Linear::fused(&parts[3..4])?,
        mlp_norm,
        mlp: load_mlp(spec, index, loader)?,
        norms_behind,
    })
}

fn load_mlp(spec: &DecoderSpec, index: usize, loader: &mut Loader<'_>) -> Result<FeedForward, EngineError> {
    let parts = load_parts(index, spec.mlp(index), loader)?;
    let activation = spec.shape.activation;
    let Some(experts) = spec.experts[index] else {
        return Ok(FeedForward::Gated(GatedMlp::new(&parts, activation)?));
    };
    Ok(FeedForward::Experts(Experts {
        router: Linear::new(&loader.load(&layer_name(index, ROUTER))?, None)?,
        experts: parts.chunks(3).map(|parts| GatedMlp::new(parts, activation)).collect::<Result<_, _>>()?,
        per_row: experts.per_token,
        normalised: experts.normalised,
    }))
}

/// Weights and biases of some of a layer's projections.
fn load_parts(
    layer: usize,
    projections: impl IntoIterator<Item = Projection>,
    loader: &mut Loader<'_>,
) -> Result<Vec<(Matrix, Option<Tensor>)>, EngineError> {
    let mut part = |Projection { name, bias, .. }| {
        let weight = loader.load_matrix(&layer_name(layer, &format!("{name}.weight")))?;
        let bias = bias.then(|| loader.load(&layer_name(layer, &format!("{name}.bias")))).transpose()?;
        Ok((weight, bias))
    };
    projections.into_iter().map(&mut part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squeezed_logits_keep_their_order_within_the_cap() {
        let mut logits = [-1e9f32, -30.0, -0.5, 0.0, 0.5, 30.0, 1e9];
        squeeze(&mut logits, 30.0);
        assert!(logits.is_sorted());
        assert_eq!((logits[0], logits[3], logits[6]), (-30.0, 0.0, 30.0));
        assert!((logits[5] - 30.0 * 1f32.tanh()).abs() < 1e-5 && (logits[4] - 0.5).abs() < 1e-4);
    }
}
