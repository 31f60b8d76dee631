//! Owns the parameters a training starts from: what the target already knows, and the best linear guess of its next
//! hidden state.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use tch::{Device, Kind, Tensor};

use super::corpus::{Corpus, Feature};
use super::generate::hash;
use super::net::HeadSpec;
use super::optimizer::InputScales;
use super::params::Params;
use super::random;
use super::tables::TrainTables;
use crate::engine::hf_config::HfConfig;

/// Spread of what starts near nothing, so that a new head begins as the linear guess.
const SMALL: f64 = 1e-3;
/// Spread of projections that have no counterpart in the target.
const USUAL: f64 = 0.02;
/// Positions the linear guess is fitted to.
const FITTED: usize = 20_000;
/// What keeps the fit finite where inputs depend on one another, relative to each one's own square.
const RIDGE: f64 = 1e-3;

/// Steps along small inputs are not made larger than this.
const LARGEST_SCALE: f64 = 8.0;

/// A linear guess.
struct Fit {
    weight: Tensor,
    bias: Tensor,
    /// One over the size of each input.
    input_scale: Tensor,
}

/// What heads begin with.
pub(super) struct Start<'a> {
    pub spec: &'a HeadSpec,
    pub target: &'a TrainTables,
    /// Target ids of the draft's vocabulary.
    pub vocabulary: &'a Tensor,
    pub seed: u64,
}

impl Start<'_> {
    /// Parameters, and how large the inputs of some are.
    pub(super) fn params(&self, corpus: &Corpus) -> Result<(Params, InputScales)> {
        tch::no_grad(|| {
            let mut tensors = BTreeMap::new();
            for parameter in self.spec.parameters() {
                let size: Vec<i64> = parameter.shape.iter().map(|&size| size as i64).collect();
                let tensor = self.parameter(&parameter.name, &size);
                tensors.insert(parameter.name, tensor);
            }
            let fit = match self.spec {
                HeadSpec::Eagle(_) => self.fit_next_hidden(corpus, Feature::Final)?,
                HeadSpec::Eagle3(_) => self.fit_next_hidden(corpus, Feature::Layers)?,
            };
            let mut scales = InputScales::new();
            if let HeadSpec::Eagle(_) = self.spec {
                // The layer's input is what comes near the next hidden state.
                let hidden = self.spec.shape().hidden_size as i64;
                for name in ["q_proj", "k_proj", "v_proj"] {
                    let name = format!("layers.0.self_attn.{name}.weight");
                    scales.insert(name, fit.input_scale.narrow(0, hidden, hidden).copy());
                }
            }
            scales.insert("fc.weight".into(), fit.input_scale);
            tensors.insert("fc.weight".into(), fit.weight);
            if let Some(place) = tensors.get_mut("fc.bias") {
                *place = fit.bias;
            }
            Ok((Params::new(tensors).trainable(), scales))
        })
    }

    fn parameter(&self, name: &str, size: &[i64]) -> Tensor {
        // By name, so that no parameter depends on which others a head has.
        let stream = hash(0, name.bytes().map(u64::from));
        let random = |spread: f64| random::even(size, self.seed, stream) * spread;
        let last = self.spec.shape();
        let from_target = |name: &str| self.target.last_layer.get(name).filter(|t| t.size() == size);
        match name {
            "norm.weight" => self.target.final_norm.to_kind(Kind::Float),
            "lm_head.weight" => self.target.head.index_select(0, self.vocabulary).to_kind(Kind::Float),
            "layers.0.self_attn.o_proj.weight" | "layers.0.mlp.down_proj.weight" => random(SMALL),
            name if name.ends_with("norm.weight") => match from_target(own_name(name)) {
                Some(norm) if name.contains("post_attention") => norm.to_kind(Kind::Float),
                _ => Tensor::ones(size, (Kind::Float, Device::Cpu)),
            },
            name if name.ends_with("bias") => Tensor::zeros(size, (Kind::Float, Device::Cpu)),
            name if name.contains("mlp.") => match from_target(own_name(name)) {
                Some(weight) => weight.to_kind(Kind::Float),
                None => random(USUAL),
            },
            _ => random(1.0 / (fan_in(size, last) as f64).sqrt()),
        }
    }

    /// The matrix and bias that come nearest to the target's next hidden state. For EAGLE from the next token's
    /// embedding and this position's hidden state; for EAGLE3 from the captured layers alone, up to the final
    /// norm's weights.
    fn fit_next_hidden(&self, corpus: &Corpus, feature: Feature) -> Result<Fit> {
        let hidden_size = self.spec.shape().hidden_size as i64;
        let inputs = corpus.width(feature) as i64 + if feature == Feature::Final { hidden_size } else { 0 };
        let options = (Kind::Double, Device::Cpu);
        let mut square = Tensor::zeros([inputs + 1, inputs + 1], options);
        let mut cross = Tensor::zeros([inputs + 1, hidden_size], options);
        let mut fitted = 0;
        for (index, sequence) in corpus.sequences().iter().enumerate() {
            let positions = sequence.rows();
            if positions < 2 || fitted >= FITTED {
                continue;
            }
            let rows = positions as i64 - 1;
            let read = |feature| -> Result<Tensor> {
                let bytes = corpus.hidden(index, positions, feature)?;
                let size = [positions as i64, corpus.width(feature) as i64];
                Ok(Tensor::from_data_size(&bytes, &size, Kind::BFloat16).to_kind(Kind::Float))
            };
            let last = read(Feature::Final)?;
            let (x, y) = match feature {
                Feature::Final => {
                    let ids: Vec<i64> =
                        sequence.tokens[1..positions].iter().map(|&id| i64::from(id)).collect();
                    let embedded = self.target.embedding.index_select(0, &Tensor::from_slice(&ids));
                    let embedded = embedded.to_kind(Kind::Float);
                    (Tensor::cat(&[&embedded, &last.narrow(0, 0, rows)], 1), last.narrow(0, 1, rows))
                }
                Feature::Layers => {
                    let norm = self.target.final_norm.to_kind(Kind::Float);
                    (read(feature)?.narrow(0, 0, rows), last.narrow(0, 1, rows) / norm)
                }
            };
            let x = x.constant_pad_nd([0, 1]).to_kind(Kind::Double);
            // What comes back is an alias: the column of the bias.
            let _ = x.narrow(1, inputs, 1).fill_(1.0);
            square += x.tr().matmul(&x);
            cross += x.tr().matmul(&y.to_kind(Kind::Double));
            fitted += positions - 1;
        }
        // Per input: embeddings are far smaller than hidden states, some of which are far larger than the rest.
        let squares = square.diagonal(0, 0, 1).copy();
        square += (&squares * RIDGE).diag(0);
        let solution =
            Tensor::f_linalg_solve(&square, &cross, true).context("fitting the next hidden state")?;
        let solution = solution.to_kind(Kind::Float);
        let weight = solution.narrow(0, 0, inputs).tr().contiguous();
        let size = (squares.narrow(0, 0, inputs) / fitted.max(1) as f64).sqrt().to_kind(Kind::Float);
        let input_scale = size.clamp_min(1.0 / LARGEST_SCALE).reciprocal();
        Ok(Fit { weight, bias: solution.get(inputs).contiguous(), input_scale })
    }
}

/// A parameter's name inside its layer.
fn own_name(name: &str) -> &str {
    name.strip_prefix("layers.0.").unwrap_or(name)
}

fn fan_in(size: &[i64], shape: &HfConfig) -> i64 {
    size.last().copied().unwrap_or(shape.hidden_size as i64)
}
