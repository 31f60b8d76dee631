//! Owns the training state on disk: parameters and moments in float32 with what is needed to go on, in one file that
//! is replaced as a whole.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use anyhow::{Context, Result, bail};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::optimizer::AdamW;
use super::params::Params;

/// What a training is: one that goes on must be the same.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Recipe {
    pub algorithm: String,
    pub seed: u64,
    pub epochs: usize,
    pub batch_size: usize,
    pub seq_len: usize,
    pub lr: f64,
    pub unroll: usize,
    pub draft_vocab_size: usize,
    /// Conversations of the corpus that are trained on: it may have grown since.
    pub sequences: usize,
}

#[derive(Debug, Serialize, Deserialize)]
struct Progress {
    recipe: Recipe,
    steps: u64,
    /// Steps the optimizer took.
    updates: u64,
}

/// A training between two steps.
#[derive(Debug)]
pub(super) struct TrainState {
    pub recipe: Recipe,
    pub steps: u64,
    pub params: Params,
    pub optimizer: AdamW,
}

const PARTS: [&str; 4] = ["params", "first", "second", "scale"];
const PROGRESS: &str = "progress";

impl TrainState {
    pub(super) fn save(&self, path: &Path) -> Result<()> {
        let mut named = Vec::new();
        for (name, tensor) in self.params.iter() {
            named.push((format!("{}/{name}", PARTS[0]), tensor));
        }
        for (name, (first, second)) in self.optimizer.moments() {
            named.push((format!("{}/{name}", PARTS[1]), first));
            named.push((format!("{}/{name}", PARTS[2]), second));
        }
        for (name, scale) in self.optimizer.scales() {
            named.push((format!("{}/{name}", PARTS[3]), scale));
        }
        let progress =
            Progress { recipe: self.recipe.clone(), steps: self.steps, updates: self.optimizer.steps() };
        let metadata = HashMap::from([(PROGRESS.to_owned(), serde_json::to_string(&progress)?)]);
        write_tensors(path, named, Some(metadata))
    }

    pub(super) fn load(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let shown = || format!("{} is no training state", path.display());
        let (_, header) = SafeTensors::read_metadata(&bytes).with_context(shown)?;
        let progress = header.metadata().as_ref().and_then(|metadata| metadata.get(PROGRESS));
        let progress: Progress = serde_json::from_str(progress.with_context(shown)?).with_context(shown)?;
        let tensors = SafeTensors::deserialize(&bytes).with_context(shown)?;
        let mut parts: [BTreeMap<String, Tensor>; 4] = Default::default();
        for (name, view) in tensors.iter() {
            let Some((part, name)) = name.split_once('/') else { bail!("unknown tensor {name}") };
            let Some(part) = PARTS.iter().position(|known| *known == part) else {
                bail!("unknown part {part}");
            };
            let size: Vec<i64> = view.shape().iter().map(|&size| size as i64).collect();
            let tensor = Tensor::f_from_data_size(view.data(), &size, Kind::Float)?;
            parts[part].insert(name.to_owned(), tensor);
        }
        let [params, first, mut second, scales] = parts;
        let pair = |(name, first): (String, Tensor)| -> Result<(String, (Tensor, Tensor))> {
            let second = second.remove(&name).with_context(|| format!("no second moment of {name}"))?;
            Ok((name, (first, second)))
        };
        let moments = first.into_iter().map(pair).collect::<Result<_>>()?;
        Ok(Self {
            recipe: progress.recipe,
            steps: progress.steps,
            params: Params::new(params).trainable(),
            optimizer: AdamW::restore(moments, scales, progress.updates),
        })
    }
}

/// Writes tensors beside their place, then moves them there: a kill leaves the old file or the new one.
pub(super) fn write_tensors(
    path: &Path,
    tensors: Vec<(String, &Tensor)>,
    metadata: Option<HashMap<String, String>>,
) -> Result<()> {
    let mut owned = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let dtype = match tensor.kind() {
            Kind::Float => Dtype::F32,
            Kind::BFloat16 => Dtype::BF16,
            Kind::Int64 => Dtype::I64,
            Kind::Bool => Dtype::BOOL,
            other => bail!("{name}: no name for {other:?} in a file"),
        };
        let size: Vec<usize> = tensor.size().iter().map(|&size| size as usize).collect();
        let flat = tensor.detach().contiguous().view([-1]);
        let flat =
            if dtype == Dtype::BOOL { flat.to_kind(Kind::Uint8) } else { flat.view_dtype(Kind::Uint8) };
        let mut bytes = vec![0u8; flat.numel()];
        flat.copy_data(&mut bytes, flat.numel());
        owned.push((name, dtype, size, bytes));
    }
    let views = owned
        .iter()
        .map(|(name, dtype, size, bytes)| Ok((name.clone(), TensorView::new(*dtype, size.clone(), bytes)?)));
    let views = views.collect::<Result<Vec<_>>>()?;
    let beside = path.with_extension("part");
    let bytes = safetensors::serialize(views, metadata)?;
    std::fs::write(&beside, bytes).with_context(|| format!("cannot write {}", beside.display()))?;
    std::fs::rename(&beside, path).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn a_state_is_what_was_saved() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.safetensors");
        let weight = Tensor::randn([3, 4], (Kind::Float, Device::Cpu));
        let params = Params::new(BTreeMap::from([("fc.weight".to_owned(), weight)])).trainable();
        let scales = BTreeMap::from([("fc.weight".to_owned(), Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0]))]);
        let mut optimizer = AdamW::new(&params, scales);
        (params.get("fc.weight").square().sum(Kind::Float)).backward();
        optimizer.step(&params, 0.1);
        let recipe = Recipe {
            algorithm: "EAGLE".into(),
            seed: 1,
            epochs: 2,
            batch_size: 3,
            seq_len: 4,
            lr: 1e-3,
            unroll: 5,
            draft_vocab_size: 6,
            sequences: 7,
        };
        let state = TrainState { recipe, steps: 9, params, optimizer };
        state.save(&path).unwrap();
        let loaded = TrainState::load(&path).unwrap();
        assert_eq!(loaded.recipe, state.recipe);
        assert_eq!((loaded.steps, loaded.optimizer.steps()), (9, 1));
        assert!(loaded.params.get("fc.weight").equal(state.params.get("fc.weight")));
        let scale = |state: &TrainState| state.optimizer.scales()["fc.weight"].copy();
        assert!(scale(&loaded).equal(&scale(&state)));
        let moments = |optimizer: &AdamW| {
            let (_, (first, second)) = optimizer.moments().next().unwrap();
            (first.copy(), second.copy())
        };
        let (loaded, saved) = (moments(&loaded.optimizer), moments(&state.optimizer));
        assert!(loaded.0.equal(&saved.0) && loaded.1.equal(&saved.1));
    }
}
