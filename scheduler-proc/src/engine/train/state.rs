//! Owns the training state on disk: parameters and moments in float32 with what is needed to go on, in one file that
//! is replaced as a whole.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use anyhow::{Context, Result, bail};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::optimizer::{Moments, Optimizer};
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
    /// Of DFLASH draft models, 1 elsewhere.
    pub draft_layers: usize,
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
    pub optimizer: Optimizer,
}

const PARTS: [&str; 4] = ["params", "first", "second", "whitener"];
const PROGRESS: &str = "progress";

impl TrainState {
    pub(super) fn save(&self, path: &Path) -> Result<()> {
        let mut named = Vec::new();
        for (name, tensor) in self.params.iter() {
            named.push((format!("{}/{name}", PARTS[0]), tensor));
        }
        for (name, moments) in self.optimizer.moments() {
            named.push((format!("{}/{name}", PARTS[1]), &moments.first));
            let second = moments.second.iter();
            named.extend(second.map(|second| (format!("{}/{name}", PARTS[2]), second)));
        }
        for (name, whitener) in self.optimizer.whiteners() {
            named.push((format!("{}/{name}", PARTS[3]), whitener));
        }
        let progress =
            Progress { recipe: self.recipe.clone(), steps: self.steps, updates: self.optimizer.steps() };
        let metadata = HashMap::from([(PROGRESS.to_owned(), serde_json::to_string(&progress)?)]);
        write_tensors(path, named, Some(metadata))
    }

    /// `kind` is the type steps are computed in.
    pub(super) fn load(path: &Path, kind: Kind) -> Result<Self> {
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
        let [params, first, mut second, whiteners] = parts;
        let moments = first.into_iter().map(|(name, first)| {
            let second = second.remove(&name);
            (name, Moments { first, second })
        });
        let moments = moments.collect();
        Ok(Self {
            recipe: progress.recipe,
            steps: progress.steps,
            params: Params::new(params).trainable(),
            optimizer: Optimizer::restore(moments, whiteners, progress.updates, kind),
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
        let random = |size: &[i64]| Tensor::randn(size, (Kind::Float, Device::Cpu));
        let tensors =
            BTreeMap::from([("fc.bias".to_owned(), random(&[3])), ("fc.weight".to_owned(), random(&[3, 4]))]);
        let params = Params::new(tensors).trainable();
        let whiteners = BTreeMap::from([("fc.weight".to_owned(), random(&[4, 4]))]);
        let mut optimizer = Optimizer::new(&params, whiteners, Kind::Float);
        for (_, tensor) in params.iter() {
            tensor.square().sum(Kind::Float).backward();
        }
        optimizer.step(&params, 0.1);
        let recipe = Recipe {
            algorithm: "EAGLE".into(),
            seed: 1,
            epochs: 2,
            batch_size: 3,
            seq_len: 4,
            lr: 1e-3,
            unroll: 5,
            draft_layers: 1,
            draft_vocab_size: 6,
            sequences: 7,
        };
        let state = TrainState { recipe, steps: 9, params, optimizer };
        state.save(&path).unwrap();
        let loaded = TrainState::load(&path, Kind::Float).unwrap();
        assert_eq!(loaded.recipe, state.recipe);
        assert_eq!((loaded.steps, loaded.optimizer.steps()), (9, 1));
        for (name, tensor) in state.params.iter() {
            assert!(loaded.params.get(name).equal(tensor));
        }
        let whitener = |state: &TrainState| state.optimizer.whiteners()["fc.weight"].copy();
        assert!(whitener(&loaded).equal(&whitener(&state)));
        for ((name, loaded), (_, saved)) in loaded.optimizer.moments().zip(state.optimizer.moments()) {
            assert!(loaded.first.equal(&saved.first));
            assert_eq!(loaded.second.is_some(), name == "fc.bias");
            let (loaded, saved) = (loaded.second.iter(), saved.second.iter());
            assert!(loaded.zip(saved).all(|(loaded, saved)| loaded.equal(saved)));
        }
    }
}
