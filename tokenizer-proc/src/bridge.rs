//! Owns the links of this process and the replies that belong to no request. What arrives is routed on the
//! link thread, without blocking.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use proto::link::{AckMode, LinkEvent, LinkHandle, LinkSpec, LinkThread, SendError, Side};
use proto::{
    AbortReq, Endpoints, FlushCacheReqInput, FlushCacheReqOutput, Front, GetInternalStateReq, InternalState,
    RequestId, Role, SchedulerInfo, ServeConfig, ToScheduler, ToTokenizer,
};
use tokio::sync::{oneshot, watch};
use tracing::info;

use crate::refusal::Refusal;
use crate::registry::Registry;

/// How the scheduler is doing, as far as this process can tell.
#[derive(Debug, Clone, Default)]
pub(crate) struct SchedulerView {
    /// It takes requests: its link stands, and its model is loaded.
    pub up: bool,
    /// Lanes on which text cannot arrive.
    pub silent_lanes: usize,
    /// What the scheduler said when it became ready; kept while it is away.
    pub info: Option<SchedulerInfo>,
}

/// The way to the other processes.
pub(crate) struct Bridge {
    scheduler: LinkHandle<ToScheduler>,
    inbox: Arc<Inbox>,
    next_id: AtomicU64,
    /// There are other tokenizer processes.
    has_siblings: bool,
    /// Keeps the links open; nothing is said on them.
    _text: Vec<LinkHandle<()>>,
}

/// What the link thread writes to.
struct Inbox {
    registry: Arc<Registry>,
    view: watch::Sender<SchedulerView>,
    waiting: Mutex<HashMap<u64, Waiting>>,
    /// Aborts for other tokenizer processes that the scheduler has not taken, by their numbers on the link.
    relayed: Mutex<Vec<(u64, AbortReq)>>,
    scheduler: OnceLock<LinkHandle<ToScheduler>>,
}

enum Waiting {
    Flush(oneshot::Sender<FlushCacheReqOutput>),
    State(oneshot::Sender<InternalState>),
}

impl Bridge {
    pub(crate) fn open(
        links: &LinkThread,
        config: &ServeConfig,
        front: Front,
        registry: Arc<Registry>,
    ) -> Self {
        let (topology, endpoints) = (config.topology, Endpoints::new(&config.run_dir));
        let silent_lanes = topology.lanes_of_front(front).count();
        let inbox = Arc::new(Inbox {
            registry: Arc::clone(&registry),
            view: watch::Sender::new(SchedulerView { silent_lanes, ..SchedulerView::default() }),
            waiting: Mutex::default(),
            relayed: Mutex::default(),
            scheduler: OnceLock::new(),
        });
        let spec = |path, side, peer| LinkSpec { path, side, peer, ack: AckMode::Auto };
        let from_scheduler = Arc::clone(&inbox);
        let scheduler = links.open::<ToScheduler, ToTokenizer>(
            spec(endpoints.scheduler(front), Side::Connect, Role::Scheduler),
            move |event| from_scheduler.scheduler_event(event),
        );
        let outbox = scheduler.clone();
        registry.connect(Box::new(move |message| outbox.send(message)));
        // Nothing was set before.
        let _ = inbox.scheduler.set(scheduler.clone());
        let text = topology.lanes_of_front(front).map(|lane| {
            let inbox = Arc::clone(&inbox);
            let spec = spec(endpoints.text(lane), Side::Bind, Role::Detokenizer);
            links.open::<(), ToTokenizer>(spec, move |event| inbox.text_event(event))
        });
        let text = text.collect();
        let has_siblings = topology.tokenizer_worker_num > 1;
        Self { scheduler, inbox, next_id: AtomicU64::new(1), has_siblings, _text: text }
    }

    pub(crate) fn scheduler_view(&self) -> watch::Receiver<SchedulerView> {
        self.inbox.view.subscribe()
    }

    /// Ends what a client calls `rid`, or everything, in whichever tokenizer process it is. Unknown names have no
    /// effect.
    pub(crate) fn abort(&self, rid: Option<&RequestId>) -> Result<(), Refusal> {
        self.inbox.registry.abort(rid);
        if self.has_siblings {
            let abort = AbortReq { rid: rid.cloned(), abort_all: rid.is_none() };
            self.inbox.relay(abort).map_err(|error| {
                Refusal::Unavailable(format!("The other processes cannot be reached: {error}"))
            })?;
        }
        Ok(())
    }

    /// Empties the scheduler's caches; waits up to `timeout` for it to become idle.
    pub(crate) async fn flush_cache(&self, timeout: Duration) -> Result<FlushCacheReqOutput, Refusal> {
        let (sender, reply) = oneshot::channel();
        let message =
            |id| ToScheduler::FlushCache(FlushCacheReqInput { id, timeout_s: timeout.as_secs_f64() });
        self.ask(Waiting::Flush(sender), message, reply, timeout + Duration::from_secs(30)).await
    }

