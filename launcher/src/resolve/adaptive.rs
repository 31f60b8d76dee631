//! Owns the flags of adaptive depth: SGLang's file of batch-size slots, the slots that stand in for one, and the shape
//! of every candidate.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use proto::{AcceptanceRule, AdaptiveConfig, AdaptiveSlot, DraftTier, SpecAlgorithm, SpecConfig};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

use super::spec::MAX_DRAFT_TOKENS;
use crate::args::SpecArgs;

const FLAG: &str = "--speculative-adaptive-config";

#[cfg(test)]
mod tests;

/// What a slot may say, or all slots together.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Settings {
    ema_alpha: Option<f64>,
    update_interval: Option<u32>,
    warmup_batches: Option<u32>,
    down_hysteresis: Option<f64>,
    up_hysteresis: Option<f64>,
    ceiling_coeff: Option<f64>,
    min_dwell: Option<u32>,
    max_backoff: Option<u32>,
    /// `null` is an answer, too.
    #[serde(deserialize_with = "given")]
    cost_margin: Option<Option<f64>>,
    isolate_depths: Option<bool>,
}

/// A slot as it is written.
#[derive(Debug, Clone)]
struct Slot {
    batch_size: u32,
    candidate_steps: BTreeSet<u32>,
    settings: Settings,
}

/// How wide a draft of some depth is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Width {
    /// One draft per step.
    Chain,
    /// A tree keeps its proportions: `nodes` at depth `steps`, as far as `topk` branches can fill them.
    Tree { steps: u32, topk: u32, nodes: u32 },
}

/// Makes depth adaptive, if the flags say so.
pub(super) fn resolve(args: &SpecArgs, config: &mut SpecConfig) -> Result<()> {
    if !args.speculative_adaptive {
        ensure!(args.speculative_adaptive_config.is_none(), "{FLAG} needs --speculative-adaptive");
        return Ok(());
    }
    ensure!(
        config.acceptance == AcceptanceRule::Equality,
        "--speculative-adaptive does not go with --speculative-use-rejection-sampling or acceptance thresholds below 1: \
         their output depends on the draft, and so would depend on the load"
    );
    let ngram = matches!(config.algorithm, SpecAlgorithm::Ngram(_));
    let asked = if ngram { asked_of_ngram(args) } else { args.speculative_num_steps };
    let slots = match &args.speculative_adaptive_config {
        Some(path) => read(path).with_context(|| format!("{FLAG} {}", path.display()))?,
        None => default_slots(ngram, asked)?,
    };
    if !ngram && asked.is_none() {
        // As in SGLang: without a depth of the user's, a chain.
        config.eagle_topk = 1;
    }
    let union: Vec<u32> = BTreeSet::from_iter(slots.iter().flat_map(|slot| &slot.candidate_steps).copied())
        .into_iter()
        .collect();
    let deepest = *union.last().expect("every slot has a candidate");
    ensure!(
        deepest > 0,
        "{FLAG} has no candidate above 0; leave --speculative-algorithm out to decode plainly"
    );
    ensure!(
        deepest < MAX_DRAFT_TOKENS,
        "the candidate {deepest} in {FLAG} must be less than {MAX_DRAFT_TOKENS}"
    );
    let steps = match asked {
        Some(steps) if union.contains(&steps) => steps,
        Some(steps) => bail!("a depth of {steps} must be one of the candidates in {FLAG}: {union:?}"),
        None => union[union.len() / 2],
    };
    let width = match config.eagle_topk {
        _ if ngram => Width::Chain,
        1 => Width::Chain,
        topk => Width::Tree { steps, topk, nodes: config.num_draft_tokens - 1 },
    };
    let slots = slots.into_iter().map(|slot| slot.resolve(steps, width)).collect::<Result<Vec<_>>>()?;
    let largest = slots.iter().flat_map(|slot| &slot.tiers).map(|tier| tier.num_draft_tokens).max();
    config.num_steps = deepest;
    config.num_draft_tokens = largest.unwrap_or(1);
    config.adaptive = Some(AdaptiveConfig { initial: width.of(steps), slots });
    Ok(())
}

/// N-grams are as deep as they are wide.
fn asked_of_ngram(args: &SpecArgs) -> Option<u32> {
    args.speculative_num_draft_tokens.map(|width| width - 1).or(args.speculative_num_steps)
}

/// SGLang's slots, each with plain decoding to fall back on; n-grams cost nothing to make, so theirs go deeper. What
/// the user asked for is a candidate where requests are few.
fn default_slots(ngram: bool, asked: Option<u32>) -> Result<Vec<Slot>> {
    let mut slots = match ngram {
        true => json!({
            "1": {"candidate_steps": [0, 1, 3, 7, 11]},
            "8": {"candidate_steps": [0, 1, 3, 7]},
            "32": {"candidate_steps": [0, 1, 3]},
            "64": {"candidate_steps": [0, 1]},
        }),
        false => json!({
            "1": {"candidate_steps": [0, 1, 3, 5, 7]},
            "8": {"candidate_steps": [0, 1, 3], "down_hysteresis": 0.0},
            "32": {"candidate_steps": [0, 1], "down_hysteresis": 0.0},
            "64": {"candidate_steps": [0], "down_hysteresis": 0.0},
        }),
    };
    let slots = parse(slots.take())?;
    let Some(asked) = asked else { return Ok(slots) };
    let add = |mut slot: Slot| {
        if slot.batch_size == 1 {
            slot.candidate_steps.insert(asked);
        }
        // A width that was asked for is a limit.
        slot.candidate_steps.retain(|&steps| !ngram || steps <= asked);
        slot
    };
    Ok(slots.into_iter().map(add).collect())
}

