//! Owns the names of all metrics, and how the processes' series become one page: every process writes snapshots
//! of its registry into the run directory, and whoever serves `/metrics` joins them. When a process dies, the launcher
//! folds what its lives have counted into one file.
//!
//! [`names`] is the contract: each metric is one constant there, and is made by registering that constant.

mod buckets;
mod def;
mod fold;
mod format;
mod join;
mod live;
pub mod names;
mod process;
mod snapshot;

pub use def::{Def, Info, Mode, Registrar};
pub use fold::fold;
pub use format::Format;
pub use join::join;
pub use live::{LiveCounts, LiveFile, Remains};
pub use process::{register_process_metrics, resident_bytes};
pub use snapshot::{SnapshotWriter, unreadable};

#[cfg(test)]
mod tests;
