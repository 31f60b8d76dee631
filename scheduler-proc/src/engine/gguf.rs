//! Owns the reading of a GGUF file: its metadata as a model shape, its tensors under Hugging Face names.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{Content, Value};
use tch::{Kind, Tensor};

use super::EngineError;
use super::hf_config::{GemmaConfig, HfConfig};
use super::layers::rope::RopeScaling;
use super::matrix::{Blocks, Format};
use super::shim::Activation;
use super::weights::WeightSource;

/// How one architecture's converter writes a model.
#[derive(Debug)]
struct Family {
    /// GGUF architecture.
    gguf: &'static str,
    /// Hugging Face architecture.
    hf: &'static str,
    /// Halves of rotated heads lie interleaved.
    interleaved: bool,
    /// Norms store the factor itself, where checkpoints store what is added to 1.
    whole_norms: bool,
    activation: Activation,
    /// Names inside of layers that come before those in [`LAYER_NAMES`].
    layer_names: &'static [(&'static str, &'static str)],
}

const PLAIN: Family = Family {
    gguf: "",
    hf: "",
    interleaved: false,
    whole_norms: false,
    activation: Activation::Silu,
    layer_names: &[],
};
static FAMILIES: [Family; 4] = [
    Family { gguf: "llama", hf: "LlamaForCausalLM", interleaved: true, ..PLAIN },
    Family { gguf: "qwen2", hf: "Qwen2ForCausalLM", ..PLAIN },
    Family { gguf: "qwen3", hf: "Qwen3ForCausalLM", ..PLAIN },
    Family {
        gguf: "gemma3",
        hf: "Gemma3ForCausalLM",
        whole_norms: true,
        activation: Activation::GeluTanh,
        layer_names: &[
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("post_attention_norm", "post_attention_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
        ],
        ..PLAIN
    },
];

/// GGUF and Hugging Face names outside and inside of layers.
const TOP_NAMES: [(&str, &str); 3] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];
const LAYER_NAMES: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Divisors of the rotary frequencies, for models that stretch some of them.
const ROPE_FACTORS: &str = "rope_freqs.weight";

pub struct GgufFile {
    path: PathBuf,
    file: BufReader<File>,
    content: Content,
    family: &'static Family,
    config: HfConfig,
}

impl GgufFile {
    pub fn open(path: &Path) -> Result<Self, EngineError> {
        let failed = |reason: String| EngineError::Load { what: path.display().to_string(), reason };
        let file = File::open(path).map_err(|error| failed(error.to_string()))?;
        let mut file = BufReader::new(file);
        let content = Content::read(&mut file).map_err(|error| failed(first_line(&error)))?;
        let (mut config, family) = read_config(&content).map_err(failed)?;
        if content.tensor_infos.contains_key(ROPE_FACTORS) {
            let (_, factors) = dequantise(&content, &mut file, ROPE_FACTORS).map_err(failed)?;
            config.rope_scaling = RopeScaling::Factors(factors);
        }
        Ok(Self { path: path.to_owned(), file, content, family, config })
    }

    pub fn config(&self) -> &HfConfig {
        &self.config
    }

    fn stored_name(&self, name: &str) -> Result<String, EngineError> {
        let stored = self.family.gguf_name(name);
        stored.ok_or_else(|| EngineError::Load { what: name.to_owned(), reason: "has no GGUF name".into() })
    }

    /// Heads of a projection whose rows the converter interleaved.
    fn interleaved_heads(&self, name: &str) -> Option<usize> {
        let projection = name.rsplit('.').nth(1)?;
        match projection {
            _ if !self.family.interleaved => None,
            "q_proj" => Some(self.config.heads),
            "k_proj" => Some(self.config.kv_heads),
            _ => None,
        }
    }
}

impl WeightSource for GgufFile {
    fn describe(&self) -> String {
        self.path.display().to_string()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let info = self.content.tensor_infos.get(&self.family.gguf_name(name)?)?;
        Some(info.shape.dims().to_vec())
    }

    fn names(&self) -> Vec<String> {
        let hf = |name: &String| self.family.hf_name(name).unwrap_or_else(|| name.clone());
        self.content.tensor_infos.keys().map(hf).collect()
    }

    fn bytes(&self, name: &str) -> u64 {
        let info = self.family.gguf_name(name).and_then(|name| self.content.tensor_infos.get(&name));
        info.map_or(0, |info| {
            (info.shape.elem_count() / info.ggml_dtype.block_size() * info.ggml_dtype.type_size()) as u64
        })
    }

