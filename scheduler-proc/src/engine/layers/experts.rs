//! Owns the mixture of experts in a feed-forward block's place: every row goes through the few experts that a router
//! likes best, and their results are summed by its weights.

use tch::Tensor;

use super::linear::Linear;
use super::mlp::GatedMlp;
use crate::engine::{EngineError, shim};

#[derive(Debug)]
pub struct Experts {
    pub router: Linear,
    pub experts: Vec<GatedMlp>,
    /// Experts per row.
    pub per_row: usize,
    /// The weights of the chosen experts are made to sum up to 1.
    pub normalised: bool,
}

/// Rows that go through one expert, with its weight in each.
#[derive(Debug, Clone, Default, PartialEq)]
struct Route {
    rows: Vec<i64>,
    weights: Vec<f32>,
}

impl Experts {
    /// A row's result depends on that row alone: each expert adds to it once, in the order of the experts.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, EngineError> {
        let scores = shim::to_host(&self.router.forward_wide(x)?)?;
        let sum = x.zeros_like();
        for (expert, route) in self.experts.iter().zip(self.routes(&scores)) {
            if route.rows.is_empty() {
                continue;
            }
            let rows = Tensor::from_slice(&route.rows).to_device(x.device());
            let weights = Tensor::from_slice(&route.weights).to_device(x.device()).to_kind(x.kind());
            let out = expert.forward(&x.index_select(0, &rows))? * weights.unsqueeze(1);
            // What comes back is an alias of the sum.
            let _ = sum.shallow_clone().index_add_(0, &rows, &out);
        }
        Ok(sum)
    }

    /// One per expert.
    fn routes(&self, scores: &[f32]) -> Vec<Route> {
        let count = self.experts.len();
        let mut routes = vec![Route::default(); count];
        for (row, scores) in scores.chunks(count).enumerate() {
            for (expert, weight) in chosen(scores, self.per_row, self.normalised) {
                routes[expert].rows.push(row as i64);
                routes[expert].weights.push(weight);
            }
        }
        routes
    }
}

/// The best experts of one row with their weights; of equal ones the first.
fn chosen(scores: &[f32], per_row: usize, normalised: bool) -> Vec<(usize, f32)> {
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shares: Vec<f32> = scores.iter().map(|score| (score - largest).exp()).collect();
    let mut best: Vec<usize> = (0..shares.len()).collect();
    best.sort_by(|&a, &b| shares[b].total_cmp(&shares[a]));
    best.truncate(per_row);
    let total: f32 = match normalised {
        true => best.iter().map(|&expert| shares[expert]).sum(),
        false => shares.iter().sum(),
    };
    best.into_iter().map(|expert| (expert, shares[expert] / total)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_shares_of_all_or_of_the_chosen() {
        let scores: Vec<f32> = [0.1f32, 0.4, 0.3, 0.2].iter().map(|share| share.ln() + 3.0).collect();
        let check = |normalised, expect: [(usize, f32); 2]| {
            for ((expert, weight), (wanted, share)) in chosen(&scores, 2, normalised).into_iter().zip(expect)
            {
                assert_eq!(expert, wanted);
                assert!((weight - share).abs() < 1e-6, "{weight} is not {share}");
            }
        };
        check(false, [(1, 0.4), (2, 0.3)]);
        check(true, [(1, 0.4 / 0.7), (2, 0.3 / 0.7)]);
        assert_eq!(chosen(&[1.0, 1.0, 1.0], 2, true), [(0, 0.5), (1, 0.5)]);
    }
}
