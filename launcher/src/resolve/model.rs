//! Owns what is read from a model's files before any process starts: where the weights are, and the few facts
//! that flags and the other processes depend on. The engine reads the rest itself.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use candle_core::quantized::gguf_file;
use proto::TokenId;
use serde_json::{Map, Value};

use crate::args::LoadFormat;

/// Where the model is, and in which form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ModelFiles {
    /// `config.json` and safetensors.
    Folder(PathBuf),
    Gguf(PathBuf),
    /// `config.json` alone; the weights are made up.
    Shape(PathBuf),
}

/// What flags and other processes need to know of the model.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ModelFacts {
    pub(super) architectures: Vec<String>,
    pub(super) model_type: String,
    pub(super) vocab_size: u32,
    pub(super) context_length: u32,
    /// Where `context_length` was read, for messages.
    pub(super) context_source: &'static str,
    pub(super) eos_token_ids: Vec<TokenId>,
    pub(super) bos_token_id: Option<TokenId>,
    pub(super) generation_defaults: Map<String, Value>,
    /// Numbers kept in the KV pool per token, over all layers.
    pub(super) kv_values_per_token: u64,
}

impl ModelFiles {
    pub(super) fn find(path: &Path, format: LoadFormat) -> Result<Self> {
        let shown = path.display();
        if !path.exists() {
            bail!("--model-path {shown} does not exist: give a folder or a .gguf file on this machine");
        }
        let path = &std::path::absolute(path)?;
        let has_config = path.join("config.json").is_file();
        let gguf = if path.is_file() { Some(path.clone()) } else { single_gguf(path)? };
        match format {
            LoadFormat::Dummy if has_config => Ok(Self::Shape(path.clone())),
            LoadFormat::Dummy => {
                bail!("--load-format dummy needs a folder with config.json, {shown} is none")
            }
            LoadFormat::Safetensors if has_config => Ok(Self::Folder(path.clone())),
            LoadFormat::Safetensors => {
                bail!("--load-format safetensors needs a folder with config.json, {shown} is none")
            }
            LoadFormat::Auto if has_config && has_safetensors(path)? => Ok(Self::Folder(path.clone())),
            LoadFormat::Auto | LoadFormat::Gguf => match gguf {
                Some(file) => Ok(Self::Gguf(file)),
                None => bail!(
                    "--model-path {shown} holds neither config.json with .safetensors files nor a single .gguf \
                     file (name the file itself where there are several)"
                ),
            },
        }
    }
}

fn entries_ending_in(dir: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == ending) {
            found.push(path);
        }
    }
    Ok(found)
}

fn single_gguf(dir: &Path) -> Result<Option<PathBuf>> {
    let mut files = entries_ending_in(dir, "gguf")?;
    Ok(if files.len() == 1 { files.pop() } else { None })
}

fn has_safetensors(dir: &Path) -> Result<bool> {
    Ok(!entries_ending_in(dir, "safetensors")?.is_empty()
        || dir.join("model.safetensors.index.json").is_file())
}

impl ModelFacts {
    /// `tokenizer_path` is where the end token is looked up when the tokenizer lies apart from the model.
    pub(super) fn read(files: &ModelFiles, tokenizer_path: Option<&Path>) -> Result<Self> {
        match files {
            ModelFiles::Folder(dir) | ModelFiles::Shape(dir) => {
                let tokenizer = tokenizer_path.filter(|path| path.is_dir()).unwrap_or(dir);
                Self::from_folder(dir, tokenizer)
            }
            ModelFiles::Gguf(file) => Self::from_gguf(file),
        }
    }

    fn from_folder(dir: &Path, tokenizer: &Path) -> Result<Self> {
        let config = read_json(&dir.join("config.json"))?.context("config.json is missing")?;
        let generation = read_json(&dir.join("generation_config.json"))?.unwrap_or(Value::Null);
        let number =
            |name: &str| config[name].as_u64().with_context(|| format!("config.json: no number {name}"));
        let heads = number("num_attention_heads")?;
        if heads == 0 {
            bail!("config.json: num_attention_heads is 0");
        }
        let kv_heads = config["num_key_value_heads"].as_u64().unwrap_or(heads);
        let head_dim = match config["head_dim"].as_u64() {
            Some(size) => size,
            None => number("hidden_size")? / heads,
        };
        let eos = token_ids(&config["eos_token_id"])
            .chain(token_ids(&generation["eos_token_id"]))
            .chain(tokenizer_eos(tokenizer)?)
            .collect::<BTreeSet<_>>();
        Ok(Self {
            architectures: strings(&config["architectures"]),
            model_type: config["model_type"].as_str().unwrap_or_default().to_owned(),
            vocab_size: number("vocab_size")?.try_into().context("config.json: vocab_size")?,
            context_length: number("max_position_embeddings")?
                .try_into()
                .context("max_position_embeddings")?,
            context_source: "max_position_embeddings in config.json",
            eos_token_ids: eos.into_iter().collect(),
            bos_token_id: token_ids(&config["bos_token_id"]).next(),
            generation_defaults: generation.as_object().map(sampling_defaults).unwrap_or_default(),
            kv_values_per_token: 2 * number("num_hidden_layers")? * kv_heads * head_dim,
        })
    }

