//! Owns the parameters of the target that a training needs in the open: serving keeps them packed.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use proto::Weights;
use tch::{Kind, Tensor};

use crate::engine::model;

/// Rounded to the type the target is served in, as its hidden states were.
#[derive(Debug)]
pub(super) struct TrainTables {
    pub embedding: Tensor,
    pub head: Tensor,
    pub final_norm: Tensor,
    /// By the name inside the layer.
    pub last_layer: BTreeMap<String, Tensor>,
}

impl TrainTables {
    pub(super) fn read(weights: &Weights, kind: Kind) -> Result<Self> {
        let (spec, mut source) = model::open(weights).context("opening the target")?;
        let mut read = |name: &str| -> Result<Tensor> { Ok(source.read(name)?.to_kind(kind)) };
        let embedding = read("model.embed_tokens.weight")?;
        let head = match spec.shape.tied {
            true => embedding.shallow_clone(),
            false => read("lm_head.weight")?,
        };
        let final_norm = read("model.norm.weight")?;
        let prefix = format!("model.layers.{}.", spec.shape.layers - 1);
        let mut last_layer = BTreeMap::new();
        for parameter in spec.parameters() {
            if let Some(name) = parameter.name.strip_prefix(&prefix) {
                last_layer.insert(name.to_owned(), read(&parameter.name)?);
            }
        }
        Ok(Self { embedding, head, final_norm, last_layer })
    }
}
