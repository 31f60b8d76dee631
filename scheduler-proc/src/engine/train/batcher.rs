//! Owns continuous batching without a server: many conversations straight through [`Engine::step`], each in KV slots
//! of its own. Generation and evaluation run on it.

use std::collections::VecDeque;
use std::ops::Range;

use anyhow::{Result, anyhow, bail};
use proto::{SpecCounters, TokenId};

use crate::batch::{Batch, BatchRow, DraftLimit, EngineSlot, KvSlot, RowKind, RowOutput, RowParams};
use crate::engine::Engine;

/// Prompt tokens that start in one step, at least one conversation's.
const PREFILL_TOKENS: usize = 4096;

/// A prompt to answer.
#[derive(Debug, Clone)]
pub(super) struct Job {
    pub number: u64,
    pub prompt: Vec<TokenId>,
    pub params: RowParams,
}

/// What goes on behind an answer.
#[derive(Debug, Clone)]
pub(super) struct NextTurn {
    pub tokens: Vec<TokenId>,
    pub params: RowParams,
}

/// A conversation at the end of an answer.
#[derive(Debug)]
pub(super) struct Conversation {
    pub job: u64,
    pub slot: EngineSlot,
    pub tokens: Vec<TokenId>,
    /// Where the answers are.
    pub answers: Vec<Range<usize>>,
    pub temperatures: Vec<f64>,
    pub spec: SpecCounters,
    /// By depth, drafts proposed.
    pub proposed_at: Vec<u64>,
}

/// What happens at the end of an answer.
pub(super) trait Listener {
    /// The next turn, if the conversation goes on.
    fn answered(&mut self, conversation: &Conversation) -> Result<Option<NextTurn>>;

    /// The conversation is over, its slot not yet released. `false` ends the whole run.
    fn ended(&mut self, conversation: Conversation) -> Result<bool>;
}

/// An engine with the conversations that run in it.
pub(super) struct Batcher<E> {
    engine: E,
    seats: Vec<Seat>,
    free: Vec<Place>,
    /// Tokens of the longest conversation.
    room: usize,
}

/// Where a conversation runs.
struct Place {
    slot: EngineSlot,
    kv_slots: Vec<KvSlot>,
}

struct Seat {
    place: Place,
    conversation: Conversation,
    params: RowParams,
    computed: usize,
    answer_from: usize,
    prompt_len: usize,
}

impl<E: Engine> Batcher<E> {
    /// Up to `rows` conversations at once, of up to `room` tokens each.
    pub(super) fn new(engine: E, rows: usize, room: usize) -> Result<Self> {
        let limits = engine.limits();
        let room = room.min(limits.context_len);
        let slots = room + engine.draft_status().max_nodes();
        let rows = rows.min(limits.kv_slots / slots);
        if rows == 0 {
            bail!("{} KV slots do not hold one conversation of {slots}", limits.kv_slots);
        }
        let place = |row: usize| Place {
            slot: EngineSlot(row as u32),
            kv_slots: (row * slots..(row + 1) * slots).map(|slot| slot as KvSlot).collect(),
        };
        Ok(Self { seats: Vec::with_capacity(rows), free: (0..rows).rev().map(place).collect(), room, engine })
    }

    /// Runs jobs until there are none left, or the listener has enough.
    pub(super) fn run(
        &mut self,
        jobs: &mut dyn Iterator<Item = Result<Job>>,
        listener: &mut dyn Listener,
    ) -> Result<()> {
        let mut waiting = VecDeque::new();
        loop {
            self.admit(jobs, &mut waiting)?;
            if self.seats.is_empty() {
                return Ok(());
            }
            self.step()?;
            if !self.settle(listener)? {
                self.abandon();
                return Ok(());
            }
        }
    }

    /// Seats new conversations; prompts that fit no seat are left out.
    fn admit(
        &mut self,
        jobs: &mut dyn Iterator<Item = Result<Job>>,
        waiting: &mut VecDeque<Job>,
    ) -> Result<()> {
        let mut budget = PREFILL_TOKENS;
        while !self.free.is_empty() {
            let Some(job) = waiting.pop_front().map(Ok).or_else(|| jobs.next()).transpose()? else { break };
            if job.prompt.is_empty() || job.prompt.len() >= self.room {
                tracing::warn!(job = job.number, tokens = job.prompt.len(), "prompt left out for its length");
                continue;
            }
            if job.prompt.len() > budget && budget < PREFILL_TOKENS {
                waiting.push_front(job);
                break;
            }
            budget = budget.saturating_sub(job.prompt.len());
            let place = self.free.pop().expect("the loop's condition");
            self.seats.push(Seat::new(place, job));
        }
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        let nodes = self.engine.draft_status().max_nodes();
        let room = self.room;
        let rows = self.seats.iter().map(|seat| seat.row(nodes, room)).collect();
        let output = self.engine.step(&Batch { rows })?;
        for (seat, row) in self.seats.iter_mut().zip(output.rows) {
            seat.take(row, room)?;
        }
        Ok(())
    }

