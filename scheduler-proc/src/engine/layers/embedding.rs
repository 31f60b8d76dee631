//! Owns the token embedding.

use std::rc::Rc;

use proto::TokenId;
use tch::{Kind, Tensor};

use super::linear::Linear;
use crate::engine::EngineError;
use crate::engine::matrix::Matrix;
use crate::engine::shim::Packed;

/// `[vocab, hidden]`: rows are gathered, never multiplied with a matrix.
#[derive(Debug)]
pub struct Embedding {
    table: Table,
    scale: Option<f64>,
}

#[derive(Debug)]
enum Table {
    Plain(Tensor),
    /// In blocks, of which the rows that are asked for are decoded. A head that is tied to the table multiplies with
    /// the same ones.
    Packed(Rc<Packed>),
}

/// Rows of a table that are decoded at once where all of them are wanted.
const CHUNK: i64 = 4096;

impl Embedding {
    pub fn new(weight: Tensor) -> Self {
        Self { table: Table::Plain(weight.contiguous()), scale: None }
    }

    /// Every row times a number, which is rounded to the table's type as it is in training.
    #[must_use]
    pub fn scaled(self, scale: f64, kind: Kind) -> Self {
        let rounded = Tensor::from(scale).to_kind(kind).double_value(&[]);
        Self { scale: Some(rounded), ..self }
    }

    pub fn of(table: Matrix) -> Result<Self, EngineError> {
        match table {
            Matrix::Plain(weight) => Ok(Self::new(weight)),
            blocks @ Matrix::Blocks(_) => {
                Ok(Self { table: Table::Packed(Rc::new(Packed::new(&blocks)?)), scale: None })
            }
        }
    }

    /// A head that is tied to the table.
    pub fn head(&self) -> Result<Linear, EngineError> {
        match &self.table {
            Table::Plain(weight) => Linear::new(weight, None),
            Table::Packed(weight) => Ok(Linear::shared(Rc::clone(weight))),
        }
    }

    /// Bytes that a head tied to the table would not share.
    pub fn bytes_beside_head(&self) -> u64 {
        match &self.table {
            Table::Plain(_) => self.bytes(),
            Table::Packed(_) => 0,
        }
    }

    pub fn bytes(&self) -> u64 {
        match &self.table {
            Table::Plain(weight) => (weight.numel() * weight.kind().elt_size_in_bytes()) as u64,
            Table::Packed(weight) => weight.bytes(),
        }
    }

    /// Whether the table's values are those.
    pub fn holds(&self, values: &Tensor) -> Result<bool, EngineError> {
        match &self.table {
            Table::Plain(weight) => Ok(weight.equal(values)),
            Table::Packed(weight) => {
                if values.size() != [weight.rows() as i64, weight.columns() as i64] {
                    return Ok(false);
                }
                let rows = weight.rows() as i64;
                for from in (0..rows).step_by(CHUNK as usize) {
                    let ids: Vec<i64> = (from..rows.min(from + CHUNK)).collect();
                    let part = values.narrow(0, from, ids.len() as i64);
                    if !weight.gather(&ids)?.equal(&part) {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
        }
    }

    /// `[ids, hidden]` as the table has them. Ids must lie inside the vocabulary.
    pub fn rows(&self, ids: &[i64]) -> Result<Tensor, EngineError> {
        match &self.table {
            Table::Plain(weight) => {
                Ok(weight.index_select(0, &Tensor::from_slice(ids).to_device(weight.device())))
            }
            Table::Packed(weight) => weight.gather(ids),
        }
    }

    /// `[tokens, hidden]`. Ids must lie inside the vocabulary.
    pub fn forward<'a>(&self, tokens: impl IntoIterator<Item = &'a TokenId>) -> Result<Tensor, EngineError> {
        let ids: Vec<i64> = tokens.into_iter().map(|&id| i64::from(id)).collect();
        let rows = self.rows(&ids)?;
        Ok(match self.scale {
            None => rows,
            Some(scale) => rows * scale,
        })
    }
}
