//! A target that is a table, a loop that schedules, and draft workers of all sorts: what the engine's tests
//! share.

mod coupling;
mod input_logprobs;
mod law;
mod lossless;
mod steps;
mod workers;

use std::cell::RefCell;
use std::rc::Rc;

use proto::{SamplingParams, SpecCounters, TokenId};

use super::*;
use crate::batch::{Batch, BatchRow, ChosenToken, KvSlot, RowKind, TokenLogprobs};
use crate::engine::rng::uniform;
use crate::engine::target::{ForwardRow, LogitRows, Logits, Target};
use crate::engine::{Engine, EngineLimits};

pub(super) const VOCAB: usize = 24;
pub(super) const POOL: usize = 2048;
/// Rows at most; each has every `ROWS`-th slot of the pool.
const ROWS: usize = 16;
/// A context with this token last has logits that are not finite.
pub(super) const POISON: TokenId = 23;

/// What a KV slot holds, and for which position it was made.
type Pool = Rc<RefCell<Vec<Option<(TokenId, usize)>>>>;

/// Its logits are a function of the last three tokens, which it reads through the KV slots: a token that is not
/// where the contract says, or was made for another position, is noticed at once.
pub(super) struct TableTarget {
    pool: Pool,
    table: Table,
}

/// Logits after a path.
type Table = fn(&[TokenId]) -> Vec<f32>;

impl TableTarget {
    fn context(&self, row: &ForwardRow<'_>) -> Vec<TokenId> {
        let pool = self.pool.borrow();
        let at = |position: usize| {
            let (token, made_for) = pool[row.kv_slots[position] as usize].expect("the slot is filled");
            assert_eq!(made_for, position, "the slot was filled for another position");
            token
        };
        (0..row.context_len).map(at).collect()
    }
}

impl Target for TableTarget {
    type Hidden = ();

    fn run(&mut self, rows: &[ForwardRow<'_>]) -> Result<(Logits, ()), EngineError> {
        let mut values = Vec::new();
        for row in rows {
            let context = self.context(row);
            let mut paths: Vec<Vec<TokenId>> = Vec::new();
            for (index, &token) in row.tokens.iter().enumerate() {
                let parent = row.parents.map_or(index.wrapping_sub(1), |parents| parents[index]);
                let mut path = if index == 0 { context.clone() } else { paths[parent].clone() };
                path.push(token);
                let slot = row.kv_slots[row.context_len + index];
                self.pool.borrow_mut()[slot as usize] = Some((token, path.len() - 1));
                let wanted = match row.logits {
                    LogitRows::None => false,
                    LogitRows::Last => index + 1 == row.tokens.len(),
                    LogitRows::From(first) => index >= first,
                };
                if wanted {
                    values.extend((self.table)(&path));
                }
                paths.push(path);
            }
        }
        Ok((Logits { vocab_size: (self.table)(&[0]).len(), values }, ()))
    }

    fn move_kv(&mut self, moves: &[(KvSlot, KvSlot)]) {
        let mut pool = self.pool.borrow_mut();
        for &(from, to) in moves {
            // A moved token keeps its place in the sequence: a draft at depth d was made for root + d.
            pool[to as usize] = pool[from as usize];
        }
    }
}

/// Logits after a path: a favourite that depends on the last two tokens, so that answers repeat themselves, and
/// noise that depends on the last three.
pub(super) fn table(path: &[TokenId]) -> Vec<f32> {
    let back = |n: usize| path.len().checked_sub(n).map_or(0, |index| path[index]);
    let (a, b, c) = (back(1), back(2), back(3));
    if a == POISON {
        return vec![f32::NAN; VOCAB];
    }
    let favourite = (a * 5 + b * 3 + 1) % 7;
    (0..VOCAB as TokenId)
        .map(|token| {
            let noise = uniform(u64::from(a), u64::from(b * 100 + c), token) as f32;
            noise * 2.5 + if token == favourite { 3.0 } else { 0.0 }
                - if token == POISON { 50.0 } else { 0.0 }
        })
        .collect()
}

#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) prompt: Vec<TokenId>,
    pub(super) params: RowParams,
    pub(super) max_new: usize,
    pub(super) speculates: bool,
}

