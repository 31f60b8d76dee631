//! Owns how deep a step drafts: the engine's depth, or the one that adapts, which hears of every step.

use proto::DraftTier;

use super::Scheduler;
use crate::adaptive::Observation;
use crate::admission::RowPlan;
use crate::batch::{DraftLimit, RowKind, StepOutput};
use crate::engine::{DraftStatus, Engine};
use crate::metrics::StepReport;
use crate::outbox::Peers;
use crate::request::Phase;

impl<E: Engine, P: Peers> Scheduler<E, P> {
    /// The shape of drafts in force.
    pub(super) fn draft_status(&self) -> DraftStatus {
        self.depth.as_ref().map_or_else(|| self.engine.draft_status(), |depth| status(depth.in_force()))
    }

    /// What the rows of the next step may draft.
    pub(super) fn choose_draft(&mut self) -> DraftLimit {
        let Some(depth) = &mut self.depth else {
            return DraftLimit::nodes(self.engine.draft_status().max_nodes());
        };
        let running = self.admission.running();
        let decoding = running.iter().filter(|request| request.phase() == Phase::Decode).count();
        let alone = decoding == running.len() && self.admission.waiting().is_empty();
        let tier = depth.choose(decoding, alone);
        DraftLimit { enabled: true, nodes: tier.nodes() as usize, depth: tier.num_steps as usize }
    }

    /// Tells what came of drafting within `most`.
    pub(super) fn observe_drafts(
        &mut self,
        most: DraftLimit,
        plans: &[RowPlan],
        output: &StepOutput,
        report: &mut StepReport,
    ) {
        let Some(depth) = &mut self.depth else { return };
        let drafts = plans.iter().zip(&output.rows).filter_map(|(plan, row)| match plan.kind {
            RowKind::Extend => None,
            RowKind::Decode { draft } => Some((draft, row.verify.as_ref())),
        });
        let (mut batch, mut speculating, mut accepted) = (0, 0, Vec::new());
        for (draft, verify) in drafts {
            batch += 1;
            speculating += usize::from(draft.enabled);
            // Those cut short by their own limits say nothing of the depth.
            accepted.extend(verify.filter(|_| draft == most).map(|verify| verify.accepted));
        }
        if batch == 0 {
            return;
        }
        let seconds = (batch == plans.len()).then(|| output.timing.total());
        depth.observe(&Observation { batch, speculating, accepted: &accepted, seconds });
        report.depth = Some(most.depth);
        report.switches = depth.take_switches();
    }
}

fn status(tier: DraftTier) -> DraftStatus {
    DraftStatus { num_steps: tier.num_steps as usize, num_draft_tokens: tier.num_draft_tokens as usize }
}
