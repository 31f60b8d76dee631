//! Owns who runs: the queue and its order, the budgets of a step, chunking of prompts, and retraction when memory
//! runs out. Moves requests between queue and seats; what an engine made of them is not its business.

use std::collections::VecDeque;

use proto::{FinishReason, ScheduleConfig, SchedulePolicy};

use crate::batch::{DraftLimit, EngineSlot, RowKind};
use crate::cache::PrefixCache;
use crate::request::{Phase, Request, Seat};

#[cfg(test)]
mod tests;

/// With more waiting, sorting by prefix costs more than it gives; then first come, first served.
const LPM_QUEUE_LIMIT: usize = 128;

/// How much of its remaining answer a running request is expected to need before others end: starts careful,
/// relaxes with every step, and becomes careful again when a retraction proves it wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GrowthRatio(f64);

impl GrowthRatio {
    const INITIAL: f64 = 0.7;
    const MIN: f64 = 0.1;
    const DECAY: f64 = 0.001;

    fn relax(&mut self) {
        self.0 = (self.0 - Self::DECAY).max(Self::MIN);
    }

    fn tighten(&mut self) {
        self.0 = (self.0 + 0.2).min(1.0);
    }

    fn of(self, tokens: usize) -> usize {
        (tokens as f64 * self.0) as usize
    }
}

/// The limits of a step.
#[derive(Debug, Clone)]
pub struct Budgets {
    pub max_running: usize,
    /// Prompt tokens run per step.
    pub chunk: usize,
    /// Prompt tokens admitted per step.
    pub max_prefill: usize,
    pub policy: SchedulePolicy,
    /// Prompt and answer of one request together.
    pub context_len: usize,
}

impl Budgets {
    pub fn new(config: &ScheduleConfig, context_len: usize) -> Self {
        let or_unlimited = |tokens: u32| if tokens == 0 { usize::MAX } else { tokens as usize };
        Self {
            max_running: (config.max_running_requests as usize).max(1),
            chunk: or_unlimited(config.chunked_prefill_size),
            max_prefill: or_unlimited(config.max_prefill_tokens),
            policy: config.policy,
            context_len,
        }
    }
}

/// One row of the next batch: which of the running requests, and what it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowPlan {
    pub index: usize,
    pub kind: RowKind,
    pub extend_len: usize,
}

/// The queue, the running requests and the memory they run in.
#[derive(Debug)]
pub struct Admission {
    pub cache: PrefixCache,
    budgets: Budgets,
    waiting: VecDeque<Request>,
    /// In the order of admission: the youngest is last.
    running: Vec<Request>,
    free_slots: Vec<EngineSlot>,
    /// Engine slots given back, of which the engine has not heard yet.
    vacated: Vec<EngineSlot>,
    growth: GrowthRatio,
    retracted: Retracted,
}

/// What retraction has cost, since it was last asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Retracted {
    pub requests: u64,
    pub input_tokens: u64,
    pub output_tokens: u64,
}

impl Admission {
    pub fn new(cache: PrefixCache, budgets: Budgets) -> Self {
        let free_slots = (0..budgets.max_running as u32).rev().map(EngineSlot).collect();
        Self {
            cache,
            budgets,
            waiting: VecDeque::new(),
            running: Vec::new(),
            free_slots,
            vacated: Vec::new(),
            growth: GrowthRatio(GrowthRatio::INITIAL),
            retracted: Retracted::default(),
        }
    }

    pub fn running(&self) -> &[Request] {
        &self.running
    }

    pub fn running_mut(&mut self) -> &mut [Request] {
        &mut self.running
    }

    pub fn waiting(&self) -> &VecDeque<Request> {
        &self.waiting
    }

    pub fn waiting_mut(&mut self) -> impl Iterator<Item = &mut Request> {
        self.waiting.iter_mut()
    }

    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Seats as if answers stayed short, so that memory runs out later.
    #[cfg(test)]
    pub fn expect_short_answers(&mut self) {
        self.growth = GrowthRatio(GrowthRatio::MIN);
    }

    pub fn take_retracted(&mut self) -> Retracted {
        std::mem::take(&mut self.retracted)
    }

    pub fn take_vacated(&mut self) -> Vec<EngineSlot> {
        std::mem::take(&mut self.vacated)
    }

    /// Tokens one request may have, prompt and answer together: the context, or the whole pool. The last token
    /// of an answer is never run and needs no slot.
    pub fn request_capacity(&self) -> usize {
        self.budgets.context_len.min(self.cache.capacity() + 1)
    }

