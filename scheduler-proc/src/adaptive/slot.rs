//! Owns the depth of one range of batch sizes: counts its steps, keeps what each depth showed, and decides.

use proto::{AdaptiveSlot, DraftTier};
use serde_json::{Value, json};

use super::Observation;
use super::accepted::{Accepted, Estimate};
use super::costs::Costs;
use super::outlook::{Outlook, Rows};
use super::report::{Reason, Switch};
use super::rule;

/// Steps after which a plain step is timed again beside the depth in force.
const PLAIN_EVERY: u64 = 48;
/// Steps that a depth is not tried again after it was left; doubles with every visit that is not longer than that.
const FIRST_BACKOFF: u64 = 64;
/// How many times faster plain decoding must be for a depth to be left at once.
const HOPELESS: f64 = 1.25;
/// Share of the time that trying other depths may cost.
const EXPLORATION: f64 = 0.01;

#[derive(Debug)]
pub(super) struct Slot {
    config: AdaptiveSlot,
    candidates: Vec<Candidate>,
    /// The one in force.
    at: usize,
    /// Mean of accepted drafts over recent steps.
    ema: f64,
    /// Steps that took part in decisions.
    updates: u64,
    /// All steps; the slot's clock.
    steps: u64,
    /// When the depth in force came into force.
    since: u64,
    rows: Rows,
}

/// What is kept of a depth.
#[derive(Debug, Clone, Default)]
struct Candidate {
    accepted: Accepted,
    /// Visits in a row that were shorter than the backoff.
    failures: u32,
    /// Until then what was measured is believed, and the depth is not tried for nothing.
    believed_until: u64,
}

impl Slot {
    pub(super) fn new(config: &AdaptiveSlot) -> Self {
        let at = config.tiers.iter().position(|tier| tier.num_steps == config.initial_steps).unwrap_or(0);
        Self {
            candidates: vec![Candidate::default(); config.tiers.len()],
            at,
            ema: f64::from(config.initial_steps) - 1.0,
            updates: 0,
            steps: 0,
            since: 0,
            rows: Rows { batch: config.batch_size as usize, speculating: 1.0 },
            config: config.clone(),
        }
    }

    pub(super) fn batch_size(&self) -> usize {
        self.config.batch_size as usize
    }

    pub(super) fn tier(&self) -> DraftTier {
        self.config.tiers[self.at]
    }

    /// Whether the next step must be a plain one, to know what this depth costs beside it.
    pub(super) fn wants_plain(&self, costs: &Costs, batch: usize) -> bool {
        let depth = self.tier().num_steps;
        self.config.cost_margin.is_some() && depth > 0 && costs.wants_plain(batch, depth, PLAIN_EVERY)
    }

    /// Whether a step at the depth in force takes what such steps usually take: the first one also computes what plain
    /// steps left to the draft.
    pub(super) fn is_typical(&self) -> bool {
        self.steps > self.since
    }

    /// Takes in a step that ran at `depth`; says what it changed.
    pub(super) fn observe(&mut self, depth: u32, step: &Observation<'_>, costs: &Costs) -> Option<Switch> {
        self.steps += 1;
        let current = self.tier().num_steps;
        if depth != current || step.accepted.is_empty() {
            return None;
        }
        self.rows =
            Rows { batch: step.batch, speculating: step.speculating as f64 / step.batch.max(1) as f64 };
        if current > 0 {
            self.learn(step.accepted);
        }
        self.updates += 1;
        let outlooks = self.outlooks(costs);
        let (to, reason) = match self.hopeless(&outlooks) {
            Some(plain) => (plain, Reason::PlainFaster),
            None => self.decide(&outlooks)?,
        };
        let switch = self.describe(current, self.config.tiers[to].num_steps, reason, outlooks);
        self.go(to, &switch.outlooks);
        Some(switch)
    }

    /// A change of depth that was not decided here.
    pub(super) fn switch(&self, from: u32, to: u32, reason: Reason, batch: usize, costs: &Costs) -> Switch {
        Switch { batch, ..self.describe(from, to, reason, self.outlooks(costs)) }
    }