    fn from_gguf(file: &Path) -> Result<Self> {
        let mut reader = BufReader::new(File::open(file)?);
        let content = gguf_file::Content::read(&mut reader).context("not a readable GGUF file")?;
        let get = |key: &str| content.metadata.get(key);
        let text = |key: &str| get(key).and_then(|value| value.to_string().ok()).cloned();
        let arch = text("general.architecture").context("GGUF metadata: no general.architecture")?;
        let number = |key: &str| {
            let key = format!("{arch}.{key}");
            get(&key).and_then(integer).with_context(|| format!("GGUF metadata: no number {key}"))
        };
        let token =
            |key: &str| get(&format!("tokenizer.ggml.{key}")).and_then(integer).map(|id| id as TokenId);
        let tokens = get("tokenizer.ggml.tokens").and_then(|tokens| tokens.to_vec().ok());
        let vocab = match tokens {
            Some(tokens) => tokens.len() as u64,
            None => number("vocab_size")?,
        };
        let types = get("tokenizer.ggml.token_type").and_then(|types| types.to_vec().ok());
        let heads = number("attention.head_count")?;
        let kv_heads = number("attention.head_count_kv").unwrap_or(heads);
        let head_dim = match number("attention.key_length") {
            Ok(size) => size,
            Err(_) => number("embedding_length")?.checked_div(heads).context("GGUF metadata: no heads")?,
        };
        let eos: BTreeSet<_> = ["eos_token_id", "eot_token_id", "eom_token_id"]
            .into_iter()
            .filter_map(token)
            .chain(turn_ends(tokens, types))
            .collect();
        Ok(Self {
            architectures: vec![architecture_of(&arch).to_owned()],
            vocab_size: vocab.try_into().context("GGUF metadata: vocabulary")?,
            context_length: number("context_length")?.try_into().context("GGUF metadata: context_length")?,
            context_source: "context_length in the GGUF metadata",
            eos_token_ids: eos.into_iter().collect(),
            bos_token_id: token("bos_token_id"),
            generation_defaults: Map::new(),
            kv_values_per_token: 2 * number("block_count")? * kv_heads * head_dim,
            model_type: arch,
        })
    }
}

/// Tokens that end a turn, by what they are called: files of models that chat do not always say which they are.
const TURN_ENDS: [&str; 3] = ["<end_of_turn>", "<|eot_id|>", "<|im_end|>"];
/// `tokenizer.ggml.token_type` of tokens that are no text.
const CONTROL: u64 = 3;

fn turn_ends(tokens: Option<&Vec<gguf_file::Value>>, types: Option<&Vec<gguf_file::Value>>) -> Vec<TokenId> {
    let all = tokens.into_iter().flatten().zip(types.into_iter().flatten()).zip(0..);
    all.filter(|((name, kind), _)| {
        integer(kind) == Some(CONTROL)
            && name.to_string().is_ok_and(|name| TURN_ENDS.contains(&name.as_str()))
    })
    .map(|(_, id)| id)
    .collect()
}

/// The Hugging Face name of a GGUF architecture; unknown ones keep theirs, and the engine lists what it knows.
fn architecture_of(gguf: &str) -> &str {
    match gguf {
        // Mistral's files say llama, too.
        "llama" => "LlamaForCausalLM",
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        "gemma3" => "Gemma3ForCausalLM",
        other => other,
    }
}

fn integer(value: &gguf_file::Value) -> Option<u64> {
    use gguf_file::Value as V;
    match value {
        V::U8(n) => Some(u64::from(*n)),
        V::U16(n) => Some(u64::from(*n)),
        V::U32(n) => Some(u64::from(*n)),
        V::U64(n) => Some(*n),
        V::I8(n) => u64::try_from(*n).ok(),
        V::I16(n) => u64::try_from(*n).ok(),
        V::I32(n) => u64::try_from(*n).ok(),
        V::I64(n) => u64::try_from(*n).ok(),
        _ => None,
    }
}

/// `None` when there is no such file; an error when it is not JSON.
pub(super) fn read_json(path: &Path) -> Result<Option<Value>> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .with_context(|| format!("{} is not JSON", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// One id, a list of ids, or nothing.
fn token_ids(value: &Value) -> impl Iterator<Item = TokenId> {
    let one = value.as_u64().into_iter();
    let many = value.as_array().into_iter().flatten().filter_map(Value::as_u64);
    one.chain(many).filter_map(|id| TokenId::try_from(id).ok()).collect::<Vec<_>>().into_iter()
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(|name| name.as_str().map(str::to_owned)).collect()
}

/// The end token that `tokenizer_config.json` names, looked up in `tokenizer.json`.
fn tokenizer_eos(dir: &Path) -> Result<Option<TokenId>> {
    let Some(config) = read_json(&dir.join("tokenizer_config.json"))? else { return Ok(None) };
    // Older files write the token as an object.
    let Some(name) = config["eos_token"].as_str().or_else(|| config["eos_token"]["content"].as_str()) else {
        return Ok(None);
    };
    let Some(tokenizer) = read_json(&dir.join("tokenizer.json"))? else { return Ok(None) };
    let added = tokenizer["added_tokens"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|token| token["content"] == name)
        .and_then(|token| token["id"].as_u64());
    let id = added.or_else(|| tokenizer["model"]["vocab"][name].as_u64());
    Ok(id.and_then(|id| TokenId::try_from(id).ok()))
}

/// The part of `generation_config.json` that the chat route takes over.
fn sampling_defaults(generation: &Map<String, Value>) -> Map<String, Value> {
    const KEYS: [&str; 5] = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"];
    let known = |(name, value): (&String, &Value)| {
        (KEYS.contains(&name.as_str()) && value.is_number()).then(|| (name.clone(), value.clone()))
    };
    generation.iter().filter_map(known).collect()
}
