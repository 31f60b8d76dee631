//! Owns the differentiable forward of every kind of head, all draft steps over whole sequences.

use proto::Dtype;
use tch::{Device, Kind, Tensor};

use super::batches::TOKENS_MULTIPLE;
use super::corpus::Feature;
use super::denoise::Denoiser;
use super::dense::{DenseBlock, Past, delayed, linear, rms_norm};
use super::layered;
use super::params::Params;
use super::tables::TrainTables;
use crate::engine::hf_config::HfConfig;
use crate::engine::layers::rope::RopeTables;
use crate::engine::models::dflash_spec::DflashSpec;
use crate::engine::models::draft::Inherited;
use crate::engine::models::draft_block;
use crate::engine::models::eagle_head::EagleSpec;
use crate::engine::models::eagle3_head::Eagle3Spec;
use crate::engine::models::mtp_head::MtpSpec;
use crate::engine::weights::Parameter;

/// What a head is, as the serving side describes it.
#[derive(Debug, Clone)]
pub(super) enum HeadSpec {
    Eagle(EagleSpec),
    Eagle3(Eagle3Spec),
    /// A layer per draft step.
    MultiLayer(Vec<MtpSpec>),
    Dflash(DflashSpec),
}

impl HeadSpec {
    pub(super) fn shape(&self) -> &HfConfig {
        match self {
            Self::Eagle(spec) => &spec.block().shape,
            Self::Eagle3(spec) => &spec.block().shape,
            Self::MultiLayer(specs) => &specs[0].block().shape,
            Self::Dflash(spec) => spec.shape(),
        }
    }

    /// What of the corpus the head is trained on.
    pub(super) fn feature(&self) -> Feature {
        match self {
            Self::Eagle(_) | Self::MultiLayer(_) => Feature::Final,
            Self::Eagle3(_) | Self::Dflash(_) => Feature::Layers,
        }
    }

    /// Blocks of a sequence that are trained on in one step, where not every position is drafted from: a block costs
    /// as much as it has tokens.
    pub(super) fn blocks(&self) -> Option<usize> {
        matches!(self, Self::Dflash(_)).then_some(BLOCKS)
    }

    /// What serving loads, less the table of tokens, which is no parameter.
    pub(super) fn parameters(&self) -> Vec<Parameter> {
        let mut all = match self {
            Self::Eagle(spec) => spec.parameters(),
            Self::Eagle3(spec) => spec.parameters(),
            Self::MultiLayer(specs) => specs.iter().flat_map(MtpSpec::parameters).collect(),
            Self::Dflash(spec) => spec.parameters(),
        };
        all.retain(|parameter| parameter.name != "d2t");
        all
    }
}

/// See [`HeadSpec::blocks`].
const BLOCKS: usize = 64;

/// A head without its parameters.
pub(super) struct HeadNet {
    spec: HeadSpec,
    tables: RopeTables,
    /// The target's final norm, which the corpus' states went through.
    final_norm: Tensor,
    /// The mask token's row of the target's embedding, where there is one.
    mask: Option<Tensor>,
}

/// A draft step of a head of one layer: what it leaves at the rows that count.
type Step = fn(&HeadNet, &Params, &Tensor, Inherited<'_>, &mut Past, &Tensor) -> Tensor;

/// The inputs of all draft steps.
#[derive(Clone, Copy)]
pub(super) struct Passed<'a> {
    /// Row `t` is the token after position `t`, `[sequences, tokens, hidden]`.
    pub embedded: &'a Tensor,
    /// Row `t` is what the target left at `t`, of [`HeadSpec::feature`].
    pub features: &'a Tensor,
    /// Of `sequences * tokens`, those that count.
    pub rows: &'a Tensor,
}

