//! A GGUF file written from the same weights is the same model; every stored type is read.

use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{Device as CandleDevice, Tensor as CandleTensor};

use super::*;
use crate::engine::models::describe;
use crate::engine::weights::{Parameter, SafetensorFiles};

fn target(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/golden").join(case).join("target")
}

fn fixture() -> PathBuf {
    target("llama-tiny")
}

fn size(value: usize) -> Value {
    Value::U32(value as u32)
}

fn metadata(config: &HfConfig) -> Vec<(String, Value)> {
    metadata_as("llama", config)
}

fn metadata_as(architecture: &str, config: &HfConfig) -> Vec<(String, Value)> {
    let mut entries = vec![("general.architecture".to_owned(), Value::String(architecture.into()))];
    let keys = [
        ("embedding_length", size(config.hidden_size)),
        ("feed_forward_length", size(config.intermediate_size)),
        ("block_count", size(config.layers)),
        ("attention.head_count", size(config.heads)),
        ("attention.head_count_kv", size(config.kv_heads)),
        ("context_length", size(config.max_positions)),
        ("attention.layer_norm_rms_epsilon", Value::F32(config.norm_eps)),
        ("rope.freq_base", Value::F32(config.rope_theta as f32)),
    ];
    entries.extend(keys.map(|(key, value)| (format!("{architecture}.{key}"), value)));
    entries
}

fn write(path: &Path, metadata: &[(String, Value)], tensors: &[(String, QTensor)]) {
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<(&str, &QTensor)> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut File::create(path).unwrap(), &metadata, &tensors).unwrap();
}

fn quantised(tensor: &Tensor, kind: GgmlDType) -> QTensor {
    let values = Vec::<f32>::try_from(tensor.reshape([-1])).unwrap();
    let shape: Vec<usize> = tensor.size().into_iter().map(|size| size as usize).collect();
    let tensor = CandleTensor::from_vec(values, shape, &CandleDevice::Cpu).unwrap();
    QTensor::quantize(&tensor, kind).unwrap()
}

/// What the converter does to rotated heads.
fn interleave_halves(weight: &Tensor, heads: i64) -> Tensor {
    let shape = weight.size();
    weight.reshape([heads, 2, shape[0] / heads / 2, -1]).transpose(1, 2).reshape(&shape)
}

#[test]
fn a_file_of_the_same_weights_is_the_same_model() {
    let config = HfConfig::read(&fixture()).unwrap();
    let mut source = SafetensorFiles::open(&fixture()).unwrap();
    let parameters = describe(&config).unwrap().parameters();
    let tensors: Vec<(String, QTensor)> = parameters
        .iter()
        .map(|parameter| {
            let tensor = source.read(&parameter.name).unwrap();
            let tensor = match parameter.name.rsplit('.').nth(1) {
                Some("q_proj") => interleave_halves(&tensor, config.heads as i64),
                Some("k_proj") => interleave_halves(&tensor, config.kv_heads as i64),
                _ => tensor,
            };
            (FAMILIES[0].gguf_name(&parameter.name).unwrap(), quantised(&tensor, GgmlDType::F32))
        })
        .collect();
    let file = tempfile::NamedTempFile::new().unwrap();
    write(file.path(), &metadata(&config), &tensors);

    let mut gguf = GgufFile::open(file.path()).unwrap();
    assert_eq!(*gguf.config(), config);
    for Parameter { name, shape } in parameters {
        assert_eq!(gguf.shape(&name), Some(shape), "{name}");
        assert!(gguf.read(&name).unwrap().equal(&source.read(&name).unwrap()), "{name}");
    }
}

/// What the parts of a Gemma layer are called in published files.
const GEMMA_NAMES: [(&str, &str); 13] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

fn gemma_name(name: &str) -> String {
    match name {
        "model.embed_tokens.weight" => "token_embd.weight".into(),
        "model.norm.weight" => "output_norm.weight".into(),
        _ => {
            let (layer, part) = name.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
            let part = part.strip_suffix(".weight").unwrap();
            let (_, gguf) = GEMMA_NAMES.iter().find(|(hf, _)| *hf == part).unwrap();
            format!("blk.{layer}.{gguf}.weight")
        }
    }
}

/// The golden Gemma as a converter writes it: norms with their 1 in them. A file cannot say that queries are scaled
/// otherwise than by the root of the head's width, so their norm says it.
pub(in crate::engine) fn gemma_file() -> tempfile::NamedTempFile {
    let dir = target("gemma3-text-tiny");
    let config = HfConfig::read(&dir).unwrap();
    let mut source = SafetensorFiles::open(&dir).unwrap();
    let extra = (config.head_dim as f64 / config.gemma.query_scalar.unwrap()).sqrt();
    let tensors: Vec<(String, QTensor)> = describe(&config)
        .unwrap()
        .parameters()
        .iter()
        .map(|Parameter { name, .. }| {
            let tensor = source.read(name).unwrap();
            let tensor = match name.rsplit('.').nth(1).unwrap() {
                "q_norm" => (tensor + 1.0) * extra,
                part if part.ends_with("norm") => tensor + 1.0,
                _ => tensor,
            };
            (gemma_name(name), quantised(&tensor, GgmlDType::F32))
        })
        .collect();
    let mut entries = metadata_as("gemma3", &config);
    let own = [
        ("attention.key_length", size(config.head_dim)),
        ("attention.sliding_window", size(config.sliding_window.unwrap())),
        ("attention.sliding_window_pattern", size(config.gemma.window_pattern.unwrap())),
    ];
    entries.extend(own.map(|(key, value)| (format!("gemma3.{key}"), value)));
    let file = tempfile::NamedTempFile::new().unwrap();
    write(file.path(), &entries, &tensors);
    file
}

