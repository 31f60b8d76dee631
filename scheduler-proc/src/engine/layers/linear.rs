//! Owns projections: weights packed once, rows independent of their batch.

use std::rc::Rc;

use tch::{Device, Kind, Tensor};

use crate::engine::EngineError;
use crate::engine::matrix::Matrix;
use crate::engine::shim::{self, Packed};

/// `x @ weight^T + bias`.
#[derive(Debug)]
pub struct Linear {
    weight: Weight,
    bias: Option<Tensor>,
}

#[derive(Debug)]
enum Weight {
    /// The layout of the shim's kernels, CPU only: outputs side by side.
    Packed(Vec<Rc<Packed>>),
    Plain(Tensor),
}

impl Linear {
    /// `weight` is `[out, in]`.
    pub fn new(weight: &Tensor, bias: Option<Tensor>) -> Result<Self, EngineError> {
        Self::fused(&[(Matrix::Plain(weight.shallow_clone()), bias)])
    }

    /// A projection without bias whose weight others use, too.
    pub fn shared(weight: Rc<Packed>) -> Self {
        Self { weight: Weight::Packed(vec![weight]), bias: None }
    }

    /// Several projections of the same input as one. All of them have a bias, or none.
    pub fn fused(parts: &[(Matrix, Option<Tensor>)]) -> Result<Self, EngineError> {
        let biases: Option<Vec<&Tensor>> = parts.iter().map(|(_, bias)| bias.as_ref()).collect();
        let bias = biases.map(|biases| Tensor::cat(&biases, 0));
        let elsewhere: Vec<&Tensor> = parts
            .iter()
            .filter_map(|(weight, _)| match weight {
                Matrix::Plain(weight) if weight.device() != Device::Cpu => Some(weight),
                _ => None,
            })
            .collect();
        let weight = match elsewhere.is_empty() {
            false => Weight::Plain(Tensor::cat(&elsewhere, 0)),
            true => {
                let packed = parts.iter().map(|(weight, _)| Packed::new(weight).map(Rc::new));
                Weight::Packed(packed.collect::<Result<_, _>>()?)
            }
        };
        Ok(Self { weight, bias })
    }

    /// `[rows, in]` to `[rows, out]`. A row's result does not depend on the number of rows.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, EngineError> {
        match &self.weight {
            Weight::Plain(weight) => Ok(x.linear(weight, self.bias.as_ref())),
            Weight::Packed(parts) => shim::linear(x, parts, self.bias.as_ref(), false),
        }
    }

    /// As [`Self::forward`], with sums as they are instead of rounded to the type of `x`: logits in bfloat16 would
    /// lie on a grid that ties their best candidates.
    pub fn forward_wide(&self, x: &Tensor) -> Result<Tensor, EngineError> {
        match &self.weight {
            Weight::Plain(weight) => Ok(x.linear(weight, self.bias.as_ref()).to_kind(Kind::Float)),
            Weight::Packed(parts) => shim::linear(x, parts, self.bias.as_ref(), true),
        }
    }
}

#[cfg(test)]
mod tests;