    /// Hears what the listener makes of ended answers. `false` when it has enough.
    fn settle(&mut self, listener: &mut dyn Listener) -> Result<bool> {
        let mut index = 0;
        while index < self.seats.len() {
            let seat = &mut self.seats[index];
            if !seat.is_at_end(self.room) {
                index += 1;
                continue;
            }
            seat.conversation.answers.push(seat.answer_from..seat.conversation.tokens.len());
            seat.conversation.temperatures.push(seat.params.sampling.temperature);
            let next = match seat.conversation.tokens.len() < self.room {
                true => listener.answered(&seat.conversation)?,
                false => None,
            };
            if let Some(next) = next.filter(|next| seat.has_room_for(next, self.room)) {
                seat.go_on(next);
                continue;
            }
            let Seat { place, conversation, .. } = self.seats.swap_remove(index);
            let slot = place.slot;
            let goes_on = listener.ended(conversation)?;
            self.engine.release(slot);
            self.free.push(place);
            if !goes_on {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn abandon(&mut self) {
        for seat in self.seats.drain(..) {
            self.engine.release(seat.place.slot);
            self.free.push(seat.place);
        }
    }
}

impl Seat {
    fn new(place: Place, job: Job) -> Self {
        let prompt_len = job.prompt.len();
        let conversation = Conversation {
            job: job.number,
            slot: place.slot,
            tokens: job.prompt,
            answers: Vec::new(),
            temperatures: Vec::new(),
            spec: SpecCounters::default(),
            proposed_at: Vec::new(),
        };
        Self { place, conversation, params: job.params, computed: 0, answer_from: prompt_len, prompt_len }
    }

    /// Tokens the answer may still have.
    fn left(&self, room: usize) -> usize {
        let tokens = self.conversation.tokens.len();
        let answer = tokens - self.answer_from;
        (self.params.sampling.max_new_tokens as usize).saturating_sub(answer).min(room - tokens)
    }

    fn row(&self, nodes: usize, room: usize) -> BatchRow<'_> {
        let tokens = &self.conversation.tokens;
        let extend_len = tokens.len() - self.computed;
        // Accepted drafts and the bonus stay inside what the answer may have.
        let depth = self.left(room).saturating_sub(1).min(nodes);
        let draft = match depth {
            0 => DraftLimit::OFF,
            depth => DraftLimit { enabled: true, nodes, depth },
        };
        let decodes = extend_len == 1 && tokens.len() > self.answer_from;
        BatchRow {
            slot: self.place.slot,
            kind: if decodes { RowKind::Decode { draft } } else { RowKind::Extend },
            params: &self.params,
            tokens,
            prompt_len: self.prompt_len,
            computed_len: self.computed,
            extend_len,
            kv_slots: &self.place.kv_slots,
        }
    }

    /// Takes in what a step made: up to an end token or the answer's limit.
    fn take(&mut self, output: RowOutput, room: usize) -> Result<()> {
        if let Some(error) = output.error {
            return Err(anyhow!("job {}: {error}", self.conversation.job));
        }
        let accepted = output.tokens.len().saturating_sub(1);
        let ids: Vec<TokenId> = output.tokens.iter().map(|token| token.id).collect();
        let ends = |id: &TokenId| self.params.terminators.contains(id);
        let kept = ids.iter().position(ends).map_or(ids.len(), |at| at + 1).min(self.left(room));
        self.computed = self.conversation.tokens.len() + accepted;
        if let Some(verify) = output.verify {
            self.conversation.spec.record(verify.proposed(), accepted, kept.min(accepted));
            let proposed = &mut self.conversation.proposed_at;
            proposed.resize(proposed.len().max(verify.proposed_at.len()), 0);
            proposed.iter_mut().zip(&verify.proposed_at).for_each(|(sum, &nodes)| *sum += u64::from(nodes));
        }
        self.conversation.tokens.extend_from_slice(&ids[..kept]);
        Ok(())
    }

    fn is_at_end(&self, room: usize) -> bool {
        let last = self.conversation.tokens.last();
        let ended = last.is_some_and(|last| self.params.terminators.contains(last));
        self.conversation.tokens.len() > self.answer_from && (ended || self.left(room) == 0)
    }

    /// A turn that leaves no room for an answer worth having is not begun.
    fn has_room_for(&self, next: &NextTurn, room: usize) -> bool {
        self.conversation.tokens.len() + next.tokens.len() + next.params.sampling.max_new_tokens as usize / 2
            <= room
    }

    fn go_on(&mut self, next: NextTurn) {
        // Drafts behind an end token may have been accepted; their keys are not of this conversation.
        self.computed = self.computed.min(self.conversation.tokens.len() - 1);
        self.conversation.tokens.extend(next.tokens);
        self.params = next.params;
        self.answer_from = self.conversation.tokens.len();
        self.prompt_len = self.answer_from;
    }
}
