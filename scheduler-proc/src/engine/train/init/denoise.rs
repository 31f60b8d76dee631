//! Owns what a DFLASH draft model begins with: attention that fetches the last context row and the anchor for each place
//! in a block, mapped linearly to the best guess of what the target would leave there.
//!
//! A mask token knows its place only by the distances that rotation shows it. So heads are dealt out to places and
//! sources; a head's keys are the same for all rows of its source and nothing for others, in the fastest rotating
//! dimensions, and its queries are turned so that the product is largest where the row stands that is wanted.

use anyhow::Result;
use tch::{Device, Kind, Tensor};

use super::{Sample, Start, Tensors, fit, principal_rows, rms_norm, whitener};
use crate::engine::layers::rope::RopeTables;
use crate::engine::models::dflash_spec::DflashSpec;
use crate::engine::train::optimizer::Whiteners;

/// Frequencies that tell distances apart.
const FREQUENCIES: i64 = 3;
/// Share of queries and keys that is left to chance, so that training finds a way out.
const CHANCE: f64 = 0.05;

/// How much short vectors are preferred, against rows of length 1 per dimension.
const SHORT: f64 = 1e-3;

/// Where a head looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Context,
    Anchor,
}

/// Places (drafts from 0) and sources in the order in which the heads of the first layer are dealt out.
const FIRST: [(usize, Source); 9] = [
    (0, Source::Context),
    (0, Source::Anchor),
    (1, Source::Context),
    (1, Source::Anchor),
    (0, Source::Context),
    (0, Source::Anchor),
    (2, Source::Context),
    (2, Source::Anchor),
    (1, Source::Context),
];
/// Those of further layers: the context is still as it was.
const FURTHER: [(usize, Source); 4] =
    [(0, Source::Context), (1, Source::Context), (0, Source::Context), (2, Source::Context)];

/// What layers are fitted on: rows of the sample, all in float32.
struct Rows {
    context: Tensor,
    /// Embeddings of anchors under the input norm.
    anchor: Tensor,
    /// Per place what its row of the block is so far, and what it should become.
    guesses: Vec<Tensor>,
    wanted: Vec<Tensor>,
}

/// One layer's projections, head by head.
#[derive(Default)]
struct Heads {
    q: Vec<Tensor>,
    k: Vec<Tensor>,
    v: Vec<Tensor>,
    o: Vec<Tensor>,
}

