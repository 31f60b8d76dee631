//! The HTTP front end: validates, renders and tokenises requests, keeps the truth about each, and puts answers
//! together.
//!
//! Layers, bottom up: `refusal`; `tokenize`, `sampling` (pure); `mailbox` and `registry` (every
//! request, exactly one end each); `bridge` (the links); `intake` (body → running request); `reply` (rows →
//! answer); `http` (routes and dialects).

mod app;
mod bridge;
mod door;
mod http;
mod intake;
mod mailbox;
mod metrics;
mod probe;
mod refusal;
mod registry;
mod reply;
mod sampling;
mod serve;
mod tokenize;

pub use serve::run;