    fn read(&mut self, name: &str) -> Result<Tensor, EngineError> {
        let failed = |reason: String| EngineError::Load { what: name.to_owned(), reason };
        let stored = self.stored_name(name)?;
        let (shape, values) = dequantise(&self.content, &mut self.file, &stored).map_err(failed)?;
        let shape: Vec<i64> = shape.into_iter().map(|size| size as i64).collect();
        let tensor =
            Tensor::f_from_slice(&values).map_err(|error| failed(error.to_string()))?.reshape(&shape);
        debug_assert_eq!(tensor.kind(), Kind::Float);
        if self.family.whole_norms && name.ends_with("norm.weight") {
            return Ok(tensor - 1.0);
        }
        Ok(match self.interleaved_heads(name) {
            None => tensor,
            Some(heads) => separate_halves(&tensor, heads as i64),
        })
    }

    fn read_blocks(&mut self, name: &str) -> Result<Option<Blocks>, EngineError> {
        let stored = self.stored_name(name)?;
        let Some(info) = self.content.tensor_infos.get(&stored) else { return Ok(None) };
        let (Some(format), &[rows, columns]) = (Format::blocks(info.ggml_dtype), info.shape.dims()) else {
            return Ok(None);
        };
        let (weights, bytes) = (info.ggml_dtype.block_size(), info.ggml_dtype.type_size());
        if columns % weights != 0 {
            return Ok(None);
        }
        let row = columns / weights * bytes;
        let at = SeekFrom::Start(self.content.tensor_data_offset + info.offset);
        let mut bytes = vec![0; rows * row];
        self.file
            .seek(at)
            .and_then(|_| self.file.read_exact(&mut bytes))
            .map_err(|error| EngineError::Load { what: name.to_owned(), reason: error.to_string() })?;
        if let Some(heads) = self.interleaved_heads(name) {
            bytes = separate_rows(&bytes, row, rows / heads);
        }
        Ok(Some(Blocks { format, rows, columns, bytes }))
    }
}

fn dequantise(
    content: &Content,
    file: &mut BufReader<File>,
    name: &str,
) -> Result<(Vec<usize>, Vec<f32>), String> {
    let cpu = candle_core::Device::Cpu;
    content
        .tensor(file, name, &cpu)
        .and_then(|tensor| tensor.dequantize(&cpu))
        .and_then(|tensor| Ok((tensor.dims().to_vec(), tensor.flatten_all()?.to_vec1::<f32>()?)))
        .map_err(|error| first_line(&error))
}

/// Undoes the converter's reordering: rows of each head lie as (first, second) pairs of the two halves.
fn separate_halves(weight: &Tensor, heads: i64) -> Tensor {
    let shape = weight.size();
    weight.reshape([heads, shape[0] / heads / 2, 2, -1]).transpose(1, 2).reshape(&shape)
}

/// The same for rows of `row` bytes, in heads of `head` rows.
fn separate_rows(bytes: &[u8], row: usize, head: usize) -> Vec<u8> {
    let mut separated = Vec::with_capacity(bytes.len());
    for head in bytes.chunks(row * head) {
        for half in [0, 1] {
            head.chunks(row).skip(half).step_by(2).for_each(|row| separated.extend_from_slice(row));
        }
    }
    separated
}

impl Family {
    fn find(name: &str) -> Result<&'static Self, String> {
        FAMILIES.iter().find(|family| family.gguf == name).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().map(|family| family.gguf).collect();
            format!("GGUF architecture {name:?} is unknown; known are {}", known.join(", "))
        })
    }

    /// GGUF and Hugging Face names inside of layers.
    fn layer_names(&self) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
        self.layer_names.iter().chain(&LAYER_NAMES)
    }

    fn gguf_name(&self, name: &str) -> Option<String> {
        if let Some((gguf, _)) = TOP_NAMES.iter().find(|(_, hf)| *hf == name) {
            return Some((*gguf).to_owned());
        }
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let (module, part) = rest.rsplit_once('.')?;
        let (gguf, _) = self.layer_names().find(|(_, hf)| *hf == module)?;
        Some(format!("blk.{layer}.{gguf}.{part}"))
    }

    fn hf_name(&self, name: &str) -> Option<String> {
        if let Some((_, hf)) = TOP_NAMES.iter().find(|(gguf, _)| *gguf == name) {
            return Some((*hf).to_owned());
        }
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let (module, part) = rest.rsplit_once('.')?;
        let (_, hf) = self.layer_names().find(|(gguf, _)| *gguf == module)?;
        Some(format!("model.layers.{layer}.{hf}.{part}"))
    }
}

/// The file's metadata, under the prefix of its architecture.
struct Metadata<'a> {
    content: &'a Content,
    prefix: String,
}

