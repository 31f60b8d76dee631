//! Owns the thread that runs all links of a process. It has a runtime of its own with a single thread, which makes a
//! round trip several times faster than sharing one, and heartbeats that a busy process does not hold up.

use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Serialize, de::DeserializeOwned};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{oneshot, watch};

use super::drops::drop_frame;
use super::inbox::Inbox;
use super::outbox::Outbox;
use super::port::Port;
use super::session::{Deliver, Peering};
use super::task::Task;
use super::{LinkEvent, LinkHandle, LinkSpec};
use crate::ids::{Incarnation, Role};
use crate::wire;

/// How long the sockets' leftovers may hold up the end of the thread.
const LEFTOVERS: Duration = Duration::from_millis(100);

/// The thread that runs all links of a process.
pub struct LinkThread {
    core: Arc<Core>,
    me: (Role, Incarnation),
    /// The links opened through this value; it closes these.
    tasks: Mutex<Vec<tokio::task::JoinHandle<()>>>,
    closing: watch::Sender<bool>,
}

struct Core {
    runtime: Handle,
    /// Dropped to end the thread.
    running: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LinkThread {
    /// `role` and `incarnation` are said in every hello.
    pub fn start(role: Role, incarnation: Incarnation) -> io::Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .thread_name("links-io")
            .max_blocking_threads(1)
            .build()?;
        let handle = runtime.handle().clone();
        let (running, stopped) = oneshot::channel();
        let thread =
            std::thread::Builder::new().name("links".to_owned()).spawn(move || turn(runtime, stopped))?;
        let core = Arc::new(Core { runtime: handle, running: Some(running), thread: Some(thread) });
        Ok(Self::on(core, (role, incarnation)))
    }

    fn on(core: Arc<Core>, me: (Role, Incarnation)) -> Self {
        Self { core, me, tasks: Mutex::new(Vec::new()), closing: watch::Sender::new(false) }
    }

    /// The same thread with a set of links of its own, which are closed on their own.
    pub(crate) fn sibling(&self) -> Self {
        Self::on(Arc::clone(&self.core), self.me)
    }

    /// Runs something else on the thread. It must not block, and ends with the thread at the latest.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.core.runtime.spawn(task);
    }

    /// Makes the thread's runtime the current one, for what must be registered in one.
    pub(crate) fn enter(&self) -> tokio::runtime::EnterGuard<'_> {
        self.core.runtime.enter()
    }

    pub fn open<Out, In>(
        &self,
        spec: LinkSpec,
        on_event: impl FnMut(LinkEvent<In>) + Send + 'static,
    ) -> LinkHandle<Out>
    where
        Out: Serialize + Send + 'static,
        In: DeserializeOwned + Send + 'static,
    {
        let name = spec.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let outbox = Arc::new(Outbox::new());
        let deliver = decoded(name.clone(), on_event);
        let peering =
            Peering::new(name, self.me, spec.peer, Arc::clone(&outbox), Inbox::new(spec.ack), deliver);
        let task = Task::new(Port::new(spec.path, spec.side), peering, self.closing.subscribe());
        let task = self.core.runtime.spawn(task.run());
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).push(task);
        LinkHandle::new(outbox)
    }

    /// Waits until the peers have acknowledged everything, at most `deadline`; then closes all links. Blocks, so
    /// an async caller goes through a thread; must not be called from a link's callback.
    pub fn close(self, deadline: Duration) {
        self.closing.send_replace(true);
        let tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        let (done, closed) = mpsc::channel();
        self.spawn(async move {
            let aborts: Vec<_> = tasks.iter().map(tokio::task::JoinHandle::abort_handle).collect();
            let _ = tokio::time::timeout(deadline, futures::future::join_all(tasks)).await;
            aborts.iter().for_each(tokio::task::AbortHandle::abort);
            // The tasks that write the sockets' last frames are ready to run, and run in turn.
            for _ in 0..16 {
                tokio::task::yield_now().await;
            }
            let _ = done.send(());
        });
        // An error means that the thread is gone, and all links with it.
        let _ = closed.recv();
    }
}

impl Drop for LinkThread {
    fn drop(&mut self) {
        self.closing.send_replace(true);
        for task in self.tasks.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            task.abort();
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.running.take();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

fn turn(runtime: Runtime, stopped: oneshot::Receiver<()>) {
    let _ = runtime.block_on(stopped);
    runtime.shutdown_timeout(LEFTOVERS);
}

/// Decodes messages on their way to the application; those that make no sense go no further.
fn decoded<In>(link: String, mut on_event: impl FnMut(LinkEvent<In>) + Send + 'static) -> Deliver
where
    In: DeserializeOwned + 'static,
{
    Box::new(move |event| {
        on_event(match event {
            LinkEvent::Up { peer, restarted } => LinkEvent::Up { peer, restarted },
            LinkEvent::Down => LinkEvent::Down,
            LinkEvent::Acked { up_to } => LinkEvent::Acked { up_to },
            LinkEvent::Message { seq, message } => match wire::decode(message) {
                Ok(message) => LinkEvent::Message { seq, message },
                Err(error) => {
                    drop_frame(&link, &error);
                    return false;
                }
            },
        });
        true
    })
}
