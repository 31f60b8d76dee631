//! Queue, batch, KV pool, prefix cache, model, draft workers, sampling and the acceptance counters. Never text.

pub mod batch;
pub mod cache;
pub mod engine;
