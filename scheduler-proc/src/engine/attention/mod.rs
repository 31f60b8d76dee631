//! Owns attention over the KV pool. Backends differ in how, never in what.

pub mod cpu;
pub mod plan;
pub mod torch;

#[cfg(test)]
mod tests;

use tch::Tensor;

use self::plan::AttentionPlan;
use super::EngineError;
use super::kv::LayerKv;
use super::layers::rope::HeadRotation;

/// Runs the part of a layer between its projections. Implementers: [`cpu::CpuAttention`] (own kernels) and
/// [`torch::TorchAttention`] (plain tensor operations, any device).
pub trait AttentionBackend {
    /// Takes `[rows, q | k | v]`, stores keys and values at the plan's new slots, and returns the queries
    /// `[rows, q_heads, head_dim]`; queries and keys are rotated to their positions.
    fn rotate_store(
        &self,
        qkv: &Tensor,
        heads: &HeadRotation,
        kv: &LayerKv,
        plan: &AttentionPlan,
    ) -> Result<Tensor, EngineError>;

    /// `[rows, q_heads, head_dim]`. Row `i` sees the keys of its plan; with a window only the last `window`.
    fn attend(
        &self,
        q: &Tensor,
        kv: &LayerKv,
        plan: &AttentionPlan,
        window: Option<usize>,
    ) -> Result<Tensor, EngineError>;
}
