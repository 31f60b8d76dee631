//! Owns the optimizer. Matrices take Muon's step on whitened inputs: momentum, made orthogonal. Norms and biases take
//! AdamW's. Unlike the library's own, its state can be kept and restored.
//!
//! Why not AdamW for all: a target's hidden states have a few dimensions a hundred times the rest and strong
//! correlations, and a step that treats entries of a matrix one by one is either too large for the former or too
//! small for the latter. With whitened inputs an orthogonal step changes what comes out by the same amount whatever
//! goes in. (Muon: Jordan et al. 2024, github.com/KellerJordan/Muon; its scale of 0.2·√max(rows, columns), which
//! makes its rates comparable to AdamW's: Liu et al. 2025, arXiv 2502.16982.)

use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use super::params::Params;

/// AdamW's.
const BETAS: (f64, f64) = (0.9, 0.95);
const EPSILON: f64 = 1e-8;
/// Muon's, with Nesterov's look ahead.
const MOMENTUM: f64 = 0.95;
/// Of Newton-Schulz, and how often.
const QUINTIC: (f64, f64, f64) = (3.4445, -4.7750, 2.0315);
const ITERATIONS: usize = 5;
const MUON_SCALE: f64 = 0.2;
/// On matrices only.
const WEIGHT_DECAY: f64 = 0.01;
/// Longest gradient, over all parameters.
const CLIP: f64 = 1.0;

/// By matrix, what whitens its inputs: see [`super::least_squares::whitener`].
pub(super) type Whiteners = BTreeMap<String, Tensor>;

/// What is kept of a parameter's gradients.
#[derive(Debug)]
pub(super) struct Moments {
    pub first: Tensor,
    /// AdamW's only.
    pub second: Option<Tensor>,
}

impl Moments {
    fn new(tensor: &Tensor) -> Self {
        let zeros = || Tensor::zeros(tensor.size(), (Kind::Float, tensor.device()));
        Self { first: zeros(), second: (tensor.dim() < 2).then(zeros) }
    }
}

/// The moments of all trained parameters by name, and the whiteners.
#[derive(Debug)]
pub(super) struct Optimizer {
    moments: BTreeMap<String, Moments>,
    whiteners: Whiteners,
    steps: u64,
    /// The type orthogonal steps are computed in.
    kind: Kind,
}

impl Optimizer {
    pub(super) fn new(params: &Params, whiteners: Whiteners, kind: Kind) -> Self {
        let trained = params.iter().filter(|(_, tensor)| tensor.requires_grad());
        let moments = trained.map(|(name, tensor)| (name.clone(), Moments::new(tensor))).collect();
        Self::restore(moments, whiteners, 0, kind)
    }

    pub(super) fn restore(
        moments: BTreeMap<String, Moments>,
        whiteners: Whiteners,
        steps: u64,
        kind: Kind,
    ) -> Self {
        Self { moments, whiteners, steps, kind }
    }

    pub(super) fn whiteners(&self) -> &Whiteners {
        &self.whiteners
    }

    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    pub(super) fn moments(&self) -> impl Iterator<Item = (&String, &Moments)> {
        self.moments.iter()
    }

    /// One step along the gradients, which are cleared. Gives their length before clipping; a step with gradients
    /// that are not finite is left out.
    pub(super) fn step(&mut self, params: &Params, rate: f64) -> f64 {
        tch::no_grad(|| {
            let gradients: Vec<Tensor> = params.iter().map(|(_, tensor)| tensor.grad()).collect();
            let square = |gradient: &Tensor| gradient.square().sum(Kind::Double).double_value(&[]);
            let length =
                gradients.iter().filter(|gradient| gradient.defined()).map(square).sum::<f64>().sqrt();
            if length.is_finite() {
                self.steps += 1;
                let scale = (CLIP / length.max(1e-12)).min(1.0);
                for ((name, tensor), gradient) in params.iter().zip(gradients) {
                    if gradient.defined() {
                        self.update(name, tensor, &(gradient * scale), rate);
                    }
                }
            }
            params.iter().for_each(|(_, tensor)| tensor.shallow_clone().zero_grad());
            length
        })
    }

