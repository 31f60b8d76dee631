//! Owns the loss over logits: cross-entropy to what the target itself would say, over the tokens that matter.
//!
//! The gradient of a softmax is its difference from the target's, so it is computed here directly, a few rows at a
//! time: logits over thousands of tokens are never kept, which is most of a training step's memory and time.

use tch::{Kind, Tensor};

/// Rows whose logits are there at once: they should fit a processor's cache.
const ROWS: i64 = 256;

/// The target is trusted a little more than it trusts itself: acceptance asks for its first choice.
const TEMPERATURE: f64 = 0.85;

/// The rows of one training step.
pub(super) struct LossRows<'a> {
    /// The target's hidden states of the positions that are drafted for, `[rows, hidden]`.
    pub target: &'a Tensor,
    /// Per draft step what the head left, `[rows, hidden]`.
    pub drafts: &'a [Tensor],
    /// Per draft step and row how much it counts, `[steps, rows]`.
    pub weights: &'a Tensor,
}

/// A loss with its gradients.
#[derive(Debug, Default)]
pub(super) struct HeadLoss {
    /// Per draft step: weighted sums over the rows.
    pub cross_entropy: Vec<f64>,
    /// Per draft step: how much weight lies on rows whose first choice is the target's.
    pub agreement: Vec<f64>,
    /// Per draft step: with respect to the rows of `drafts`.
    pub gradients: Vec<Tensor>,
}

/// The loss of all rows, with `table`'s row per token looked at for both the target and the draft. Rows of weight 0
/// add nothing.
pub(super) fn head_loss(table: &Tensor, rows: &LossRows<'_>) -> HeadLoss {
    let count = rows.target.size()[0];
    let steps = rows.drafts.len();
    let mut loss =
        HeadLoss { cross_entropy: vec![0.0; steps], agreement: vec![0.0; steps], ..HeadLoss::default() };
    let mut gradients: Vec<Vec<Tensor>> = (0..steps).map(|_| Vec::new()).collect();
    let transposed = table.tr();
    let mut from = 0;
    while from < count {
        let len = ROWS.min(count - from);
        let target = rows.target.narrow(0, from, len).matmul(&transposed).to_kind(Kind::Float);
        let choice = target.argmax(-1, true);
        let target = (target / TEMPERATURE).softmax(-1, Kind::Float);
        for (step, drafts) in rows.drafts.iter().enumerate() {
            let weight = rows.weights.get(step as i64).narrow(0, from, len).unsqueeze(1);
            let draft = drafts.narrow(0, from, len);
            let logits = draft.matmul(&transposed).to_kind(Kind::Float);
            let agrees = logits.argmax(-1, true).eq_tensor(&choice);
            loss.agreement[step] += sum(&(agrees.to_kind(Kind::Float) * &weight));
            let log_draft = logits.log_softmax(-1, Kind::Float);
            let dots = (&target * &log_draft).sum_dim_intlist(-1, true, Kind::Float);
            loss.cross_entropy[step] -= sum(&(dots * &weight));
            let difference = ((log_draft.exp() - &target) * weight).to_kind(draft.kind());
            gradients[step].push(difference.matmul(table));
        }
        from += len;
    }
    loss.gradients = gradients.iter().map(|parts| Tensor::cat(parts, 0)).collect();
    loss
}

fn sum(values: &Tensor) -> f64 {
    values.sum(Kind::Double).double_value(&[])
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// The direct gradients against those of autograd.
    #[test]
    fn gradients_are_those_of_the_loss() {
        tch::manual_seed(1);
        let random = |size: &[i64]| Tensor::randn(size, (Kind::Float, Device::Cpu));
        let (table, hidden) = (random(&[11, 6]), random(&[300, 6]));
        let drafts: Vec<Tensor> = (0..2).map(|_| random(&[300, 6]).set_requires_grad(true)).collect();
        let weights = random(&[2, 300]).abs();
        let mut total = Tensor::zeros([], (Kind::Float, Device::Cpu));
        let target = (hidden.matmul(&table.tr()) / TEMPERATURE).softmax(-1, Kind::Float);
        for (step, draft) in drafts.iter().enumerate() {
            let log = draft.matmul(&table.tr()).log_softmax(-1, Kind::Float);
            let rows = -(&target * log).sum_dim_intlist(-1, false, Kind::Float);
            total += (rows * weights.get(step as i64)).sum(Kind::Float);
        }
        total.backward();
        let loss = tch::no_grad(|| {
            head_loss(&table, &LossRows { target: &hidden, drafts: &drafts, weights: &weights })
        });
        let close = |a: &Tensor, b: &Tensor| a.allclose(b, 1e-4, 1e-4, false);
        for (draft, gradient) in drafts.iter().zip(&loss.gradients) {
            assert!(close(&draft.grad(), gradient));
        }
        let sum: f64 = loss.cross_entropy.iter().sum();
        assert!((sum - total.double_value(&[])).abs() < 1e-2 * sum.abs());
    }
}
