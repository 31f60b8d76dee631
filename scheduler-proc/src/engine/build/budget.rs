//! Owns the table that says at start where the memory goes.

use std::fmt;

use crate::engine::EngineLimits;
use crate::engine::model::Neighbour;

/// Bytes by what they hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Budget {
    slots: usize,
    target_weights: u64,
    target_kv: u64,
    draft_weights: u64,
    draft_kv: u64,
    draft_buffers: u64,
}

impl Budget {
    /// Of a target with its pool, and the draft worker beside it.
    pub(super) fn new(target: &EngineLimits, neighbour: Neighbour) -> Self {
        Self {
            slots: target.kv_slots,
            target_weights: target.weight_bytes,
            target_kv: target.kv_bytes,
            draft_weights: neighbour.weight_bytes,
            draft_kv: neighbour.slot_bytes * target.kv_slots as u64,
            draft_buffers: neighbour.buffer_bytes,
        }
    }

    /// One log line per row, so that every row carries its time and origin.
    pub(super) fn log(&self) {
        self.to_string().lines().for_each(|line| tracing::info!("{line}"));
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = [
            ("weights", self.target_weights, self.draft_weights),
            ("KV pool", self.target_kv, self.draft_kv),
            ("buffers", 0, self.draft_buffers),
        ];
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        writeln!(f, "memory, MiB     target    draft      sum   ({} KV slots)", self.slots)?;
        let mut total = (0, 0);
        for (name, target, draft) in rows {
            writeln!(
                f,
                "  {name:<10} {:>9.1} {:>8.1} {:>8.1}",
                mib(target),
                mib(draft),
                mib(target + draft)
            )?;
            total = (total.0 + target, total.1 + draft);
        }
        write!(
            f,
            "  {:<10} {:>9.1} {:>8.1} {:>8.1}",
            "sum",
            mib(total.0),
            mib(total.1),
            mib(total.0 + total.1)
        )
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn every_row_and_every_column_adds_up() {
        let target = EngineLimits {
            kv_slots: 1024,
            context_len: 512,
            vocab_size: 8,
            weight_bytes: 3 << 20,
            weight_types: BTreeMap::new(),
            gathered_bytes: 0,
            kv_bytes: 4 << 20,
        };
        let neighbour = Neighbour { slot_bytes: 1 << 10, weight_bytes: 2 << 20, buffer_bytes: 1 << 19 };
        assert_eq!(
            Budget::new(&target, neighbour).to_string(),
            "memory, MiB     target    draft      sum   (1024 KV slots)\n\
             \x20 weights          3.0      2.0      5.0\n\
             \x20 KV pool          4.0      1.0      5.0\n\
             \x20 buffers          0.0      0.5      0.5\n\
             \x20 sum              7.0      3.5     10.5"
        );
    }
}
