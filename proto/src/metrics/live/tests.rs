//! Tests of the counts beside a snapshot and of the log behind them.

use prometheus::Registry;

use super::*;
use crate::metrics::{Format, Registrar, SnapshotWriter, fold, join, names};

fn counts(steps: u64, at: &[u64]) -> Vec<LiveCounts> {
    let positions = at.iter().enumerate().map(|(position, count)| (position.to_string(), *count));
    vec![
        LiveCounts {
            name: names::SPEC_VERIFY_STEPS.info.name.into(),
            label: String::new(),
            values: vec![(String::new(), steps)],
        },
        LiveCounts {
            name: names::SPEC_PROPOSED_AT_POSITION.info.name.into(),
            label: "position".into(),
            values: positions.collect(),
        },
    ]
}

fn snapshot(dir: &Path, incarnation: u64, steps: u64) {
    let registry = Registry::new();
    let to = Registrar::new(&registry, [("model_name", "tiny".to_owned())]);
    names::SPEC_VERIFY_STEPS.register(&to).unwrap().inc_by(steps);
    SnapshotWriter::new(dir, Role::Scheduler, Incarnation(incarnation)).write(&registry).unwrap();
}

fn live(dir: &Path, incarnation: u64) -> LiveFile {
    LiveFile::create(dir, Role::Scheduler, Incarnation(incarnation)).unwrap()
}

const STEPS: &str = "sglang:spec_verify_steps_total{model_name=\"tiny\"}";

#[test]
fn the_page_shows_the_latest_counts_also_of_the_dead() {
    let dir = tempfile::tempdir().unwrap();
    let page = || Format::Prometheus.render(&join(dir.path(), None));
    snapshot(dir.path(), 1, 3);
    let mut file = live(dir.path(), 1);
    file.commit(b"", &counts(5, &[4, 1])).unwrap();
    let position = "sglang:spec_proposed_at_position_total{model_name=\"tiny\",position=\"1\"} 1\n";
    assert!(page().contains(&format!("{STEPS} 5\n")) && page().contains(position), "{}", page());
    file.commit(b"", &counts(6, &[4, 1])).unwrap();
    fold(dir.path(), Role::Scheduler).unwrap();
    assert!(page().contains(&format!("{STEPS} 6\n")) && page().contains(position), "{}", page());
    snapshot(dir.path(), 2, 0);
    live(dir.path(), 2).commit(b"", &counts(10, &[])).unwrap();
    assert!(page().contains(&format!("{STEPS} 16\n")), "{}", page());
}

#[test]
fn a_record_exists_with_the_counts_that_include_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = live(dir.path(), 1);
    let records = || Remains::of_others(dir.path(), Role::Scheduler, Incarnation(9)).pop().unwrap().records;
    assert!(records().is_empty());
    file.commit(b"first", &counts(1, &[])).unwrap();
    file.commit(b"", &counts(1, &[])).unwrap();
    file.commit(b"second", &counts(2, &[])).unwrap();
    assert_eq!(records(), [b"first".to_vec(), b"second".to_vec()]);
    // Killed between the two writes.
    file.append(b"third").unwrap();
    assert_eq!(records().len(), 2);
    file.commit(b"another", &counts(3, &[])).unwrap();
    assert_eq!(records()[2], b"another");
    file.rewrite(b"all", &counts(3, &[])).unwrap();
    file.commit(b"more", &counts(4, &[])).unwrap();
    assert_eq!(records(), [b"all".to_vec(), b"more".to_vec()]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

/// Whatever part of the last write is missing, the step before it stands.
#[test]
fn a_torn_slot_gives_way_to_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = live(dir.path(), 1);
    (1..=3).for_each(|step| file.commit(b"r", &counts(step, &[step; 8])).unwrap());
    let whole = std::fs::read(&file.path).unwrap();
    let (number, ..) = slot(&whole).unwrap();
    assert_eq!(number, 3);
    for at in 0..SLOT_HEADER + 20 {
        let mut torn = whole.clone();
        torn[SLOT + at] ^= 0x55;
        assert_eq!(slot(&torn).unwrap().0, 2, "byte {at}");
    }
    assert!(slot(&[]).is_none() && slot(&[7; 100]).is_none());
}

#[test]
fn junk_is_no_file_of_anybody() {
    let dir = tempfile::tempdir().unwrap();
    snapshot(dir.path(), 1, 3);
    for junk in [vec![], vec![0xff; 100], vec![0; 40_000], vec![0xff; 40_000]] {
        std::fs::write(dir.path().join("scheduler.0000000000000001.live"), &junk).unwrap();
        assert!(Format::Prometheus.render(&join(dir.path(), None)).contains(&format!("{STEPS} 3\n")));
        let remains = Remains::of_others(dir.path(), Role::Scheduler, Incarnation(9));
        assert!(remains.iter().all(|remains| remains.records.is_empty()));
    }
}

#[test]
fn remains_are_kept_until_their_counts_are_folded() {
    let dir = tempfile::tempdir().unwrap();
    snapshot(dir.path(), 1, 3);
    live(dir.path(), 1).commit(b"r", &counts(5, &[])).unwrap();
    let remains = || Remains::of_others(dir.path(), Role::Scheduler, Incarnation(2));
    remains().pop().unwrap().discard();
    assert_eq!(remains().len(), 1);
    fold(dir.path(), Role::Scheduler).unwrap();
    remains().pop().unwrap().discard();
    assert!(remains().is_empty());
    assert!(Format::Prometheus.render(&join(dir.path(), None)).contains(&format!("{STEPS} 5\n")));
}
