//! Owns the parameters of a head that is trained, by their published names.

use std::collections::BTreeMap;

use tch::{Kind, Tensor};

/// The rows of the target's table of logits that a draft's own vocabulary needs, where it has one.
pub(super) const TABLE: &str = "lm_head.weight";

/// Parameters by name: the trained ones in float32, or a copy in the type a pass computes in.
#[derive(Debug)]
pub(super) struct Params {
    tensors: BTreeMap<String, Tensor>,
}

impl Params {
    pub(super) fn new(tensors: BTreeMap<String, Tensor>) -> Self {
        Self { tensors }
    }

    /// The ones a pass computes with: gradients flow through to these.
    pub(super) fn cast(&self, kind: Kind) -> Self {
        let cast = |(name, tensor): (&String, &Tensor)| (name.clone(), tensor.to_kind(kind));
        Self { tensors: self.tensors.iter().map(cast).collect() }
    }

    /// Copies in float32 that gradients are collected in; not in a table of logits, which stays the target's.
    pub(super) fn trainable(&self) -> Self {
        let leaf = |(name, tensor): (&String, &Tensor)| {
            let copy = tensor.detach().to_kind(Kind::Float).copy();
            (name.clone(), copy.set_requires_grad(name != TABLE))
        };
        Self { tensors: self.tensors.iter().map(leaf).collect() }
    }

    pub(super) fn find(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    pub(super) fn get(&self, name: &str) -> &Tensor {
        self.find(name).expect("a head's parameters are complete when it is made")
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&String, &Tensor)> {
        self.tensors.iter()
    }

    /// Several projections of the same input as one weight.
    pub(super) fn fused(&self, names: &[&str]) -> Tensor {
        let weights: Vec<&Tensor> = names.iter().map(|name| self.get(name)).collect();
        Tensor::cat(&weights, 0)
    }

    /// The biases of these projections, where they have any.
    pub(super) fn fused_bias(&self, names: &[&str]) -> Option<Tensor> {
        let biases: Option<Vec<&Tensor>> = names.iter().map(|name| self.find(name)).collect();
        biases.map(|biases| Tensor::cat(&biases, 0))
    }
}
