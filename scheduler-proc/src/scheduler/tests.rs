//! The scheduler with a scripted engine: examples for each promise, and random runs in `random`.

use proto::link::LinkEvent;
use proto::{
    AbortReq, FinishReason, FlushCacheReqInput, GetInternalStateReq, Incarnation, Matched, SchedulePolicy,
    ToScheduler, ToTokenizer, Topology,
};

use super::*;
use crate::engine::DraftStatus;
use crate::engine::scripted::Script;
use crate::testing::*;

mod adaptive;
mod random;
mod restart;
mod several;

impl TestScheduler {
    pub(crate) fn recorder(&self) -> &Recorder {
        self.outbox.peers()
    }

    pub(crate) fn recorder_mut(&mut self) -> &mut Recorder {
        self.outbox.peers_mut()
    }

    fn running(&self) -> usize {
        self.admission.running().len()
    }

    fn flushes(&self) -> Vec<(u64, bool)> {
        let replies = self.recorder().replies.iter();
        replies
            .filter_map(|reply| match reply {
                ToTokenizer::FlushCache(flush) => Some((flush.id, flush.success)),
                _ => None,
            })
            .collect()
    }
}

fn speculative(width: usize) -> Script {
    let draft = DraftStatus { num_steps: width - 1, num_draft_tokens: width };
    Script { draft, ..Script::default() }
}

fn length(length: u32) -> Option<FinishReason> {
    Some(FinishReason::Length { length })
}

#[test]
fn an_answer_is_the_same_with_and_without_speculation() {
    let input = request("a", vec![1, 2, 3], 50);
    let mut scheduler = scheduler(config(), speculative(4));
    scheduler.submit(input.clone());
    scheduler.settle();
    let (fast, slow) = (scheduler.answer("a"), solo(&input, 1024));
    assert_eq!((&fast.ids, &fast.finish), (&slow.ids, &slow.finish));
    assert_eq!(fast.finish, length(50));
    assert!(fast.rows < slow.rows, "blocks travel together");
    let spec = fast.last.expect("has rows").spec;
    assert!(spec.accepted_drafts > 0 && spec.proposed_drafts > spec.accepted_drafts);
    assert_eq!(slow.last.expect("has rows").spec.verify_ct, 0);
}

#[test]
fn limits_are_met_exactly_at_every_value() {
    for limit in 0..12 {
        let mut scheduler = scheduler(config(), Script { accept: vec![5], ..speculative(6) });
        scheduler.submit(request("a", vec![1, 2, 3], limit));
        scheduler.settle();
        let answer = scheduler.answer("a");
        assert_eq!((answer.ids.len(), answer.finish), (limit as usize, length(limit)));
    }
}

#[test]
fn all_drafts_accepted_is_a_rate_of_one_and_proposed_is_width_less_one() {
    let mut scheduler = scheduler(config(), Script { accept: vec![3], ..speculative(4) });
    scheduler.submit(request("a", vec![1, 2, 3], 41));
    scheduler.settle();
    let spec = scheduler.answer("a").last.expect("has rows").spec;
    assert_eq!(spec.accept_rate(), Some(1.0));
    assert_eq!((spec.verify_ct, spec.proposed_drafts), (10, 30), "the first token is made by prefill");
}

#[test]
fn proposed_is_what_the_budget_left_room_for() {
    let mut scheduler = scheduler(config(), Script { accept: vec![5], ..speculative(6) });
    scheduler.submit(request("a", vec![1, 2, 3], 4));
    scheduler.settle();
    let spec = scheduler.answer("a").last.expect("has rows").spec;
    assert_eq!((spec.verify_ct, spec.accepted_drafts), (1, 2), "one prefill token, two drafts, one bonus");
    assert_eq!(spec.proposed_drafts, 5, "nodes beyond the depth are proposed too");
}

#[test]
fn a_request_that_opts_out_takes_part_in_no_verify_step() {
    let mut input = request("a", vec![1, 2, 3], 20);
    input.sampling_params.max_draft_tokens = Some(0);
    let mut scheduler = scheduler(config(), speculative(4));
    scheduler.submit(input);
    scheduler.submit(request("b", vec![4, 5], 20));
    scheduler.settle();
    assert_eq!(scheduler.answer("a").last.expect("has rows").spec.verify_ct, 0);
    assert!(scheduler.answer("b").last.expect("has rows").spec.verify_ct > 0);
}

