//! Owns the step: draft → forward → choose → compact → commit. Plain decoding is the same path without drafts.

use std::borrow::Cow;
use std::ops::Range;
use std::time::{Duration, Instant};

use proto::{AcceptanceRule, TokenId};
use rustc_hash::FxHashMap;

use super::input_logprobs::{self, Due};
use super::tree::DraftTree;
use super::verify::{Verifier, Walk};
use super::{Commit, DraftInput, Drafter};
use crate::batch::{
    Batch, BatchRow, DraftLimit, EngineSlot, KvSlot, RowKind, RowOutput, StepOutput, StepTiming, VerifyCount,
};
use crate::engine::sample::Path;
use crate::engine::target::{ForwardRow, LogitRows, Logits, Target};
use crate::engine::{DraftStatus, Engine, EngineError, EngineLimits};

/// An engine over a model that can verify, with or without a draft worker.
pub struct SpecEngine<T: Target> {
    target: T,
    limits: EngineLimits,
    drafter: Option<Box<dyn Drafter<T::Hidden>>>,
    verifier: Verifier,
    slots: FxHashMap<EngineSlot, SlotState>,
}

/// What is kept for a request between steps.
#[derive(Debug, Default)]
struct SlotState {
    /// Tokens the draft worker has been told of.
    committed: usize,
    due: Option<Due>,
}

/// One row on its way through the model.
struct Submission<'a> {
    row: &'a BatchRow<'a>,
    tree: DraftTree,
    /// The row takes part in a verify step, if with an empty tree.
    verifies: bool,
    /// Tokens to run: the row's own, then the draft's.
    tokens: Vec<TokenId>,
    /// As [`ForwardRow::parents`]; `None` for a chain.
    parents: Option<Vec<usize>>,
    logits: LogitRows,
}

/// What became final of one row; see [`Commit`].
struct Final<'a> {
    row: &'a BatchRow<'a>,
    tokens: Cow<'a, [TokenId]>,
    computed: Range<usize>,
    hidden_rows: Vec<usize>,
}

impl<T: Target> SpecEngine<T> {
    pub fn new(target: T, limits: EngineLimits, drafter: Option<Box<dyn Drafter<T::Hidden>>>) -> Self {
        Self { target, limits, drafter, verifier: Verifier::default(), slots: FxHashMap::default() }
    }

    #[must_use]
    pub fn accepting_by(mut self, rule: AcceptanceRule) -> Self {
        self.verifier = Verifier::new(rule);
        self
    }

    fn caught_up(&self) -> Duration {
        self.drafter.as_ref().map_or(Duration::ZERO, |drafter| drafter.caught_up())
    }

    /// One tree per row of the batch, empty where nothing may or can be drafted.
    fn draft(&mut self, batch: &Batch<'_>) -> Result<Vec<DraftTree>, EngineError> {
        let mut trees = vec![DraftTree::new(); batch.rows.len()];
        let Some(drafter) = &mut self.drafter else { return Ok(trees) };
        let mut owners = Vec::with_capacity(batch.rows.len());
        let mut inputs = Vec::with_capacity(batch.rows.len());
        for (index, row) in batch.rows.iter().enumerate() {
            let limit = draft_limit(row);
            if limit.enabled && limit.nodes > 0 && limit.depth > 0 {
                owners.push((index, limit));
                inputs.push(DraftInput {
                    slot: row.slot,
                    tokens: row.tokens,
                    prompt_len: row.prompt_len,
                    params: row.params,
                    kv_slots: row.kv_slots,
                    limit,
                    draw: self.verifier.draw(&row.params.sampling),
                });
            }
        }
        if inputs.is_empty() {
            return Ok(trees);
        }
        let drafts = drafter.draft(&inputs)?;
        if drafts.len() != inputs.len() {
            let reason = format!("{} trees for {} rows", drafts.len(), inputs.len());
            return Err(EngineError::Step { stage: "draft", reason });
        }
        for ((index, limit), tree) in owners.into_iter().zip(drafts) {
            // The limit keeps a request inside its budget and its KV slots, so no worker is trusted with it.
            trees[index] = tree.truncated(limit);
        }
        Ok(trees)
    }