    pub(super) fn report(&self, costs: &Costs) -> Value {
        let candidates: Vec<_> = self.outlooks(costs).into_iter().map(Outlook::to_json).collect();
        json!({
            "batch_size": self.config.batch_size,
            "num_steps": self.tier().num_steps,
            "num_draft_tokens": self.tier().num_draft_tokens,
            "ema_accept_len": self.ema,
            "measured_at_batch_size": self.rows.batch,
            "steps_since_switch": self.dwelt(),
            "candidates": candidates,
        })
    }

    #[cfg(test)]
    pub(super) fn candidates_steps(&self) -> Vec<usize> {
        self.config.tiers.iter().map(|tier| tier.num_steps as usize).collect()
    }

    fn learn(&mut self, accepted: &[usize]) {
        let mean = accepted.iter().sum::<usize>() as f64 / accepted.len() as f64;
        let alpha = self.config.ema_alpha;
        self.ema = (1.0 - alpha) * self.ema + alpha * mean;
        if self.candidates[self.at].accepted.add(accepted) {
            // Other requests, or another part of the answer: nothing measured before says anything now.
            self.candidates.iter_mut().for_each(|candidate| candidate.believed_until = 0);
            self.candidates[self.at].accepted = Accepted::default();
        }
    }

    fn dwelt(&self) -> u64 {
        self.steps - self.since
    }

    fn describe(&self, from: u32, to: u32, reason: Reason, outlooks: Vec<Outlook>) -> Switch {
        Switch { from, to, reason, batch: self.rows.batch, ema: self.ema, outlooks }
    }

    /// Far slower than plain decoding: not to be borne until the next decision.
    fn hopeless(&self, outlooks: &[Outlook]) -> Option<usize> {
        self.config.cost_margin?;
        let (plain, here) = (outlooks.first().filter(|first| first.steps == 0)?, outlooks[self.at].rate?);
        (here.high * HOPELESS < plain.rate?.mean).then_some(0)
    }

    fn decide(&self, outlooks: &[Outlook]) -> Option<(usize, Reason)> {
        let warm = self.updates.checked_sub(u64::from(self.config.warmup_batches));
        let due = warm.unwrap_or(self.updates) % u64::from(self.config.update_interval) == 0;
        if !due || self.dwelt() < u64::from(self.config.min_dwell) {
            return None;
        }
        if let Some(margin) = self.config.cost_margin {
            if let Some(decision) = self.promising(outlooks, margin) {
                return Some(decision);
            }
            if let Some(decision) = self.faster(outlooks, margin) {
                return Some(decision);
            }
        }
        warm.filter(|&updates| updates > 0).and_then(|_| self.wished(outlooks))
    }

    /// What was not measured, but would beat all that was, at best.
    fn promising(&self, outlooks: &[Outlook], margin: f64) -> Option<(usize, Reason)> {
        let here = outlooks[self.at].rate.filter(|_| self.tier().num_steps > 0)?;
        let known = outlooks.iter().filter_map(|outlook| outlook.rate).map(|rate| rate.mean);
        // What promises little more is not worth the try. The nearest one is dared first.
        let to_beat = known.fold(here.high, f64::max) * (1.0 + 2.0 * margin);
        let promises = outlooks.iter().enumerate().filter(|(_, outlook)| outlook.waits == 0);
        let (nearest, _) = promises
            .filter(|(_, outlook)| outlook.promise.is_some_and(|promise| promise > to_beat))
            .min_by_key(|&(index, _)| index.abs_diff(self.at))?;
        Some((nearest, Reason::Promise))
    }

    /// What is measured to be faster, beyond the errors; plain decoding needs no margin.
    fn faster(&self, outlooks: &[Outlook], margin: f64) -> Option<(usize, Reason)> {
        let here = outlooks[self.at].rate?;
        let others = outlooks.iter().enumerate().filter(|&(index, _)| index != self.at);
        let (best, steps, _) = others
            .filter_map(|(index, outlook)| Some((index, outlook.steps, outlook.rate?)))
            .filter(|(_, steps, rate)| rate.low > here.high * if *steps == 0 { 1.0 } else { 1.0 + margin })
            .max_by(|a, b| a.2.mean.total_cmp(&b.2.mean))?;
        Some((best, if steps == 0 { Reason::PlainFaster } else { Reason::Faster }))
    }

