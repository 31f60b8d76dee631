//! Owns the target model: decoder, KV pool and attention backend, loaded and stepped in one thread.

use std::rc::Rc;

use proto::{DeviceKind, Dtype, ScheduleConfig, ServeConfig, TokenId, Weights};
use tch::{Device, Kind, Tensor};

use super::attention::AttentionBackend;
use super::attention::cpu::CpuAttention;
use super::attention::plan::AttentionPlan;
use super::attention::torch::TorchAttention;
use super::gguf::GgufFile;
use super::hf_config::HfConfig;
use super::kv::KvPool;
use super::layers::embedding::Embedding;
use super::layers::linear::Linear;
use super::models;
use super::models::decoder::{self, Decoder, DecoderInput, DecoderOutput, DecoderSpec};
use super::shim::{self, InferenceMode};
use super::target::{ForwardRow, LogitRows, Logits, Target};
use super::weights::{DummyWeights, Loader, SafetensorFiles, WeightSource, kind_name};
use super::{EngineError, EngineLimits};
use crate::batch::KvSlot;

/// Rows that go through the head at once: logits are wide.
const HEAD_ROWS: usize = 256;

/// What a machine is taken to have free when it does not say, in bytes.
const UNKNOWN_HOST_MEMORY: u64 = 4 << 30;

/// A decoder with its pool. Results of a row depend on that row alone (see [`Target`]).
pub struct TargetModel {
    decoder: Decoder,
    kv: KvPool,
    attention: Box<dyn AttentionBackend>,
    limits: EngineLimits,
    placement: (Kind, Device),
    features: Features,
    weights: Weights,
}

/// Which hidden states a pass leaves for a draft worker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Features {
    #[default]
    None,
    /// After the final norm.
    Final,
    /// What goes into these layers, side by side in this order.
    Layers(Vec<usize>),
    /// The same, with what is there after the final norm behind them.
    LayersAndFinal(Vec<usize>),
}

/// What a draft worker needs beside the target: memory that the target's pool must leave.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Neighbour {
    /// Bytes per slot of the target's pool.
    pub slot_bytes: u64,
    pub weight_bytes: u64,
    /// Bytes of what it works in, whatever the pool's size.
    pub buffer_bytes: u64,
}

impl TargetModel {
    /// Loads the model and makes its pool. `progress` hears of bytes done and bytes in all.
    pub fn load(config: &ServeConfig, progress: &mut dyn FnMut(u64, u64)) -> Result<Self, EngineError> {
        Self::load_beside(config, Neighbour::default(), progress)
    }

