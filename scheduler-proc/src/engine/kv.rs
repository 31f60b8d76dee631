//! Owns the tensors that hold keys and values of every slot, in every layer. Which slot is whose, the scheduler knows.

use tch::{Device, Kind, Tensor};

use super::{EngineError, shim};
use crate::batch::KvSlot;

/// One layer's keys and values, each `[kv_heads, slots, head_dim]`: a head's keys of neighbouring slots are neighbours.
#[derive(Debug)]
pub struct LayerKv {
    pub k: Tensor,
    pub v: Tensor,
}

/// Shape of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl KvShape {
    /// Bytes of one slot in all layers.
    pub fn slot_bytes(&self, kind: Kind) -> u64 {
        (2 * self.layers * self.kv_heads * self.head_dim * kind.elt_size_in_bytes()) as u64
    }
}

#[derive(Debug)]
pub struct KvPool {
    layers: Vec<LayerKv>,
    slots: usize,
}

impl KvPool {
    pub fn new(shape: KvShape, slots: usize, kind: Kind, device: Device) -> Result<Self, EngineError> {
        let size = [shape.kv_heads as i64, slots as i64, shape.head_dim as i64];
        // Left as it comes: no slot is read before it is written, and untouched pages cost nothing.
        let tensor = || {
            Tensor::f_empty(size, (kind, device)).map_err(|error| EngineError::Load {
                what: format!(
                    "KV pool of {slots} tokens ({} MiB)",
                    (shape.slot_bytes(kind) * slots as u64) >> 20
                ),
                reason: error.to_string().lines().next().unwrap_or_default().to_owned(),
            })
        };
        let layers = (0..shape.layers)
            .map(|_| Ok(LayerKv { k: tensor()?, v: tensor()? }))
            .collect::<Result<_, EngineError>>()?;
        Ok(Self { layers, slots })
    }

    pub fn slots(&self) -> usize {
        self.slots
    }

    pub fn layer(&self, index: usize) -> &LayerKv {
        &self.layers[index]
    }

    /// Copies slots, in order, in every layer.
    pub fn move_slots(&self, moves: &[(KvSlot, KvSlot)]) -> Result<(), EngineError> {
        let moves: Vec<[u32; 2]> =
            moves.iter().filter(|(from, to)| from != to).map(|&(from, to)| [from, to]).collect();
        if moves.is_empty() {
            return Ok(());
        }
        self.layers
            .iter()
            .flat_map(|layer| [&layer.k, &layer.v])
            .try_for_each(|pool| shim::move_slots(pool, &moves))
    }
}
