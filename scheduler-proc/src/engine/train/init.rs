//! Owns the parameters a training starts from: what the target already knows, and what least squares can find of the
//! rest before the first step.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use tch::{Device, Kind, Tensor};

use super::corpus::{Corpus, Feature};
use super::dense::rms_norm;
use super::generate::hash;
use super::least_squares::{fit, fit_with_bias, principal_rows, whitener};
use super::net::HeadSpec;
use super::optimizer::Whiteners;
use super::params::Params;
use super::prompts::Split;
use super::random;
use super::tables::TrainTables;
use crate::engine::models::draft_block;

mod denoise;
mod layered;

/// Spread of what starts near nothing.
const SMALL: f64 = 1e-3;
/// Spread of projections that have no counterpart in the target.
const USUAL: f64 = 0.02;
/// Positions that least squares sees, at least as many as inputs of a projection.
const FITTED: usize = 32_768;
/// How much a position attends to itself at first, where attention is all that sees the token: the score it has over
/// those far away, per frequency.
const SELF_SCORE: f64 = 3.0;

/// Of a head of one layer.
const PREFIX: &str = draft_block::PREFIX;
const ATTENTION: [&str; 3] =
    ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"];

type Tensors = BTreeMap<String, Tensor>;

/// What heads begin with.
pub(super) struct Start<'a> {
    pub spec: &'a HeadSpec,
    /// Draft steps it is trained for.
    pub drafts: usize,
    pub target: &'a TrainTables,
    /// Target ids of the draft's vocabulary.
    pub vocabulary: &'a Tensor,
    pub seed: u64,
}

/// Positions that are drafted from, one per row.
struct Sample {
    /// Of the token after each, and of those after that, one further on for each further draft step.
    embedded: Vec<Tensor>,
    features: Tensor,
    hidden: Tensor,
    /// The target's final hidden state one position on, and so forth.
    next: Vec<Tensor>,
}

