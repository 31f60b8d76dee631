//! Owns the differentiable forward of multi-token-prediction layers, one for each draft step, over whole sequences:
//! the same mathematics as [`crate::engine::spec::multi_layer`] over [`crate::engine::models::mtp_head`], with every
//! token known.
//!
//! A row here stands `k` positions further on than a row of layer `k` there, at the last of the tokens that a draft of
//! that depth has seen, so that the rows of all layers that say something of the same token are the same row. Rotation
//! depends on distances alone and does not notice.

use tch::{Kind, Tensor};

use super::dense::{DenseBlock, Past, delayed, linear, rms_norm};
use super::params::Params;
use crate::engine::layers::rope::RopeTables;
use crate::engine::models::mtp_head::MtpSpec;

/// What every layer leaves at `rows`, `[rows, hidden]` each. Row `t` of `embedded` is the token after position `t`, row
/// `t` of `states` the target's hidden state there, before its final norm.
pub(super) fn states(
    specs: &[MtpSpec],
    tables: &RopeTables,
    params: &Params,
    embedded: &Tensor,
    states: &Tensor,
    rows: &Tensor,
) -> Vec<Tensor> {
    let size = embedded.size();
    let every_row = Tensor::arange(size[0] * size[1], (Kind::Int64, embedded.device()));
    let mut before = states.shallow_clone();
    let mut left = Vec::with_capacity(specs.len());
    for (index, spec) in (0..).zip(specs) {
        let last = left.len() + 1 == specs.len();
        let wanted = if last { rows } else { &every_row };
        let x = joined(spec, params, embedded, &before);
        let shape = &spec.block().shape;
        let block = DenseBlock { shape, tables, prefix: &spec.block().prefix };
        let normed = rms_norm(&x, params.get(&spec.input_norm()), shape.norm_eps);
        let state = block.forward(params, &normed, &x, &mut Past::without_the_first(index), wanted);
        if last {
            left.push(state);
            break;
        }
        left.push(state.index_select(0, rows));
        before = delayed(&state.view_as(embedded), 1);
    }
    left
}

fn joined(spec: &MtpSpec, params: &Params, embedded: &Tensor, states: &Tensor) -> Tensor {
    let eps = spec.block().shape.norm_eps;
    let token = rms_norm(embedded, params.get(&spec.token_norm()), eps);
    let hidden = rms_norm(states, params.get(&spec.hidden_norm()), eps);
    let join = spec.join();
    linear(&Tensor::cat(&[token, hidden], -1), params, join.trim_end_matches(".weight"))
}
