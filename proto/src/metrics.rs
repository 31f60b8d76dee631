//! Owns the names of all metrics, and how the processes' series become one page: every process writes snapshots
//! of its registry into the run directory, and whoever serves `/metrics` joins them.
//!
//! [`names`] is the contract: each metric is one constant there, and is made by registering that constant.

mod buckets;
mod def;
mod join;
pub mod names;
mod process;
mod snapshot;

pub use def::{Def, Info, Registrar};
pub use join::{join, render};
pub use process::register_process_metrics;
pub use snapshot::SnapshotWriter;

/// What [`render`] makes.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

#[cfg(test)]
mod tests;
