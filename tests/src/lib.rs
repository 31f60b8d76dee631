//! A whole server under test: the real binaries on a free port with a private home, every log kept for the failure
//! report, and nothing left behind afterwards.
//!
//! Layers, bottom up: `logs` (what the processes wrote), `process` (who is alive), `http` and `sse` (talking to it),
//! `metrics` and `exposition` (reading `/metrics`, and its rules), `server` (all of it together), `shared` (one server for many tests).

mod exposition;
mod http;
mod logs;
mod metrics;
mod other_server;
mod process;
mod server;
mod shared;
mod sse;

pub use exposition::{Exposition, KEPT_FOR_DASHBOARDS, complaints};
pub use http::{Reply, Stream};
pub use metrics::Metrics;
pub use other_server::OtherServer;
pub use process::{is_alive, peak_mib, wait_until};
pub use server::{Ended, Server, ServerOptions, repository, target_dir};
pub use shared::shared;
pub use sse::Events;