#[test]
fn drafts_never_pass_the_end_of_the_context() {
    let script = Script { context_len: 20, accept: vec![5], ..speculative(6) };
    let mut scheduler = scheduler(config(), script);
    scheduler.submit(request("a", (0..15).collect(), 100));
    scheduler.settle();
    assert_eq!((scheduler.answer("a").ids.len(), scheduler.answer("a").finish), (5, length(5)));
}

#[test]
fn the_second_turn_of_a_chat_finds_prompt_and_answer_less_the_last_token() {
    let mut scheduler = scheduler(config(), Script { accept: vec![3], ..speculative(4) });
    scheduler.submit(request("a", (0..10).collect(), 7));
    scheduler.settle();
    let mut prompt: Vec<_> = (0..10).collect();
    prompt.extend(scheduler.answer("a").ids);
    prompt.extend([1, 2, 3]);
    scheduler.submit(request("b", prompt, 3));
    scheduler.settle();
    assert_eq!(scheduler.answer("b").last.expect("has rows").cached_tokens, 10 + 7 - 1);
}

#[test]
fn equal_prompts_in_flight_share_what_is_computed() {
    let mut config = config();
    config.schedule.chunked_prefill_size = 16;
    let mut scheduler = scheduler(config, Script::default());
    let prompt: Vec<_> = (0..40).map(|i| i % 50).collect();
    scheduler.submit(request("a", prompt.clone(), 30));
    scheduler.turns(2);
    scheduler.submit(request("b", prompt, 30));
    scheduler.turns(3);
    let used = scheduler.admission.cache.usage().used;
    assert!(used < 60, "{used} slots for two prompts of 40");
    scheduler.settle();
    assert!(scheduler.answer("b").last.expect("has rows").cached_tokens >= 32);
    assert_eq!(scheduler.answer("a").ids, scheduler.answer("b").ids);
}

#[test]
fn decoding_goes_on_in_every_step_of_a_long_prefill() {
    let mut config = config();
    config.schedule.chunked_prefill_size = 8;
    let mut scheduler = scheduler(config, Script::default());
    scheduler.submit(request("stream", vec![1, 2], 100));
    scheduler.turn();
    scheduler.submit(request("long", (0..200).map(|i| i % 60).collect(), 1));
    for turn in 1..=25 {
        scheduler.turn();
        assert_eq!(scheduler.answer("stream").ids.len(), 1 + turn, "one token per step");
    }
    assert_eq!(scheduler.answer("long").finish, length(1), "200 tokens in 25 chunks of 8");
}

#[test]
fn retraction_resumes_with_the_same_answer_and_counts_once() {
    for page_size in [1, 16] {
        let mut config = config();
        config.schedule.page_size = page_size;
        let mut scheduler = scheduler(config, Script { kv_slots: 96, ..speculative(4) });
        scheduler.admission.expect_short_answers();
        let inputs: Vec<_> = (0..4).map(|i| request(&format!("r{i}"), vec![i; 12], 60)).collect();
        inputs.iter().for_each(|input| scheduler.submit(input.clone()));
        scheduler.settle();
        let mut retractions = 0;
        for input in &inputs {
            let answer = scheduler.answer(&input.rid.0);
            assert_eq!(answer.ids, solo(input, 97).ids);
            let last = answer.last.expect("has rows");
            retractions += last.retraction_count;
            assert_eq!(last.completion_tokens, 60);
        }
        assert!(retractions > 0, "the pool is too small for all at once");
    }
}

#[test]
fn a_prompt_that_can_never_fit_is_refused_and_an_answer_is_cut_to_the_pool() {
    let mut scheduler = scheduler(config(), Script { kv_slots: 32, ..Script::default() });
    scheduler.submit(request("long", vec![1; 33], 4));
    scheduler.submit(request("fits", vec![1; 32], 4));
    scheduler.settle();
    let Some(FinishReason::Abort { status_code, message, .. }) = scheduler.refused("long") else {
        panic!("not refused")
    };
    assert_eq!(status_code, Some(400));
    assert!(message.contains("33") && message.contains("32"), "{message}");
    assert_eq!(scheduler.answer("fits").finish, length(1));
}

#[test]
fn an_abort_frees_a_running_request_at_once() {
    let mut scheduler = scheduler(config(), Script::default());
    scheduler.submit(request("a", vec![1, 2, 3], 100));
    scheduler.turns(5);
    scheduler.abort_rid("a");
    assert_eq!(scheduler.admission.cache.usage().used, 0);
    assert_eq!(scheduler.engine.seated(), 0);
    scheduler.turn();
    let answer = scheduler.answer("a");
    assert_eq!((answer.ids.len(), answer.finish), (5, Some(FinishReason::aborted("Aborted"))));
}

