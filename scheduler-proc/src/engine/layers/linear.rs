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

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    /// Rows of a batch against the same rows in batches of every size.
    fn check(kind: Kind, out: i64, input: i64) {
        let weight = (Tensor::randn([out, input], (Kind::Float, Device::Cpu)) * 0.05).to_kind(kind);
        let linear = Linear::new(&weight, None).unwrap();
        let x = Tensor::randn([300, input], (Kind::Float, Device::Cpu)).to_kind(kind);
        let all = linear.forward(&x).unwrap();
        let mut differing = Vec::new();
        for rows in
            [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 100, 128, 200, 256]
        {
            let part = linear.forward(&x.narrow(0, 0, rows).contiguous()).unwrap();
            if !part.equal(&all.narrow(0, 0, rows)) {
                differing.push(rows);
            }
        }
        assert_eq!(differing, Vec::<i64>::new(), "{kind:?} {out}x{input}");
    }

    #[test]
    fn rows_do_not_depend_on_their_number() {
        let mut failures = Vec::new();
        for kind in [Kind::Float, Kind::BFloat16] {
            for (out, input) in [
                (960, 576),
                (576, 576),
                (3072, 576),
                (576, 1536),
                (4096, 4096),
                (49152, 576),
                (128, 64),
                (112, 48),
            ] {
                if let Err(error) = std::panic::catch_unwind(|| check(kind, out, input)) {
                    failures.push(error.downcast_ref::<String>().cloned());
                }
            }
        }
        assert!(failures.is_empty(), "{failures:#?}");
    }
}
