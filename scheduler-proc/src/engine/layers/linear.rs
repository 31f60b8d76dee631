//! Owns projections: weights packed once, rows independent of their batch.

use tch::{Device, Tensor};

use super::rows::{Cut, RowPolicy};
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
    Packed {
        weight: Tensor,
        policy: RowPolicy,
    },
    Plain(Tensor),
}

impl Linear {
    /// `weight` is `[out, in]`.
    pub fn new(weight: &Tensor, bias: Option<Tensor>) -> Result<Self, EngineError> {
        if weight.device() != Device::Cpu {
            return Ok(Self { weight: Weight::Plain(weight.shallow_clone()), bias });
        }
        let packed = shim::linear_pack(&weight.contiguous())?;
        let policy = RowPolicy::find(weight.kind(), weight.size())?;
        Ok(Self { weight: Weight::Packed { weight: packed, policy }, bias })
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
            Weight::Plain(weight) => Ok(x.linear(weight, self.bias.as_ref())),
            Weight::Packed { weight, policy } => self.forward_packed(x, weight, policy),
        }
    }

    fn forward_packed(&self, x: &Tensor, weight: &Tensor, policy: &RowPolicy) -> Result<Tensor, EngineError> {
        let mut from = 0;
        let mut parts = Vec::new();
        for Cut { rows, size } in policy.cuts(x.size()[0]) {
            let part = x.narrow(0, from, rows);
            from += rows;
            let y = match size - rows {
                0 => shim::linear(&part, weight, self.bias.as_ref())?,
                filling => {
                    let filled = part.constant_pad_nd([0, 0, 0, filling]);
                    shim::linear(&filled, weight, self.bias.as_ref())?.narrow(0, 0, rows)
                }
            };
            parts.push(y);
        }
        match parts.len() {
            1 => Ok(parts.swap_remove(0)),
            _ => Ok(Tensor::cat(&parts, 0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    #[test]
    fn fused_projections_are_those_of_their_parts() {
        let random = |size: &[i64]| Tensor::randn(size, (Kind::Float, Device::Cpu));
        let parts: Vec<(Tensor, Option<Tensor>)> =
            [8, 4, 12].map(|out| (random(&[out, 16]), Some(random(&[out])))).into_iter().collect();
        let x = random(&[5, 16]);
        let expected: Vec<Tensor> =
            parts.iter().map(|(weight, bias)| x.linear(weight, bias.as_ref())).collect();
        let actual = Linear::fused(&parts).unwrap().forward(&x).unwrap();
        assert!(actual.allclose(&Tensor::cat(&expected, 1), 1e-5, 1e-5, false));
    }
}