    /// Longest prompt that can ever run, with one token behind it.
    pub fn max_prompt_len(&self) -> usize {
        self.request_capacity().saturating_sub(1)
    }

    /// Why a request can never run, if so.
    pub fn refusal(&self, prompt_len: usize) -> Option<FinishReason> {
        let most = self.max_prompt_len();
        (prompt_len > most).then(|| {
            let message = format!(
                "Input length ({prompt_len} tokens) exceeds the maximum allowed length ({most} tokens)."
            );
            FinishReason::failed(400, "BadRequestError", message)
        })
    }

    pub fn enqueue(&mut self, request: Request) {
        self.waiting.push_back(request);
    }

    /// Takes a request out of the queue.
    pub fn withdraw(&mut self, matches: impl Fn(&Request) -> bool) -> Option<Request> {
        let index = self.waiting.iter().position(matches)?;
        self.waiting.remove(index)
    }

    /// Ends a running request: what it computed becomes cached, the rest of its memory free.
    pub fn finish(&mut self, index: usize) -> Request {
        let mut request = self.running.remove(index);
        let seat = request.unseat(Phase::Done);
        self.give_back(&request, seat, request.computed_len());
        request
    }

    /// Makes what a request has computed known to others.
    pub fn share_prefix(&mut self, index: usize) {
        let request = &mut self.running[index];
        if let Some(mut seat) = request.seat.take() {
            self.cache.commit(&mut seat.lease, &request.tokens()[..request.computed_len()]);
            request.seat = Some(seat);
        }
    }

    /// Seats waiting requests while the step's budgets and the memory last. `draft_room` is the slots a verify
    /// step needs behind a request's tokens.
    pub fn admit(&mut self, draft_room: usize) {
        if self.waiting.is_empty() || self.running.len() >= self.budgets.max_running {
            return;
        }
        self.order_queue();
        let mut to_run: usize =
            self.running.iter().filter(|r| r.phase() == Phase::Prefill).map(Request::missing_len).sum();
        let mut admitted = 0;
        while self.running.len() < self.budgets.max_running && to_run < self.budgets.chunk {
            let Some(next) = self.waiting.front() else { break };
            // What is cached counts as computed; it is looked at again when the lease opens.
            let reusable = &next.tokens()[..next.reusable_len()];
            let uncached = next.tokens().len() - self.cache.lookup(&next.namespace, reusable);
            if admitted > 0 && admitted + uncached > self.budgets.max_prefill {
                break;
            }
            if !self.seat_front(draft_room) {
                break;
            }
            admitted += uncached;
            to_run += uncached;
        }
    }

    /// Chooses what runs next: one token and drafts for every decoding request, and prompt chunks with what the
    /// budget leaves. When memory does not suffice, the youngest give theirs back. No row drafts more than `draft`.
    pub fn pick(&mut self, draft: DraftLimit) -> Vec<RowPlan> {
        self.growth.relax();
        loop {
            let mut plans = self.pick_decodes(draft);
            self.pick_chunks(&mut plans);
            if !plans.is_empty() || self.running.is_empty() {
                return plans;
            }
            // Prompts that each wait for the memory of the others.
            self.retract_youngest();
        }
    }

    fn order_queue(&mut self) {
        if self.budgets.policy != SchedulePolicy::Lpm || self.waiting.len() > LPM_QUEUE_LIMIT {
            return;
        }
        let cache = &self.cache;
        self.waiting.make_contiguous().sort_by_cached_key(|request| {
            let prefix = cache.lookup(&request.namespace, &request.tokens()[..request.reusable_len()]);
            // Retracted ones stay in front.
            (request.retractions == 0, std::cmp::Reverse(prefix))
        });
    }

    /// Seats the first of the queue if its tokens and what the running ones still need fit together.
    fn seat_front(&mut self, draft_room: usize) -> bool {
        let Some(next) = self.waiting.front() else { return false };
        let lease = self.cache.open(&next.namespace, &next.tokens()[..next.reusable_len()]);
        let needed = self.cache.missing_pages(&lease, self.expected_len(next, draft_room));
        let reserved: usize = self.running.iter().map(|r| self.expected_pages(r, draft_room)).sum();
        let available = self.cache.available() / self.cache.page_size();
        if !self.running.is_empty() && needed + reserved > available {
            self.cache.release(lease, &[]);
            return false;
        }
        let mut request = self.waiting.pop_front().expect("looked at above");
        let slot = self.free_slots.pop().expect("one slot per request that may run");
        request.seat(Seat { slot, lease });
        self.running.push(request);
        true
    }

