//! Owns projections: weights packed once, rows independent of their batch.

use tch::{Device, Kind, Tensor};

use crate::engine::{EngineError, shim};

/// `x @ weight^T + bias`.
#[derive(Debug)]
pub struct Linear {
    weight: Weight,
    bias: Option<Tensor>,
}

#[derive(Debug)]
enum Weight {
    /// The layout of the shim's kernels, CPU only.
    Packed {
        weight: Tensor,
        outputs: i64,
    },
    Plain(Tensor),
}

impl Linear {
    /// `weight` is `[out, in]`.
    pub fn new(weight: &Tensor, bias: Option<Tensor>) -> Result<Self, EngineError> {
        let weight = match weight.device() {
            Device::Cpu => {
                Weight::Packed { weight: shim::linear_pack(&weight.contiguous())?, outputs: weight.size()[0] }
            }
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
            Weight::Plain(weight) => Ok(x.linear(weight, self.bias.as_ref())),
            Weight::Packed { weight, outputs } => {
                shim::linear(x, weight, self.bias.as_ref(), *outputs, false)
            }
        }
    }

    /// As [`Self::forward`], with sums as they are instead of rounded to the type of `x`: logits in bfloat16 would
    /// lie on a grid that ties their best candidates.
    pub fn forward_wide(&self, x: &Tensor) -> Result<Tensor, EngineError> {
        match &self.weight {
            Weight::Plain(weight) => Ok(x.linear(weight, self.bias.as_ref()).to_kind(Kind::Float)),
            Weight::Packed { weight, outputs } => shim::linear(x, weight, self.bias.as_ref(), *outputs, true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(kind: Kind, size: &[i64]) -> Tensor {
        Tensor::randn(size, (Kind::Float, Device::Cpu)).to_kind(kind)
    }

    /// Shapes of real models, and some that fill no panel and no tile.
    const SHAPES: [(i64, i64); 8] =
        [(960, 576), (576, 576), (3072, 576), (576, 1536), (2048, 2048), (128, 64), (112, 48), (7, 5)];

    #[test]
    fn products_are_those_of_exact_arithmetic() {
        if let Ok(wanted) = std::env::var("DRAFTHORSE_KERNELS") {
            assert_eq!(shim::kernels_name(), wanted);
        }
        for kind in [Kind::Float, Kind::BFloat16] {
            for (out, input) in SHAPES {
                let (x, weight) = (random(kind, &[37, input]), random(kind, &[out, input]));
                let bias = random(kind, &[out]);
                let double = |tensor: &Tensor| tensor.to_kind(Kind::Double);
                let expected = double(&x).linear(&double(&weight), Some(&double(&bias)));
                let linear = Linear::new(&weight, Some(bias)).unwrap();
                let wide = linear.forward_wide(&x).unwrap();
                assert_eq!(wide.kind(), Kind::Float);
                assert!(double(&wide).allclose(&expected, 1e-4, 1e-3, false), "{kind:?} {out}x{input}");
                let rounded = linear.forward(&x).unwrap();
                assert!(
                    rounded.equal(&wide.to_kind(kind)),
                    "{kind:?} {out}x{input}: rounded once, at the end"
                );
            }
        }
    }

    #[test]
    fn rows_do_not_depend_on_their_number() {
        for kind in [Kind::Float, Kind::BFloat16] {
            for (out, input) in SHAPES {
                // Products that cancel, half against half, leave rounding alone: any other order of sums shows.
                let half = (input + 1) / 2;
                let (x, weight) = (random(kind, &[300, half]), random(kind, &[out, half]));
                let x = Tensor::cat(&[&x, &-&x], 1).narrow(1, 0, input).contiguous();
                let weight = Tensor::cat(&[&weight, &weight], 1).narrow(1, 0, input).contiguous();
                let linear = Linear::new(&weight, None).unwrap();
                let all = linear.forward(&x).unwrap();
                for rows in [1, 2, 3, 4, 7, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100, 256] {
                    let part = linear.forward(&x.narrow(0, 300 - rows, rows)).unwrap();
                    assert!(
                        part.equal(&all.narrow(0, 300 - rows, rows)),
                        "{kind:?} {out}x{input}, {rows} rows"
                    );
                }
            }
        }
    }

    /// The other tests once more on every instruction set this processor has, each in a process of its own: the
    /// choice is made once.
    #[test]
    fn every_instruction_set_multiplies_the_same_way() {
        let has = |level: &str| match level {
            "kernels_v4" => std::is_x86_feature_detected!("avx512bw"),
            "kernels_v3" => std::is_x86_feature_detected!("avx2"),
            _ => true,
        };
        for kernels in ["kernels_baseline", "kernels_v3", "kernels_v4"].into_iter().filter(|level| has(level))
        {
            let output = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["linear::tests::", "--skip", "every_instruction_set", "--test-threads", "1"])
                .env("DRAFTHORSE_KERNELS", kernels)
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("3 passed"), "{kernels}: {text}");
        }
    }

    #[test]
    fn fused_projections_are_those_of_their_parts() {
        let parts: Vec<(Tensor, Option<Tensor>)> =
            [8, 4, 12].map(|out| (random(Kind::Float, &[out, 16]), Some(random(Kind::Float, &[out])))).into();
        let x = random(Kind::Float, &[5, 16]);
        let expected: Vec<Tensor> =
            parts.iter().map(|(weight, bias)| x.linear(weight, bias.as_ref())).collect();
        let actual = Linear::fused(&parts).unwrap().forward(&x).unwrap();
        assert!(actual.allclose(&Tensor::cat(&expected, 1), 1e-5, 1e-5, false));
    }
}
