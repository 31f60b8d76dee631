//! Owns the gated feed-forward block: `down(activation(gate(x)) * up(x))`, gate and up as one projection.

use tch::Tensor;

use super::linear::Linear;
use crate::engine::EngineError;
use crate::engine::matrix::Matrix;
use crate::engine::shim::{self, Activation};

#[derive(Debug)]
pub struct GatedMlp {
    gate_up: Linear,
    down: Linear,
    activation: Activation,
}

impl GatedMlp {
    /// `parts` are gate, up and down.
    pub fn new(parts: &[(Matrix, Option<Tensor>)], activation: Activation) -> Result<Self, EngineError> {
        Ok(Self { gate_up: Linear::fused(&parts[..2])?, down: Linear::fused(&parts[2..])?, activation })
    }

    pub fn forward(&self, x: &Tensor) -> Result<Tensor, EngineError> {
        self.down.forward(&shim::gate_mul(&self.gate_up.forward(x)?, self.activation)?)
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn activations_are_torchs_and_rows_do_not_depend_on_their_number() {
        for kind in [Kind::Float, Kind::BFloat16] {
            for width in [7, 16, 96, 130] {
                let gate_up = (Tensor::randn([9, 2 * width], (Kind::Float, Device::Cpu)) * 4.0).to_kind(kind);
                let wide = gate_up.to_kind(Kind::Double);
                let (gate, up) = (wide.narrow(1, 0, width), wide.narrow(1, width, width));
                for (activation, expected) in
                    [(Activation::Silu, gate.silu()), (Activation::GeluTanh, gate.gelu("tanh"))]
                {
                    let all = shim::gate_mul(&gate_up, activation).unwrap();
                    let tolerance = if kind == Kind::Float { 1e-5 } else { 1e-2 };
                    let expected = expected * &up;
                    assert!(
                        all.to_kind(Kind::Double).allclose(&expected, tolerance, tolerance, false),
                        "{activation:?} of {width} in {kind:?}"
                    );
                    let one = shim::gate_mul(&gate_up.narrow(0, 4, 1), activation).unwrap();
                    assert!(one.equal(&all.narrow(0, 4, 1)));
                }
            }
        }
    }

    /// Far from zero a gate is open or shut, and never not a number.
    #[test]
    fn gates_saturate() {
        let gate_up = Tensor::from_slice(&[-1e4f32, -60.0, 60.0, 1e4, 1.0, 1.0, 1.0, 1.0]).view([1, 8]);
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let out = shim::gate_mul(&gate_up, activation).unwrap();
            let expected = Tensor::from_slice(&[0.0f32, 0.0, 60.0, 1e4]).view([1, 4]);
            assert!(out.allclose(&expected, 1e-6, 1e-20, false), "{activation:?}: {out:?}");
        }
    }
}