impl Metadata<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.content.metadata.get(&format!("{}.{key}", self.prefix))
    }

    fn size(&self, key: &str) -> Result<Option<usize>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let size = match value {
            Value::U64(size) => Some(*size),
            Value::I32(size) => u64::try_from(*size).ok(),
            Value::U32(size) => Some(u64::from(*size)),
            _ => None,
        };
        let size = size.ok_or_else(|| format!("{}.{key} is no size", self.prefix))?;
        usize::try_from(size).map(Some).map_err(|error| error.to_string())
    }

    fn need_size(&self, key: &str) -> Result<usize, String> {
        self.size(key)?.ok_or_else(|| format!("metadata {}.{key} is missing", self.prefix))
    }

    fn float(&self, key: &str) -> Option<f32> {
        self.get(key).and_then(|value| value.to_f32().ok())
    }

    fn flags(&self, key: &str) -> Option<Vec<bool>> {
        self.get(key)?.to_vec().ok()?.iter().map(|value| value.to_bool().ok()).collect()
    }

    fn rope_scaling(&self) -> Result<RopeScaling, String> {
        let kind = self.get("rope.scaling.type").and_then(|value| value.to_string().ok());
        match kind.map(String::as_str) {
            None | Some("none") => Ok(RopeScaling::Default),
            Some("linear") => {
                let factor = self.float("rope.scaling.factor").ok_or("rope.scaling.factor is missing")?;
                Ok(RopeScaling::Linear { factor: f64::from(factor) })
            }
            Some(other) => Err(format!("rope scaling {other:?} is not supported; known are none and linear")),
        }
    }
}

fn read_config(content: &Content) -> Result<(HfConfig, &'static Family), String> {
    let name = content.metadata.get("general.architecture").and_then(|value| value.to_string().ok());
    let name = name.ok_or("metadata general.architecture is missing")?;
    let family = Family::find(name)?;
    let meta = Metadata { content, prefix: name.clone() };
    let (hidden_size, heads) = (meta.need_size("embedding_length")?, meta.need_size("attention.head_count")?);
    let layers = meta.need_size("block_count")?;
    let embedding =
        content.tensor_infos.get("token_embd.weight").ok_or("tensor token_embd.weight is missing")?;
    let head_dim = match meta.size("attention.key_length")?.or(meta.size("rope.dimension_count")?) {
        Some(dim) => dim,
        None => hidden_size.checked_div(heads).ok_or("attention.head_count is 0")?,
    };
    let config = HfConfig {
        architecture: family.hf.to_owned(),
        hidden_size,
        intermediate_size: meta.need_size("feed_forward_length")?,
        layers,
        heads,
        kv_heads: meta.size("attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        vocab_size: embedding.shape.dims().first().copied().unwrap_or(0),
        max_positions: meta.need_size("context_length")?,
        norm_eps: meta.float("attention.layer_norm_rms_epsilon").unwrap_or(1e-5),
        rope_theta: f64::from(meta.float("rope.freq_base").unwrap_or(10_000.0)),
        rope_scaling: meta.rope_scaling()?,
        sliding_window: meta.size("attention.sliding_window")?,
        use_sliding_window: false,
        max_window_layers: layers,
        sliding_layers: meta.flags("attention.sliding_window_pattern"),
        attention_bias: content.tensor_infos.contains_key("blk.0.attn_q.bias"),
        mlp_bias: false,
        activation: family.activation,
        experts: None,
        gemma: match family.whole_norms {
            true => gemma(&meta, hidden_size / heads.max(1), head_dim, layers)?,
            false => GemmaConfig::default(),
        },
        tied: !content.tensor_infos.contains_key("output.weight"),
    };
    Ok((config.check()?, family))
}

/// Layers of the one Gemma 3 whose queries are not scaled by their own width; its files do not say so.
const GEMMA_27B_LAYERS: usize = 62;

fn gemma(
    meta: &Metadata<'_>,
    head_share: usize,
    head_dim: usize,
    layers: usize,
) -> Result<GemmaConfig, String> {
    let scalar = if layers == GEMMA_27B_LAYERS { head_share } else { head_dim };
    let window_pattern = match meta.get("attention.sliding_window_pattern") {
        // Layer by layer instead.
        Some(Value::Array(_)) => None,
        _ => meta.size("attention.sliding_window_pattern")?,
    };
    Ok(GemmaConfig {
        query_scalar: Some(scalar as f64),
        local_rope_theta: meta.float("rope.freq_base_swa").map(f64::from),
        window_pattern,
        logit_softcap: meta.float("final_logit_softcapping").map(f64::from),
    })
}

fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
pub(super) mod tests;
