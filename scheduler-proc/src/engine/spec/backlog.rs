//! Owns what draft workers that follow the target's hidden states know of their requests: tokens and slots, how far
//! their pools are filled, and the hidden state of every slot.
//!
//! A draft's row that depends on tokens `0..=i` lies where the target keeps token `i`, so whatever the prefix cache
//! shares of the target's pool it shares of the draft's too, and of the hidden states beside it. A cached prefix
//! therefore needs no recomputation, and the first row after it finds the hidden state it starts from.

use proto::TokenId;
use rustc_hash::FxHashMap;
use tch::{Device, Kind, Tensor};

use crate::batch::{EngineSlot, KvSlot};
use crate::engine::EngineError;
use crate::engine::spec::Commit;

pub(super) struct Backlog {
    /// The target's hidden state of every slot.
    hidden: Option<Tensor>,
    /// Pools that each request fills.
    pools: usize,
    slots: FxHashMap<EngineSlot, RequestRows>,
    /// Requests that left before all their rows were computed, though others may go on from their slots.
    left: Vec<RequestRows>,
}

/// What is kept for a request between steps. Positions are those of the last token that a row depends on.
#[derive(Debug)]
pub(super) struct RequestRows {
    pub(super) tokens: Vec<TokenId>,
    pub(super) kv_slots: Vec<KvSlot>,
    /// Per pool, positions whose rows are in it.
    pub(super) covered: Vec<usize>,
    /// Positions whose rows could be, since the target has their tokens.
    pub(super) possible: usize,
}

impl Backlog {
    /// `slots` is the size of the target's pool, `width` that of its hidden states; 0 for none.
    pub(super) fn new(pools: usize, width: usize, slots: usize, (kind, device): (Kind, Device)) -> Self {
        // Left as it comes: no slot is read before it is written.
        let hidden = (width > 0).then(|| Tensor::empty([slots as i64, width as i64], (kind, device)));
        Self { hidden, pools, slots: FxHashMap::default(), left: Vec::new() }
    }

    /// Takes in what became final. What is left behind by requests that are gone must be settled first, before a new
    /// owner of their slots changes what those hold.
    pub(super) fn learn(&mut self, commits: &[Commit<'_>], hidden: Option<&Tensor>) {
        if let Some(hidden) = hidden {
            self.keep_hidden(commits, hidden);
        }
        commits.iter().for_each(|commit| self.learn_one(commit));
    }

    fn keep_hidden(&mut self, commits: &[Commit<'_>], hidden: &Tensor) {
        let Some(pool) = &mut self.hidden else { return };
        let slots = commits.iter().flat_map(|commit| &commit.kv_slots[commit.computed.clone()]);
        let slots: Vec<i64> = slots.map(|&slot| i64::from(slot)).collect();
        let rows = commits.iter().flat_map(|commit| &commit.hidden_rows);
        let rows: Vec<i64> = rows.map(|&row| row as i64).collect();
        if rows.is_empty() {
            return;
        }
        let device = pool.device();
        let rows = hidden.index_select(0, &Tensor::from_slice(&rows).to_device(device));
        // What comes back is an alias of the pool.
        let _ = pool.index_copy_(0, &Tensor::from_slice(&slots).to_device(device), &rows);
    }

    fn learn_one(&mut self, commit: &Commit<'_>) {
        let pools = self.pools;
        let state = self.slots.entry(commit.slot).or_insert_with(|| RequestRows {
            tokens: Vec::new(),
            kv_slots: Vec::new(),
            // What the target did not compute it found in the prefix cache.
            covered: vec![commit.computed.start; pools],
            possible: 0,
        });
        state.tokens.truncate(commit.tokens.len() - commit.new_len);
        let known = state.tokens.len();
        state.tokens.extend_from_slice(&commit.tokens[known..]);
        state.kv_slots.clear();
        state.kv_slots.extend_from_slice(&commit.kv_slots[..commit.computed.end]);
        state.possible = commit.computed.end;
    }

    pub(super) fn get_mut(&mut self, slot: EngineSlot) -> Result<&mut RequestRows, EngineError> {
        self.slots.get_mut(&slot).ok_or_else(|| EngineError::Step {
            stage: "draft",
            reason: format!("nothing was committed for {slot:?}"),
        })
    }

    /// The target's hidden states of these slots.
    pub(super) fn features<'a>(&self, slots: impl Iterator<Item = &'a KvSlot>) -> Option<Tensor> {
        let pool = self.hidden.as_ref()?;
        let slots: Vec<i64> = slots.map(|&slot| i64::from(slot)).collect();
        Some(pool.index_select(0, &Tensor::from_slice(&slots).to_device(pool.device())))
    }

    /// Requests whose missing rows must be computed now: their slots are about to change hands.
    pub(super) fn take_left(&mut self) -> Vec<RequestRows> {
        std::mem::take(&mut self.left)
    }

    /// Takes requests out, to compute their rows; they come back by [`Self::put_back`].
    pub(super) fn take(&mut self, slots: impl Iterator<Item = EngineSlot>) -> Vec<(EngineSlot, RequestRows)> {
        slots.filter_map(|slot| self.slots.remove_entry(&slot)).collect()
    }

    /// All their rows are in the pools now.
    pub(super) fn put_back(&mut self, settled: Vec<(EngineSlot, RequestRows)>) {
        for (slot, mut rows) in settled {
            let RequestRows { covered, possible, .. } = &mut rows;
            covered.iter_mut().for_each(|covered| *covered = (*covered).max(*possible));
            self.slots.insert(slot, rows);
        }
    }

    pub(super) fn release(&mut self, slot: EngineSlot) {
        if let Some(rows) = self.slots.remove(&slot)
            && rows.covered.iter().any(|&covered| covered < rows.possible)
        {
            self.left.push(rows);
        }
    }

    /// Nobody goes on from what is left behind.
    pub(super) fn flush(&mut self) {
        self.left.clear();
    }
}