impl HeadNet {
    /// For sequences of up to `positions` tokens, filled up.
    pub(super) fn new(spec: HeadSpec, positions: usize, target: &TrainTables) -> Self {
        let shape = spec.shape();
        // A block reaches further than what it follows.
        let positions = (positions + 1).next_multiple_of(TOKENS_MULTIPLE) + TOKENS_MULTIPLE;
        let tables =
            RopeTables::new(shape.rope_theta, &shape.rope_scaling, shape.head_dim, positions, Device::Cpu);
        let mask = match &spec {
            HeadSpec::Dflash(spec) => Some(target.embedding.get(i64::from(spec.mask()))),
            _ => None,
        };
        Self { final_norm: target.final_norm.to_kind(Kind::Float), mask, tables, spec }
    }

    pub(super) fn spec(&self) -> &HeadSpec {
        &self.spec
    }

    /// What `steps` draft steps say, before the table of logits: `[rows, hidden]` per step.
    pub(super) fn drafts(&self, params: &Params, passed: Passed<'_>, steps: usize) -> Vec<Tensor> {
        let Passed { embedded, features, rows } = passed;
        let eps = self.spec.shape().norm_eps;
        match &self.spec {
            HeadSpec::Eagle(_) => self.unroll(params, passed, steps, Self::eagle),
            HeadSpec::Eagle3(_) => {
                let states = self.unroll(params, passed, steps, Self::eagle3);
                states.iter().map(|state| rms_norm(state, params.get("norm.weight"), eps)).collect()
            }
            HeadSpec::MultiLayer(specs) => {
                // Its layers norm what they take, so that the length that the final norm took away is not missed.
                let before_norm = (features / &self.final_norm).to_kind(features.kind());
                let states =
                    layered::states(&specs[..steps], &self.tables, params, embedded, &before_norm, rows);
                let normed = |(state, spec): (&Tensor, &MtpSpec)| {
                    rms_norm(state, params.get(&spec.output_norm()), eps)
                };
                states.iter().zip(specs).map(normed).collect()
            }
            HeadSpec::Dflash(spec) => {
                let mask = self.mask.as_ref().expect("a DFLASH net is made with its mask");
                let denoiser = Denoiser { spec, tables: &self.tables, mask, drafts: steps as i64 };
                denoiser.drafts(params, embedded, features, rows)
            }
        }
    }

    /// One layer again and again, each step on the states of the one before it.
    fn unroll(&self, params: &Params, passed: Passed<'_>, steps: usize, step: Step) -> Vec<Tensor> {
        let Passed { embedded, features, rows } = passed;
        let mut past = Past::default();
        let mut states: Vec<Tensor> = Vec::with_capacity(steps);
        for _ in 0..steps {
            let state = match states.last() {
                None => step(self, params, embedded, Inherited::Target(features), &mut past, rows),
                Some(last) => {
                    let whole = delayed(&spread(last, rows, &embedded.size()), 1);
                    step(self, params, embedded, Inherited::Own(&whole), &mut past, rows)
                }
            };
            states.push(state);
        }
        states
    }

    fn block(&self) -> DenseBlock<'_> {
        DenseBlock { shape: self.spec.shape(), tables: &self.tables, prefix: draft_block::PREFIX }
    }

    fn eagle(
        &self,
        params: &Params,
        embedded: &Tensor,
        inherited: Inherited<'_>,
        past: &mut Past,
        rows: &Tensor,
    ) -> Tensor {
        let (Inherited::Target(hidden) | Inherited::Own(hidden)) = inherited;
        let x = linear(&Tensor::cat(&[embedded, hidden], -1), params, "fc");
        self.block().forward(params, &x, &x, past, rows)
    }

    fn eagle3(
        &self,
        params: &Params,
        embedded: &Tensor,
        inherited: Inherited<'_>,
        past: &mut Past,
        rows: &Tensor,
    ) -> Tensor {
        let residual = match inherited {
            Inherited::Target(features) => linear(features, params, "fc"),
            Inherited::Own(states) => states.shallow_clone(),
        };
        let norm = |x: &Tensor, name: &str| rms_norm(x, params.get(name), self.spec.shape().norm_eps);
        let x = Tensor::cat(
            &[
                norm(embedded, "layers.0.input_layernorm.weight"),
                norm(&residual, "layers.0.hidden_norm.weight"),
            ],
            -1,
        );
        self.block().forward(params, &x, &residual, past, rows)
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
