//! Owns an engine without a model: the next token is a hash of the sequence, drafts are right as often as the
//! script says, and every promise of the scheduler about rows and KV slots is checked. For tests of scheduling.

use proto::TokenId;

use super::{DraftStatus, Engine, EngineError, EngineLimits};
use crate::batch::{
    Batch, BatchRow, ChosenToken, DraftLimit, EngineSlot, KvSlot, LogprobParams, RowKind, RowOutput,
    StepOutput, StepTiming, TokenLogprobs, VerifyCount,
};

/// What the engine plays.
#[derive(Debug, Clone)]
pub struct Script {
    pub vocab_size: usize,
    pub context_len: usize,
    pub kv_slots: usize,
    /// 0 and 0 play an engine without speculation.
    pub draft: DraftStatus,
    /// How many drafts are right at most, by position in the sequence, over and over.
    pub accept: Vec<usize>,
    /// A row whose prompt starts with this token cannot be computed.
    pub poison: Option<TokenId>,
    /// The engine breaks at this step, counted from 1.
    pub break_at_step: Option<u64>,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            vocab_size: 64,
            context_len: 1024,
            kv_slots: 4096,
            draft: DraftStatus::default(),
            accept: vec![0, 2, 1, 3],
            poison: None,
            break_at_step: None,
        }
    }
}

/// See the module.
pub struct ScriptedEngine {
    script: Script,
    limits: EngineLimits,
    /// Per KV slot the hash of the sequence that ends there: its "keys and values".
    kv: Vec<Option<u64>>,
    steps: u64,
    rows: u64,
    seated: Vec<EngineSlot>,
}

impl ScriptedEngine {
    pub fn new(script: Script) -> Self {
        let limits = EngineLimits {
            kv_slots: script.kv_slots,
            context_len: script.context_len,
            vocab_size: script.vocab_size,
            weight_bytes: 0,
            weight_types: std::collections::BTreeMap::new(),
            gathered_bytes: 0,
            kv_bytes: script.kv_slots as u64,
        };
        Self { kv: vec![None; script.kv_slots], script, limits, steps: 0, rows: 0, seated: Vec::new() }
    }

    /// Steps run so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Rows run so far, over all steps.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Requests that were run and not released.
    pub fn seated(&self) -> usize {
        self.seated.len()
    }

    fn run(&mut self, row: &BatchRow<'_>) -> RowOutput {
        if self.script.poison.is_some() && row.tokens.first() == self.script.poison.as_ref() {
            return RowOutput { error: Some("logits are not finite".to_owned()), ..RowOutput::default() };
        }
        let hash = self.extend(row);
        let mut output = RowOutput { input_logprobs: input_logprobs(row), ..RowOutput::default() };
        if !row.samples() {
            return output;
        }
        let mut hash = hash;
        let mut accepted = 0;
        if let RowKind::Decode { draft } = row.kind {
            assert!(draft.depth <= draft.nodes, "a depth of {} needs as many nodes", draft.depth);
            if draft.enabled {
                let (verify, last) = self.verify(row, draft, hash, &mut output.tokens);
                accepted = verify.accepted;
                hash = last;
                output.verify = Some(verify);
            }
        }
        output.tokens.push(self.chosen(row, hash, accepted));
        output
    }

    /// Checks what the row says is computed, and computes the rest; returns the hash of the whole sequence.
    fn extend(&mut self, row: &BatchRow<'_>) -> u64 {
        let end = row.computed_len + row.extend_len;
        let mut hash = 0;
        for (position, &token) in row.tokens[..end].iter().enumerate() {
            hash = mix(hash, token);
            let slot = row.kv_slots[position] as usize;
            if position < row.computed_len {
                assert_eq!(self.kv[slot], Some(hash), "{:?}: position {position} is not computed", row.slot);
            } else {
                self.kv[slot] = Some(hash);
            }
        }
        hash
    }

    /// A chain of drafts, right as far as the script says, with all nodes left over as wrong guesses at depth 1.
    fn verify(
        &mut self,
        row: &BatchRow<'_>,
        draft: DraftLimit,
        root: u64,
        tokens: &mut Vec<ChosenToken>,
    ) -> (VerifyCount, u64) {
        let right = self.script.accept[row.tokens.len() % self.script.accept.len()].min(draft.depth);
        let base = row.tokens.len();
        let mut hash = root;
        for depth in 0..right {
            let token = self.chosen(row, hash, depth);
            hash = mix(hash, token.id);
            self.kv[row.kv_slots[base + depth] as usize] = Some(hash);
            tokens.push(token);
        }
        // Rejected drafts leave rubbish behind the accepted ones.
        for node in right..draft.nodes {
            self.kv[row.kv_slots[base + node] as usize] = Some(!hash);
        }
        let mut proposed_at = vec![1; draft.depth];
        if let Some(first) = proposed_at.first_mut() {
            *first += (draft.nodes - draft.depth) as u32;
        }
        (VerifyCount { proposed_at, accepted: right, ..VerifyCount::default() }, hash)
    }