#[test]
fn every_tensor_of_a_gemma_file_has_its_name_and_its_1_taken_out() {
    let file = gemma_file();
    let mut gguf = GgufFile::open(file.path()).unwrap();
    let mut source = SafetensorFiles::open(&target("gemma3-text-tiny")).unwrap();
    let (mut found, mut expected) = (gguf.names(), source.names());
    found.sort_unstable();
    expected.sort_unstable();
    assert_eq!(found, expected);
    for name in expected.iter().filter(|name| !name.ends_with("q_norm.weight")) {
        let (found, expected) = (gguf.read(name).unwrap(), source.read(name).unwrap());
        assert!(found.allclose(&expected, 0.0, 1e-6, false), "{name}");
    }
}

#[test]
fn a_gemma_file_says_which_layers_slide_by_a_number_or_one_by_one() {
    let config = HfConfig::read(&target("gemma3-text-tiny")).unwrap();
    let table = quantised(&Tensor::zeros([4, 48], (Kind::Float, tch::Device::Cpu)), GgmlDType::F32);
    let tensors = [("token_embd.weight".to_owned(), table)];
    let windows = |pattern: Option<Value>| {
        let mut entries = metadata_as("gemma3", &config);
        entries.push(("gemma3.attention.sliding_window".into(), size(9)));
        entries.extend(pattern.map(|value| ("gemma3.attention.sliding_window_pattern".to_owned(), value)));
        let file = tempfile::NamedTempFile::new().unwrap();
        write(file.path(), &entries, &tensors);
        let gguf = GgufFile::open(file.path()).unwrap();
        describe(gguf.config()).unwrap().windows
    };
    let (slides, sees) = (Some(9), None);
    assert_eq!(windows(None), [slides; 4]);
    assert_eq!(windows(Some(size(2))), [slides, sees, slides, sees]);
    let one_by_one = [false, true, true, false].map(Value::Bool);
    assert_eq!(windows(Some(Value::Array(one_by_one.into()))), [sees, slides, slides, sees]);
}

#[test]
fn every_stored_type_is_read_to_its_own_precision() {
    let config = HfConfig::read(&fixture()).unwrap();
    let weight = Tensor::randn([8, 512], (Kind::Float, tch::Device::Cpu));
    let types = [
        (GgmlDType::F32, 0.0),
        (GgmlDType::F16, 2e-3),
        (GgmlDType::BF16, 2e-2),
        (GgmlDType::Q8_0, 0.02),
        (GgmlDType::Q6K, 0.1),
        (GgmlDType::Q5_0, 0.2),
        (GgmlDType::Q5_1, 0.2),
        (GgmlDType::Q5K, 0.2),
        (GgmlDType::Q4_0, 0.45),
        (GgmlDType::Q4_1, 0.45),
        (GgmlDType::Q4K, 0.45),
    ];
    for (kind, tolerance) in types {
        let tensors = [("token_embd.weight".to_owned(), quantised(&weight, kind))];
        let file = tempfile::NamedTempFile::new().unwrap();
        write(file.path(), &metadata(&config), &tensors);
        let read = GgufFile::open(file.path()).unwrap().read("model.embed_tokens.weight").unwrap();
        let difference = f64::try_from((&read - &weight).abs().max()).unwrap();
        assert!(difference <= tolerance, "{kind:?}: {difference}");
        assert!(tolerance == 0.0 || difference > 0.0, "{kind:?} lost nothing");
    }
}

#[test]
fn rope_factors_divide_the_frequencies() {
    let config = HfConfig::read(&fixture()).unwrap();
    let row = |values: &[f32]| quantised(&Tensor::from_slice(values), GgmlDType::F32);
    let tensors = [
        (
            "token_embd.weight".to_owned(),
            quantised(&Tensor::zeros([4, 64], (Kind::Float, tch::Device::Cpu)), GgmlDType::F32),
        ),
        ("rope_freqs.weight".to_owned(), row(&[1.0, 2.0, 8.0])),
    ];
    let file = tempfile::NamedTempFile::new().unwrap();
    write(file.path(), &metadata(&config), &tensors);
    let gguf = GgufFile::open(file.path()).unwrap();
    assert_eq!(gguf.config().rope_scaling, RopeScaling::Factors(vec![1.0, 2.0, 8.0]));
}

#[test]
fn an_unknown_architecture_and_a_broken_file_are_refused() {
    let config = HfConfig::read(&fixture()).unwrap();
    let mut entries = metadata(&config);
    entries[0].1 = Value::String("mamba".into());
    let file = tempfile::NamedTempFile::new().unwrap();
    write(file.path(), &entries, &[]);
    let refusal = |path: &Path| GgufFile::open(path).err().expect("is refused").to_string();
    let error = refusal(file.path());
    assert!(error.contains("\"mamba\"") && error.contains("llama, qwen2, qwen3, gemma3"), "{error}");
    std::fs::write(file.path(), b"not a model").unwrap();
    assert!(refusal(file.path()).contains(&file.path().display().to_string()));
}
