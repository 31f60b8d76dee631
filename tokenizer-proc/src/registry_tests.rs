//! Tests of the registry.

use std::sync::{Arc, Mutex};

use proto::link::{Backlog, SendError};
use proto::{
    BatchStrOutput, FinishReason, RequestId, RowLogprobs, RowProgress, SamplingParams, SpecCounters, TextRow,
    ToScheduler, TokenId, TokenizedGenerateReqInput,
};

use super::*;

fn client_name(wire: &RequestId) -> String {
    wire.0.split('#').next().unwrap_or_default().to_owned()
}

/// A registry whose messages are kept, and refused while `full`.
struct Bench {
    registry: Arc<Registry>,
    sent: Arc<Mutex<Vec<ToScheduler>>>,
    full: Arc<Mutex<bool>>,
}

fn bench() -> Bench {
    let registry = Registry::new(TokenizerMetrics::new("m").unwrap(), Front(0));
    let (sent, full) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(false)));
    let (log, refuses) = (Arc::clone(&sent), Arc::clone(&full));
    registry.connect(Box::new(move |message| {
        if *refuses.lock().unwrap() {
            return Err(SendError::Full(Backlog::default()));
        }
        log.lock().unwrap().push(message.clone());
        Ok(1)
    }));
    registry.scheduler_up(false);
    registry.scheduler_ready();
    Bench { registry, sent, full }
}

fn request(rid: &str, stream: bool) -> Registration {
    let input = TokenizedGenerateReqInput {
        rid: rid.into(),
        input_ids: vec![1, 2],
        output_ids: Vec::new(),
        spec: SpecCounters::default(),
        sampling_params: SamplingParams::default(),
        stream,
        return_logprob: false,
        logprob_start_len: None,
        top_logprobs_num: 0,
        token_ids_logprob: Vec::new(),
        extra_key: None,
        log_metrics: true,
        attempt: 0,
    };
    Registration { input, group: rid.into() }
}

/// A row of tokens `start..end`, each with the text "ab".
fn row(rid: &str, start: u32, end: u32, reason: Option<FinishReason>) -> BatchStrOutput {
    let output_ids: Vec<TokenId> = (start..end).collect();
    let logprobs = RowLogprobs {
        output_token_logprobs_val: output_ids.iter().map(|&id| id as f32).collect(),
        output_token_logprobs_idx: output_ids.clone(),
        input_token_logprobs_val: if start == 0 { vec![None, Some(-1.0)] } else { Vec::new() },
        input_token_logprobs_idx: if start == 0 { vec![1, 2] } else { Vec::new() },
        ..RowLogprobs::default()
    };
    let mut spec = SpecCounters::default();
    (0..end).for_each(|_| spec.record(2, 1, 1));
    let progress = RowProgress {
        rid: rid.into(),
        start,
        output_ids,
        finished_reason: reason,
        prompt_tokens: 2,
        completion_tokens: end,
        cached_tokens: 0,
        retraction_count: 0,
        queue_time: 0.0,
        logprobs: Some(logprobs),
        spec,
    };
    let text = "ab".repeat((end - start) as usize);
    BatchStrOutput::from_rows([TextRow { text, text_start: u64::from(start) * 2, progress }])
}

fn length(n: u32) -> Option<FinishReason> {
    Some(FinishReason::Length { length: n })
}

impl Bench {
    /// The name on the links of the request last registered under `name`.
    fn wire(&self, name: &str) -> RequestId {
        let sent = self.sent.lock().unwrap();
        let last = sent.iter().rev().find_map(|message| match message {
            ToScheduler::Generate(input) if client_name(&input.rid) == name => Some(input.rid.clone()),
            _ => None,
        });
        last.unwrap_or_else(|| name.into())
    }

    /// Routes rows that are named as the client names them.
    fn route(&self, mut batch: BatchStrOutput) {
        batch.rids.iter_mut().for_each(|rid| *rid = self.wire(&rid.0));
        self.registry.route(batch);
    }

    fn one(&self, rid: &str) -> Ticket {
        self.registry.register(vec![request(rid, true)]).unwrap().pop().unwrap()
    }

    fn aborts(&self) -> Vec<String> {
        let sent = self.sent.lock().unwrap();
        let rid = |message: &ToScheduler| match message {
            ToScheduler::Abort(AbortReq { rid: Some(rid), .. }) => Some(client_name(rid)),
            _ => None,
        };
        sent.iter().filter_map(rid).collect()
    }

