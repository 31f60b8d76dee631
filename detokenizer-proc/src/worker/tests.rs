//! Tests of the loop's reactions, with both links played by the test.

use std::cell::RefCell;
use std::rc::Rc;

use proto::{
    BatchTokenIDOutput, DecodeRow, FinishReason, Incarnation, RowProgress, SpecCounters, TokenKind,
    TokenPiece, TokenRow,
};

use super::*;

#[derive(Clone, Default)]
struct Wire {
    acked: Rc<RefCell<Vec<u64>>>,
    sent: Rc<RefCell<Vec<ToTokenizer>>>,
}

impl AckTokens for Wire {
    fn ack(&self, seq: u64) {
        self.acked.borrow_mut().push(seq);
    }
}

impl SendText for Wire {
    fn send(&self, message: &ToTokenizer) -> Result<u64, SendError> {
        self.sent.borrow_mut().push(message.clone());
        Ok(self.sent.borrow().len() as u64)
    }
}

impl Wire {
    fn texts(&self) -> Vec<String> {
        let rows = |message: &ToTokenizer| match message {
            ToTokenizer::Text(batch) => batch.output_strs.concat(),
            other => panic!("{other:?}"),
        };
        self.sent.borrow().iter().map(rows).collect()
    }
}

fn worker() -> (Worker<Wire, Wire>, Wire) {
    let pieces =
        (b'a'..=b'z').zip(0..).map(|(byte, id)| TokenPiece { id, bytes: vec![byte], special: false });
    let tokens = TokenBytes::from_pieces(TokenKind::ByteLevel, false, pieces);
    let wire = Wire::default();
    let metrics = DetokenizerMetrics::new("model").unwrap();
    (Worker::new(Some(Arc::new(tokens)), wire.clone(), wire.clone(), metrics), wire)
}

fn row(rid: &str, start: u32, text: &str, finished_reason: Option<FinishReason>) -> TokenRow {
    let output_ids: Vec<u32> = text.bytes().map(|byte| u32::from(byte - b'a')).collect();
    TokenRow {
        decode: DecodeRow {
            decode_ids: output_ids.clone(),
            read_offset: 0,
            skip_special_tokens: true,
            spaces_between_special_tokens: true,
            no_stop_trim: false,
            stop_strs: Vec::new(),
        },
        progress: RowProgress {
            rid: rid.into(),
            start,
            completion_tokens: start + output_ids.len() as u32,
            output_ids,
            finished_reason,
            prompt_tokens: 1,
            cached_tokens: 0,
            retraction_count: 0,
            queue_time: 0.0,
            logprobs: None,
            spec: SpecCounters::default(),
        },
    }
}

fn tokens(seq: u64, rows: Vec<TokenRow>) -> Event {
    Event::Scheduler(LinkEvent::Message {
        seq,
        message: ToDetokenizer::TokenIds(BatchTokenIDOutput::from_rows(rows)),
    })
}

fn up<In>(restarted: bool) -> LinkEvent<In> {
    LinkEvent::Up { peer: Incarnation(1), restarted }
}

fn arrived(up_to: u64) -> Event {
    Event::Tokenizer(LinkEvent::Acked { up_to })
}

#[test]
fn tokens_become_text_and_are_acknowledged_after_it() {
    let (mut worker, wire) = worker();
    worker.handle(tokens(1, vec![row("r", 0, "on", None), row("s", 0, "up", None)])).unwrap();
    worker.handle(tokens(2, vec![row("r", 2, "ce", Some(FinishReason::Length { length: 4 }))])).unwrap();
    assert_eq!(wire.texts(), ["onup", "ce"]);
    assert!(wire.acked.borrow().is_empty());
    worker.handle(arrived(2)).unwrap();
    assert_eq!(*wire.acked.borrow(), [2]);
    assert_eq!((worker.heartbeat().in_flight, worker.heartbeat().queued), (1, 0));
}

#[test]
fn a_broken_batch_is_dropped_and_acknowledged() {
    let (mut worker, wire) = worker();
    let mut batch = BatchTokenIDOutput::from_rows([row("r", 0, "on", None)]);
    batch.start.clear();
    let message = ToDetokenizer::TokenIds(batch);
    worker.handle(Event::Scheduler(LinkEvent::Message { seq: 1, message })).unwrap();
    assert_eq!((wire.texts().len(), wire.acked.borrow().as_slice()), (0, &[1][..]));
}

#[test]
fn orphans_are_dropped_and_the_batch_goes_on() {
    let (mut worker, wire) = worker();
    worker.handle(tokens(1, vec![row("ghost", 5, "x", None), row("r", 0, "on", None)])).unwrap();
    assert_eq!(wire.texts(), ["on"]);
    let dropped = worker.metrics.registry().gather();
    let family = dropped.iter().find(|family| family.name().contains("dropped")).unwrap();
    let total: f64 = family.get_metric().iter().map(|metric| metric.get_counter().value()).sum();
    assert_eq!(total, 1.0);
}

#[test]
fn a_new_scheduler_starts_afresh() {
    let (mut worker, wire) = worker();
    worker.handle(Event::Scheduler(up(false))).unwrap();
    worker.handle(tokens(7, vec![row("r", 0, "on", None), row("s", 0, "up", None)])).unwrap();
    worker.handle(Event::Scheduler(LinkEvent::Down)).unwrap();
    worker.handle(Event::Scheduler(up(true))).unwrap();
    assert_eq!(worker.heartbeat().in_flight, 0);
    worker.handle(tokens(8, vec![row("s", 0, "up", None)])).unwrap();
    worker.handle(arrived(2)).unwrap();
    assert_eq!(wire.texts(), ["onup", "up"]);
    assert_eq!(*wire.acked.borrow(), [8], "message numbers go on over schedulers");
}

#[test]
fn a_new_tokenizer_process_gets_the_text_again() {
    let (mut worker, wire) = worker();
    worker.handle(tokens(1, vec![row("r", 0, "on", None)])).unwrap();
    worker.handle(Event::Tokenizer(LinkEvent::Down)).unwrap();
    worker.handle(Event::Tokenizer(up(true))).unwrap();
    assert_eq!(wire.texts(), ["on", "on"]);
    worker.handle(arrived(2)).unwrap();
    assert_eq!(*wire.acked.borrow(), [1]);
}

#[test]
fn a_drain_ends_when_the_scheduler_has_left_and_the_text_has_arrived() {
    let (mut worker, _wire) = worker();
    assert!(worker.is_drained());
    worker.handle(Event::Scheduler(up(false))).unwrap();
    assert!(!worker.is_drained());
    worker.handle(tokens(1, vec![row("r", 0, "on", Some(FinishReason::Length { length: 2 }))])).unwrap();
    worker.handle(Event::Scheduler(LinkEvent::Down)).unwrap();
    assert!(!worker.is_drained());
    worker.handle(arrived(1)).unwrap();
    assert!(worker.is_drained());
}
