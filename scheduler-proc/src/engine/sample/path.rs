//! Owns what a choice depends on besides its logits: the request's parameters and the tokens made so far, and
//! the edits these put on the logits.
//!
//! Edits follow SGLang's order: frequency and presence penalties (`- frequency * count - presence`), then the
//! repetition penalty (a positive logit is divided, another multiplied), both over the output only, never the
//! prompt; then `logit_bias`; then the mask of end tokens below `min_new_tokens`. All before temperature.
//! Unlike SGLang's they see every token of the path, also those accepted earlier in the same verify step.

use std::collections::hash_map::Entry;

use proto::TokenId;
use rustc_hash::FxHashMap;

use crate::batch::RowParams;
use crate::engine::rng::{Noise, Stream};

/// A request's output so far, as the next choice sees it. A verify step walks by pushing accepted tokens.
#[derive(Debug, Clone)]
pub struct Path<'a> {
    params: &'a RowParams,
    prompt_len: usize,
    len: usize,
    /// How often each output token was made; kept only for requests with penalties.
    counts: FxHashMap<TokenId, u32>,
}

impl<'a> Path<'a> {
    /// `tokens` is the prompt, then the answer so far.
    pub fn new(params: &'a RowParams, tokens: &[TokenId], prompt_len: usize) -> Self {
        let mut path = Self { params, prompt_len, len: prompt_len, counts: FxHashMap::default() };
        tokens[prompt_len..].iter().for_each(|&token| path.push(token));
        path
    }

    pub fn push(&mut self, token: TokenId) {
        self.len += 1;
        if self.params.sampling.has_penalties() {
            match self.counts.entry(token) {
                Entry::Occupied(mut count) => *count.get_mut() += 1,
                Entry::Vacant(slot) => _ = slot.insert(1),
            }
        }
    }

    pub fn params(&self) -> &'a RowParams {
        self.params
    }

    /// The index, in prompt and answer together, of the token to choose.
    pub fn position(&self) -> usize {
        self.len
    }

    /// The draws for that token.
    pub fn noise(&self, stream: Stream) -> Noise {
        Noise::new(self.params.sampling.sampling_seed, self.len as u64, stream)
    }

    /// Whether the choice is just the largest logit.
    pub fn is_argmax(&self) -> bool {
        super::is_greedy(&self.params.sampling) && !self.edits()
    }

    /// Whether [`Self::edit`] changes anything.
    pub(super) fn edits(&self) -> bool {
        !self.counts.is_empty() || !self.params.sampling.logit_bias.is_empty() || self.masks_terminators()
    }

    pub(super) fn edit(&self, logits: &mut [f32]) {
        let sampling = &self.params.sampling;
        for (&token, &count) in &self.counts {
            edit_one(logits, token, |logit| {
                let lowered =
                    logit - sampling.frequency_penalty * f64::from(count) - sampling.presence_penalty;
                let factor = sampling.repetition_penalty;
                if lowered > 0.0 { lowered / factor } else { lowered * factor }
            });
        }
        for &(token, bias) in &sampling.logit_bias {
            edit_one(logits, token, |logit| logit + bias);
        }
        if self.masks_terminators() {
            for &token in &self.params.terminators {
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }

    fn masks_terminators(&self) -> bool {
        let made = self.len - self.prompt_len;
        made < self.params.sampling.min_new_tokens as usize && !self.params.terminators.is_empty()
    }
}

/// Edits in f64 and keeps the result finite, so that only a mask makes a token impossible.
fn edit_one(logits: &mut [f32], token: TokenId, edit: impl FnOnce(f64) -> f64) {
    if let Some(logit) = logits.get_mut(token as usize) {
        *logit = (edit(f64::from(*logit)) as f32).clamp(f32::MIN, f32::MAX);
    }
}