fn read(path: &Path) -> Result<Vec<Slot>> {
    let text = std::fs::read(path).context("cannot be read")?;
    parse(serde_json::from_slice(&text).context("is no JSON")?)
}

/// By rising batch size.
fn parse(file: Value) -> Result<Vec<Slot>> {
    let Value::Object(file) = file else { bail!("must hold one JSON object of batch sizes") };
    let (slots, common): (Map<_, _>, Map<_, _>) = file
        .into_iter()
        .partition(|(key, _)| !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_digit()));
    let common = Settings::deserialize(Value::Object(common)).context("beside the batch sizes")?;
    ensure!(
        !slots.is_empty(),
        "must have at least one batch size as a key, as in {{\"1\": {{\"candidate_steps\": [1, 3, 7]}}}}"
    );
    let mut slots = slots
        .into_iter()
        .map(|(key, value)| Slot::parse(&key, value, &common).with_context(|| format!("batch size {key:?}")))
        .collect::<Result<Vec<_>>>()?;
    slots.sort_by_key(|slot| slot.batch_size);
    ensure!(slots.is_sorted_by(|a, b| a.batch_size < b.batch_size), "has a batch size twice");
    Ok(slots)
}

impl Slot {
    fn parse(key: &str, value: Value, common: &Settings) -> Result<Self> {
        let Value::Object(mut slot) = value else { bail!("must be an object") };
        let candidates = slot.remove("candidate_steps").context("has no candidate_steps")?;
        let candidates: Vec<u32> = serde_json::from_value(candidates)
            .context("candidate_steps must be a list of depths from 0 on")?;
        ensure!(!candidates.is_empty(), "candidate_steps must not be empty");
        let own = Settings::deserialize(Value::Object(slot))?;
        Ok(Self {
            batch_size: key.parse().context("is no batch size")?,
            candidate_steps: candidates.into_iter().collect(),
            settings: own.or(common),
        })
    }

    /// With SGLang's defaults, and ours for what is ours.
    fn resolve(self, steps: u32, width: Width) -> Result<AdaptiveSlot> {
        let candidates: Vec<u32> = self.candidate_steps.into_iter().collect();
        let settings = self.settings;
        let slot = AdaptiveSlot {
            batch_size: self.batch_size,
            initial_steps: if candidates.contains(&steps) { steps } else { candidates[candidates.len() / 2] },
            tiers: candidates.into_iter().map(|steps| width.of(steps)).collect(),
            ema_alpha: settings.ema_alpha.unwrap_or(0.2),
            update_interval: settings.update_interval.unwrap_or(5),
            warmup_batches: settings.warmup_batches.unwrap_or(10),
            down_hysteresis: settings.down_hysteresis.unwrap_or(-0.25),
            up_hysteresis: settings.up_hysteresis.unwrap_or(0.0),
            ceiling_coeff: settings.ceiling_coeff.unwrap_or(0.0),
            min_dwell: settings.min_dwell.unwrap_or(8),
            max_backoff: settings.max_backoff.unwrap_or(1024),
            cost_margin: settings.cost_margin.unwrap_or(Some(0.03)),
            isolate_depths: settings.isolate_depths.unwrap_or(true),
        };
        ensure!(
            slot.ema_alpha > 0.0 && slot.ema_alpha <= 1.0,
            "ema_alpha {} must be above 0 and at most 1",
            slot.ema_alpha
        );
        ensure!(slot.update_interval >= 1, "update_interval must be at least 1");
        ensure!(slot.ceiling_coeff >= 0.0, "ceiling_coeff {} must not be negative", slot.ceiling_coeff);
        ensure!(
            slot.cost_margin.is_none_or(|margin| (0.0..1.0).contains(&margin)),
            "cost_margin {:?} must be from 0 on and less than 1, or null",
            slot.cost_margin
        );
        Ok(slot)
    }
}

impl Settings {
    /// What is not said here is said there.
    fn or(self, common: &Self) -> Self {
        Self {
            ema_alpha: self.ema_alpha.or(common.ema_alpha),
            update_interval: self.update_interval.or(common.update_interval),
            warmup_batches: self.warmup_batches.or(common.warmup_batches),
            down_hysteresis: self.down_hysteresis.or(common.down_hysteresis),
            up_hysteresis: self.up_hysteresis.or(common.up_hysteresis),
            ceiling_coeff: self.ceiling_coeff.or(common.ceiling_coeff),
            min_dwell: self.min_dwell.or(common.min_dwell),
            max_backoff: self.max_backoff.or(common.max_backoff),
            cost_margin: self.cost_margin.or(common.cost_margin),
            isolate_depths: self.isolate_depths.or(common.isolate_depths),
        }
    }
}

impl Width {
    fn of(self, steps: u32) -> DraftTier {
        let nodes = match self {
            Self::Chain => steps,
            Self::Tree { .. } if steps == 0 => 0,
            Self::Tree { steps: base, topk, nodes } => {
                let scaled = (u64::from(nodes) * u64::from(steps)).div_ceil(u64::from(base.max(1)));
                let tried = u64::from(topk) + u64::from(steps - 1) * u64::from(topk).pow(2);
                scaled.min(tried).min(u64::from(MAX_DRAFT_TOKENS) - 1) as u32
            }
        };
        DraftTier { num_steps: steps, num_draft_tokens: nodes + 1 }
    }
}

fn given<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<f64>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}
