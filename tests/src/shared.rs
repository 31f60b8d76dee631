//! Owns the servers that several tests use: one per set of flags, alive while any of its users is.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use crate::server::{Server, ServerOptions};

type Slot = Arc<Mutex<Weak<Server>>>;

static SERVERS: LazyLock<Mutex<HashMap<ServerOptions, Slot>>> = LazyLock::new(Mutex::default);

/// The server with these options; started when nobody holds it yet. The last one to let go ends it, so that its
/// clean end is checked, too (a static would never be dropped).
pub fn shared(options: ServerOptions) -> Arc<Server> {
    let slot = {
        let mut servers = SERVERS.lock().unwrap_or_else(PoisonError::into_inner);
        servers.entry(options.clone()).or_default().clone()
    };
    // Held while starting: a second user waits for the first one's server.
    let mut server = slot.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(running) = server.upgrade() {
        return running;
    }
    let started = Arc::new(Server::start(options));
    *server = Arc::downgrade(&started);
    started
}