/// How the loop schedules.
#[derive(Debug, Clone, Copy)]
pub(super) struct Schedule {
    /// Steps between admissions.
    pub(super) stagger: usize,
    /// Prompt tokens per request and step.
    pub(super) chunk: usize,
    pub(super) max_depth: usize,
    /// Depths of the steps, over and over; `max_depth` where there are none.
    pub(super) depths: &'static [usize],
    /// At this step the first running request loses its KV slots and starts over.
    pub(super) retract_at: Option<usize>,
}

pub(super) const SCHEDULE: Schedule =
    Schedule { stagger: 2, chunk: 4, max_depth: 64, depths: &[], retract_at: None };

#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct Outcome {
    pub(super) output: Vec<ChosenToken>,
    pub(super) counters: SpecCounters,
    pub(super) input_logprobs: Vec<Option<TokenLogprobs>>,
    pub(super) error: Option<String>,
    /// Tokens made by prefill.
    pub(super) prefilled: usize,
}

impl Outcome {
    pub(super) fn ids(&self) -> Vec<TokenId> {
        self.output.iter().map(|token| token.id).collect()
    }
}

struct Running {
    request: Request,
    slot: EngineSlot,
    tokens: Vec<TokenId>,
    kv_slots: Vec<KvSlot>,
    computed: usize,
    outcome: Outcome,
}

impl Running {
    fn new(index: usize, request: &Request, nodes: usize) -> Self {
        let len = request.prompt.len() + request.max_new + nodes;
        assert!(len <= POOL / ROWS && index < ROWS);
        // From the back: never the identity.
        let kv_slots = (0..len).map(|i| (POOL - 1 - i * ROWS - index) as KvSlot).collect();
        Self {
            request: request.clone(),
            slot: EngineSlot(index as u32),
            tokens: request.prompt.clone(),
            kv_slots,
            computed: 0,
            outcome: Outcome::default(),
        }
    }

    fn is_done(&self) -> bool {
        self.outcome.error.is_some() || self.outcome.output.len() >= self.request.max_new
    }

    fn row(&self, schedule: Schedule, nodes: usize) -> BatchRow<'_> {
        let missing = self.tokens.len() - self.computed;
        let decodes = missing == 1 && self.computed >= self.request.prompt.len();
        let budget = self.request.max_new - self.outcome.output.len();
        let draft =
            DraftLimit { enabled: true, nodes, depth: schedule.max_depth.min(budget.saturating_sub(1)) };
        BatchRow {
            slot: self.slot,
            kind: match decodes {
                true if self.request.speculates => RowKind::Decode { draft },
                true => RowKind::Decode { draft: DraftLimit::OFF },
                false => RowKind::Extend,
            },
            params: &self.request.params,
            tokens: &self.tokens,
            prompt_len: self.request.prompt.len(),
            computed_len: self.computed,
            extend_len: missing.min(schedule.chunk),
            kv_slots: &self.kv_slots,
        }
    }
}

pub(super) fn engine(drafter: Option<Box<dyn Drafter>>) -> (SpecEngine<TableTarget>, Pool) {
    engine_over(table, drafter)
}

fn engine_over(table: Table, drafter: Option<Box<dyn Drafter>>) -> (SpecEngine<TableTarget>, Pool) {
    let pool = Pool::new(RefCell::new(vec![None; POOL]));
    let vocab_size = table(&[0]).len();
    let limits = EngineLimits {
        kv_slots: POOL,
        context_len: 256,
        vocab_size,
        weight_bytes: 0,
        weight_types: std::collections::BTreeMap::new(),
        gathered_bytes: 0,
        kv_bytes: 0,
    };
    (SpecEngine::new(TableTarget { pool: pool.clone(), table }, limits, drafter), pool)
}

