//! Owns the token embedding.

use proto::TokenId;
use tch::Tensor;

/// `[vocab, hidden]`, plain: rows are gathered, never multiplied with a matrix.
#[derive(Debug)]
pub struct Embedding {
    weight: Tensor,
    scale: Option<f64>,
}

impl Embedding {
    pub fn new(weight: Tensor) -> Self {
        Self { weight: weight.contiguous(), scale: None }
    }

    /// Every row times a number, which is rounded to the table's type as it is in training.
    pub fn scaled(weight: Tensor, scale: f64) -> Self {
        let rounded = Tensor::from(scale).to_kind(weight.kind()).double_value(&[]);
        Self { scale: Some(rounded), ..Self::new(weight) }
    }

    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    pub fn bytes(&self) -> u64 {
        (self.weight.numel() * self.weight.kind().elt_size_in_bytes()) as u64
    }

    /// `[tokens, hidden]`. Ids must lie inside the vocabulary.
    pub fn forward<'a>(&self, tokens: impl IntoIterator<Item = &'a TokenId>) -> Tensor {
        let ids: Vec<i64> = tokens.into_iter().map(|&id| i64::from(id)).collect();
        let rows = self.weight.index_select(0, &Tensor::from_slice(&ids).to_device(self.weight.device()));
        match self.scale {
            None => rows,
            Some(scale) => rows * scale,
        }
    }
}
