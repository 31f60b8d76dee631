//! Owns the one match on the algorithm's name: from a configuration to an engine that runs it.

use proto::{ServeConfig, SpecAlgorithm, SpecConfig};

use super::model::TargetModel;
use super::spec::ngram::NgramDrafter;
use super::spec::{Drafter, SpecEngine};
use super::{Engine, EngineError};

/// Loads what the configuration names. `progress` hears of bytes done and bytes in all.
pub fn build(
    config: &ServeConfig,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Box<dyn Engine>, EngineError> {
    let target = TargetModel::load(config, progress)?;
    let limits = target.limits().clone();
    Ok(Box::new(SpecEngine::new(target, limits, config.spec.as_ref().map(drafter))))
}

fn drafter(config: &SpecConfig) -> Box<dyn Drafter> {
    let (width, steps) = (config.num_draft_tokens as usize, config.num_steps as usize);
    match &config.algorithm {
        SpecAlgorithm::Ngram(ngram) => Box::new(NgramDrafter::new(ngram, width, steps)),
    }
}