    fn submissions(&self) -> Vec<TokenizedGenerateReqInput> {
        let sent = self.sent.lock().unwrap();
        let input = |message: &ToScheduler| match message {
            ToScheduler::Generate(input) => Some((**input).clone()),
            _ => None,
        };
        sent.iter().filter_map(input).collect()
    }
}

/// What a ticket has to give without waiting.
fn take(ticket: &mut Ticket) -> Update {
    let mut waiting = std::pin::pin!(ticket.next());
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match waiting.as_mut().poll(&mut context) {
        std::task::Poll::Ready(update) => update.expect("the request had not ended"),
        std::task::Poll::Pending => panic!("nothing is there"),
    }
}

#[test]
fn rows_that_overlap_are_taken_once() {
    let bench = bench();
    let mut ticket = bench.one("a");
    bench.route(row("a", 0, 3, None));
    bench.route(row("a", 0, 2, None));
    bench.route(row("a", 1, 5, length(5)));
    let Update { delta, end } = take(&mut ticket);
    assert_eq!(delta.output_ids, [0, 1, 2, 3, 4]);
    assert_eq!(delta.text, "ab".repeat(5));
    let logprobs = delta.logprobs.unwrap();
    assert_eq!(logprobs.output_token_logprobs_val, [0.0, 1.0, 2.0, 3.0, 4.0]);
    assert_eq!(logprobs.input_token_logprobs_idx, [1, 2]);
    assert_eq!(delta.progress.unwrap().completion_tokens, 5);
    assert_eq!(end.unwrap().reason, length(5).unwrap());
    assert!(bench.aborts().is_empty());
}

#[test]
fn a_hole_fails_the_request_alone() {
    let bench = bench();
    let (mut hurt, mut well) = (bench.one("hurt"), bench.one("well"));
    bench.route(row("hurt", 0, 1, None));
    bench.route(row("hurt", 2, 3, None));
    bench.route(row("well", 0, 1, length(1)));
    let reason = take(&mut hurt).end.unwrap().reason;
    assert!(matches!(reason, FinishReason::Abort { status_code: Some(500), .. }), "{reason:?}");
    assert_eq!(take(&mut well).end.unwrap().reason, length(1).unwrap());
    assert_eq!(bench.aborts(), ["hurt"]);
}

#[test]
fn a_request_ends_once_and_late_rows_are_dropped() {
    let bench = bench();
    let mut ticket = bench.one("a");
    bench.route(row("a", 0, 1, length(1)));
    bench.route(row("a", 1, 2, length(2)));
    bench.registry.refuse(&bench.wire("a"), FinishReason::failed(503, "x", "late"));
    bench.registry.close("later still");
    assert_eq!(take(&mut ticket).end.unwrap().reason, length(1).unwrap());
    drop(ticket);
    assert!(bench.aborts().is_empty(), "an ended request needs no abort");
    assert_eq!(bench.registry.len(), 0);
}

#[test]
fn leaving_aborts_even_when_the_link_is_full() {
    let bench = bench();
    let ticket = bench.one("a");
    *bench.full.lock().unwrap() = true;
    drop(ticket);
    assert_eq!(bench.registry.len(), 0);
    assert!(bench.aborts().is_empty());
    *bench.full.lock().unwrap() = false;
    bench.registry.flush_aborts();
    bench.registry.flush_aborts();
    assert_eq!(bench.aborts(), ["a"]);
}

#[test]
fn a_batch_that_does_not_fit_leaves_nothing_behind() {
    let bench = bench();
    let _first = bench.one("a");
    let refusal = bench.registry.register(vec![request("b", false), request("a", false)]).err().unwrap();
    assert_eq!(refusal, Refusal::invalid("Duplicate request ID a"));
    let refusal = bench.registry.register(vec![request("c", false), request("c", false)]).err().unwrap();
    assert_eq!(refusal, Refusal::invalid("Duplicate request ID c"));
    *bench.full.lock().unwrap() = true;
    let refusal = bench.registry.register(vec![request("d", false)]).err().unwrap();
    assert!(matches!(refusal, Refusal::Unavailable(_)));
    assert_eq!(bench.registry.len(), 1);
}