    fn forward(&mut self, submissions: &[Submission<'_>]) -> Result<(Logits, T::Hidden), EngineError> {
        let rows: Vec<_> = submissions.iter().map(Submission::forward_row).collect();
        let (logits, hidden) = self.target.run(&rows)?;
        let expect = submissions.iter().map(Submission::logit_rows).sum::<usize>() * logits.vocab_size;
        if logits.values.len() != expect {
            let reason = format!("{} logits where {expect} were asked for", logits.values.len());
            return Err(EngineError::Step { stage: "forward", reason });
        }
        Ok((logits, hidden))
    }

    /// Scores and chooses for every row; also what each row accepted, for the rows without an error.
    fn choose(&mut self, submissions: &[Submission<'_>], logits: &Logits) -> Vec<(RowOutput, Vec<usize>)> {
        let mut first = 0;
        let mut outputs = Vec::with_capacity(submissions.len());
        for submission in submissions {
            let state = self.slots.entry(submission.row.slot).or_default();
            let rows = |index: usize| logits.row(first + index);
            let chosen = choose_row(&mut self.verifier, state, submission, rows);
            outputs.push(chosen.unwrap_or_else(|reason| {
                let output = RowOutput { error: Some(reason), ..RowOutput::default() };
                (output, Vec::new())
            }));
            first += submission.logit_rows();
        }
        outputs
    }

    /// Tells the draft worker of the tokens up to each row's root that no earlier step told it of: a request can
    /// come to decode without an extend step of its own, after a retraction or behind a prefix cache.
    fn catch_up(&mut self, batch: &Batch<'_>) -> Result<(), EngineError> {
        let decoding = batch.rows.iter().filter(|row| row.kind != RowKind::Extend);
        let finals = decoding.map(|row| Final {
            row,
            tokens: Cow::Borrowed(row.tokens),
            computed: row.computed_len..row.computed_len,
            hidden_rows: Vec::new(),
        });
        self.commit(finals.collect(), None)
    }

    /// Tells the draft worker what became final in this step.
    fn commit_step(
        &mut self,
        submissions: &[Submission<'_>],
        outputs: &[RowOutput],
        accepted: &[Vec<usize>],
        hidden: &T::Hidden,
    ) -> Result<(), EngineError> {
        if self.drafter.is_none() {
            return Ok(());
        }
        let mut finals = Vec::with_capacity(submissions.len());
        let mut first = 0;
        for ((submission, output), accepted) in submissions.iter().zip(outputs).zip(accepted) {
            if output.error.is_none() {
                finals.push(submission.outcome(output, accepted, first));
            }
            first += submission.tokens.len();
        }
        self.commit(finals, Some(hidden))
    }

    fn commit(&mut self, finals: Vec<Final<'_>>, hidden: Option<&T::Hidden>) -> Result<(), EngineError> {
        let Some(drafter) = &mut self.drafter else { return Ok(()) };
        let mut commits = Vec::with_capacity(finals.len());
        for Final { row, tokens, computed, hidden_rows } in &finals {
            let state = self.slots.entry(row.slot).or_default();
            let new_len = tokens.len().saturating_sub(state.committed);
            if new_len > 0 {
                state.committed = tokens.len();
                commits.push(Commit {
                    slot: row.slot,
                    tokens,
                    new_len,
                    kv_slots: row.kv_slots,
                    computed: computed.clone(),
                    hidden_rows: hidden_rows.clone(),
                    shares: row.kind == RowKind::Extend,
                });
            }
        }
        if commits.is_empty() { Ok(()) } else { drafter.commit(&commits, hidden) }
    }
}

impl<T: Target> Engine for SpecEngine<T> {
    fn limits(&self) -> &EngineLimits {
        &self.limits
    }

    fn draft_status(&self) -> DraftStatus {
        self.drafter.as_ref().map_or_else(DraftStatus::default, |drafter| drafter.status())
    }

    fn step(&mut self, batch: &Batch<'_>) -> Result<StepOutput, EngineError> {
        if batch.rows.is_empty() {
            return Ok(StepOutput::default());
        }
        let start = Instant::now();
        self.catch_up(batch)?;
        let told = Instant::now();
        let before = self.caught_up();
        let trees = self.draft(batch)?;
        let drafted = Instant::now();
        let caught_up = self.caught_up() - before;

        let drafting = self.drafter.is_some();
        let submissions: Vec<_> =
            batch.rows.iter().zip(trees).map(|(row, tree)| Submission::new(row, tree, drafting)).collect();
        let (logits, hidden) = self.forward(&submissions)?;
        let forwarded = Instant::now();

        let (rows, accepted): (Vec<_>, Vec<_>) = self.choose(&submissions, &logits).into_iter().unzip();
        let chosen = Instant::now();

        let moves = compaction(&submissions, &accepted);
        if !moves.is_empty() {
            self.target.move_kv(&moves);
        }
        let moved = Instant::now();
        self.commit_step(&submissions, &rows, &accepted, &hidden)?;

        let timing = StepTiming {
            draft: (drafted - told).saturating_sub(caught_up).as_secs_f64(),
            extend: (told - start + caught_up + moved.elapsed()).as_secs_f64(),
            forward: (forwarded - drafted + (moved - chosen)).as_secs_f64(),
            choose: (chosen - forwarded).as_secs_f64(),
        };
        Ok(StepOutput { rows, timing })
    }

    fn release(&mut self, slot: EngineSlot) {
        self.slots.remove(&slot);
        if let Some(drafter) = &mut self.drafter {
            drafter.release(slot);
        }
    }

    fn flush(&mut self) {
        if let Some(drafter) = &mut self.drafter {
            drafter.flush();
        }
    }
}

impl<'a> Submission<'a> {
    fn new(row: &'a BatchRow<'a>, tree: DraftTree, drafting: bool) -> Self {
        let mut tokens = row.tokens[row.computed_len..row.computed_len + row.extend_len].to_vec();
        tokens.extend_from_slice(tree.tokens());
        let parents =
            (!tree.is_chain()).then(|| std::iter::once(0).chain(tree.parents().iter().copied()).collect());
        let verifies = drafting && matches!(row.kind, RowKind::Decode { draft } if draft.enabled);
        let logits = match (row.kind, input_logprobs::first_logits(row)) {
            (RowKind::Decode { .. }, _) => LogitRows::From(0),
            (RowKind::Extend, Some(first)) => LogitRows::From(first),
            (RowKind::Extend, None) if row.samples() => LogitRows::Last,
            (RowKind::Extend, None) => LogitRows::None,
        };
        Self { row, tree, verifies, tokens, parents, logits }
    }

    fn forward_row(&self) -> ForwardRow<'_> {
        ForwardRow {
            tokens: &self.tokens,
            context_len: self.row.computed_len,
            kv_slots: self.row.kv_slots,
            parents: self.parents.as_deref(),
            logits: self.logits,
        }
    }

    fn logit_rows(&self) -> usize {
        match self.logits {
            LogitRows::None => 0,
            LogitRows::Last => 1,
            LogitRows::From(first) => self.tokens.len() - first,
        }
    }

    /// What became final of the row. `first` is where the row's tokens begin in the pass.
    fn outcome(&self, output: &RowOutput, accepted: &[usize], first: usize) -> Final<'a> {
        let row = self.row;
        let known = row.computed_len + row.extend_len;
        let mut tokens = row.tokens[..known].to_vec();
        tokens.extend(output.tokens.iter().map(|token| token.id));
        let drafts = accepted.iter().map(|&node| first + row.extend_len + node);
        Final {
            row,
            tokens: Cow::Owned(tokens),
            computed: row.computed_len..known + accepted.len(),
            hidden_rows: (first..first + row.extend_len).chain(drafts).collect(),
        }
    }

    /// Index of the first run token that has logits.
    fn first_logits(&self) -> usize {
        self.tokens.len() - self.logit_rows()
    }
}

/// What a row may draft, also inside the KV slots it was given.
fn draft_limit(row: &BatchRow<'_>) -> DraftLimit {
    match row.kind {
        RowKind::Extend => DraftLimit::OFF,
        RowKind::Decode { draft } => {
            let spare = row.kv_slots.len().saturating_sub(row.computed_len + row.extend_len);
            DraftLimit { nodes: draft.nodes.min(spare), ..draft }
        }
    }
}

/// One row's output and accepted nodes, or why it has none. `logits(i)` is the row's `i`-th row of logits.
fn choose_row<'l>(
    verifier: &mut Verifier,
    state: &mut SlotState,
    submission: &Submission<'_>,
    logits: impl Fn(usize) -> &'l [f32],
) -> Result<(RowOutput, Vec<usize>), String> {
    let row = submission.row;
    let first = submission.first_logits();
    let prompt_logits = |token| logits(token - first);
    let input_logprobs = input_logprobs::score(verifier.chooser(), row, &mut state.due, prompt_logits)
        .map_err(|error| error.to_string())?;
    if !row.samples() {
        return Ok((RowOutput { input_logprobs, ..RowOutput::default() }, Vec::new()));
    }
    let mut path = Path::new(row.params, row.tokens, row.prompt_len);
    let root = row.extend_len - 1;
    let Walk { accepted, tokens } = verifier
        .walk(&mut path, &submission.tree, |node| logits(root + node - first))
        .map_err(|error| error.to_string())?;
    let verify = submission.verifies.then(|| VerifyCount {
        proposed_at: submission.tree.nodes_at(),
        accepted: accepted.len(),
        source: submission.tree.source(),
    });
    Ok((RowOutput { tokens, verify, input_logprobs, error: None }, accepted))
}

/// Brings accepted drafts next to their context: the k-th accepted one belongs k slots behind the root. A node
/// never moves up, so moves made in order overwrite nothing that is still to be moved.
fn compaction(submissions: &[Submission<'_>], accepted: &[Vec<usize>]) -> Vec<(KvSlot, KvSlot)> {
    let mut moves = Vec::new();
    for (submission, accepted) in submissions.iter().zip(accepted) {
        let drafts = &submission.row.kv_slots[submission.row.computed_len + submission.row.extend_len..];
        for (to, &from) in accepted.iter().enumerate() {
            if from != to {
                moves.push((drafts[from], drafts[to]));
            }
        }
    }
    moves
}
