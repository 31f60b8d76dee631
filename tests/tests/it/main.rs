//! Everything that a client or an operator can see, tried on real processes: with the real default model, and with
//! every draft worker on tiny ones.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should panic where it stands")]

mod abort;
mod adaptive;
mod chat;
mod default_model;
mod docs;
mod ends;
mod errors;
mod every_worker;
mod faults;
mod generate;
mod golden_counts;
mod lifecycle;
mod lossless;
mod metrics;
mod numbers;
mod openai_client;
mod opt_out;
mod pool;
mod spec;
mod support;
mod told;
mod workers;
