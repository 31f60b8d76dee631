//! Owns nothing: attention by the CPU kernels of the shim, bit-identical however a row's token came.

use tch::Tensor;

use super::AttentionBackend;
use super::plan::AttentionPlan;
use crate::engine::EngineError;
use crate::engine::kv::LayerKv;
use crate::engine::layers::rope::HeadRotation;
use crate::engine::shim;

#[derive(Debug, Clone, Copy, Default)]
pub struct CpuAttention;

impl AttentionBackend for CpuAttention {
    fn rotate_store(
        &self,
        qkv: &Tensor,
        heads: &HeadRotation,
        kv: &LayerKv,
        plan: &AttentionPlan,
    ) -> Result<Tensor, EngineError> {
        let norms = heads.norms.as_ref();
        let rotation = shim::Rotation {
            cos: heads.tables.cos(),
            sin: heads.tables.sin(),
            norms: norms.map(|norms| (norms.q.weight(), norms.k.weight())),
            eps: norms.map_or(0.0, |norms| norms.q.eps()),
        };
        shim::rotate_store(qkv, (&kv.k, &kv.v), &rotation, plan)
    }

    fn attend(
        &self,
        q: &Tensor,
        kv: &LayerKv,
        plan: &AttentionPlan,
        window: Option<usize>,
    ) -> Result<Tensor, EngineError> {
        shim::attend(q, (&kv.k, &kv.v), plan, window)
    }
}
