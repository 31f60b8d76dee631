//! Tests of what a scheduler leaves to its successor.

use super::*;
use crate::testing::request;

const ME: Incarnation = Incarnation(1);
const NEXT: Incarnation = Incarnation(2);

fn spec(steps: u64) -> SpecCounters {
    SpecCounters { verify_ct: steps, acceptance_histogram: vec![steps], ..SpecCounters::default() }
}

fn step(journal: &mut Journal, rid: &str, start: usize, ids: &[TokenId], finish: Option<FinishReason>) {
    let end = start + ids.len();
    journal.entries.push(Entry {
        rid: rid.into(),
        lane: Lane(0),
        start,
        ids: ids.to_vec(),
        spec: spec(end as u64),
        finish,
        logprobs: None,
        age: 0,
    });
    journal.commit(&[]);
}

fn back(rid: &str, have: &[TokenId]) -> TokenizedGenerateReqInput {
    let mut input = request(rid, vec![1, 2], 30);
    input.output_ids = have.to_vec();
    input
}

#[test]
fn a_request_goes_on_behind_what_was_made_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = Journal::open(dir.path(), ME).unwrap();
    step(&mut first, "a", 0, &[5, 6], None);
    step(&mut first, "b", 0, &[7], None);
    step(&mut first, "a", 2, &[8], None);
    step(&mut first, "b", 1, &[9], Some(FinishReason::Length { length: 2 }));
    let mut second = Journal::open(dir.path(), NEXT).unwrap();
    let a = second.claim(&back("a", &[5])).unwrap();
    assert_eq!((a.ids, a.spec, a.finish), (vec![6, 8], spec(3), None));
    let b = second.claim(&back("b", &[7, 9])).unwrap();
    assert_eq!((b.ids, b.spec, b.finish), (vec![], spec(2), Some(FinishReason::Length { length: 2 })));
    assert_eq!(second.claim(&back("a", &[5])), None, "claimed once");
    assert_eq!(second.claim(&back("c", &[])), None);
}

#[test]
fn what_does_not_fit_what_the_client_has_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = Journal::open(dir.path(), ME).unwrap();
    for rid in ["other", "longer", "before", "logprobs"] {
        step(&mut first, rid, 3, &[5, 6], None);
    }
    let mut second = Journal::open(dir.path(), NEXT).unwrap();
    assert_eq!(second.claim(&back("other", &[1, 2, 3, 4])), None);
    assert_eq!(second.claim(&back("longer", &[1, 2, 3, 5, 6, 7])), None);
    assert_eq!(second.claim(&back("before", &[1, 2])), None);
    let mut input = back("logprobs", &[1, 2, 3, 5]);
    input.return_logprob = true;
    assert_eq!(second.claim(&input), None);
}

#[test]
fn it_outlives_a_successor_that_never_worked_and_no_more() {
    let dir = tempfile::tempdir().unwrap();
    step(&mut Journal::open(dir.path(), ME).unwrap(), "a", 0, &[5], None);
    drop(Journal::open(dir.path(), NEXT).unwrap());
    assert!(Journal::open(dir.path(), Incarnation(3)).unwrap().claim(&back("a", &[])).is_some());
    assert_eq!(Journal::open(dir.path(), Incarnation(4)).unwrap().claim(&back("a", &[])), None);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "earlier files are gone");
}

#[test]
fn a_directory_that_cannot_be_written_costs_no_service() {
    let dir = tempfile::tempdir().unwrap();
    let full = dir.path().join("full");
    std::fs::write(&full, "a file, not a folder").unwrap();
    assert!(Journal::open(&full, ME).is_err());
}
