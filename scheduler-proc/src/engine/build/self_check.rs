//! Owns the start-up question whether a draft model fits its target at all: it drafts a fixed continuation and says
//! so in the log when next to nothing is accepted. A miswired draft changes no answer, it only wastes time, and
//! nothing else would tell.

use std::time::{Duration, Instant};

use proto::{SamplingParams, ServeConfig, SpecConfig, TokenBytes, TokenId};

use crate::batch::{Batch, BatchRow, DraftLimit, DraftSource, EngineSlot, KvSlot, RowKind, RowParams};
use crate::engine::{Engine, EngineError};

/// Verify steps of the check, and fewer than which say too little.
const STEPS: usize = 24;
const FEWEST_STEPS: usize = 12;
/// Start-up waits no longer for an answer than this and one step.
const PATIENCE: Duration = Duration::from_secs(3);
/// What is continued: plain prose, as a draft model meets it.
const TEXT: &str = "The sun rises in the east and sets in the west. In the morning, the sky is often";
/// Ids that are continued where there is no vocabulary to write the text with.
const FALLBACK_LEN: usize = 8;
/// Tokens per verify step below which a draft is hardly worth its time.
pub(super) const USEFUL_LENGTH: f64 = 1.2;

/// Decodes greedily from a fixed text, then forgets it all. Returns the tokens per verify step, where there was room
/// and time to find out.
pub(super) fn run(
    engine: &mut impl Engine,
    config: &ServeConfig,
    vocabulary: Option<&TokenBytes>,
) -> Result<Option<f64>, EngineError> {
    let prompt = prompt(config, vocabulary);
    let nodes = engine.draft_status().max_nodes();
    let longest = prompt.len() + (STEPS + 1) * (nodes + 1);
    if longest > engine.limits().kv_slots.min(engine.limits().context_len) {
        return Ok(None);
    }
    let length = accept_length(engine, prompt, longest)?;
    engine.release(SLOT);
    engine.flush();
    let Some(length) = length else {
        tracing::info!(
            "too few drafts in the time at start to check whether the draft model agrees with its target"
        );
        return Ok(None);
    };
    let algorithm = config.spec.as_ref().map(SpecConfig::name).unwrap_or_default();
    if length < USEFUL_LENGTH {
        tracing::warn!(
            algorithm,
            accept_length = length,
            "the draft model hardly agrees with its target: is --speculative-draft-model-path made for this model?"
        );
    } else {
        tracing::info!(algorithm, accept_length = length, "the draft model agrees with its target");
    }
    Ok(Some(length))
}

const SLOT: EngineSlot = EngineSlot(0);

/// Tokens per verify step; nothing if there was no time to find out.
fn accept_length(
    engine: &mut impl Engine,
    prompt: Vec<TokenId>,
    slots: usize,
) -> Result<Option<f64>, EngineError> {
    let start = Instant::now();
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let params = RowParams { sampling, terminators: Vec::new(), logprobs: None };
    let kv_slots: Vec<KvSlot> = (0..slots as KvSlot).collect();
    let prompt_len = prompt.len();
    let mut tokens = prompt;
    let nodes = engine.draft_status().max_nodes();
    let draft = DraftLimit { enabled: true, nodes, depth: nodes };
    let (mut computed, mut accepted, mut verified) = (0, 0, 0);
    for step in 0..=STEPS {
        if start.elapsed() > PATIENCE {
            break;
        }
        let kind = if step == 0 { RowKind::Extend } else { RowKind::Decode { draft } };
        let row = BatchRow {
            slot: SLOT,
            kind,
            params: &params,
            tokens: &tokens,
            prompt_len,
            computed_len: computed,
            extend_len: tokens.len() - computed,
            kv_slots: &kv_slots,
        };
        let output = engine.step(&Batch { rows: vec![row] })?.rows.remove(0);
        if let Some(reason) = output.error {
            return Err(EngineError::Step { stage: "self-check", reason });
        }
        // What the text itself repeats says nothing of the model.
        let by_model = output.verify.as_ref().filter(|verify| verify.source == DraftSource::Model);
        verified += usize::from(by_model.is_some());
        accepted += by_model.map_or(0, |verify| verify.accepted);
        computed = tokens.len() + output.tokens.len().saturating_sub(1);
        tokens.extend(output.tokens.iter().map(|token| token.id));
    }
    Ok((verified >= FEWEST_STEPS).then(|| (accepted + verified) as f64 / verified as f64))
}

/// The text in the target's tokens; a few ids that every vocabulary has, if its words are unknown.
fn prompt(config: &ServeConfig, vocabulary: Option<&TokenBytes>) -> Vec<TokenId> {
    let limit = config.model.vocab_size.max(1);
    let written = vocabulary.and_then(|vocabulary| vocabulary.cover(TEXT.as_bytes()));
    let fits = |ids: &Vec<TokenId>| ids.iter().all(|&id| id < limit);
    let rest = written
        .filter(fits)
        .unwrap_or_else(|| (1..FALLBACK_LEN as TokenId).map(|index| (index * 37) % limit).collect());
    config.model.bos_token_id.into_iter().chain(rest).collect()
}