    /// What acceptance asks for; where times are known, only if that is faster, or could be.
    fn wished(&self, outlooks: &[Outlook]) -> Option<(usize, Reason)> {
        let to = rule::wish(&self.config, self.at, self.ema);
        let (here, there) = (&outlooks[self.at], &outlooks[to]);
        let pays = match (self.config.cost_margin, here.rate) {
            (Some(margin), Some(here)) => {
                let there = there.rate.map(|rate| rate.mean).or(there.promise);
                there.is_none_or(|there| there > here.mean * (1.0 + margin))
            }
            _ => true,
        };
        let up = to > self.at;
        if to == self.at || !pays || (up && there.waits > 0) {
            return None;
        }
        let reason = match up {
            true if here.steps == 0 => Reason::Probe,
            true => Reason::AcceptanceUp,
            false => Reason::AcceptanceDown,
        };
        Some((to, reason))
    }

    fn outlooks(&self, costs: &Costs) -> Vec<Outlook> {
        let known = |index: usize| {
            let candidate = &self.candidates[index];
            match self.config.tiers[index].num_steps {
                0 => Some(Estimate::NOTHING),
                _ if index == self.at || candidate.believed_until > self.steps => {
                    candidate.accepted.estimate()
                }
                _ => None,
            }
        };
        let cost = |steps: u32| costs.of(self.rows.batch, steps);
        let seconds = |steps: u32| cost(steps).map(|cost| cost.seconds);
        let here = self.tier().num_steps;
        let best = |index: usize| {
            let there = self.config.tiers[index].num_steps;
            let accepted = match known(index) {
                Some(known) => known.mean,
                // Plain decoding shows nothing of what would be accepted.
                None if here == 0 => f64::from(there),
                None => self.candidates[self.at].accepted.at_best(here, there)?,
            };
            let like =
                seconds(there).or_else(|| Some(Self::at_least(here, there, seconds(here)?, seconds(0))));
            Some(self.rows.rate(accepted, like?))
        };
        let outlook = |(index, tier): (usize, &DraftTier)| {
            let (accepted, cost) = (known(index), cost(tier.num_steps));
            let rate = accepted.zip(cost).map(|(accepted, cost)| self.rows.measured(accepted, cost));
            Outlook {
                steps: tier.num_steps,
                accepted,
                seconds: cost.map(|cost| cost.seconds),
                rate,
                promise: if rate.is_none() && index != self.at { best(index) } else { None },
                waits: self.candidates[index].believed_until.saturating_sub(self.steps),
            }
        };
        self.config.tiers.iter().enumerate().map(outlook).collect()
    }

    /// What a step at another depth takes at least: a deeper draft half as much more per level as the levels up to here
    /// took, a shallower one as much as none.
    fn at_least(here: u32, there: u32, takes: f64, plain: Option<f64>) -> f64 {
        let plain = plain.unwrap_or(takes).min(takes);
        match there > here {
            true if here > 0 => takes + f64::from(there - here) * (takes - plain) / f64::from(here) / 2.0,
            true => takes,
            false => plain,
        }
    }

    fn go(&mut self, to: usize, outlooks: &[Outlook]) {
        let dwelt = self.dwelt();
        let lost = lost_steps(dwelt, &outlooks[self.at], &outlooks[to]);
        let left = &mut self.candidates[self.at];
        let backoff = FIRST_BACKOFF << left.failures.min(16);
        left.failures = if dwelt <= backoff { left.failures + 1 } else { 0 };
        let backoff = backoff.max((lost / EXPLORATION) as u64).min(u64::from(self.config.max_backoff));
        left.believed_until = self.steps + backoff;
        self.at = to;
        self.since = self.steps;
        self.candidates[to].accepted = Accepted::default();
        self.candidates[to].believed_until = 0;
        let start = f64::from(self.tier().num_steps) - 1.0;
        if self.config.isolate_depths {
            self.ema = start.max(0.0);
        } else if self.ema < 0.0 {
            self.ema = start;
        }
    }
}

/// What a visit cost, in steps of the depth it is left for, where that is the faster one.
fn lost_steps(steps: u64, left: &Outlook, to: &Outlook) -> f64 {
    let measured = (left.rate, to.rate, left.seconds, to.seconds);
    let (Some(slow), Some(fast), Some(took), Some(takes)) = measured else { return 0.0 };
    steps as f64 * (1.0 - slow.mean / fast.mean).max(0.0) * took / takes
}
