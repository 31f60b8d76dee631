//! Owns the start-up question whether a draft model fits its target at all: it drafts a fixed continuation and says
//! so in the log when next to nothing is accepted. A miswired draft changes no answer, it only wastes time, and
//! nothing else would tell.

use std::time::{Duration, Instant};

use proto::{SamplingParams, ServeConfig, TokenId};

use crate::batch::{Batch, BatchRow, DraftLimit, EngineSlot, KvSlot, RowKind, RowParams};
use crate::engine::{Engine, EngineError};

/// Verify steps of the check, and fewer than which say too little.
const STEPS: usize = 24;
const FEWEST_STEPS: usize = 12;
/// Start-up waits no longer for an answer than this and one step.
const PATIENCE: Duration = Duration::from_secs(3);
const PROMPT_LEN: usize = 8;
/// Tokens per verify step below which a draft is hardly worth its time.
const USEFUL_LENGTH: f64 = 1.2;

/// Decodes greedily from a few tokens, then forgets it all.
pub(super) fn run(engine: &mut impl Engine, config: &ServeConfig) -> Result<(), EngineError> {
    let nodes = engine.draft_status().max_nodes();
    let longest = PROMPT_LEN + (STEPS + 1) * (nodes + 1);
    if longest > engine.limits().kv_slots.min(engine.limits().context_len) {
        return Ok(());
    }
    let length = accept_length(engine, config, longest)?;
    engine.release(SLOT);
    engine.flush();
    let Some(length) = length else {
        tracing::info!("too slow to check at start whether the draft model agrees with its target");
        return Ok(());
    };
    let algorithm = config.spec.as_ref().map_or("", |spec| spec.algorithm.as_str());
    if length < USEFUL_LENGTH {
        tracing::warn!(
            algorithm,
            accept_length = length,
            "the draft model hardly agrees with its target: is --speculative-draft-model-path made for this model?"
        );
    } else {
        tracing::info!(algorithm, accept_length = length, "the draft model agrees with its target");
    }
    Ok(())
}

const SLOT: EngineSlot = EngineSlot(0);

/// Tokens per verify step; nothing if there was no time to find out.
fn accept_length(
    engine: &mut impl Engine,
    config: &ServeConfig,
    slots: usize,
) -> Result<Option<f64>, EngineError> {
    let start = Instant::now();
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let params = RowParams { sampling, terminators: Vec::new(), logprobs: None };
    let kv_slots: Vec<KvSlot> = (0..slots as KvSlot).collect();
    let mut tokens = prompt(config);
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
            prompt_len: PROMPT_LEN,
            computed_len: computed,
            extend_len: tokens.len() - computed,
            kv_slots: &kv_slots,
        };
        let output = engine.step(&Batch { rows: vec![row] })?.rows.remove(0);
        if let Some(reason) = output.error {
            return Err(EngineError::Step { stage: "self-check", reason });
        }
        verified += usize::from(output.verify.is_some());
        accepted += output.tokens.len().saturating_sub(1);
        computed = tokens.len() + output.tokens.len().saturating_sub(1);
        tokens.extend(output.tokens.iter().map(|token| token.id));
    }
    Ok((verified >= FEWEST_STEPS).then(|| (accepted + verified) as f64 / verified as f64))
}

/// The start token, where there is one, and a few ids that every vocabulary has.
fn prompt(config: &ServeConfig) -> Vec<TokenId> {
    let first = config.model.bos_token_id.unwrap_or(0);
    let rest = (1..PROMPT_LEN as TokenId).map(|index| (index * 37) % config.model.vocab_size.max(1));
    std::iter::once(first).chain(rest).collect()
}
