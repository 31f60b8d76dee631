//! Owns projections: weights packed once, rows independent of their batch.

use tch::{Device, Tensor};

use crate::engine::{EngineError, shim};

/// `x @ weight^T + bias`.
#[derive(Debug)]
pub struct Linear {
    weight: Weight,
    bias: Option<Tensor>,
}

#[derive(Debug)]
enum Weight {
    /// oneDNN's own layout, CPU only.
    Packed(Tensor),
    Plain(Tensor),
}

impl Linear {
    /// `weight` is `[out, in]`.
    pub fn new(weight: &Tensor, bias: Option<Tensor>) -> Result<Self, EngineError> {
        let weight = match weight.device() {
            Device::Cpu => Weight::Packed(shim::linear_pack(&weight.contiguous())?),
            _ => Weight::Plain(weight.shallow_clone()),
        };
        Ok(Self { weight, bias })
    }

    /// Several projections of the same input as one.
    pub fn fused(parts: &[(Tensor, Option<Tensor>)]) -> Result<Self, EngineError> {
        let weights: Vec<&Tensor> = parts.iter().map(|(weight, _)| weight).collect();
        let biases: Option<Vec<&Tensor>> = parts.iter().map(|(_, bias)| bias.as_ref()).collect();
        Self::new(&Tensor::cat(&weights, 0), biases.map(|biases| Tensor::cat(&biases, 0)))
    }

    /// `[rows, in]` to `[rows, out]`. A row's result does not depend on the number of rows.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, EngineError> {
        match &self.weight {
            Weight::Packed(weight) => shim::linear(x, weight, self.bias.as_ref()),
            Weight::Plain(weight) => Ok(x.linear(weight, self.bias.as_ref())),
        }
    }
}