#[test]
fn late_double_and_unknown_aborts_have_no_effect_and_the_id_can_be_used_again() {
    let mut scheduler = scheduler(config(), Script::default());
    scheduler.submit(request("job-10", vec![1], 10));
    scheduler.turn();
    for rid in ["job-1", "", "nobody"] {
        scheduler.abort_rid(rid);
    }
    scheduler.tell(ToScheduler::Abort(AbortReq { rid: None, abort_all: false }));
    scheduler.settle();
    assert_eq!(scheduler.answer("job-10").finish, length(10));
    scheduler.abort_rid("job-10");
    scheduler.abort_rid("job-10");
    scheduler.recorder_mut().rows.clear();
    scheduler.submit(request("job-10", vec![1], 4));
    scheduler.settle();
    assert_eq!(scheduler.answer("job-10").finish, length(4));
}

#[test]
fn an_abort_in_the_queue_is_a_refusal() {
    let mut config = config();
    config.schedule.max_running_requests = 1;
    let mut scheduler = scheduler(config, Script::default());
    scheduler.submit(request("runs", vec![1], 10));
    scheduler.submit(request("waits", vec![1], 10));
    scheduler.turn();
    scheduler.abort_rid("waits");
    assert_eq!(scheduler.refused("waits"), Some(FinishReason::aborted("Abort in waiting queue")));
    scheduler.settle();
    assert_eq!(scheduler.answer("waits").rows, 0);
    assert_eq!(scheduler.answer("runs").finish, length(10));
}

#[test]
fn abort_all_ends_everything_once_and_retracted_ones_keep_what_they_have() {
    let mut scheduler = scheduler(config(), Script { kv_slots: 48, ..Script::default() });
    scheduler.admission.expect_short_answers();
    for i in 0..6 {
        scheduler.submit(request(&format!("r{i}"), vec![i; 8], 30));
    }
    while !scheduler.admission.waiting().iter().any(|waiting| waiting.retractions > 0) {
        assert!(scheduler.turn(), "a retraction comes first");
    }
    scheduler.tell(ToScheduler::Abort(AbortReq { rid: None, abort_all: true }));
    scheduler.settle();
    let answers = scheduler.answers();
    for i in 0..6 {
        let rid = format!("r{i}");
        let finish = answers.get(&rid).and_then(|answer| answer.finish.clone());
        let (told, refused) = (finish.is_some(), scheduler.refused(&rid).is_some());
        assert!(told != refused, "{rid} ends exactly once");
    }
    let in_queue =
        answers.values().find(|a| a.finish == Some(FinishReason::aborted("Abort in waiting queue")));
    assert!(!in_queue.expect("one was retracted").ids.is_empty());
}

#[test]
fn a_duplicate_of_a_live_request_is_ignored() {
    let mut scheduler = scheduler(config(), Script::default());
    scheduler.submit(request("a", vec![1], 10));
    scheduler.turn();
    scheduler.submit(request("a", vec![1], 10));
    scheduler.settle();
    assert_eq!(scheduler.answer("a").ids.len(), 10);
    assert!(scheduler.recorder().replies.is_empty());
}

#[test]
fn a_full_queue_refuses_with_503() {
    let mut config = config();
    config.schedule.max_running_requests = 1;
    config.server.max_queued_requests = 1;
    let mut scheduler = scheduler(config, Script::default());
    (0..10).for_each(|i| scheduler.submit(request(&format!("r{i}"), vec![1], 5)));
    scheduler.settle();
    let reason = FinishReason::failed(503, "ServiceUnavailableError", "The request queue is full.");
    assert_eq!((1..10).filter(|i| scheduler.refused(&format!("r{i}")) == Some(reason.clone())).count(), 9);
    assert_eq!(scheduler.answer("r0").finish, length(5));
}

#[test]
fn a_flush_is_refused_while_busy_deferred_with_a_time_out_and_answered_alike() {
    let flush = |id, timeout_s| ToScheduler::FlushCache(FlushCacheReqInput { id, timeout_s });
    let mut scheduler = scheduler(config(), Script::default());
    scheduler.submit(request("a", vec![1, 2, 3], 5));
    scheduler.turn();
    scheduler.tell(flush(1, 0.0));
    scheduler.tell(flush(2, 100.0));
    scheduler.tell(flush(3, f64::INFINITY));
    scheduler.tell(flush(4, f64::NAN));
    assert_eq!(scheduler.flushes(), [(1, false), (4, false)]);
    scheduler.settle();
    assert_eq!(scheduler.flushes()[2..], [(2, true), (3, true)]);
    assert_eq!(scheduler.admission.cache.usage().cached, 0);
    scheduler.tell(flush(5, 0.0));
    assert_eq!(scheduler.flushes().last(), Some(&(5, true)));
}