    /// As [`Self::load`], with a pool that leaves room for a draft worker.
    pub fn load_beside(
        config: &ServeConfig,
        neighbour: Neighbour,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, EngineError> {
        let (kind, device) = placement(config)?;
        // Loading is many small pieces of work: a team of threads spends more time on meeting than on them, most of
        // all where other processes want the same CPUs (measured: 7.5 s instead of 1.1 s).
        tch::set_num_threads(1);
        shim::flush_denormals();
        let attention = attention_for(device);
        let model = Self::load_with(config, (kind, device), attention, neighbour, progress);
        tch::set_num_threads(config.schedule.num_threads.max(1) as i32);
        model
    }

    fn load_with(
        config: &ServeConfig,
        placement: (Kind, Device),
        attention: Box<dyn AttentionBackend>,
        neighbour: Neighbour,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, EngineError> {
        let _inference = InferenceMode::enter();
        let (kind, device) = placement;
        let context_len = config.model.context_length as usize;
        let (spec, source) = open(&config.model.weights)?;
        let parameters = spec.parameters();
        let loader = Loader::new(source, &parameters, placement, progress)?;
        let mut loader = loader.quantized(config.model.quantization);
        let decoder = Decoder::load(&spec, context_len, &mut loader)?;
        let mut weight_types = loader.types().clone();
        if spec.shape.tied {
            // A plain table is there twice, to gather and to multiply.
            *weight_types.entry(kind_name(kind)).or_default() += decoder.gathered_bytes();
        }
        let slot_bytes = spec.kv_shape().slot_bytes(kind);
        let slots = pool_slots(&config.schedule, context_len, slot_bytes, neighbour, device)?;
        let kv = KvPool::new(spec.kv_shape(), slots, kind, device)?;
        let limits = EngineLimits {
            kv_slots: slots,
            context_len,
            vocab_size: spec.shape.vocab_size,
            weight_bytes: weight_types.values().sum(),
            weight_types,
            gathered_bytes: decoder.gathered_bytes(),
            kv_bytes: slot_bytes * slots as u64,
        };
        tracing::info!(
            architecture = spec.shape.architecture,
            ?kind,
            ?device,
            kernels = shim::kernels_name(),
            weights = ?limits.weight_types,
            kv_slots = slots,
            "model loaded"
        );
        let weights = config.model.weights.clone();
        Ok(Self { decoder, kv, attention, limits, placement, features: Features::None, weights })
    }

    /// What passes leave for a draft worker from now on.
    pub fn leave(&mut self, features: Features) {
        self.features = features;
    }

    pub fn limits(&self) -> &EngineLimits {
        &self.limits
    }

    pub fn vocab_size(&self) -> usize {
        self.limits.vocab_size
    }

    pub fn placement(&self) -> (Kind, Device) {
        self.placement
    }

    pub fn embedding(&self) -> Rc<Embedding> {
        self.decoder.embedding()
    }

    pub fn head(&self) -> Rc<Linear> {
        self.decoder.head()
    }

    /// Whether the head's matrix, `[vocab, hidden]`, has those values.
    pub fn head_holds(&self, values: &Tensor) -> Result<bool, EngineError> {
        match self.untied_head()? {
            None => self.embedding().holds(values),
            Some(head) => Ok(head.equal(values)),
        }
    }

    /// Some rows of the head's matrix, by token.
    pub fn head_rows(&self, ids: &[i64]) -> Result<Tensor, EngineError> {
        match self.untied_head()? {
            None => self.embedding().rows(ids),
            Some(head) => Ok(head.index_select(0, &Tensor::from_slice(ids).to_device(head.device()))),
        }
    }

    /// The one in use is packed, so it is read again.
    fn untied_head(&self) -> Result<Option<Tensor>, EngineError> {
        let (spec, mut source) = open(&self.weights)?;
        let (kind, device) = self.placement;
        match spec.shape.tied {
            true => Ok(None),
            false => Ok(Some(source.read(decoder::HEAD)?.to_kind(kind).to_device(device))),
        }
    }

    /// Logits of the wanted tokens.
    pub fn forward(&mut self, rows: &[ForwardRow<'_>]) -> Result<Logits, EngineError> {
        Ok(self.run(rows)?.0)
    }

    /// Runs the rows, stores their keys and values, and returns the hidden states of all tokens in order, with
    /// those of the layers in `capture` (see [`DecoderOutput`]).
    pub fn forward_hidden(
        &mut self,
        rows: &[ForwardRow<'_>],
        capture: &[usize],
    ) -> Result<DecoderOutput, EngineError> {
        let _inference = InferenceMode::enter();
        let tokens: Vec<TokenId> = rows.iter().flat_map(|row| row.tokens).copied().collect();
        self.check_tokens(&tokens)?;
        let input = DecoderInput {
            tokens,
            plan: AttentionPlan::new(rows),
            kv: &self.kv,
            attention: self.attention.as_ref(),
        };
        self.decoder.forward(&input, capture)
    }

    /// Logits of the wanted rows of hidden states that went through the final norm.
    pub fn logits(&self, hidden: &Tensor, wanted: &[usize]) -> Result<Logits, EngineError> {
        let _inference = InferenceMode::enter();
        let vocab_size = self.vocab_size();
        let mut values = Vec::new();
        for rows in wanted.chunks(HEAD_ROWS) {
            let index: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
            let rows = match rows.len() == hidden.size()[0] as usize {
                true => hidden.shallow_clone(),
                false => hidden.index_select(0, &Tensor::from_slice(&index).to_device(hidden.device())),
            };
            let part = self.decoder.logits(&rows)?;
            if values.is_empty() {
                values = part;
            } else {
                values.extend_from_slice(&part);
            }
        }
        Ok(Logits { vocab_size, values })
    }

    fn check_tokens(&self, tokens: &[TokenId]) -> Result<(), EngineError> {
        match tokens.iter().find(|&&token| token as usize >= self.vocab_size()) {
            None => Ok(()),
            Some(token) => Err(EngineError::Step {
                stage: "forward",
                reason: format!("token {token} is not in a vocabulary of {}", self.vocab_size()),
            }),
        }
    }
}

impl Target for TargetModel {
    /// As [`Self::leave`] asked: one row per token.
    type Hidden = Option<Tensor>;

    fn run(&mut self, rows: &[ForwardRow<'_>]) -> Result<(Logits, Option<Tensor>), EngineError> {
        let wanted = wanted_rows(rows);
        if rows.iter().all(|row| row.tokens.is_empty()) {
            return Ok((Logits { vocab_size: self.vocab_size(), values: Vec::new() }, None));
        }
        let mut layers = match &self.features {
            Features::Layers(layers) | Features::LayersAndFinal(layers) => layers.clone(),
            Features::None | Features::Final => Vec::new(),
        };
        layers.sort_unstable();
        layers.dedup();
        let output = self.forward_hidden(rows, &layers)?;
        let logits = self.logits(&output.hidden, &wanted)?;
        let _inference = InferenceMode::enter();
        let hidden = match &self.features {
            Features::None => None,
            Features::Final => Some(output.hidden),
            Features::Layers(order) | Features::LayersAndFinal(order) => {
                let place = |layer| layers.iter().position(|kept| kept == layer);
                let mut parts: Vec<_> =
                    order.iter().filter_map(place).map(|at| &output.captured[at]).collect();
                if matches!(self.features, Features::LayersAndFinal(_)) {
                    parts.push(&output.hidden);
                }
                Some(Tensor::cat(&parts, 1))
            }
        };
        Ok((logits, hidden))
    }

    fn move_kv(&mut self, moves: &[(KvSlot, KvSlot)]) {
        self.kv.move_slots(moves).expect("moves lie inside the pool");
    }
}

/// Indices of the tokens that need logits, over all rows.
fn wanted_rows(rows: &[ForwardRow<'_>]) -> Vec<usize> {
    let mut wanted = Vec::new();
    let mut end = 0;
    for row in rows {
        let first = end;
        end += row.tokens.len();
        match row.logits {
            LogitRows::None => {}
            LogitRows::Last => wanted.extend(end.checked_sub(1).filter(|&last| last >= first)),
            LogitRows::From(index) => wanted.extend((first + index).min(end)..end),
        }
    }
    wanted
}

/// The shape of the model that `weights` holds.
pub fn shape_of(weights: &Weights) -> Result<HfConfig, EngineError> {
    Ok(spec_of(weights)?.shape)
}

/// The model that `weights` holds.
pub fn spec_of(weights: &Weights) -> Result<DecoderSpec, EngineError> {
    Ok(open(weights)?.0)
}

/// The model that `weights` holds, and its parameters.
pub(super) fn open(weights: &Weights) -> Result<(DecoderSpec, Box<dyn WeightSource>), EngineError> {
    match weights {
        Weights::Safetensors(dir) => {
            let spec = models::describe(&HfConfig::read(dir)?)?;
            Ok((spec, Box::new(SafetensorFiles::open(dir)?)))
        }
        Weights::Gguf(path) => {
            let file = GgufFile::open(path)?;
            Ok((models::describe(file.config())?, Box::new(file)))
        }
        Weights::Dummy { dir, seed } => {
            let spec = models::describe(&HfConfig::read(dir)?)?;
            let dummy = DummyWeights::new(&spec.parameters(), *seed);
            Ok((spec, Box::new(dummy)))
        }
    }
}

/// Where the model runs and in which type, if this machine can.
fn placement(config: &ServeConfig) -> Result<(Kind, Device), EngineError> {
    let failed = |what: &str, reason: &str| EngineError::Load { what: what.into(), reason: reason.into() };
    let kind = match config.model.dtype {
        Dtype::Float32 => Kind::Float,
        Dtype::Bfloat16 => Kind::BFloat16,
        Dtype::Float16 => Kind::Half,
    };
    match (config.model.device, kind) {
        (DeviceKind::Cuda, _) => {
            shim::load_cuda().map_err(|reason| failed("the CUDA backend", &reason))?;
            match tch::Cuda::is_available() {
                true => Ok((kind, Device::Cuda(0))),
                false => Err(failed("the CUDA backend", "it found no usable GPU")),
            }
        }
        (DeviceKind::Cpu, Kind::Half) => {
            Err(failed("float16 on a CPU", "there are no kernels for it; use --dtype bfloat16 or float32"))
        }
        (DeviceKind::Cpu, _) => Ok((kind, Device::Cpu)),
    }
}

/// Slots of the pool, in whole pages.
fn pool_slots(
    schedule: &ScheduleConfig,
    context_len: usize,
    own_bytes: u64,
    neighbour: Neighbour,
    device: Device,
) -> Result<usize, EngineError> {
    let page = u64::from(schedule.page_size.max(1));
    let slot_bytes = own_bytes + neighbour.slot_bytes;
    let wanted = match schedule.max_total_tokens {
        Some(tokens) => tokens,
        None => {
            let useful = u64::from(schedule.max_running_requests.max(1)) * context_len as u64;
            let free = free_memory(device).saturating_sub(neighbour.weight_bytes + neighbour.buffer_bytes);
            let free = (free as f64 * schedule.mem_fraction_static) as u64;
            useful.div_ceil(page).saturating_mul(page).min(free / slot_bytes)
        }
    };
    let slots = wanted / page * page;
    if slots == 0 || u32::try_from(slots).is_err() {
        return Err(EngineError::Load {
            what: "KV pool".into(),
            reason: format!(
                "{wanted} tokens of {slot_bytes} bytes make no pool with pages of {page}; \
                 set --max-total-tokens or --page-size"
            ),
        });
    }
    Ok(slots as usize)
}

/// The backend of a device.
pub fn attention_for(device: Device) -> Box<dyn AttentionBackend> {
    match device {
        Device::Cpu => Box::new(CpuAttention),
        _ => Box::new(TorchAttention),
    }
}

/// Bytes that can be had on a device.
fn free_memory(device: Device) -> u64 {
    match device {
        Device::Cpu => available_host_memory().unwrap_or(UNKNOWN_HOST_MEMORY),
        _ => shim::free_device_memory().unwrap_or(0),
    }
}

fn available_host_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kib| kib << 10)
}

#[cfg(test)]
pub(super) mod tests;
