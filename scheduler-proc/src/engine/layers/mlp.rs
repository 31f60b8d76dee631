//! Owns the gated feed-forward block: `down(silu(gate(x)) * up(x))`, gate and up as one projection.

use tch::Tensor;

use super::linear::Linear;
use crate::engine::{EngineError, shim};

#[derive(Debug)]
pub struct GatedMlp {
    pub gate_up: Linear,
    pub down: Linear,
}

impl GatedMlp {
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, EngineError> {
        self.down.forward(&shim::silu_mul(&self.gate_up.forward(x)?)?)
    }
}