#[test]
fn a_new_scheduler_gets_what_the_client_has() {
    let bench = bench();
    let (mut ticket, _aborted) = (bench.one("a"), bench.one("b"));
    bench.route(row("a", 0, 3, None));
    bench.registry.abort(Some(&RequestId::from("b")));
    bench.registry.scheduler_down();
    bench.registry.scheduler_up(true);
    let again = bench.submissions().pop().unwrap();
    assert_eq!((client_name(&again.rid).as_str(), again.attempt), ("a", 2));
    assert_eq!(again.output_ids, [0, 1, 2]);
    assert_eq!(again.spec.verify_ct, 3);
    assert_eq!(bench.submissions().len(), 3, "an aborted request is not run again");
    bench.route(row("a", 3, 4, length(4)));
    assert_eq!(take(&mut ticket).delta.output_ids, [0, 1, 2, 3]);
}

#[test]
fn a_request_that_kills_two_schedulers_fails_alone() {
    let bench = bench();
    let mut ticket = bench.one("a");
    bench.registry.scheduler_up(true);
    assert_eq!(bench.registry.len(), 1);
    bench.registry.scheduler_ready();
    bench.registry.scheduler_up(true);
    let reason = take(&mut ticket).end.unwrap().reason;
    assert!(matches!(reason, FinishReason::Abort { status_code: Some(500), .. }), "{reason:?}");
}

#[test]
fn a_scheduler_that_dies_while_it_loads_or_is_told_to_was_killed_by_no_request() {
    let bench = bench();
    let mut ticket = bench.one("a");
    bench.registry.scheduler_up(true);
    // Three that never had their model, and three that were told to leave.
    (0..3).for_each(|_| bench.registry.scheduler_up(true));
    for _ in 0..3 {
        bench.registry.scheduler_ready();
        bench.registry.scheduler_leaves();
        bench.registry.scheduler_up(true);
    }
    assert_eq!(bench.submissions().len(), 8);
    bench.registry.scheduler_ready();
    bench.route(row("a", 0, 4, length(4)));
    assert_eq!(take(&mut ticket).delta.output_ids, [0, 1, 2, 3]);
}

#[test]
fn a_client_that_does_not_read_is_cut_off_and_others_are_not() {
    let bench = bench();
    let (mut slow, mut whole) = (bench.one("slow"), {
        let whole = bench.registry.register(vec![request("whole", false)]).unwrap();
        whole.into_iter().next().unwrap()
    });
    let step = 1 << 18;
    for start in (0..4 * step).step_by(step as usize) {
        bench.route(row("slow", start, start + step, None));
        bench.route(row("whole", start, start + step, None));
    }
    assert_eq!(bench.aborts(), ["slow"]);
    let reason = take(&mut slow).end.unwrap().reason;
    assert_eq!(reason, FinishReason::failed(503, "SlowClient", "The client does not read."));
    assert!(take(&mut whole).end.is_none());
}

#[test]
fn close_wakes_everybody_and_refuses_the_rest() {
    let bench = bench();
    let mut tickets: Vec<_> = ["a", "b"].iter().map(|rid| bench.one(rid)).collect();
    bench.registry.close("The server is stopping.");
    for ticket in &mut tickets {
        let reason = take(ticket).end.unwrap().reason;
        assert_eq!(reason, FinishReason::failed(503, "ServiceUnavailable", "The server is stopping."));
    }
    assert!(bench.registry.register(vec![request("c", true)]).is_err());
}

#[test]
fn a_name_stands_for_its_copies_and_for_no_other() {
    let bench = bench();
    let copy = |rid: &str| Registration { group: "job".into(), ..request(rid, false) };
    let _tickets =
        bench.registry.register(vec![copy("job_0"), copy("job_1"), request("job_10", false)]).unwrap();
    bench.registry.abort(Some(&RequestId::from("job")));
    let mut aborts = bench.aborts();
    aborts.sort();
    assert_eq!(aborts, ["job_0", "job_1"]);
}

#[test]
fn a_name_can_be_used_again_while_rows_of_its_first_request_are_on_their_way() {
    let bench = bench();
    let first = bench.one("a");
    let late = bench.wire("a");
    drop(first);
    let mut second = bench.one("a");
    let mut batch = row("a", 1, 3, None);
    batch.rids[0] = late;
    bench.registry.route(batch);
    bench.route(row("a", 0, 1, length(1)));
    let Update { delta, end } = take(&mut second);
    assert_eq!((delta.output_ids, end.unwrap().reason), (vec![0], length(1).unwrap()));
}
