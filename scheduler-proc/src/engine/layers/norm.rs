//! Owns RMS normalisation, with the residual addition that comes before it.

use tch::{Kind, Tensor};

use crate::engine::weights::Loader;
use crate::engine::{EngineError, shim};

/// How a checkpoint stores its norms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormFormat {
    pub eps: f32,
    /// What is stored is added to 1.
    pub from_one: bool,
}

impl NormFormat {
    pub fn load(self, name: &str, loader: &mut Loader<'_>) -> Result<RmsNorm, EngineError> {
        self.load_times(1.0, name, loader)
    }

    /// A norm whose results are multiplied by a number.
    pub fn load_times(
        self,
        number: f64,
        name: &str,
        loader: &mut Loader<'_>,
    ) -> Result<RmsNorm, EngineError> {
        let stored = loader.load(name)?;
        if !self.from_one && number == 1.0 {
            return Ok(RmsNorm::new(stored, self.eps));
        }
        let kind = stored.kind();
        let weight = (stored.to_kind(Kind::Float) + f64::from(u8::from(self.from_one))) * number;
        Ok(RmsNorm::new(weight.to_kind(kind), self.eps))
    }
}

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
