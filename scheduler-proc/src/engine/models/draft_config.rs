//! Owns the reading of a draft head's `config.json` and the names of its tensors, as published.

use std::path::Path;

use serde::Deserialize;
use tch::Tensor;

use crate::engine::EngineError;
use crate::engine::hf_config::HfConfig;
use crate::engine::weights::{SafetensorFiles, WeightSource};

/// A draft head's folder: its shape, what its config adds to that, and its tensors.
pub struct DraftFiles {
    pub shape: HfConfig,
    pub config: HeadConfig,
    pub source: Box<dyn WeightSource>,
}

/// Keys that only heads have.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct HeadConfig {
    pub draft_vocab_size: Option<usize>,
    pub target_hidden_size: Option<usize>,
    #[serde(default)]
    pub norm_output: bool,
    eagle_config: Option<EagleConfig>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
struct EagleConfig {
    eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
    use_aux_hidden_state: Option<bool>,
}

impl HeadConfig {
    /// The layers of the target whose inputs the head takes. The config counts outputs, one lower.
    pub fn captured_layers(&self, target_layers: usize) -> Option<Vec<usize>> {
        let config = self.eagle_config.as_ref();
        if config.is_some_and(|config| config.use_aux_hidden_state == Some(false)) {
            return None;
        }
        let ids = config.and_then(|config| config.eagle_aux_hidden_state_layer_ids.as_deref());
        Some(match ids {
            Some(ids) => ids.iter().map(|id| id + 1).collect(),
            None => vec![2, target_layers / 2, target_layers.saturating_sub(3)],
        })
    }
}

impl DraftFiles {
    pub fn open(dir: &Path) -> Result<Self, EngineError> {
        let shape = HfConfig::read(dir)?;
        let path = dir.join("config.json");
        let failed = |reason: String| EngineError::Load { what: path.display().to_string(), reason };
        let text = std::fs::read(&path).map_err(|error| failed(error.to_string()))?;
        let config = serde_json::from_slice(&text).map_err(|error| failed(error.to_string()))?;
        let source = Box::new(HeadTensors { files: SafetensorFiles::open(dir)? });
        Ok(Self { shape, config, source })
    }
}

/// Tensors of a head under one set of names: without `model.`, its only layer called `layers.0`.
struct HeadTensors {
    files: SafetensorFiles,
}

impl HeadTensors {
    fn stored_name(&self, name: &str) -> Option<String> {
        let midlayer = name.strip_prefix("layers.0.").map(|rest| format!("midlayer.{rest}"));
        let plain = [Some(name.to_owned()), midlayer];
        plain
            .into_iter()
            .flatten()
            .flat_map(|name| [format!("model.{name}"), name])
            .find(|name| self.files.shape(name).is_some())
    }
}

impl WeightSource for HeadTensors {
    fn describe(&self) -> String {
        self.files.describe()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.files.shape(&self.stored_name(name)?)
    }

    fn names(&self) -> Vec<String> {
        let canonical = |name: String| {
            let name = name.strip_prefix("model.").map_or(name.clone(), str::to_owned);
            match name.strip_prefix("midlayer.") {
                Some(rest) => format!("layers.0.{rest}"),
                None => name,
            }
        };
        self.files.names().into_iter().map(canonical).collect()
    }

    fn bytes(&self, name: &str) -> u64 {
        self.stored_name(name).map_or(0, |name| self.files.bytes(&name))
    }

    fn read(&mut self, name: &str) -> Result<Tensor, EngineError> {
        let stored = self.stored_name(name);
        self.files.read(stored.as_deref().unwrap_or(name))
    }

    fn read_integers(&mut self, name: &str) -> Result<Vec<i64>, EngineError> {
        let stored = self.stored_name(name);
        self.files.read_integers(stored.as_deref().unwrap_or(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn captured_layers_count_inputs() {
        let parse = |text: &str| serde_json::from_str::<HeadConfig>(text).unwrap();
        let check = |text: &str, layers, expect: Option<&[usize]>| {
            assert_eq!(parse(text).captured_layers(layers).as_deref(), expect, "{text}");
        };
        check("{}", 8, Some(&[2, 4, 5]));
        check("{}", 30, Some(&[2, 15, 27]));
        check(
            r#"{"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 33]}}"#,
            36,
            Some(&[2, 18, 34]),
        );
        check(r#"{"eagle_config": {"use_aux_hidden_state": false}}"#, 36, None);
    }
}
