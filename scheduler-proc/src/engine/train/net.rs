//! Owns the differentiable forward of the two kinds of head, one draft step at a time over whole sequences.

use proto::Dtype;
use tch::{Device, Kind, Tensor};

use super::batches::TOKENS_MULTIPLE;
use super::corpus::Feature;
use super::dense::{DenseBlock, Past, delayed, linear, rms_norm};
use super::params::Params;
use crate::engine::hf_config::HfConfig;
use crate::engine::layers::rope::RopeTables;
use crate::engine::models::draft::Inherited;
use crate::engine::models::eagle_head::EagleSpec;
use crate::engine::models::eagle3_head::Eagle3Spec;
use crate::engine::weights::Parameter;

/// What a head is, as the serving side describes it.
#[derive(Debug, Clone)]
pub(super) enum HeadSpec {
    Eagle(EagleSpec),
    Eagle3(Eagle3Spec),
}

impl HeadSpec {
    pub(super) fn shape(&self) -> &HfConfig {
        match self {
            Self::Eagle(spec) => &spec.block().shape,
            Self::Eagle3(spec) => &spec.block().shape,
        }
    }

    /// What of the target the head takes.
    pub(super) fn feature(&self) -> Feature {
        match self {
            Self::Eagle(_) => Feature::Final,
            Self::Eagle3(_) => Feature::Layers,
        }
    }

    /// What serving loads, less the table of tokens, which is no parameter.
    pub(super) fn parameters(&self) -> Vec<Parameter> {
        let mut all = match self {
            Self::Eagle(spec) => spec.parameters(),
            Self::Eagle3(spec) => spec.parameters(),
        };
        all.retain(|parameter| parameter.name != "d2t");
        all
    }
}

/// A head without its parameters.
pub(super) struct HeadNet {
    spec: HeadSpec,
    tables: RopeTables,
}

impl HeadNet {
    /// For sequences of up to `positions` tokens, filled up.
    pub(super) fn new(spec: HeadSpec, positions: usize) -> Self {
        let shape = spec.shape();
        let positions = positions.next_multiple_of(TOKENS_MULTIPLE);
        let tables =
            RopeTables::new(shape.rope_theta, &shape.rope_scaling, shape.head_dim, positions, Device::Cpu);
        Self { spec, tables }
    }

    pub(super) fn spec(&self) -> &HeadSpec {
        &self.spec
    }

    /// All draft steps, each on the states of the one before it: what the head leaves at `rows` of
    /// `sequences * tokens`, `[rows, hidden]` per step. Row `t` of `embedded` is the token after position `t`, row `t`
    /// of `features` what the target left at `t`.
    pub(super) fn unroll(
        &self,
        params: &Params,
        embedded: &Tensor,
        features: &Tensor,
        rows: &Tensor,
        steps: usize,
    ) -> Vec<Tensor> {
        let mut past = Past::default();
        let mut states: Vec<Tensor> = Vec::with_capacity(steps);
        for _ in 0..steps {
            let state = match states.last() {
                None => self.step(params, embedded, Inherited::Target(features), &mut past, rows),
                Some(last) => {
                    let whole = delayed(&spread(last, rows, &embedded.size()), 1);
                    self.step(params, embedded, Inherited::Own(&whole), &mut past, rows)
                }
            };
            states.push(state);
        }
        states
    }

    fn step(
        &self,
        params: &Params,
        embedded: &Tensor,
        inherited: Inherited<'_>,
        past: &mut Past,
        rows: &Tensor,
    ) -> Tensor {
        let shape = self.spec.shape();
        let block = DenseBlock { shape, tables: &self.tables };
        match &self.spec {
            HeadSpec::Eagle(_) => {
                let (Inherited::Target(hidden) | Inherited::Own(hidden)) = inherited;
                let x = linear(&Tensor::cat(&[embedded, hidden], -1), params, "fc");
                block.forward(params, &x, &x, past, rows)
            }
            HeadSpec::Eagle3(_) => {
                let residual = match inherited {
                    Inherited::Target(features) => linear(features, params, "fc"),
                    Inherited::Own(states) => states.shallow_clone(),
                };
                let norm = |x: &Tensor, name: &str| rms_norm(x, params.get(name), shape.norm_eps);
                let x = Tensor::cat(
                    &[
                        norm(embedded, "layers.0.input_layernorm.weight"),
                        norm(&residual, "layers.0.hidden_norm.weight"),
                    ],
                    -1,
                );
                block.forward(params, &x, &residual, past, rows)
            }
        }
    }

    /// What the table of logits is multiplied with.
    pub(super) fn before_logits(&self, params: &Params, states: &Tensor) -> Tensor {
        match &self.spec {
            HeadSpec::Eagle(_) => states.shallow_clone(),
            HeadSpec::Eagle3(spec) => {
                rms_norm(states, params.get("norm.weight"), spec.block().shape.norm_eps)
            }
        }
    }

    /// The type passes compute in on this machine.
    pub(super) fn compute_kind() -> Kind {
        if Dtype::Bfloat16.is_computed_by_this_cpu() { Kind::BFloat16 } else { Kind::Float }
    }
}

/// Rows at their places in `[sequences, tokens, ..]`, zeros elsewhere.
fn spread(states: &Tensor, rows: &Tensor, size: &[i64]) -> Tensor {
    let whole = Tensor::zeros([size[0] * size[1], states.size()[1]], (states.kind(), states.device()));
    whole.index_copy(0, rows, states).view([size[0], size[1], -1])
}

#[cfg(test)]
mod tests;