impl Start<'_> {
    /// Parameters, and what whitens the inputs of their matrices.
    pub(super) fn params(&self, corpus: &Corpus) -> Result<(Params, Whiteners)> {
        tch::no_grad(|| {
            let mut tensors = Tensors::new();
            for parameter in self.spec.parameters() {
                let size: Vec<i64> = parameter.shape.iter().map(|&size| size as i64).collect();
                let tensor = self.parameter(&parameter.name, &size);
                tensors.insert(parameter.name, tensor);
            }
            let mut whiteners = Whiteners::new();
            let steps = match self.spec {
                HeadSpec::MultiLayer(_) | HeadSpec::Dflash(_) => self.drafts,
                HeadSpec::Eagle(_) | HeadSpec::Eagle3(_) => 1,
            };
            let sample = self.sample(corpus, steps)?;
            match self.spec {
                HeadSpec::Eagle(_) => self.fit_eagle(&sample, &mut tensors, &mut whiteners)?,
                HeadSpec::Eagle3(_) => self.fit_eagle3(&sample, &mut tensors, &mut whiteners)?,
                HeadSpec::MultiLayer(specs) => {
                    self.fit_layers(specs, &sample, &mut tensors, &mut whiteners)?
                }
                HeadSpec::Dflash(spec) => self.fit_dflash(spec, &sample, &mut tensors, &mut whiteners)?,
            }
            Ok((Params::new(tensors).trainable(), whiteners))
        })
    }

    fn parameter(&self, name: &str, size: &[i64]) -> Tensor {
        let from_target = |name: &str| self.target.last_layer.get(name).filter(|t| t.size() == size);
        match name {
            name if name == "norm.weight" || name.ends_with("shared_head.norm.weight") => {
                self.target.final_norm.to_kind(Kind::Float)
            }
            "lm_head.weight" => self.target.head.index_select(0, self.vocabulary).to_kind(Kind::Float),
            name if name.ends_with("self_attn.o_proj.weight") => self.random(name, size, SMALL),
            name if name.ends_with("norm.weight") => match from_target(own_name(name)) {
                Some(norm) if name.contains("post_attention") => norm.to_kind(Kind::Float),
                _ => Tensor::ones(size, (Kind::Float, Device::Cpu)),
            },
            name if name.ends_with("bias") => Tensor::zeros(size, (Kind::Float, Device::Cpu)),
            name if name.contains("mlp.") => match from_target(own_name(name)) {
                Some(weight) => weight.to_kind(Kind::Float),
                None => self.random(name, size, USUAL),
            },
            _ => self.random(name, size, 1.0 / (size[size.len() - 1] as f64).sqrt()),
        }
    }

    fn random(&self, name: &str, size: &[i64], spread: f64) -> Tensor {
        // By name, so that no parameter depends on which others a head has.
        random::even(size, self.seed, hash(0, name.bytes().map(u64::from))) * spread
    }

    /// The layer's input is the best linear guess of the next hidden state, which attention adds nothing to at first.
    fn fit_eagle(&self, sample: &Sample, tensors: &mut Tensors, whiteners: &mut Whiteners) -> Result<()> {
        let x = Tensor::cat(&[&sample.embedded[0], &sample.features], 1);
        let (weight, bias) = fit_with_bias(&x, &sample.next[0])?;
        let guess = x.linear(&weight, Some(&bias));
        whiteners.insert("fc.weight".into(), whitener(&x)?);
        tensors.insert("fc.weight".into(), weight);
        tensors.insert("fc.bias".into(), bias);
        whiten(&whitener(&guess)?, &ATTENTION.map(|name| format!("{PREFIX}{name}")), tensors, whiteners);
        self.fit_mlp(PREFIX, &guess, &sample.next[0], tensors, whiteners).map(|_| ())
    }

    /// The residual is this position's final hidden state before its norm, as far as the captured layers tell; that
    /// of the next is guessed from it and the token by attention, which each position pays to itself.
    fn fit_eagle3(&self, sample: &Sample, tensors: &mut Tensors, whiteners: &mut Whiteners) -> Result<()> {
        let eps = self.spec.shape().norm_eps;
        let weight = fit(&sample.features, &self.before_norm(&sample.hidden))?;
        let residual = sample.features.linear(&weight, None::<Tensor>);
        whiteners.insert("fc.weight".into(), whitener(&sample.features)?);
        tensors.insert("fc.weight".into(), weight);
        let normed = |x: &Tensor, name: &str| rms_norm(x, &tensors[name], eps);
        let x = Tensor::cat(
            &[
                normed(&sample.embedded[0], "layers.0.input_layernorm.weight"),
                normed(&residual, "layers.0.hidden_norm.weight"),
            ],
            1,
        );
        let wanted = self.before_norm(&sample.next[0]);
        let mixed = self.fit_attention(&x, &(&wanted - &residual), tensors, whiteners)?;
        self.fit_mlp(PREFIX, &(residual + mixed), &wanted, tensors, whiteners).map(|_| ())
    }

    /// A final hidden state before the target's norm, but for its length.
    fn before_norm(&self, hidden: &Tensor) -> Tensor {
        hidden / self.target.final_norm.to_kind(Kind::Float)
    }

    /// Values and output as the best linear map of as many ranks as there are values. Gives what they add.
    fn fit_attention(
        &self,
        x: &Tensor,
        wanted: &Tensor,
        tensors: &mut Tensors,
        whiteners: &mut Whiteners,
    ) -> Result<Tensor> {
        let shape = self.spec.shape();
        let (heads, kv_heads, head_dim) = (shape.heads as i64, shape.kv_heads as i64, shape.head_dim as i64);
        let map = fit(x, wanted)?;
        let guess = x.matmul(&map.tr());
        let rank = (kv_heads * head_dim).min(wanted.size()[1]);
        let rows = principal_rows(&guess, rank)?;
        let values = rows.matmul(&map).constant_pad_nd([0, 0, 0, kv_heads * head_dim - rank]);
        // Every query head of a key head carries its share.
        let group = heads / kv_heads;
        let back = rows.constant_pad_nd([0, 0, 0, kv_heads * head_dim - rank]) / group as f64;
        let back = back.view([kv_heads, 1, head_dim, -1]).expand([-1, group, -1, -1], false);
        let back = back.reshape([heads * head_dim, -1]).tr().contiguous();
        let white = whitener(x)?;
        let one = fit(x, &Tensor::ones([x.size()[0], 1], (Kind::Float, Device::Cpu)))?;
        for name in ["q_proj", "k_proj"] {
            let name = format!("layers.0.self_attn.{name}.weight");
            let rest = tensors[&name].matmul(&white);
            tensors.insert(name, attending_to_self(&rest, &one, head_dim));
        }
        tensors.insert("layers.0.self_attn.v_proj.weight".into(), values);
        tensors.insert("layers.0.self_attn.o_proj.weight".into(), back);
        for name in ATTENTION {
            whiteners.insert(format!("{PREFIX}{name}"), white.shallow_clone());
        }
        Ok(guess.matmul(&rows.tr()).matmul(&rows))
    }

    /// What the target's own gate finds in the guess, mapped to what the guess lacks. Gives what it adds.
    fn fit_mlp(
        &self,
        prefix: &str,
        guess: &Tensor,
        wanted: &Tensor,
        tensors: &mut Tensors,
        whiteners: &mut Whiteners,
    ) -> Result<Tensor> {
        let named = |name: &str| format!("{prefix}{name}.weight");
        let norm = &tensors[&named("post_attention_layernorm")];
        let normed = rms_norm(guess, norm, self.spec.shape().norm_eps);
        let through = |name: &str| normed.matmul(&tensors[&named(name)].tr());
        let found = through("mlp.gate_proj").silu() * through("mlp.up_proj");
        let white = whitener(&normed)?;
        whiteners.insert(named("mlp.gate_proj"), white.shallow_clone());
        whiteners.insert(named("mlp.up_proj"), white);
        whiteners.insert(named("mlp.down_proj"), whitener(&found)?);
        let down = fit(&found, &(wanted - guess))?;
        let added = found.matmul(&down.tr());
        tensors.insert(named("mlp.down_proj"), down);
        Ok(added)
    }

    /// Of conversations that are trained on, from all over the corpus.
    fn sample(&self, corpus: &Corpus, steps: usize) -> Result<Sample> {
        let feature = self.spec.feature();
        let sequences = || corpus.sequences().iter().enumerate().filter(|(_, s)| s.split == Split::Train);
        let all: usize = sequences().map(|(_, sequence)| sequence.rows()).sum();
        let every = (all / FITTED).max(1);
        let per_step = || (0..steps).map(|_| Vec::new()).collect::<Vec<_>>();
        let (mut embedded, mut next) = (per_step(), per_step());
        let (mut features, mut all) = (Vec::new(), Vec::new());
        for (index, sequence) in sequences().step_by(every) {
            let positions = sequence.rows();
            if positions <= steps {
                continue;
            }
            let rows = (positions - steps) as i64;
            let read = |feature| -> Result<Tensor> {
                let bytes = corpus.hidden(index, positions, feature)?;
                let size = [positions as i64, corpus.width(feature) as i64];
                Ok(Tensor::from_data_size(&bytes, &size, Kind::BFloat16).to_kind(Kind::Float))
            };
            let hidden = read(Feature::Final)?;
            let ids: Vec<i64> = sequence.tokens[1..positions].iter().map(|&id| i64::from(id)).collect();
            let tokens =
                self.target.embedding.index_select(0, &Tensor::from_slice(&ids)).to_kind(Kind::Float);
            for step in 0..steps {
                embedded[step].push(tokens.narrow(0, step as i64, rows));
                next[step].push(hidden.narrow(0, step as i64 + 1, rows));
            }
            features.push(read(feature)?.narrow(0, 0, rows));
            all.push(hidden.narrow(0, 0, rows));
        }
        if all.is_empty() {
            bail!("the corpus has no conversation to train on");
        }
        let whole = |parts: &Vec<Tensor>| Tensor::cat(parts, 0);
        Ok(Sample {
            embedded: embedded.iter().map(whole).collect(),
            features: whole(&features),
            hidden: whole(&all),
            next: next.iter().map(whole).collect(),
        })
    }
}

