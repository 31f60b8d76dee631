//! Owns AdamW with its moments: unlike the library's own, its state can be kept and restored.

use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use super::params::Params;

const BETAS: (f64, f64) = (0.9, 0.95);
const EPSILON: f64 = 1e-8;
/// On matrices only.
const WEIGHT_DECAY: f64 = 0.01;
/// Longest gradient, over all parameters.
const CLIP: f64 = 0.5;

/// By parameter, one factor per input: inputs that are large for all tokens alike get smaller steps, as if they had
/// been scaled to the size of the others. Hidden states have a few that are a hundred times the rest.
pub(super) type InputScales = BTreeMap<String, Tensor>;

/// First and second moments by the parameter's name.
#[derive(Debug)]
pub(super) struct AdamW {
    moments: BTreeMap<String, (Tensor, Tensor)>,
    scales: InputScales,
    steps: u64,
}

impl AdamW {
    pub(super) fn new(params: &Params, scales: InputScales) -> Self {
        let zero = |(name, tensor): (&String, &Tensor)| {
            let zeros = || Tensor::zeros(tensor.size(), (Kind::Float, tensor.device()));
            (name.clone(), (zeros(), zeros()))
        };
        Self { moments: params.iter().map(zero).collect(), scales, steps: 0 }
    }

    pub(super) fn restore(
        moments: BTreeMap<String, (Tensor, Tensor)>,
        scales: InputScales,
        steps: u64,
    ) -> Self {
        Self { moments, scales, steps }
    }

    pub(super) fn scales(&self) -> &InputScales {
        &self.scales
    }

    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    pub(super) fn moments(&self) -> impl Iterator<Item = (&String, &(Tensor, Tensor))> {
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
        let (first, second) = self.moments.get_mut(name).expect("moments are made for every parameter");
        let (beta1, beta2) = BETAS;
        // What comes back is an alias.
        let _ = first.lerp_(gradient, 1.0 - beta1);
        let _ = second.lerp_(&gradient.square(), 1.0 - beta2);
        let steps = self.steps as f64;
        let unbiased = (&*second / (1.0 - beta2.powf(steps))).sqrt() + EPSILON;
        let mut update = &*first / (1.0 - beta1.powf(steps)) / unbiased;
        if let Some(scale) = self.scales.get(name) {
            update *= scale;
        }
        let mut tensor = tensor.shallow_clone();
        if tensor.dim() > 1 {
            let _ = tensor.g_mul_scalar_(1.0 - rate * WEIGHT_DECAY);
        }
        let _ = tensor.g_sub_(&(update * rate));
    }
}