    fn update(&mut self, name: &str, tensor: &Tensor, gradient: &Tensor, rate: f64) {
        let moments = self.moments.get_mut(name).expect("moments are made for every trained parameter");
        let update = match &mut moments.second {
            Some(second) => adam(&mut moments.first, second, gradient, self.steps as f64),
            None => muon(&mut moments.first, gradient, self.whiteners.get(name), self.kind),
        };
        let mut tensor = tensor.shallow_clone();
        if tensor.dim() > 1 {
            let _ = tensor.g_mul_scalar_(1.0 - rate * WEIGHT_DECAY);
        }
        let _ = tensor.g_sub_(&(update * rate));
    }
}

fn adam(first: &mut Tensor, second: &mut Tensor, gradient: &Tensor, steps: f64) -> Tensor {
    let (beta1, beta2) = BETAS;
    // What comes back is an alias.
    let _ = first.lerp_(gradient, 1.0 - beta1);
    let _ = second.lerp_(&gradient.square(), 1.0 - beta2);
    let unbiased = (&*second / (1.0 - beta2.powf(steps))).sqrt() + EPSILON;
    &*first / (1.0 - beta1.powf(steps)) / unbiased
}

fn muon(first: &mut Tensor, gradient: &Tensor, whitener: Option<&Tensor>, kind: Kind) -> Tensor {
    let _ = first.lerp_(gradient, 1.0 - MOMENTUM);
    let ahead = first.lerp(gradient, 1.0 - MOMENTUM);
    let size = gradient.size();
    let scale = MUON_SCALE * (size[0].max(size[1]) as f64).sqrt();
    match whitener {
        // The gradient of the matrix that takes whitened inputs, and the step back in the given ones.
        Some(whitener) => orthogonal(&ahead.matmul(&whitener.tr()), kind).matmul(whitener) * scale,
        None => orthogonal(&ahead, kind) * scale,
    }
}

/// Near the closest matrix with orthonormal rows or columns, by Newton-Schulz.
fn orthogonal(matrix: &Tensor, kind: Kind) -> Tensor {
    let (a, b, c) = QUINTIC;
    let length = matrix.square().sum(Kind::Double).double_value(&[]).sqrt();
    let tall = matrix.size()[0] > matrix.size()[1];
    let mut x = (matrix / (length + 1e-12)).to_kind(kind);
    if tall {
        x = x.tr();
    }
    for _ in 0..ITERATIONS {
        let square = x.matmul(&x.tr());
        let mix = &square * b + square.matmul(&square) * c;
        x = &x * a + mix.matmul(&x);
    }
    if tall { x.tr().to_kind(Kind::Float) } else { x.to_kind(Kind::Float) }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn a_step_is_nearly_orthogonal() {
        tch::manual_seed(1);
        for size in [[5, 9], [9, 5]] {
            let step = orthogonal(&Tensor::randn(size, (Kind::Float, Device::Cpu)), Kind::Float);
            let smaller = if size[0] < size[1] { step.matmul(&step.tr()) } else { step.tr().matmul(&step) };
            let (squares, _) = smaller.linalg_eigh("L");
            let squares = Vec::<f64>::try_from(squares).unwrap();
            assert!(squares.iter().all(|square| (0.3..1.7).contains(square)), "{squares:?}");
        }
    }

    /// One input ten times the others, two nearly the same: least squares is found all the same.
    #[test]
    fn whitened_steps_find_least_squares() {
        tch::manual_seed(2);
        let random = |size: &[i64]| Tensor::randn(size, (Kind::Float, Device::Cpu));
        let x = random(&[400, 6]);
        let near = x.select(1, 1) + random(&[400]) * 0.3;
        let x = Tensor::cat(&[x.narrow(1, 0, 1) * 10.0, x.narrow(1, 1, 5), near.unsqueeze(1)], 1);
        let y = x.matmul(&random(&[7, 4]));
        let weight = Tensor::zeros([4, 7], (Kind::Float, Device::Cpu));
        let params = Params::new(BTreeMap::from([("w".to_owned(), weight)])).trainable();
        let whitener = super::super::least_squares::whitener(&x).unwrap();
        let mut optimizer =
            Optimizer::new(&params, BTreeMap::from([("w".to_owned(), whitener)]), Kind::Float);
        let error = || (x.matmul(&params.get("w").tr()) - &y).square().mean(Kind::Float);
        let start = error().double_value(&[]);
        for step in 0..300 {
            error().backward();
            optimizer.step(&params, 1.0 - f64::from(step) / 300.0);
        }
        let end = error().double_value(&[]);
        assert!(end < 1e-3 * start, "{start} {end}");
    }
}