/// Queries or keys that are the same for all tokens in the fastest rotating dimensions, so that the product of two is
/// largest where they stand at one position. `one` maps any input to about 1; `rest` fills the other dimensions.
fn attending_to_self(rest: &Tensor, one: &Tensor, head_dim: i64) -> Tensor {
    let frequencies = (head_dim / 16).max(2).min(head_dim / 2);
    let size = (SELF_SCORE * (head_dim as f64).sqrt()).sqrt();
    let heads = rest.size()[0] / head_dim;
    let rest = rest.view([heads, head_dim, -1]);
    let pair = |from: i64, value: f64| {
        let fill = one.unsqueeze(0).expand([heads, frequencies, -1], false) * value;
        Tensor::cat(&[fill, rest.narrow(1, from + frequencies, head_dim / 2 - frequencies)], 1)
    };
    // A dimension turns with the one half a head further on.
    Tensor::cat(&[pair(0, size), pair(head_dim / 2, 0.0)], 1).view([heads * head_dim, -1])
}

/// Sets how the inputs of these matrices are whitened, and lets them see whitened ones from the start.
fn whiten(white: &Tensor, names: &[String], tensors: &mut Tensors, whiteners: &mut Whiteners) {
    for name in names {
        let weight = tensors[name].matmul(white);
        tensors.insert(name.clone(), weight);
        whiteners.insert(name.clone(), white.shallow_clone());
    }
}

/// A parameter's name inside its layer.
fn own_name(name: &str) -> &str {
    let inside = name.strip_prefix("model.").unwrap_or(name).strip_prefix("layers.");
    inside.and_then(|inside| inside.split_once('.')).map_or(name, |(_, own)| own)
}
