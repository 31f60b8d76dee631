//! One scheduler with several tokenizer processes and detokenizers: whatever happens to one of them is nothing to the
//! others.

use super::*;

/// Two tokenizer processes over two detokenizers.
fn two() -> TestScheduler {
    with(2, 2, config())
}

fn with(tokenizer_worker_num: u8, detokenizer_worker_num: u8, mut config: ServeConfig) -> TestScheduler {
    config.topology = Topology { tokenizer_worker_num, detokenizer_worker_num };
    scheduler(config, Script::default())
}

fn submit(scheduler: &mut TestScheduler, front: u8, rid: &str, max_new_tokens: u32) {
    let prompt = rid.bytes().map(|byte| u32::from(byte % 50)).collect();
    let input = Box::new(request(rid, prompt, max_new_tokens));
    scheduler.tell_from(Front(front), ToScheduler::Generate(input));
}

/// The lanes that a request's rows took.
fn lanes(scheduler: &TestScheduler, rid: &str) -> Vec<u8> {
    let recorder = scheduler.recorder();
    let rows = recorder.rows.iter().zip(&recorder.lanes);
    let mut lanes: Vec<u8> =
        rows.filter(|(row, _)| row.progress.rid.0 == rid).map(|(_, lane)| lane.0).collect();
    lanes.dedup();
    lanes
}

#[test]
fn rows_go_back_to_whom_the_request_came_from() {
    let mut scheduler = two();
    submit(&mut scheduler, 0, "a", 9);
    submit(&mut scheduler, 1, "b", 9);
    scheduler.settle();
    assert_eq!((lanes(&scheduler, "a"), lanes(&scheduler, "b")), (vec![0], vec![1]));
    for rid in ["a", "b"] {
        let prompt = rid.bytes().map(|byte| u32::from(byte % 50)).collect();
        assert_eq!(scheduler.answer(rid).ids, solo(&request(rid, prompt, 9), 1024).ids);
    }
}

#[test]
fn one_tokenizer_process_shares_its_requests_out_to_all_detokenizers() {
    let mut scheduler = with(1, 3, config());
    for i in 0..60 {
        submit(&mut scheduler, 0, &format!("r{i}"), 2);
    }
    scheduler.settle();
    for lane in 0..3 {
        let its = (0..60).filter(|i| lanes(&scheduler, &format!("r{i}")) == [lane]).count();
        assert!(its >= 10, "lane {lane} has {its} of 60");
    }
}

#[test]
fn a_tokenizer_process_that_restarts_takes_its_own_requests_along_and_no_others() {
    let mut scheduler = two();
    for (front, rid) in [(0, "a"), (1, "b"), (0, "c")] {
        submit(&mut scheduler, front, rid, 30);
    }
    scheduler.turns(3);
    scheduler.handle(Event::Tokenizer(Front(0), LinkEvent::Up { peer: Incarnation(2), restarted: true }));
    assert_eq!(scheduler.running(), 1);
    scheduler.settle();
    assert_eq!(scheduler.answer("b").finish, length(30));
    for rid in ["a", "c"] {
        assert!(matches!(scheduler.answer(rid).finish, Some(FinishReason::Abort { .. })));
    }
}

#[test]
fn a_detokenizer_that_restarts_gets_its_own_requests_again_and_no_others() {
    let mut scheduler = two();
    submit(&mut scheduler, 0, "a", 30);
    submit(&mut scheduler, 1, "b", 30);
    scheduler.turns(4);
    let before = scheduler.recorder().rows.len();
    scheduler.handle(Event::Detokenizer(Lane(1), LinkEvent::Up { peer: Incarnation(2), restarted: true }));
    scheduler.turn();
    let starts: Vec<_> = scheduler.recorder().rows[before..]
        .iter()
        .map(|row| (row.progress.rid.0.as_str(), row.progress.start > 0))
        .collect();
    assert_eq!(starts, [("a", true), ("b", false)]);
    scheduler.settle();
    assert_eq!((scheduler.answer("a").finish, scheduler.answer("b").finish), (length(30), length(30)));
}

#[test]
fn a_detokenizer_that_does_not_read_holds_up_nobody_else() {
    let mut scheduler = two();
    scheduler.recorder_mut().full_lane = Some(Lane(0));
    submit(&mut scheduler, 0, "a", 9);
    submit(&mut scheduler, 1, "b", 9);
    scheduler.settle();
    assert_eq!((scheduler.answer("a").rows, scheduler.answer("b").finish), (0, length(9)));
    // Nothing more for that one, everything for the other.
    submit(&mut scheduler, 0, "c", 3);
    submit(&mut scheduler, 1, "d", 3);
    scheduler.settle();
    assert!(matches!(scheduler.refused("c"), Some(FinishReason::Abort { status_code: Some(503), .. })));
    assert_eq!(scheduler.answer("d").finish, length(3));
    scheduler.recorder_mut().full_lane = None;
    scheduler.handle(Event::Detokenizer(Lane(0), LinkEvent::Acked { up_to: 0 }));
    scheduler.settle();
    assert_eq!(scheduler.answer("a").finish, length(9));
}

#[test]
fn replies_go_to_whom_they_are_due() {
    let mut config = config();
    config.server.max_queued_requests = 1;
    config.schedule.max_running_requests = 1;
    let mut scheduler = with(2, 1, config);
    submit(&mut scheduler, 0, "a", 30);
    scheduler.turn();
    submit(&mut scheduler, 0, "b", 30);
    submit(&mut scheduler, 1, "c", 30);
    scheduler.tell_from(Front(1), ToScheduler::GetInternalState(GetInternalStateReq { id: 7 }));
    let flush = FlushCacheReqInput { id: 8, timeout_s: 0.0 };
    scheduler.tell_from(Front(1), ToScheduler::FlushCache(flush));
    let recorder = scheduler.recorder();
    assert_eq!(recorder.replied_to, [Front(1); 3], "{:?}", recorder.replies);
    assert!(scheduler.refused("c").is_some() && scheduler.refused("b").is_none());
}

#[test]
fn an_abort_by_a_clients_name_is_passed_on_to_the_others() {
    let mut scheduler = with(3, 1, config());
    let abort = AbortReq { rid: Some("job".into()), abort_all: false };
    scheduler.tell_from(Front(1), ToScheduler::AbortElsewhere(abort.clone()));
    let recorder = scheduler.recorder();
    assert_eq!(recorder.replied_to, [Front(0), Front(2)]);
    assert_eq!(
        recorder.replies,
        [ToTokenizer::AbortFromElsewhere(abort.clone()), ToTokenizer::AbortFromElsewhere(abort)]
    );
}
