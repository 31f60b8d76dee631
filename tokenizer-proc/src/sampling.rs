//! Owns the validation of sampling parameters: JSON values in, [`SamplingParams`] out, with one set of ranges and
//! messages for all routes.

use std::collections::BTreeMap;

use proto::{SamplingParams, TokenId};
use regex::RegexBuilder;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::refusal::{Refusal, invalid};

const MAX_STOPS: usize = 32;
const MAX_STOP_BYTES: usize = 4096;
const MAX_REGEX_BYTES: usize = 256;
/// Bytes of one compiled stop pattern.
const MAX_COMPILED_REGEX: usize = 1 << 20;
const MAX_STOP_TOKENS: usize = 1024;
/// Copies of one prompt.
pub(crate) const MAX_N: i64 = 128;
/// Below this a temperature is 0, before dividing by it can overflow.
const GREEDY_BELOW: f64 = 1e-6;

/// Sampling parameters as a client wrote them; `null` is the same as absent, except for `max_new_tokens`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RawSampling {
    /// Absent: 128. `null`: what the context leaves.
    #[serde(deserialize_with = "present")]
    pub max_new_tokens: Option<Option<i64>>,
    pub min_new_tokens: Option<i64>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub stop: Option<Strings>,
    pub stop_token_ids: Option<Vec<i64>>,
    pub stop_regex: Option<Strings>,
    pub ignore_eos: Option<bool>,
    pub skip_special_tokens: Option<bool>,
    pub spaces_between_special_tokens: Option<bool>,
    pub no_stop_trim: Option<bool>,
    pub n: Option<i64>,
    pub logit_bias: Option<BTreeMap<String, f64>>,
    pub sampling_seed: Option<i64>,
    pub stream_interval: Option<i64>,
}

/// Every key of [`RawSampling`]; anything else is a spelling mistake or a feature that does not exist.
const KNOWN: &[&str] = &[
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "n",
    "logit_bias",
    "sampling_seed",
    "stream_interval",
];

/// Keys that SGLang has and this server does not.
const UNSUPPORTED: &[&str] =
    &["json_schema", "regex", "ebnf", "structural_tag", "beam_width", "custom_params", "watermark"];

/// One string or several.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
pub(crate) enum Strings {
    One(String),
    Many(Vec<String>),
}

impl Strings {
    /// Both forms as a list, without the empty strings, which match everywhere and mean nothing.
    fn into_nonempty(self) -> Vec<String> {
        let mut all = match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        };
        all.retain(|text| !text.is_empty());
        all
    }

    fn len(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Many(texts) => texts.len(),
        }
    }
}

/// Tells an explicit `null` from an absent key.
fn present<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Option<i64>>, D::Error> {
    Option::deserialize(input).map(Some)
}

/// How many tokens a request asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Budget {
    /// Not said: the default, cut to what the context leaves.
    Default(u32),
    /// Said: must fit.
    Exact(u32),
    /// Everything the context leaves.
    Rest,
}

/// Valid parameters. `params.max_new_tokens` and `params.sampling_seed` are set by the intake, which knows the
/// prompt's length and the copies.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ValidSampling {
    pub params: SamplingParams,
    pub budget: Budget,
    pub seed: Option<u64>,
    pub n: u32,
}

/// What of the model the ranges depend on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub vocab_size: u32,
    /// False with `--skip-tokenizer-init`.
    pub has_tokenizer: bool,
}

impl RawSampling {
    /// Reads the `sampling_params` object of `/generate`.
    pub(crate) fn from_object(object: &Map<String, Value>) -> Result<Self, Refusal> {
        for (key, value) in object {
            if UNSUPPORTED.contains(&key.as_str()) {
                if !value.is_null() {
                    return invalid!("sampling parameter '{key}' is not supported by this server");
                }
            } else if !KNOWN.contains(&key.as_str()) {
                return invalid!("unexpected sampling parameter '{key}'");
            }
        }
        let known = object.iter().filter(|(key, _)| !UNSUPPORTED.contains(&key.as_str()));
        let object = known.map(|(key, value)| (key.clone(), value.clone())).collect();
        serde_path_to_error::deserialize(Value::Object(object))
            .map_err(|error| Refusal::Invalid(format!("sampling_params.{}: {}", error.path(), error.inner())))
    }