    pub(crate) async fn internal_state(&self, timeout: Duration) -> Result<InternalState, Refusal> {
        let (sender, reply) = oneshot::channel();
        let message = |id| ToScheduler::GetInternalState(GetInternalStateReq { id });
        self.ask(Waiting::State(sender), message, reply, timeout).await
    }

    async fn ask<T>(
        &self,
        waiting: Waiting,
        message: impl FnOnce(u64) -> ToScheduler,
        reply: oneshot::Receiver<T>,
        timeout: Duration,
    ) -> Result<T, Refusal> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.inbox.waiting().insert(id, waiting);
        let _forget = Forget { inbox: &self.inbox, id };
        self.scheduler
            .send(&message(id))
            .map_err(|error| Refusal::Unavailable(format!("The scheduler cannot be reached: {error}")))?;
        match tokio::time::timeout(timeout, reply).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) => Err(Refusal::Unavailable("The scheduler was restarted.".to_owned())),
            Err(_) => Err(Refusal::Unavailable("The scheduler did not answer in time.".to_owned())),
        }
    }
}

/// Forgets a question when its asker is gone, answered or not.
struct Forget<'a> {
    inbox: &'a Inbox,
    id: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.inbox.waiting().remove(&self.id);
    }
}

impl Inbox {
    fn scheduler_event(&self, event: LinkEvent<ToTokenizer>) {
        match event {
            LinkEvent::Up { peer, restarted } => {
                info!(%peer, restarted, "scheduler connected");
                if restarted {
                    // Its senders' drop tells those who wait.
                    self.waiting().clear();
                    let lost = std::mem::take(&mut *self.relayed());
                    lost.into_iter().for_each(|(_, abort)| drop(self.relay(abort)));
                }
                // A new one listens before it has loaded its model, and says when it has.
                self.registry.scheduler_up(restarted);
            }
            LinkEvent::Down => {
                // A death is the launcher's to report; at an end asked for this is normal.
                info!("scheduler disconnected");
                self.view.send_modify(|view| view.up = false);
                self.registry.scheduler_down();
            }
            LinkEvent::Message { message, .. } => self.message(message),
            LinkEvent::Acked { up_to } => {
                self.relayed().retain(|(seq, _)| *seq > up_to);
                self.registry.flush_aborts();
            }
        }
    }

    fn text_event(&self, event: LinkEvent<ToTokenizer>) {
        match event {
            LinkEvent::Up { peer, restarted } => {
                info!(%peer, restarted, "detokenizer connected");
                self.view.send_modify(|view| view.silent_lanes -= 1);
            }
            LinkEvent::Down => {
                info!("detokenizer disconnected");
                self.view.send_modify(|view| view.silent_lanes += 1);
            }
            LinkEvent::Message { message, .. } => self.message(message),
            LinkEvent::Acked { .. } => {}
        }
    }

    fn message(&self, message: ToTokenizer) {
        match message {
            ToTokenizer::Text(batch) => self.registry.route(batch),
            ToTokenizer::SchedulerReady(info) => {
                self.registry.scheduler_ready();
                self.view.send_modify(|view| (view.up, view.info) = (true, Some(info)));
            }
            ToTokenizer::AbortFromElsewhere(abort) => {
                self.registry.abort(abort.rid.as_ref().filter(|_| !abort.abort_all))
            }
            ToTokenizer::Leaving => self.registry.scheduler_leaves(),
            ToTokenizer::Refused { rid, reason } => self.registry.refuse(&rid, reason),
            ToTokenizer::FlushCache(reply) => {
                if let Some(Waiting::Flush(asker)) = self.waiting().remove(&reply.id) {
                    // The asker may have given up meanwhile.
                    let _ = asker.send(reply);
                }
            }
            ToTokenizer::InternalState(reply) => {
                if let Some(Waiting::State(asker)) = self.waiting().remove(&reply.id) {
                    let _ = asker.send(reply.internal_state);
                }
            }
        }
    }

    /// Remembered until the scheduler has it: one that dies takes what it was sent along.
    fn relay(&self, abort: AbortReq) -> Result<(), SendError> {
        let mut relayed = self.relayed();
        let scheduler = self.scheduler.get().ok_or(SendError::Closed)?;
        let seq = scheduler.send(&ToScheduler::AbortElsewhere(abort.clone()))?;
        relayed.push((seq, abort));
        Ok(())
    }

    fn relayed(&self) -> MutexGuard<'_, Vec<(u64, AbortReq)>> {
        self.relayed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<u64, Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
