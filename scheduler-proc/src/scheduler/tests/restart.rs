//! What a scheduler does when a neighbour, or it itself, was restarted.

use super::*;
use crate::journal::Journal;

fn detokenizer_restarts(scheduler: &mut TestScheduler) {
    scheduler.handle(Event::Detokenizer(Lane(0), LinkEvent::Up { peer: Incarnation(2), restarted: true }));
}

#[test]
fn a_new_detokenizer_gets_every_request_from_its_first_id() {
    let mut scheduler = scheduler(config(), speculative(4));
    let prompt: Vec<_> = (10..20).collect();
    let mut input = request("a", prompt, 30);
    input.return_logprob = true;
    input.sampling_params.stop = vec!["zzz".to_owned()];
    scheduler.submit(input);
    scheduler.turns(4);
    let before = scheduler.answer("a").ids;
    assert!(before.len() > 3);
    detokenizer_restarts(&mut scheduler);
    scheduler.turn();
    let row = scheduler.recorder().rows.last().expect("a row").clone();
    assert_eq!((row.progress.start, row.decode.read_offset), (0, 5));
    assert_eq!(row.decode.decode_ids[..5], [15, 16, 17, 18, 19]);
    assert_eq!(row.decode.decode_ids[5..], row.progress.output_ids);
    assert_eq!(row.decode.stop_strs, ["zzz"]);
    assert!(row.progress.output_ids.starts_with(&before));
    scheduler.settle();
    assert_eq!(scheduler.answer("a").finish, length(30));
}

#[test]
fn an_end_is_told_again_until_it_is_acknowledged() {
    let mut scheduler = scheduler(config(), Script::default());
    scheduler.submit(request("a", vec![1], 3));
    scheduler.settle();
    assert_eq!(scheduler.outbox.unacknowledged(), 1);
    detokenizer_restarts(&mut scheduler);
    let rows = scheduler.recorder().rows.len();
    scheduler.turn();
    let again = &scheduler.recorder().rows[rows..];
    assert_eq!(again.len(), 1);
    assert_eq!((again[0].progress.start, again[0].progress.output_ids.len()), (0, 3));
    assert_eq!(again[0].progress.finished_reason, length(3));
    let up_to = scheduler.recorder().messages;
    scheduler.handle(Event::Detokenizer(Lane(0), LinkEvent::Acked { up_to: up_to - 1 }));
    assert_eq!(scheduler.outbox.unacknowledged(), 1);
    scheduler.handle(Event::Detokenizer(Lane(0), LinkEvent::Acked { up_to }));
    assert_eq!(scheduler.outbox.unacknowledged(), 0);
    detokenizer_restarts(&mut scheduler);
    scheduler.turn();
    assert_eq!(scheduler.recorder().rows.len(), rows + 1, "nothing more to tell");
}

#[test]
fn a_resubmitted_request_goes_on_where_the_client_is() {
    let fresh = request("a", vec![1, 2, 3], 30);
    let whole = solo(&fresh, 1024).ids;
    let mut input = fresh;
    input.output_ids = whole[..11].to_vec();
    input.spec.record(3, 2, 2);
    input.attempt = 2;
    let mut scheduler = scheduler(config(), speculative(4));
    scheduler.submit(input);
    scheduler.settle();
    let answer = scheduler.answer("a");
    assert_eq!(answer.ids, whole[11..], "only new ids are sent");
    let first = &scheduler.recorder().rows[0];
    assert_eq!(first.progress.start, 11);
    assert_eq!(first.decode.decode_ids[3..14], whole[..11], "a detokenizer needs them all");
    let last = answer.last.expect("has rows");
    assert_eq!(last.completion_tokens, 30);
    assert!(last.spec.verify_ct > 1, "counters go on");
    assert_eq!(scheduler.metrics.totals().verify_ct + 1, last.spec.verify_ct, "what came along is not new");
}

#[test]
fn a_resubmitted_request_that_was_complete_ends_without_a_token() {
    let mut input = request("a", vec![1, 2, 3], 5);
    input.output_ids = vec![4; 5];
    let mut scheduler = scheduler(config(), Script::default());
    scheduler.submit(input);
    scheduler.settle();
    let answer = scheduler.answer("a");
    assert_eq!((answer.ids.len(), answer.finish), (0, length(5)));
    assert_eq!(answer.last.expect("has rows").completion_tokens, 5);
}

#[test]
fn requests_of_a_dead_tokenizer_process_are_aborted_at_once() {
    let mut config = config();
    config.schedule.max_running_requests = 1;
    let mut scheduler = scheduler(config, Script::default());
    scheduler.submit(request("runs", vec![1], 50));
    scheduler.submit(request("waits", vec![1], 50));
    scheduler.turns(2);
    scheduler.handle(Event::Tokenizer(Front(0), LinkEvent::Up { peer: Incarnation(2), restarted: true }));
    assert!(scheduler.admission.is_idle());
    assert_eq!(scheduler.admission.cache.usage().used, 0);
    scheduler.submit(request("runs", vec![1], 5));
    scheduler.settle();
    assert!(scheduler.refused("waits").is_none(), "nobody asks for it any more");
    let ends: Vec<_> =
        scheduler.recorder().rows.iter().filter_map(|row| row.progress.finished_reason.clone()).collect();
    assert_eq!(ends, [FinishReason::aborted("Aborted"), FinishReason::Length { length: 5 }]);
}

/// Whatever the client has of it, the successor goes on behind the last step that was counted.
#[test]
fn a_successor_makes_and_counts_nothing_again() {
    let fresh = request("a", vec![1, 2, 3], 30);
    let whole = solo(&fresh, 1024).ids;
    for (turns, told) in [(1, 0), (4, 0), (4, 3), (40, 3), (40, 30)] {
        let dir = tempfile::tempdir().unwrap();
        let open = |life| Journal::open(dir.path(), Incarnation(life)).unwrap();
        let mut first = scheduler(config(), speculative(4));
        first.keep(open(1));
        first.submit(fresh.clone());
        first.turns(turns);
        let counted = first.metrics.totals().clone();
        drop(first);
        let mut second = scheduler(config(), speculative(4));
        second.keep(open(2));
        let mut input = fresh.clone();
        input.output_ids = whole[..told].to_vec();
        input.attempt = 2;
        second.submit(input);
        second.settle();
        let answer = second.answer("a");
        assert_eq!(answer.ids, whole[told..], "after {turns} turns, {told} told");
        assert_eq!(answer.finish, length(30));
        let spec = answer.last.expect("has rows").spec;
        let both = counted.verify_ct + second.metrics.totals().verify_ct;
        assert_eq!(spec.verify_ct, both, "after {turns} turns, {told} told");
        assert_eq!(spec.proposed_drafts, counted.proposed_drafts + second.metrics.totals().proposed_drafts);
        if turns == 40 {
            assert_eq!(second.metrics.totals().verify_ct, 0, "only the end was left to tell");
        }
    }
}
