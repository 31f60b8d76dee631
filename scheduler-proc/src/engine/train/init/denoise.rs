//! Owns what a DFLASH draft model begins with: a context that is the target's last hidden state as far as the captured
//! layers tell, and layers that do little yet.

use anyhow::Result;
use tch::Tensor;

use super::{SMALL, Sample, Start, Tensors, fit, whiten, whitener};
use crate::engine::models::dflash_spec::DflashSpec;
use crate::engine::train::optimizer::Whiteners;

impl Start<'_> {
    pub(super) fn fit_dflash(
        &self,
        spec: &DflashSpec,
        sample: &Sample,
        tensors: &mut Tensors,
        whiteners: &mut Whiteners,
    ) -> Result<()> {
        let weight = fit(&sample.features, &self.before_norm(&sample.hidden))?;
        let context = sample.features.linear(&weight, None::<Tensor>);
        let context = super::rms_norm(&context, &tensors["hidden_norm.weight"], spec.shape().norm_eps);
        whiteners.insert("fc.weight".into(), whitener(&sample.features)?);
        tensors.insert("fc.weight".into(), weight);
        let white = whitener(&context)?;
        for layer in 0..spec.shape().layers {
            // Most of what keys and values are made of is context; queries are not.
            let names = ["k_proj", "v_proj"].map(|name| format!("layers.{layer}.self_attn.{name}.weight"));
            whiten(&white, &names, tensors, whiteners);
            let down = format!("layers.{layer}.mlp.down_proj.weight");
            let size = tensors[&down].size();
            tensors.insert(down.clone(), self.random(&down, &size, SMALL));
        }
        Ok(())
    }
}
