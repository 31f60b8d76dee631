//! Owns where parameters come from: safetensors files, a GGUF file, or a seed. Parameters are asked for by their
//! Hugging Face names, whatever the file calls them.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use proto::Quantization;
use rustc_hash::FxHashMap;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

use super::matrix::{Blocks, Matrix};
use super::{EngineError, shim};

/// A parameter a model needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    pub name: String,
    pub shape: Vec<usize>,
}

/// A place that has parameters. Implementers: [`SafetensorFiles`], [`super::gguf::GgufFile`], [`DummyWeights`].
pub trait WeightSource {
    /// Where from, for messages.
    fn describe(&self) -> String;

    /// The shape of a parameter, if it is there.
    fn shape(&self, name: &str) -> Option<Vec<usize>>;

    /// Names that are there, by the same names parameters are asked for.
    fn names(&self) -> Vec<String>;

    /// Bytes read for a parameter.
    fn bytes(&self, name: &str) -> u64;

    /// Reads one that is there, in the type it is stored in or in float32.
    fn read(&mut self, name: &str) -> Result<Tensor, EngineError>;

    /// Reads one that is there as blocks, if it is stored in blocks that kernels decode.
    fn read_blocks(&mut self, _name: &str) -> Result<Option<Blocks>, EngineError> {
        Ok(None)
    }

    /// Reads a table of integers that is there.
    fn read_integers(&mut self, name: &str) -> Result<Vec<i64>, EngineError> {
        Err(EngineError::Load {
            what: name.to_owned(),
            reason: "integers are read from safetensors only".into(),
        })
    }
}

/// Hands out parameters in the model's type and on its device, and reports how far it is.
pub struct Loader<'a> {
    source: Box<dyn WeightSource + 'a>,
    kind: Kind,
    device: Device,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
    types: BTreeMap<&'static str, u64>,
    keeps_blocks: bool,
}

impl<'a> Loader<'a> {
    /// Fails, naming them all, when parameters are missing or of another shape.
    pub fn new(
        source: Box<dyn WeightSource + 'a>,
        parameters: &[Parameter],
        (kind, device): (Kind, Device),
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Result<Self, EngineError> {
        check(source.as_ref(), parameters)?;
        let total = parameters.iter().map(|parameter| source.bytes(&parameter.name)).sum();
        progress(0, total);
        let types = BTreeMap::new();
        Ok(Self { source, kind, device, done: 0, total, progress, types, keeps_blocks: true })
    }

    /// Decides about blocks that could stay as they are.
    #[must_use]
    pub fn quantized(mut self, quantization: Quantization) -> Self {
        self.keeps_blocks = quantization == Quantization::Gguf;
        self
    }

    pub fn device(&self) -> Device {
        self.device
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    pub fn load_integers(&mut self, name: &str) -> Result<Vec<i64>, EngineError> {
        self.source.read_integers(name)
    }

    pub fn load(&mut self, name: &str) -> Result<Tensor, EngineError> {
        let tensor = self.source.read(name)?.to_kind(self.kind).to_device(self.device);
        let bytes = tensor.numel() * self.kind.elt_size_in_bytes();
        self.loaded(name, kind_name(self.kind), bytes as u64);
        Ok(tensor)
    }

    /// A matrix to multiply with. What a file has in blocks stays as it is where kernels decode blocks, to bfloat16.
    pub fn load_matrix(&mut self, name: &str) -> Result<Matrix, EngineError> {
        if self.keeps_blocks
            && (self.kind, self.device) == (Kind::BFloat16, Device::Cpu)
            && let Some(blocks) = self.source.read_blocks(name)?
        {
            self.loaded(name, blocks.format.name(), blocks.bytes.len() as u64);
            return Ok(Matrix::Blocks(blocks));
        }
        self.load(name).map(Matrix::Plain)
    }

    fn loaded(&mut self, name: &str, kind: &'static str, bytes: u64) {
        *self.types.entry(kind).or_default() += bytes;
        self.done += self.source.bytes(name);
        (self.progress)(self.done, self.total);
    }

    /// Bytes loaded so far, by the type they are kept in.
    pub fn types(&self) -> &BTreeMap<&'static str, u64> {
        &self.types
    }
}

/// What a type is called in messages.
pub fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Float => "float32",
        Kind::BFloat16 => "bfloat16",
        Kind::Half => "float16",
        _ => "other",
    }
}

/// Fails, naming them all, when parameters are missing or of another shape.
pub fn check(source: &dyn WeightSource, parameters: &[Parameter]) -> Result<(), EngineError> {
    let mut faults = Vec::new();
    for Parameter { name, shape } in parameters {
        match source.shape(name) {
            None => faults.push(format!("{name} is missing")),
            Some(found) if found != *shape => {
                faults.push(format!("{name} has shape {found:?}, not {shape:?}"));
            }
            Some(_) => {}
        }
    }
    if !faults.is_empty() {
        return Err(EngineError::Load { what: source.describe(), reason: faults.join("; ") });
    }
    for name in source.names() {
        if parameters.iter().all(|parameter| parameter.name != name) {
            tracing::debug!(name, "parameter in the file that the model does not use");
        }
    }
    Ok(())
}

/// One or more mapped `.safetensors` files.
pub struct SafetensorFiles {
    dir: PathBuf,
    files: Vec<Mmap>,
    entries: BTreeMap<String, Entry>,
}

