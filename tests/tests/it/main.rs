//! Everything that a client or an operator can see, tried on real processes with the real default model.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should panic where it stands")]

mod abort;
mod chat;
mod errors;
mod faults;
mod generate;
mod lifecycle;
mod metrics;
mod openai_client;
mod spec;
mod support;
