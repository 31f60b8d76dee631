//! Owns RMS normalisation, with the residual addition that comes before it.

use tch::Tensor;

use crate::engine::weights::Loader;
use crate::engine::{EngineError, shim};

#[derive(Debug)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f32,
}

impl RmsNorm {
    pub fn new(weight: Tensor, eps: f32) -> Self {
        Self { weight: weight.contiguous(), eps }
    }

    /// The norm whose weight the checkpoint calls `name`.
    pub fn load(name: &str, eps: f32, loader: &mut Loader<'_>) -> Result<Self, EngineError> {
        Ok(Self::new(loader.load(name)?, eps))
    }

    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    pub fn eps(&self) -> f32 {
        self.eps
    }

    /// Over the rows of `[rows, width]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, EngineError> {
        shim::rms_norm(x, None, &self.weight, self.eps)
    }

    /// Adds `delta` to the residual stream in place and returns the normalised sum.
    pub fn add_forward(&self, residual: &Tensor, delta: &Tensor) -> Result<Tensor, EngineError> {
        shim::rms_norm(residual, Some(delta), &self.weight, self.eps)
    }

    /// Over the last dimension of any shape.
    pub fn forward_nd(&self, x: &Tensor) -> Result<Tensor, EngineError> {
        let rows = x.reshape([-1, self.weight.numel() as i64]).contiguous();
        Ok(self.forward(&rows)?.view_as(x))
    }
}