    pub(crate) fn validate(self, limits: Limits) -> Result<ValidSampling, Refusal> {
        let defaults = SamplingParams::default();
        let stop = self.stop_strings(limits)?;
        let stop_regex = self.stop_patterns(limits)?;
        let stop_token_ids = self.stop_tokens(limits)?;
        let logit_bias = self.biases(limits)?;
        let budget = self.budget()?;
        let params = SamplingParams {
            min_new_tokens: self.min_new_tokens(budget)?,
            temperature: self.temperature(defaults.temperature)?,
            top_k: self.top_k()?,
            top_p: ranged("top_p", self.top_p, defaults.top_p, |x| x > 0.0 && x <= 1.0, "(0, 1]")?,
            min_p: ranged("min_p", self.min_p, defaults.min_p, |x| (0.0..=1.0).contains(&x), "[0, 1]")?,
            frequency_penalty: penalty("frequency_penalty", self.frequency_penalty)?,
            presence_penalty: penalty("presence_penalty", self.presence_penalty)?,
            repetition_penalty: ranged(
                "repetition_penalty",
                self.repetition_penalty,
                defaults.repetition_penalty,
                |x| x > 0.0 && x <= 2.0,
                "(0, 2]",
            )?,
            logit_bias,
            stop,
            stop_token_ids,
            stop_regex,
            ignore_eos: self.ignore_eos.unwrap_or(defaults.ignore_eos),
            skip_special_tokens: self.skip_special_tokens.unwrap_or(defaults.skip_special_tokens),
            spaces_between_special_tokens: self
                .spaces_between_special_tokens
                .unwrap_or(defaults.spaces_between_special_tokens),
            no_stop_trim: self.no_stop_trim.unwrap_or(defaults.no_stop_trim),
            stream_interval: optional_count("stream_interval", self.stream_interval, 1)?,
            ..defaults
        };
        let seed = self.sampling_seed.map(i64::cast_unsigned);
        Ok(ValidSampling { params, budget, seed, n: self.copies()? })
    }

    fn copies(&self) -> Result<u32, Refusal> {
        match self.n.unwrap_or(1) {
            n @ 1..=MAX_N => Ok(n as u32),
            n => invalid!("n must be in [1, {MAX_N}], got {n}."),
        }
    }

    fn budget(&self) -> Result<Budget, Refusal> {
        match self.max_new_tokens {
            None => Ok(Budget::Default(SamplingParams::default().max_new_tokens)),
            Some(None) => Ok(Budget::Rest),
            Some(Some(count)) => u32::try_from(count).map(Budget::Exact).map_err(|_| {
                Refusal::Invalid(if count < 0 {
                    format!("max_new_tokens must be at least 0, got {count}.")
                } else {
                    format!("max_new_tokens is too large: {count}.")
                })
            }),
        }
    }

    fn min_new_tokens(&self, budget: Budget) -> Result<u32, Refusal> {
        let min = self.min_new_tokens.unwrap_or(0);
        let max = match budget {
            Budget::Default(max) | Budget::Exact(max) => max,
            Budget::Rest => u32::MAX,
        };
        match u32::try_from(min) {
            Ok(min) if min <= max => Ok(min),
            _ if budget == Budget::Rest => invalid!("min_new_tokens must be at least 0, got {min}."),
            _ => invalid!("min_new_tokens must be in [0, max_new_tokens({max})], got {min}."),
        }
    }

    fn temperature(&self, default: f64) -> Result<f64, Refusal> {
        match self.temperature.unwrap_or(default) {
            t if !t.is_finite() || t < 0.0 => {
                invalid!("temperature must be finite and non-negative, got {t}.")
            }
            t if t < GREEDY_BELOW => Ok(0.0),
            t => Ok(t),
        }
    }

    fn top_k(&self) -> Result<Option<u32>, Refusal> {
        match self.top_k.unwrap_or(-1) {
            -1 => Ok(None),
            k if k >= 1 => Ok(Some(u32::try_from(k).unwrap_or(u32::MAX))),
            k => invalid!("top_k must be -1 (disable) or at least 1, got {k}."),
        }
    }

    fn stop_strings(&self, limits: Limits) -> Result<Vec<String>, Refusal> {
        let stop = take_strings("stop", self.stop.as_ref(), MAX_STOP_BYTES)?;
        if !stop.is_empty() && !limits.has_tokenizer {
            return invalid!("stop needs a tokenizer, and the server runs with --skip-tokenizer-init");
        }
        Ok(stop)
    }

