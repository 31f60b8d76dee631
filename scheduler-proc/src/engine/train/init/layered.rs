//! Owns what multi-token-prediction layers begin with: one after the other, each the best linear guess from what the
//! one before leaves.

use anyhow::Result;
use tch::{Kind, Tensor};

use super::{ATTENTION, Sample, Start, Tensors, fit, rms_norm, whiten, whitener};
use crate::engine::models::mtp_head::MtpSpec;
use crate::engine::train::optimizer::Whiteners;

impl Start<'_> {
    /// As for EAGLE, a layer's input is the guess, which attention adds nothing to at first.
    pub(super) fn fit_layers(
        &self,
        specs: &[MtpSpec],
        sample: &Sample,
        tensors: &mut Tensors,
        whiteners: &mut Whiteners,
    ) -> Result<()> {
        let eps = self.spec.shape().norm_eps;
        let mut before = self.before_norm(&sample.hidden);
        for ((spec, embedded), next) in specs.iter().zip(&sample.embedded).zip(&sample.next) {
            let prefix = &spec.block().prefix;
            let normed = |x: &Tensor, name: &str| rms_norm(x, &tensors[name], eps);
            let x =
                Tensor::cat(&[normed(embedded, &spec.token_norm()), normed(&before, &spec.hidden_norm())], 1);
            let wanted = self.before_norm(next);
            let weight = fit(&x, &wanted)?;
            let guess = x.matmul(&weight.tr());
            let input = normed(&guess, &spec.input_norm()).to_kind(Kind::Float);
            whiteners.insert(spec.join(), whitener(&x)?);
            tensors.insert(spec.join(), weight);
            let attention = ATTENTION.map(|name| format!("{prefix}{name}"));
            whiten(&whitener(&input)?, &attention, tensors, whiteners);
            let added = self.fit_mlp(prefix, &guess, &wanted, tensors, whiteners)?;
            before = guess + added;
        }
        Ok(())
    }
}