    /// Slots a request is expected to fill before others make room.
    fn expected_len(&self, request: &Request, draft_room: usize) -> usize {
        request.tokens().len() + draft_room.min(request.budget()) + self.growth.of(request.budget())
    }

    fn expected_pages(&self, request: &Request, draft_room: usize) -> usize {
        request
            .seat
            .as_ref()
            .map_or(0, |seat| self.cache.missing_pages(&seat.lease, self.expected_len(request, draft_room)))
    }

    fn pick_decodes(&mut self, most: DraftLimit) -> Vec<RowPlan> {
        let mut plans = Vec::new();
        let mut index = 0;
        while index < self.running.len() {
            if self.running[index].phase() != Phase::Decode {
                index += 1;
                continue;
            }
            // The youngest is never older than this one, and rows before this one keep what they have.
            match self.reserve_decode(index, most) {
                Some(draft) => {
                    plans.push(RowPlan { index, kind: RowKind::Decode { draft }, extend_len: 1 });
                    index += 1;
                }
                None => self.retract_youngest(),
            }
        }
        plans
    }

    /// Reserves one slot and as many for drafts as can be had; `None` when there is not even the one.
    fn reserve_decode(&mut self, index: usize, most: DraftLimit) -> Option<DraftLimit> {
        let request = &mut self.running[index];
        let wanted = request_draft_limit(request, most, self.budgets.context_len);
        let next_len = request.tokens().len();
        let lease = &mut request.seat.as_mut().expect("running requests have seats").lease;
        let room = lease.slots().len() + self.cache.available();
        let nodes = wanted.nodes.min(room.checked_sub(next_len)?);
        self.cache.reserve(lease, next_len + nodes).ok()?;
        Some(DraftLimit { nodes, depth: wanted.depth.min(nodes), ..wanted })
    }

    fn pick_chunks(&mut self, plans: &mut Vec<RowPlan>) {
        let mut budget = self.budgets.chunk;
        for (index, request) in self.running.iter_mut().enumerate() {
            if request.phase() != Phase::Prefill || budget == 0 {
                continue;
            }
            let (computed, missing) = (request.computed_len(), request.missing_len());
            let lease = &mut request.seat.as_mut().expect("running requests have seats").lease;
            let room = (lease.slots().len() + self.cache.available()).saturating_sub(computed);
            let extend_len = missing.min(budget).min(room);
            if extend_len == 0 || self.cache.reserve(lease, computed + extend_len).is_err() {
                continue;
            }
            plans.push(RowPlan { index, kind: RowKind::Extend, extend_len });
            budget -= extend_len;
        }
    }

    /// The youngest goes back to the front of the queue; what it has computed stays cached while there is room.
    fn retract_youngest(&mut self) {
        let Some(mut request) = self.running.pop() else { return };
        self.retracted.requests += 1;
        self.retracted.input_tokens += request.prompt_len() as u64;
        self.retracted.output_tokens += request.output_len() as u64;
        self.growth.tighten();
        let computed = request.computed_len();
        let seat = request.unseat(Phase::Waiting);
        self.give_back(&request, seat, computed);
        self.waiting.push_front(request);
    }

    fn give_back(&mut self, request: &Request, seat: Option<Seat>, computed: usize) {
        if let Some(Seat { slot, lease }) = seat {
            self.cache.release(lease, &request.tokens()[..computed]);
            self.free_slots.push(slot);
            self.vacated.push(slot);
        }
    }
}

/// What a request may draft of `most`, before memory is looked at. Accepted drafts and the bonus fit its budget and
/// the context.
fn request_draft_limit(request: &Request, most: DraftLimit, context_len: usize) -> DraftLimit {
    let own = request.params.sampling.max_draft_tokens.map_or(usize::MAX, |own| own as usize);
    if !most.enabled || own == 0 {
        return DraftLimit::OFF;
    }
    let nodes = most.nodes.min(own);
    let context_left = context_len.saturating_sub(request.tokens().len());
    let depth = request.budget().min(context_left).saturating_sub(1).min(nodes).min(most.depth);
    DraftLimit { enabled: true, nodes: if depth == 0 { 0 } else { nodes }, depth }
}