impl Start<'_> {
    pub(super) fn fit_dflash(
        &self,
        spec: &DflashSpec,
        sample: &Sample,
        tensors: &mut Tensors,
        whiteners: &mut Whiteners,
    ) -> Result<()> {
        let eps = spec.shape().norm_eps;
        let weight = fit(&sample.features, &self.before_norm(&sample.hidden))?;
        let context = sample.features.linear(&weight, None::<Tensor>);
        whiteners.insert("fc.weight".into(), whitener(&sample.features)?);
        tensors.insert("fc.weight".into(), weight);
        let mask = self.target.embedding.get(i64::from(spec.mask())).to_kind(Kind::Float).unsqueeze(0);
        let mut rows = Rows {
            context: rms_norm(&context, &tensors["hidden_norm.weight"], eps),
            anchor: rms_norm(&sample.embedded[0], &tensors["layers.0.input_layernorm.weight"], eps),
            guesses: sample.next.iter().map(|next| mask.expand_as(next)).collect(),
            wanted: sample.next.iter().map(|next| self.before_norm(next)).collect(),
        };
        let white = whitener(&rows.context)?;
        for layer in 0..spec.shape().layers {
            let prefix = format!("layers.{layer}.");
            let heads = self.fit_heads(spec, layer, &mut rows, tensors)?;
            for (name, parts) in [("q", &heads.q), ("k", &heads.k), ("v", &heads.v)] {
                tensors.insert(format!("{prefix}self_attn.{name}_proj.weight"), Tensor::cat(parts, 0));
            }
            tensors.insert(format!("{prefix}self_attn.o_proj.weight"), Tensor::cat(&heads.o, 1));
            for name in ["k", "v"] {
                whiteners.insert(format!("{prefix}self_attn.{name}_proj.weight"), white.shallow_clone());
            }
            let (guess, wanted) = (Tensor::cat(&rows.guesses, 0), Tensor::cat(&rows.wanted, 0));
            let added = self.fit_mlp(&prefix, &guess, &wanted, tensors, whiteners)?;
            let added = added.chunk(rows.guesses.len() as i64, 0);
            rows.guesses.iter_mut().zip(added).for_each(|(guess, added)| *guess = &*guess + added);
        }
        Ok(())
    }

    /// A layer's heads, whose guesses are added to the rows. Of the values of a place and source each head has the next
    /// most important directions.
    fn fit_heads(
        &self,
        spec: &DflashSpec,
        layer: usize,
        rows: &mut Rows,
        tensors: &Tensors,
    ) -> Result<Heads> {
        let shape = spec.shape();
        let (heads, head_dim) = (shape.heads, shape.head_dim as i64);
        let order: &[(usize, Source)] = if layer == 0 { &FIRST } else { &FURTHER };
        let places = rows.guesses.len();
        let order: Vec<_> =
            order.iter().filter(|(place, _)| *place < places).cycle().take(heads).copied().collect();
        let norm = &tensors[&format!("layers.{layer}.input_layernorm.weight")];
        let inputs: Vec<_> = rows.guesses.iter().map(|guess| rms_norm(guess, norm, shape.norm_eps)).collect();
        let asks = constant(&[(&Tensor::cat(&inputs, 0), 1.0)])?;
        let turns = Turns::new(spec, places);
        let mut all: Vec<(usize, [Tensor; 4])> = Vec::new();
        for place in 0..places {
            for source in [Source::Context, Source::Anchor] {
                let mine = order.iter().enumerate().filter(|(_, head)| **head == (place, source));
                let mine: Vec<usize> = mine.map(|(index, _)| index).collect();
                if mine.is_empty() {
                    continue;
                }
                let block = Tensor::cat(&inputs, 0);
                let (x, answers, distance) = match source {
                    Source::Context => (
                        &rows.context,
                        constant(&[(&rows.context, 1.0), (&rows.anchor, 0.0), (&block, 0.0)])?,
                        place + 2,
                    ),
                    Source::Anchor => (
                        &rows.anchor,
                        constant(&[(&rows.anchor, 1.0), (&rows.context, 0.0), (&block, 0.0)])?,
                        place + 1,
                    ),
                };
                let map = fit(x, &(&rows.wanted[place] - &rows.guesses[place]))?;
                let guess = x.matmul(&map.tr());
                let rank = (mine.len() as i64 * head_dim).min(guess.size()[1]);
                let directions = principal_rows(&guess, rank)?;
                rows.guesses[place] =
                    &rows.guesses[place] + guess.matmul(&directions.tr()).matmul(&directions);
                for (at, &head) in mine.iter().enumerate() {
                    let from = (at as i64 * head_dim).min(rank);
                    let own = directions.narrow(0, from, head_dim.min(rank - from));
                    let own = own.constant_pad_nd([0, 0, 0, head_dim - own.size()[0]]);
                    let chance = |name: &str| {
                        let name = format!("{layer}.{head}.{name}");
                        let size = [head_dim, asks.size()[0]];
                        self.random(&name, &size, CHANCE / (size[1] as f64).sqrt())
                    };
                    let q = turns.at(distance).unsqueeze(1) * asks.unsqueeze(0) + chance("q");
                    let k = turns.at(0).unsqueeze(1) * answers.unsqueeze(0) + chance("k");
                    all.push((head, [q, k, own.matmul(&map), own.tr().contiguous()]));
                }
            }
        }
        all.sort_by_key(|&(head, _)| head);
        let mut heads = Heads::default();
        for (_, [q, k, v, o]) in all {
            heads.q.push(q);
            heads.k.push(k);
            heads.v.push(v);
            heads.o.push(o);
        }
        Ok(heads)
    }
}

/// The vector whose product with the rows of each set comes nearest to that set's number. Rows of a set may all be the
/// same, so that short vectors are preferred.
fn constant(sets: &[(&Tensor, f64)]) -> Result<Tensor> {
    let numbers = |rows: i64, number: f64| Tensor::full([rows, 1], number, (Kind::Float, Device::Cpu));
    let (mut x, mut y) = (Vec::new(), Vec::new());
    for &(rows, number) in sets {
        x.push(rows.shallow_clone());
        y.push(numbers(rows.size()[0], number));
    }
    let width = x[0].size()[1];
    let length: i64 = x.iter().map(|rows| rows.size()[0]).sum();
    x.push(Tensor::eye(width, (Kind::Float, Device::Cpu)) * (SHORT * length as f64).sqrt());
    y.push(numbers(width, 0.0));
    Ok(fit(&Tensor::cat(&x, 0), &Tensor::cat(&y, 0))?.view([-1]))
}

/// Directions of a head that meet when they are so far apart.
struct Turns {
    tables: RopeTables,
    head_dim: i64,
}

impl Turns {
    fn new(spec: &DflashSpec, places: usize) -> Self {
        let shape = spec.shape();
        let tables =
            RopeTables::new(shape.rope_theta, &shape.rope_scaling, shape.head_dim, places + 3, Device::Cpu);
        Self { tables, head_dim: shape.head_dim as i64 }
    }

    /// Turned back by a distance.
    fn at(&self, distance: usize) -> Tensor {
        let used = FREQUENCIES.min(self.head_dim / 2);
        let half = |of: &Tensor, sign: f64| {
            (of.get(distance as i64).narrow(0, 0, used) * sign).constant_pad_nd([0, self.head_dim / 2 - used])
        };
        Tensor::cat(&[half(self.tables.cos(), 1.0), half(self.tables.sin(), -1.0)], 0)
    }
}