    fn chosen(&self, row: &BatchRow<'_>, hash: u64, ahead: usize) -> ChosenToken {
        let output_len = row.tokens.len() + ahead - row.prompt_len;
        let masked = output_len < row.params.sampling.min_new_tokens as usize;
        let mut draw = hash ^ row.params.sampling.sampling_seed;
        let id = loop {
            draw = mix(draw, 1);
            let id = (draw >> 16) as TokenId % self.script.vocab_size as TokenId;
            if !masked || !row.params.terminators.contains(&id) {
                break id;
            }
        };
        let logprobs = row.params.logprobs.as_ref().map(|wanted| token_logprobs(wanted, id));
        ChosenToken { id, logprobs }
    }

    /// Everything a scheduler promises about the rows of one step.
    fn check(&self, batch: &Batch<'_>) {
        let mut written: Vec<KvSlot> = Vec::new();
        let mut read: Vec<KvSlot> = Vec::new();
        let mut slots: Vec<EngineSlot> = Vec::new();
        for row in &batch.rows {
            let end = row.computed_len + row.extend_len;
            assert!(row.extend_len > 0 && end <= row.tokens.len(), "{:?} runs past its tokens", row.slot);
            assert!(row.prompt_len <= row.tokens.len() && row.tokens.len() <= self.limits.context_len);
            let nodes = match row.kind {
                RowKind::Extend => 0,
                RowKind::Decode { draft } => {
                    assert_eq!(row.extend_len, 1, "a decode row runs one token");
                    assert!(row.samples(), "a decode row is at the end of its tokens");
                    assert!(draft.nodes <= self.script.draft.max_nodes(), "more nodes than the width allows");
                    draft.nodes
                }
            };
            assert!(row.kv_slots.len() >= end + nodes, "{:?}: drafts have no slots", row.slot);
            read.extend(&row.kv_slots[..row.computed_len]);
            written.extend(&row.kv_slots[row.computed_len..end + nodes]);
            slots.push(row.slot);
        }
        let count = slots.len();
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), count, "one row per request");
        let count = written.len();
        written.sort_unstable();
        written.dedup();
        assert_eq!(written.len(), count, "two rows write one KV slot");
        assert!(
            read.iter().all(|slot| written.binary_search(slot).is_err()),
            "a row writes what another reads"
        );
    }
}

impl Engine for ScriptedEngine {
    fn limits(&self) -> &EngineLimits {
        &self.limits
    }

    fn draft_status(&self) -> DraftStatus {
        self.script.draft
    }

    fn step(&mut self, batch: &Batch<'_>) -> Result<StepOutput, EngineError> {
        self.steps += 1;
        if self.script.break_at_step == Some(self.steps) {
            return Err(EngineError::Step { stage: "forward", reason: "scripted".to_owned() });
        }
        self.check(batch);
        self.rows += batch.rows.len() as u64;
        for row in &batch.rows {
            if !self.seated.contains(&row.slot) {
                self.seated.push(row.slot);
            }
        }
        let rows = batch.rows.iter().map(|row| self.run(row)).collect();
        Ok(StepOutput { rows, timing: StepTiming::default() })
    }

    fn release(&mut self, slot: EngineSlot) {
        self.seated.retain(|seated| *seated != slot);
    }

    fn flush(&mut self) {}
}

fn input_logprobs(row: &BatchRow<'_>) -> Vec<Option<TokenLogprobs>> {
    let Some(wanted) = &row.params.logprobs else { return Vec::new() };
    let Some(start) = wanted.start_len else { return Vec::new() };
    let end = (row.computed_len + row.extend_len).min(row.prompt_len);
    (start.max(row.computed_len)..end)
        .map(|position| (position > 0).then(|| token_logprobs(wanted, row.tokens[position])))
        .collect()
}

/// A number that depends on the token alone.
fn token_logprobs(wanted: &LogprobParams, id: TokenId) -> TokenLogprobs {
    let logprob = |id: TokenId| -((id % 97) as f32) / 8.0;
    let top = (0..wanted.top_num as TokenId).map(|rank| (logprob(rank), rank)).collect();
    let token_ids = wanted.token_ids.iter().map(|&id| (logprob(id), id)).collect();
    TokenLogprobs { logprob: logprob(id), top, token_ids }
}

fn mix(hash: u64, token: TokenId) -> u64 {
    let mut x = hash.rotate_left(5) ^ (u64::from(token) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 32)
}