#[test]
fn a_row_that_cannot_be_computed_fails_alone() {
    let mut scheduler = scheduler(config(), Script { poison: Some(7), ..speculative(4) });
    scheduler.submit(request("good", vec![1, 2], 10));
    scheduler.submit(request("bad", vec![7, 2], 10));
    scheduler.settle();
    assert_eq!(scheduler.answer("good").finish, length(10));
    let Some(FinishReason::Abort { status_code: Some(500), message, .. }) = scheduler.answer("bad").finish
    else {
        panic!("not failed")
    };
    assert_eq!(message, "logits are not finite");
    scheduler.submit(request("next", vec![1, 2], 3));
    scheduler.settle();
    assert_eq!(scheduler.answer("next").finish, length(3));
}

#[test]
fn a_broken_engine_is_an_error_of_the_step() {
    let mut scheduler = scheduler(config(), Script { break_at_step: Some(2), ..Script::default() });
    scheduler.submit(request("a", vec![1], 10));
    scheduler.turn();
    assert!(scheduler.step().is_err());
}

#[test]
fn a_stalled_detokenizer_stops_admission_and_loses_nothing() {
    let mut scheduler = scheduler(config(), speculative(4));
    scheduler.submit(request("a", vec![1], 30));
    scheduler.turn();
    scheduler.recorder_mut().full = true;
    scheduler.turns(2);
    scheduler.submit(request("b", vec![1], 30));
    assert!(matches!(scheduler.refused("b"), Some(FinishReason::Abort { status_code: Some(503), .. })));
    scheduler.settle();
    assert_eq!(scheduler.answer("a").ids.len(), 1, "the rest waits, and the engine has stopped");
    assert_eq!(scheduler.running(), 0);
    scheduler.recorder_mut().full = false;
    scheduler.handle(Event::Detokenizer(Lane(0), LinkEvent::Acked { up_to: 1 }));
    scheduler.submit(request("c", vec![1], 30));
    scheduler.settle();
    assert_eq!(scheduler.answer("a").ids, solo(&request("a", vec![1], 30), 1024).ids);
    assert_eq!(scheduler.answer("c").finish, length(30));
}

#[test]
fn rows_too_large_for_one_message_travel_in_several() {
    let mut scheduler = scheduler(config(), Script::default());
    scheduler.recorder_mut().max_rows = Some(1);
    (0..5).for_each(|i| scheduler.submit(request(&format!("r{i}"), vec![i], 4)));
    scheduler.settle();
    assert!((0..5).all(|i| scheduler.answer(&format!("r{i}")).finish == length(4)));
}

#[test]
fn a_row_too_large_for_any_message_gives_up_its_logprobs_and_fails_alone() {
    let mut scheduler = scheduler(config(), Script::default());
    let mut input = request("a", vec![1], 40);
    input.return_logprob = true;
    scheduler.submit(input);
    scheduler.turn();
    scheduler.recorder_mut().max_rows = Some(0);
    scheduler.turn();
    scheduler.recorder_mut().max_rows = None;
    scheduler.settle();
    assert_eq!(scheduler.running(), 0, "it does not run on");
}

#[test]
fn draining_refuses_new_requests_and_ends_what_is_there() {
    let mut config = config();
    config.schedule.max_running_requests = 1;
    let mut scheduler = scheduler(config, Script::default());
    scheduler.submit(request("runs", vec![1], 5));
    scheduler.submit(request("waits", vec![1], 5));
    let (sender, shutdown) = Shutdown::new();
    sender.advance(ShutdownPhase::Draining);
    scheduler.draining = true;
    scheduler.submit(request("late", vec![1], 5));
    let (_keep, inbox) = std::sync::mpsc::channel();
    scheduler.run(&inbox, &shutdown, &StatusReporter::detached()).expect("ends by itself");
    assert!(matches!(scheduler.refused("late"), Some(FinishReason::Abort { status_code: Some(503), .. })));
    assert_eq!(scheduler.answer("runs").finish, length(5));
    assert_eq!(scheduler.answer("waits").finish, length(5));
}