    fn stop_patterns(&self, limits: Limits) -> Result<Vec<String>, Refusal> {
        let patterns = take_strings("stop_regex", self.stop_regex.as_ref(), MAX_REGEX_BYTES)?;
        if !patterns.is_empty() && !limits.has_tokenizer {
            return invalid!("stop_regex needs a tokenizer, and the server runs with --skip-tokenizer-init");
        }
        for pattern in &patterns {
            RegexBuilder::new(pattern).size_limit(MAX_COMPILED_REGEX).build().map_err(|error| {
                Refusal::Invalid(format!("stop_regex '{pattern}' is not a valid pattern: {error}"))
            })?;
        }
        Ok(patterns)
    }

    fn stop_tokens(&self, limits: Limits) -> Result<Vec<TokenId>, Refusal> {
        let ids = self.stop_token_ids.as_deref().unwrap_or_default();
        if ids.len() > MAX_STOP_TOKENS {
            return invalid!("stop_token_ids holds at most {MAX_STOP_TOKENS} ids, got {}.", ids.len());
        }
        token_ids("stop_token_ids", ids, limits.vocab_size)
    }

    fn biases(&self, limits: Limits) -> Result<Vec<(TokenId, f64)>, Refusal> {
        let last = limits.vocab_size.saturating_sub(1);
        let mut biases = BTreeMap::new();
        for (key, &bias) in self.logit_bias.iter().flatten() {
            let Some(id) = key.parse::<TokenId>().ok().filter(|&id| id <= last) else {
                return invalid!("logit_bias must have keys in [0, {last}], got {key}.");
            };
            if !bias.is_finite() {
                return invalid!("logit_bias must be finite, got {bias} for token {id}.");
            }
            biases.insert(id, bias);
        }
        Ok(biases.into_iter().collect())
    }
}

/// Checks that ids lie inside the vocabulary.
pub(crate) fn token_ids(name: &str, ids: &[i64], vocab_size: u32) -> Result<Vec<TokenId>, Refusal> {
    ids.iter()
        .map(|&id| match TokenId::try_from(id) {
            Ok(id) if id < vocab_size => Ok(id),
            _ => invalid!("{name} must lie in [0, {}], got {id}.", vocab_size.saturating_sub(1)),
        })
        .collect()
}

fn ranged(
    name: &str,
    value: Option<f64>,
    default: f64,
    inside: impl Fn(f64) -> bool,
    range: &str,
) -> Result<f64, Refusal> {
    let value = value.unwrap_or(default);
    if value.is_finite() && inside(value) {
        return Ok(value);
    }
    invalid!("{name} must be in {range}, got {value}.")
}

fn penalty(name: &str, value: Option<f64>) -> Result<f64, Refusal> {
    ranged(name, value, 0.0, |x| (-2.0..=2.0).contains(&x), "[-2, 2]")
}

fn optional_count(name: &str, value: Option<i64>, least: i64) -> Result<Option<u32>, Refusal> {
    match value {
        None => Ok(None),
        Some(count) if count >= least => Ok(Some(u32::try_from(count).unwrap_or(u32::MAX))),
        Some(count) => invalid!("{name} must be at least {least}, got {count}."),
    }
}

fn take_strings(name: &str, value: Option<&Strings>, max_bytes: usize) -> Result<Vec<String>, Refusal> {
    let Some(strings) = value else { return Ok(Vec::new()) };
    if strings.len() > MAX_STOPS {
        return invalid!("{name} holds at most {MAX_STOPS} strings, got {}.", strings.len());
    }
    let strings = strings.clone().into_nonempty();
    if let Some(long) = strings.iter().find(|text| text.len() > max_bytes) {
        return invalid!("{name} strings hold at most {max_bytes} bytes, got {}.", long.len());
    }
    Ok(strings)
}

/// Reads `speculative`: `false` turns drafting off, `{"max_draft_tokens": n}` limits it.
pub(crate) fn max_draft_tokens(value: Option<&Value>) -> Result<Option<u32>, Refusal> {
    let limit = match value {
        None | Some(Value::Null | Value::Bool(true)) => return Ok(None),
        Some(Value::Bool(false)) => return Ok(Some(0)),
        Some(Value::Object(object)) if object.keys().all(|key| key == "max_draft_tokens") => {
            object.get("max_draft_tokens").and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok())
        }
        Some(_) => None,
    };
    match limit {
        Some(limit) => Ok(Some(limit)),
        None => invalid!("speculative must be true, false or {{\"max_draft_tokens\": n}} with n at least 0."),
    }
}

#[cfg(test)]
#[path = "sampling_tests.rs"]
mod tests;
