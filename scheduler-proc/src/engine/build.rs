//! Owns the way from a configuration to an engine that runs it.

mod budget;
mod draft;
mod self_check;
#[cfg(test)]
mod tests;

use proto::{ServeConfig, TokenBytes};

use self::budget::Budget;
use self::draft::DraftPlan;
use super::model::{Neighbour, TargetModel};
use super::spec::SpecEngine;
use super::spec::plan::BoxedDrafter;
use super::{Engine, EngineError};

/// Loads what the configuration names. `progress` hears of bytes done and bytes in all; `vocabulary` serves the
/// start-up check of a draft model.
pub fn build(
    config: &ServeConfig,
    vocabulary: Option<&TokenBytes>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Box<dyn Engine>, EngineError> {
    let Parts { target, drafter, needs_check } = load(config, progress)?;
    let limits = target.limits().clone();
    let rule = config.spec.as_ref().map(|spec| spec.acceptance).unwrap_or_default();
    let mut engine = SpecEngine::new(target, limits, drafter).accepting_by(rule);
    if needs_check {
        self_check::run(&mut engine, config, vocabulary)?;
    }
    Ok(Box::new(engine))
}

/// What an engine is made of.
struct Parts {
    target: TargetModel,
    drafter: Option<BoxedDrafter>,
    needs_check: bool,
}

fn load(config: &ServeConfig, progress: &mut dyn FnMut(u64, u64)) -> Result<Parts, EngineError> {
    let Some(spec) = &config.spec else {
        let target = TargetModel::load(config, progress)?;
        Budget::new(target.limits(), Neighbour::default()).log();
        return Ok(Parts { target, drafter: None, needs_check: false });
    };
    let plan = DraftPlan::new(config, spec)?;
    let neighbour = plan.neighbour(config);
    let mut target = TargetModel::load_beside(config, neighbour, progress)?;
    target.leave(plan.features());
    Budget::new(target.limits(), neighbour).log();
    let needs_check = plan.needs_check(config);
    let drafter = plan.load(&target, progress)?;
    Ok(Parts { target, drafter: Some(drafter), needs_check })
}