/// Serves all requests to their end.
pub(super) fn serve(
    requests: &[Request],
    schedule: Schedule,
    drafter: Option<Box<dyn Drafter>>,
) -> Vec<Outcome> {
    let drafts = drafter.is_some();
    let (mut engine, pool) = engine(drafter);
    let nodes = engine.draft_status().max_nodes();
    let mut all: Vec<_> = (0..).zip(requests).map(|(i, request)| Running::new(i, request, nodes)).collect();
    for step in 0.. {
        let max_depth = schedule.depths.get(step % schedule.depths.len().max(1));
        let schedule = Schedule { max_depth: max_depth.copied().unwrap_or(schedule.max_depth), ..schedule };
        let admitted = requests.len().min(step / schedule.stagger.max(1) + 1);
        let active: Vec<_> = (0..admitted).filter(|&index| !all[index].is_done()).collect();
        if active.is_empty() && admitted == requests.len() {
            break;
        }
        if schedule.retract_at == Some(step)
            && let Some(&first) = active.first()
        {
            engine.release(all[first].slot);
            all[first].computed = 0;
            all[first].kv_slots.rotate_left(3);
        }
        let rows = active.iter().map(|&index| all[index].row(schedule, nodes)).collect();
        let outputs = engine.step(&Batch { rows }).unwrap().rows;
        assert_eq!(outputs.len(), active.len());
        for (&index, output) in active.iter().zip(outputs) {
            take(&mut all[index], schedule, drafts, output);
            check_pool(&all[index], &pool);
        }
    }
    all.into_iter().map(|running| running.outcome).collect()
}

/// What a scheduler does with a row's output.
fn take(running: &mut Running, schedule: Schedule, drafts: bool, output: crate::batch::RowOutput) {
    let row = running.row(schedule, usize::MAX);
    let (samples, decodes, ran) = (row.samples(), row.kind != RowKind::Extend, row.extend_len);
    if output.error.is_some() {
        assert!(output.tokens.is_empty() && output.verify.is_none());
        running.outcome.error = output.error;
        return;
    }
    let verifies = drafts && decodes && running.request.speculates;
    assert_eq!(output.verify.is_some(), verifies);
    let accepted = output.verify.as_ref().map_or(0, |verify| verify.accepted);
    assert_eq!(output.tokens.len(), if samples { accepted + 1 } else { 0 });
    if let Some(verify) = &output.verify {
        assert!(accepted <= verify.proposed_at.len(), "no deeper than the tree");
        assert!(verify.proposed_at.len() <= schedule.max_depth);
        running.outcome.counters.record(verify.proposed(), accepted, accepted);
    }
    if samples && !decodes {
        running.outcome.prefilled += 1;
    }
    running.computed += ran + accepted;
    running.tokens.extend(output.tokens.iter().map(|token| token.id));
    running.outcome.output.extend(output.tokens);
    running.outcome.input_logprobs.extend(output.input_logprobs);
}

/// Every computed position's slot holds that position's token.
fn check_pool(running: &Running, pool: &Pool) {
    let pool = pool.borrow();
    for position in 0..running.computed {
        let held = pool[running.kv_slots[position] as usize];
        assert_eq!(held, Some((running.tokens[position], position)));
    }
}

pub(super) fn request(seed: u64, max_new: usize, sampling: SamplingParams) -> Request {
    let prompt = (0..5 + seed as u32 % 9).map(|i| (i * i + seed as u32) % 7).collect();
    let sampling = SamplingParams { sampling_seed: seed, ..sampling };
    let params = RowParams { sampling, terminators: vec![2, 5], logprobs: None };
    Request { prompt, params, max_new, speculates: true }
}