struct Entry {
    file: usize,
    shape: Vec<usize>,
    bytes: u64,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl SafetensorFiles {
    /// `model.safetensors`, or the shards that `model.safetensors.index.json` names.
    pub fn open(dir: &Path) -> Result<Self, EngineError> {
        let index = dir.join("model.safetensors.index.json");
        let mut source = Self { dir: dir.to_owned(), files: Vec::new(), entries: BTreeMap::new() };
        if !index.is_file() {
            source.add(&dir.join("model.safetensors"))?;
            return Ok(source);
        }
        let text = std::fs::read(&index).map_err(|error| load_error(&index, error))?;
        let Index { weight_map } =
            serde_json::from_slice(&text).map_err(|error| load_error(&index, error))?;
        let shards: std::collections::BTreeSet<&String> = weight_map.values().collect();
        for shard in shards {
            if shard.contains(['/', '\\']) {
                return Err(load_error(&index, format!("shard {shard:?} lies outside the folder")));
            }
            source.add(&dir.join(shard))?;
        }
        Ok(source)
    }

    fn add(&mut self, path: &Path) -> Result<(), EngineError> {
        let map = File::open(path)
            .and_then(|file| shim::map_file(&file))
            .map_err(|error| load_error(path, error))?;
        let tensors = SafeTensors::deserialize(&map).map_err(|error| load_error(path, error))?;
        for (name, view) in tensors.iter() {
            let entry = Entry {
                file: self.files.len(),
                shape: view.shape().to_vec(),
                bytes: view.data().len() as u64,
            };
            self.entries.insert(name.to_owned(), entry);
        }
        self.files.push(map);
        Ok(())
    }
}

impl WeightSource for SafetensorFiles {
    fn describe(&self) -> String {
        self.dir.display().to_string()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.entries.get(name).map(|entry| entry.shape.clone())
    }

    fn names(&self) -> Vec<String> {
        self.entries.keys().cloned().collect()
    }

    fn bytes(&self, name: &str) -> u64 {
        self.entries.get(name).map_or(0, |entry| entry.bytes)
    }

    fn read(&mut self, name: &str) -> Result<Tensor, EngineError> {
        let failed = |reason: String| EngineError::Load { what: name.to_owned(), reason };
        let entry = self.entries.get(name).ok_or_else(|| failed("is missing".into()))?;
        let tensors =
            SafeTensors::deserialize(&self.files[entry.file]).map_err(|error| failed(error.to_string()))?;
        let view = tensors.tensor(name).map_err(|error| failed(error.to_string()))?;
        let kind = match view.dtype() {
            Dtype::F32 => Kind::Float,
            Dtype::F16 => Kind::Half,
            Dtype::BF16 => Kind::BFloat16,
            other => {
                return Err(failed(format!("type {other:?} is not supported; known are F32, F16 and BF16")));
            }
        };
        let shape: Vec<i64> = view.shape().iter().map(|&size| size as i64).collect();
        Tensor::f_from_data_size(view.data(), &shape, kind).map_err(|error| failed(error.to_string()))
    }

    fn read_integers(&mut self, name: &str) -> Result<Vec<i64>, EngineError> {
        let failed = |reason: String| EngineError::Load { what: name.to_owned(), reason };
        let entry = self.entries.get(name).ok_or_else(|| failed("is missing".into()))?;
        let tensors =
            SafeTensors::deserialize(&self.files[entry.file]).map_err(|error| failed(error.to_string()))?;
        let view = tensors.tensor(name).map_err(|error| failed(error.to_string()))?;
        integers(&view).map_err(failed)
    }
}

/// A table of integers, as 64-bit ones.
pub fn integers(view: &TensorView<'_>) -> Result<Vec<i64>, String> {
    match view.dtype() {
        Dtype::I64 => {
            let (values, _) = view.data().as_chunks::<8>();
            Ok(values.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect())
        }
        Dtype::I32 => {
            let (values, _) = view.data().as_chunks::<4>();
            Ok(values.iter().map(|&bytes| i64::from(i32::from_le_bytes(bytes))).collect())
        }
        other => Err(format!("type {other:?} is not supported; known are I64 and I32")),
    }
}

/// Random parameters of whatever shape is asked for, the same for the same seed.
pub struct DummyWeights {
    shapes: FxHashMap<String, Vec<usize>>,
    seed: u64,
}

impl DummyWeights {
    pub fn new(parameters: &[Parameter], seed: u64) -> Self {
        let shapes =
            parameters.iter().map(|parameter| (parameter.name.clone(), parameter.shape.clone())).collect();
        Self { shapes, seed }
    }
}

/// Standard deviation of dummy weights, as models are usually initialised.
const DUMMY_STD: f64 = 0.02;

impl WeightSource for DummyWeights {
    fn describe(&self) -> String {
        format!("dummy weights of seed {}", self.seed)
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.shapes.get(name).cloned()
    }

    fn names(&self) -> Vec<String> {
        self.shapes.keys().cloned().collect()
    }

    fn bytes(&self, name: &str) -> u64 {
        self.shapes.get(name).map_or(0, |shape| 4 * shape.iter().product::<usize>() as u64)
    }

    fn read(&mut self, name: &str) -> Result<Tensor, EngineError> {
        let shape: Vec<i64> = self.shapes[name].iter().map(|&size| size as i64).collect();
        if name.ends_with("norm.weight") {
            return Ok(Tensor::ones(shape, (Kind::Float, Device::Cpu)));
        }
        // By name, so that a parameter does not depend on the order of loading.
        let seed =
            name.bytes().fold(self.seed, |hash, byte| hash.wrapping_mul(0x100_0000_01b3) ^ u64::from(byte));
        tch::manual_seed(seed as i64);
        Ok(Tensor::randn(shape, (Kind::Float, Device::Cpu)) * DUMMY_STD)
    }
}

fn load_error(path: &Path, reason: impl ToString) -> EngineError {
    EngineError::Load { what: path.display().to_string(), reason: reason.to_string() }
}
