//! Owns the launcher's own series, and what becomes of those of dead children.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use prometheus::{GaugeVec, IntCounter, IntCounterVec, Registry};
use proto::metrics::{Registrar, SnapshotWriter, fold, names, register_process_metrics, unreadable};
use proto::{Incarnation, Member, Role, ServerHealth};

/// The launcher's series, shown like any other process's by a snapshot.
pub(crate) struct LauncherMetrics {
    dir: PathBuf,
    registry: Registry,
    snapshots: SnapshotWriter,
    up: GaugeVec,
    restarts: IntCounterVec,
    skipped: IntCounter,
    /// Files already counted as skipped that still lie there.
    bad: BTreeSet<PathBuf>,
    /// The last write failed; said once.
    failing: bool,
}

impl LauncherMetrics {
    pub(crate) fn new(dir: &Path, incarnation: Incarnation) -> prometheus::Result<Self> {
        let registry = Registry::new();
        let to = Registrar::new(&registry, []);
        register_process_metrics(&to, Role::Launcher)?;
        Ok(Self {
            dir: dir.to_owned(),
            snapshots: SnapshotWriter::new(dir, Role::Launcher, incarnation),
            up: names::PROCESS_UP.register(&to)?,
            restarts: names::PROCESS_RESTARTS.register(&to)?,
            skipped: names::METRICS_FILES_SKIPPED.register(&to)?,
            bad: BTreeSet::new(),
            failing: false,
            registry,
        })
    }

    /// Takes in how the children are doing, and shows it. An error is news: it is given once until a write works.
    pub(crate) fn publish(&mut self, health: &ServerHealth) -> Option<String> {
        for process in &health.processes {
            let number = process.process.number().to_string();
            let labels = &[process.process.role.as_str(), &number];
            self.up.with_label_values(labels).set(f64::from(u8::from(process.ready)));
            let restarts = self.restarts.with_label_values(labels);
            restarts.inc_by(process.restarts.saturating_sub(restarts.get()));
        }
        let bad = unreadable(&self.dir);
        self.skipped.inc_by(bad.difference(&self.bad).count() as u64);
        self.bad = bad;
        let written = self.snapshots.write(&self.registry);
        let was_failing = std::mem::replace(&mut self.failing, written.is_err());
        written.err().filter(|_| !was_failing).map(|error| format!("metrics cannot be written: {error}"))
    }

    /// A child is dead: its counts are kept, its gauges vanish.
    pub(crate) fn bury(&mut self, member: Member) -> Option<String> {
        let counted = self.bad.iter().filter(|path| is_of(path, member)).count();
        match fold(&self.dir, member) {
            Ok(unreadable) => {
                self.skipped.inc_by(unreadable.saturating_sub(counted) as u64);
                self.bad.retain(|path| !is_of(path, member));
                None
            }
            Err(error) => Some(format!("metrics of {member} cannot be folded: {error}")),
        }
    }
}

fn is_of(path: &Path, member: Member) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.strip_prefix(&member.to_string()).is_some_and(|rest| rest.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use proto::{Heartbeat, ProcessHealth};

    use super::*;

    fn health(ready: bool, restarts: u64) -> ServerHealth {
        let process = ProcessHealth {
            process: Role::Scheduler.into(),
            alive: ready,
            ready,
            restarts,
            heartbeat_age_ms: 1,
            heartbeat: Heartbeat::default(),
        };
        ServerHealth { processes: vec![process] }
    }

    fn page(dir: &Path) -> String {
        proto::metrics::Format::Prometheus.render(&proto::metrics::join(dir, None))
    }

    #[test]
    fn what_happens_to_children_is_on_the_page() {
        let dir = tempfile::tempdir().unwrap();
        let mut metrics = LauncherMetrics::new(dir.path(), Incarnation(1)).unwrap();
        assert_eq!(metrics.publish(&health(true, 0)), None);
        assert!(page(dir.path()).contains("sglang:process_up{number=\"0\",role=\"scheduler\"} 1\n"));
        metrics.publish(&health(false, 3));
        let shown = page(dir.path());
        assert!(shown.contains("sglang:process_up{number=\"0\",role=\"scheduler\"} 0\n"), "{shown}");
        assert!(
            shown.contains("sglang:process_restarts_total{number=\"0\",role=\"scheduler\"} 3\n"),
            "{shown}"
        );
    }

    #[test]
    fn a_bad_file_is_counted_once_however_it_goes() {
        let dir = tempfile::tempdir().unwrap();
        let mut metrics = LauncherMetrics::new(dir.path(), Incarnation(1)).unwrap();
        std::fs::write(dir.path().join("scheduler.2.pb"), b"\xff\xff\xff\xff\xff\x7fjunk").unwrap();
        metrics.publish(&health(true, 0));
        metrics.publish(&health(true, 0));
        assert!(page(dir.path()).contains("sglang:metrics_files_skipped_total 1\n"));
        assert_eq!(metrics.bury(Role::Scheduler.into()), None);
        std::fs::write(dir.path().join("tokenizer.2.pb"), b"\xff\xff\xff\xff\xff\x7fjunk").unwrap();
        assert_eq!(metrics.bury(Role::Tokenizer.into()), None);
        metrics.publish(&health(true, 0));
        assert!(page(dir.path()).contains("sglang:metrics_files_skipped_total 2\n"), "{}", page(dir.path()));
    }
}