#[test]
fn the_longest_cached_prefix_goes_first_under_lpm() {
    let mut config = config();
    config.schedule.policy = SchedulePolicy::Lpm;
    config.schedule.max_running_requests = 1;
    let mut scheduler = scheduler(config, Script::default());
    scheduler.submit(request("seed", (0..20).collect(), 1));
    scheduler.settle();
    scheduler.submit(request("cold", (30..50).collect(), 1));
    scheduler.submit(request("warm", (0..21).collect(), 1));
    scheduler.settle();
    let order: Vec<_> = scheduler.recorder().rows.iter().map(|row| row.progress.rid.0.as_str()).collect();
    assert_eq!(order, ["seed", "warm", "cold"]);
}

#[test]
fn logprobs_come_one_per_token_and_the_prompts_once() {
    let mut config = config();
    config.schedule.chunked_prefill_size = 4;
    let mut scheduler = scheduler(config, Script { kv_slots: 64, ..speculative(4) });
    scheduler.submit(request("warm", (0..12).collect(), 1));
    scheduler.settle();
    let mut input = request("a", (0..12).collect(), 9);
    (input.return_logprob, input.logprob_start_len, input.top_logprobs_num) = (true, Some(3), 2);
    input.token_ids_logprob = vec![5];
    scheduler.submit(input);
    scheduler.settle();
    let answer = scheduler.answer("a");
    let logprobs = answer.logprobs;
    assert_eq!(logprobs.input_token_logprobs_idx, (3..12).collect::<Vec<_>>());
    assert_eq!(logprobs.input_top_logprobs.len(), 9);
    assert_eq!(logprobs.output_token_logprobs_idx, answer.ids);
    assert_eq!((logprobs.output_top_logprobs.len(), logprobs.output_token_ids_logprobs.len()), (9, 9));
    assert!(logprobs.output_top_logprobs.iter().all(|top| top.len() == 2));
    assert_eq!(answer.last.expect("has rows").cached_tokens, 2, "position 2 must run for position 3's");
}

#[test]
fn stops_inside_a_block_end_the_answer_there() {
    let plain = solo(&request("a", vec![1, 2, 3], 40), 1024).ids;
    let stop = plain[17];
    let mut input = request("a", vec![1, 2, 3], 40);
    input.sampling_params.stop_token_ids = vec![stop];
    let first = plain.iter().position(|id| *id == stop).expect("it is there");
    let mut scheduler = scheduler(config(), Script { accept: vec![5], ..speculative(6) });
    scheduler.submit(input);
    scheduler.settle();
    let answer = scheduler.answer("a");
    assert_eq!(answer.ids, plain[..=first]);
    assert_eq!(answer.finish, Some(FinishReason::Stop { matched: Matched::Token(stop) }));
    let spec = answer.last.expect("has rows").spec;
    assert!(spec.delivered_drafts <= spec.accepted_drafts);
}

#[test]
fn the_state_tells_lengths_and_acceptance_from_the_first_verify_step_on() {
    let mut scheduler = scheduler(config(), Script { accept: vec![3], ..speculative(4) });
    let state = |scheduler: &mut TestScheduler| {
        scheduler.tell(ToScheduler::GetInternalState(GetInternalStateReq { id: 1 }));
        match scheduler.recorder_mut().replies.pop() {
            Some(ToTokenizer::InternalState(reply)) => reply.internal_state,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(state(&mut scheduler).avg_spec_accept_length, None);
    scheduler.submit(request("a", vec![1, 2], 40));
    scheduler.turns(2);
    let now = state(&mut scheduler);
    assert_eq!((now.num_running_reqs, now.avg_spec_accept_length), (1, Some(4.0)));
    assert_eq!((now.speculative_num_steps, now.speculative_num_draft_tokens), (3, 4));
    assert!(now.memory_usage["used"].as_u64() > Some(0));
}

#[test]
fn a_tokenizer_process_that_comes_up_hears_that_the_scheduler_is_ready() {
    let mut scheduler = scheduler(config(), Script { kv_slots: 100, ..speculative(4) });
    scheduler.handle(Event::Tokenizer(Front(0), LinkEvent::Up { peer: Incarnation(1), restarted: false }));
    let Some(ToTokenizer::SchedulerReady(info)) = scheduler.recorder().replies.first() else {
        panic!("no greeting")
    };
    assert_eq!((info.max_total_num_tokens, info.max_req_input_len), (100, 100));
    assert_eq!(info.effective_speculative_algorithm, "NONE");
}
