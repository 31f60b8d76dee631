//! Owns the names of all metrics, and how the processes' series become one page: every process writes snapshots
//! of its registry into the run directory, and whoever serves `/metrics` joins them.
