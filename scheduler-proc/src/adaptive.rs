//! Owns how deep to draft: one state machine per batch-size slot, fed with what every step accepted and took. Knows no
//! engine and no clock.
//!
//! Acceptance says where to look, measured tokens per second say where to stay: `rule` is SGLang's, `costs` and
//! `accepted` are what was measured, `slot` decides. docs/speculation.md has the formulas.

mod accepted;
mod costs;
mod outlook;
mod report;
mod rule;
mod slot;
#[cfg(test)]
pub(crate) mod tests;

use proto::{AdaptiveConfig, DraftTier};
use serde_json::Value;

use self::costs::Costs;
pub use self::report::{Reason, Switch};
use self::slot::Slot;

const PLAIN: DraftTier = DraftTier { num_steps: 0, num_draft_tokens: 1 };

/// What a step showed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Observation<'a> {
    /// Rows that decoded.
    pub batch: usize,
    /// Those of them that speculate.
    pub speculating: usize,
    /// Accepted drafts of every row that was free to draft as deep as the step's depth. The others say nothing of it.
    pub accepted: &'a [usize],
    /// Seconds the step took; `None` where prompts ran in it, too.
    pub seconds: Option<f64>,
}

/// The depths in force, by batch size.
#[derive(Debug)]
pub struct AdaptiveDepth {
    slots: Vec<Slot>,
    costs: Costs,
    /// The slot of the last batch.
    active: usize,
    /// What the step runs at that is not observed yet.
    running: Option<DraftTier>,
    switches: Vec<Switch>,
}

impl AdaptiveDepth {
    pub fn new(config: &AdaptiveConfig) -> Self {
        Self {
            slots: config.slots.iter().map(Slot::new).collect(),
            costs: Costs::default(),
            active: 0,
            running: None,
            switches: Vec::new(),
        }
    }

    /// The depth in force.
    pub fn in_force(&self) -> DraftTier {
        self.slots[self.active].tier()
    }

    /// The depth for a step of so many decoding rows: the one in force at this batch size, or plain decoding for a
    /// step where its time must be known. `alone` says that no prompt is to run in the step.
    pub fn choose(&mut self, batch: usize, alone: bool) -> DraftTier {
        if batch == 0 {
            self.running = None;
            return self.in_force();
        }
        self.route(batch);
        let slot = &self.slots[self.active];
        let tier = if alone && slot.wants_plain(&self.costs, batch) { PLAIN } else { slot.tier() };
        self.running = Some(tier);
        tier
    }

    /// Takes in what the step showed that was last chosen for.
    pub fn observe(&mut self, step: &Observation<'_>) {
        let Some(tier) = self.running.take() else { return };
        let depth = tier.num_steps;
        let typical = depth == 0 || self.slots[self.active].is_typical();
        if let Some(seconds) = step.seconds.filter(|_| typical) {
            self.costs.record(step.batch, depth, seconds);
        }
        self.switches.extend(self.slots[self.active].observe(depth, step, &self.costs));
    }

    /// What changed since it was last asked.
    pub fn take_switches(&mut self) -> Vec<Switch> {
        std::mem::take(&mut self.switches)
    }

    /// Everything an operator may ask, for `/server_info`.
    pub fn report(&self) -> Value {
        self.slots.iter().map(|slot| slot.report(&self.costs)).collect()
    }

    /// The slot with the largest batch size that is not above this one; the first takes what is below all.
    fn route(&mut self, batch: usize) {
        let above = self.slots.partition_point(|slot| slot.batch_size() <= batch);
        let slot = above.saturating_sub(1);
        let (from, to) = (self.in_force().num_steps, self.slots[slot].tier().num_steps);
        self.active = slot;
        if from != to {
            let slot = &self.slots[slot];
            self.switches.push(slot.switch(from, to, Reason::BatchSize, batch, &self.costs));
        }
    }
}
