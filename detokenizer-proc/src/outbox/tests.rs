//! Tests of delivery and acknowledgement, with a link that fills up, refuses and dies.

use std::cell::RefCell;

use proto::link::Backlog;
use proto::{RowProgress, SpecCounters};

use super::*;

/// A link with room for `room` more messages, each of at most `limit` rows.
struct FakeLink {
    room: RefCell<usize>,
    limit: usize,
    sent: RefCell<Vec<Vec<TextRow>>>,
}

impl FakeLink {
    fn new(room: usize) -> Self {
        Self { room: RefCell::new(room), limit: usize::MAX, sent: RefCell::default() }
    }

    fn texts(&self) -> Vec<String> {
        self.sent.borrow().iter().map(|rows| rows.iter().map(|row| row.text.as_str()).collect()).collect()
    }
}

impl SendText for FakeLink {
    fn send(&self, message: &ToTokenizer) -> Result<u64, SendError> {
        let ToTokenizer::Text(batch) = message else { panic!("only text is sent") };
        let rows = batch.clone().into_rows().unwrap();
        let size: usize = rows.iter().map(|row| row.text.len()).sum();
        if size > self.limit {
            return Err(SendError::TooLarge { bytes: size, limit: self.limit });
        }
        let mut room = self.room.borrow_mut();
        if *room == 0 {
            return Err(SendError::Full(Backlog::default()));
        }
        *room -= 1;
        let mut sent = self.sent.borrow_mut();
        sent.push(rows);
        Ok(sent.len() as u64)
    }
}

fn row(text: &str) -> TextRow {
    TextRow {
        text: text.to_owned(),
        text_start: 0,
        progress: RowProgress {
            rid: text.into(),
            start: 0,
            output_ids: vec![7],
            finished_reason: None,
            prompt_tokens: 1,
            completion_tokens: 1,
            cached_tokens: 0,
            retraction_count: 0,
            queue_time: 0.0,
            logprobs: None,
            spec: SpecCounters::default(),
        },
    }
}

#[test]
fn tokens_are_processed_only_when_their_text_has_arrived() {
    let (mut outbox, link) = (Outbox::default(), FakeLink::new(9));
    outbox.push(vec![row("a")], 1);
    outbox.push(vec![row("b")], 2);
    assert_eq!(outbox.flush(&link), Ok(()));
    assert_eq!(outbox.take_done(), None);
    outbox.acknowledged(1);
    assert_eq!((outbox.take_done(), outbox.take_done()), (Some(1), None));
    outbox.acknowledged(2);
    assert_eq!((outbox.take_done(), outbox.len()), (Some(2), 0));
}

#[test]
fn a_full_link_takes_the_rest_later_and_in_order() {
    let (mut outbox, link) = (Outbox::default(), FakeLink::new(1));
    for (seq, text) in [(1, "a"), (2, "b"), (3, "c")] {
        outbox.push(vec![row(text)], seq);
    }
    assert_eq!(outbox.flush(&link), Ok(()));
    assert_eq!(link.texts(), ["a"]);
    *link.room.borrow_mut() = 2;
    outbox.acknowledged(1);
    assert_eq!(outbox.flush(&link), Ok(()));
    assert_eq!(link.texts(), ["a", "b", "c"]);
}

#[test]
fn a_message_without_rows_waits_for_those_before_it() {
    let (mut outbox, link) = (Outbox::default(), FakeLink::new(9));
    outbox.push(Vec::new(), 1);
    assert_eq!(outbox.take_done(), Some(1), "nothing is before it");
    outbox.push(vec![row("a")], 2);
    outbox.push(Vec::new(), 3);
    assert_eq!((outbox.flush(&link), outbox.take_done()), (Ok(()), None));
    outbox.acknowledged(1);
    assert_eq!(outbox.take_done(), Some(3));
}

#[test]
fn a_new_tokenizer_process_gets_all_that_has_not_arrived() {
    let (mut outbox, link) = (Outbox::default(), FakeLink::new(9));
    outbox.push(vec![row("a")], 1);
    outbox.push(vec![row("b")], 2);
    assert_eq!(outbox.flush(&link), Ok(()));
    outbox.acknowledged(1);
    outbox.send_again();
    assert_eq!(outbox.flush(&link), Ok(()));
    assert_eq!(link.texts(), ["a", "b", "b"]);
    outbox.acknowledged(2);
    assert_eq!(outbox.len(), 1, "the number of the first sending no longer counts");
    outbox.acknowledged(3);
    assert_eq!(outbox.take_done(), Some(2));
}

#[test]
fn a_message_that_is_too_large_is_split() {
    let mut link = FakeLink::new(9);
    link.limit = 2;
    let mut outbox = Outbox::default();
    outbox.push(["a", "b", "c", "d", "e"].map(row).into(), 1);
    assert_eq!(outbox.flush(&link), Ok(()));
    assert_eq!(link.texts(), ["ab", "c", "de"]);
    outbox.acknowledged(2);
    assert_eq!(outbox.take_done(), None);
    outbox.acknowledged(3);
    assert_eq!(outbox.take_done(), Some(1), "only the last part completes the message");
}

#[test]
fn a_single_row_that_is_too_large_fails_its_request() {
    let mut link = FakeLink::new(9);
    link.limit = 2;
    let mut outbox = Outbox::default();
    outbox.push(vec![row("large"), row("ok")], 1);
    assert_eq!(outbox.flush(&link), Ok(()));
    let sent = link.sent.borrow();
    let failed = &sent[0][0];
    assert!(matches!(
        failed.progress.finished_reason,
        Some(FinishReason::Abort { status_code: Some(500), .. })
    ));
    assert_eq!((failed.progress.rid.0.as_str(), failed.text.as_str()), ("large", ""));
    assert_eq!(sent[1][0].text, "ok");
}

#[test]
fn a_closed_link_ends_the_loop() {
    struct Gone;
    impl SendText for Gone {
        fn send(&self, _: &ToTokenizer) -> Result<u64, SendError> {
            Err(SendError::Closed)
        }
    }
    let mut outbox = Outbox::default();
    outbox.push(vec![row("a")], 1);
    assert_eq!(outbox.flush(&Gone), Err(Closed));
}
