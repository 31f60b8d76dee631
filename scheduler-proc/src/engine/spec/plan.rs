//! Owns the seam between the constructor and the draft workers that keep tensors: what one needs of its target, and of
//! memory, before anything is loaded.

use tch::Tensor;

use super::Drafter;
use crate::engine::EngineError;
use crate::engine::model::{Features, TargetModel};

pub type BoxedDrafter = Box<dyn Drafter<Option<Tensor>>>;

/// A draft worker that fits its target and is not loaded yet.
pub trait WorkerPlan {
    /// What the target's passes must leave for it.
    fn features(&self) -> Features {
        Features::None
    }

    fn memory(&self) -> DraftMemory {
        DraftMemory::default()
    }

    /// Whether it may not fit its target at all, though every shape does.
    fn may_disagree(&self) -> bool {
        true
    }

    /// `progress` hears of bytes done and bytes in all.
    fn load(
        self: Box<Self>,
        target: &TargetModel,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<BoxedDrafter, EngineError>;
}

/// Numbers that a draft worker keeps, in the model's type.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DraftMemory {
    pub weights: usize,
    pub per_slot: usize,
    /// Slots it works in beside the target's.
    pub scratch_slots: usize,
}
