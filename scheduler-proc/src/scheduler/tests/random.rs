//! Random runs: whatever is mixed, every answer is its solo answer, every request ends once, no slot is lost, and
//! the counters agree with each other.

use proptest::prelude::*;
use proto::{SpecCounters, TokenizedGenerateReqInput};

use super::adaptive::restless;
use super::*;

#[derive(Debug, Clone)]
struct Arrival {
    at: usize,
    input: TokenizedGenerateReqInput,
    /// Turns after arrival.
    abort_after: Option<usize>,
}

#[derive(Debug, Clone)]
struct Run {
    page_size: u32,
    kv_pages: usize,
    radix: bool,
    /// Memory is promised lightly, so that retraction is frequent.
    optimistic: bool,
    policy: SchedulePolicy,
    max_running: u32,
    chunk: u32,
    max_prefill: u32,
    width: usize,
    /// Depth changes all the time.
    adaptive: bool,
    accept: Vec<usize>,
    arrivals: Vec<Arrival>,
    /// Turns at which the detokenizer restarts, and at which it does not read.
    restart_at: Option<usize>,
    full: std::ops::Range<usize>,
}

fn arrival() -> impl Strategy<Value = Arrival> {
    let sampling = (0u32..40, 0u32..12, any::<bool>(), prop::option::weighted(0.3, 0u32..3), 1u32..6);
    let stops = (
        prop::collection::vec(0u32..64, 0..2),
        prop::collection::vec("[a-h]{1,3}", 0..2),
        prop::option::weighted(0.2, Just("a+b|c[de]f".to_owned())),
    );
    let prompt = (0u32..3, 1usize..90, prop::option::weighted(0.3, 0u32..64));
    let asks = (prop::bool::weighted(0.3), prop::option::of(0usize..90), any::<bool>(), 0u64..3);
    (0usize..30, prompt, sampling, stops, asks, prop::option::weighted(0.25, 0usize..25)).prop_map(
        |(at, (family, prompt_len, last), sampling, stops, asks, abort_after)| {
            let (max_new, min_new, ignore_eos, max_draft_tokens, interval) = sampling;
            // Prompts of one family share prefixes of any length.
            let mut prompt: Vec<_> = (0..prompt_len as u32).map(|i| (i * 7 + family) % 60).collect();
            prompt.extend(last);
            let mut input = request("", prompt, max_new);
            let params = &mut input.sampling_params;
            (params.min_new_tokens, params.ignore_eos) = (min_new, ignore_eos);
            (params.max_draft_tokens, params.stream_interval) = (max_draft_tokens, Some(interval));
            (params.stop_token_ids, params.stop) = (stops.0, stops.1);
            params.stop_regex.extend(stops.2);
            let (logprob, start, stream, seed) = asks;
            (input.return_logprob, input.stream, params.sampling_seed) = (logprob, stream, seed);
            input.logprob_start_len =
                start.filter(|_| logprob).map(|start| (start % input.input_ids.len()) as u32);
            Arrival { at, input, abort_after }
        },
    )
}

fn run() -> impl Strategy<Value = Run> {
    let memory =
        (prop::sample::select(vec![1u32, 16, 64]), 60usize..300, any::<bool>(), any::<bool>(), any::<bool>());
    let budgets =
        (1u32..7, prop::sample::select(vec![0u32, 3, 16, 50]), prop::sample::select(vec![0u32, 20, 200]));
    let spec = (1usize..7, any::<bool>(), prop::collection::vec(0usize..6, 1..5));
    let faults = (prop::option::weighted(0.3, 0usize..40), 0usize..40, 0usize..15);
    (memory, budgets, spec, prop::collection::vec(arrival(), 1..12), faults).prop_map(
        |(memory, budgets, (width, adaptive, accept), mut arrivals, (restart_at, full_from, full_for))| {
            let (page_size, slots, radix, lpm, optimistic) = memory;
            for (index, arrival) in arrivals.iter_mut().enumerate() {
                arrival.input.rid = format!("r{index}").as_str().into();
            }
            Run {
                page_size,
                kv_pages: (slots / page_size as usize).max(2),
                radix,
                optimistic,
                policy: if lpm { SchedulePolicy::Lpm } else { SchedulePolicy::Fcfs },
                max_running: budgets.0,
                chunk: budgets.1,
                max_prefill: budgets.2,
                width,
                adaptive,
                accept,
                arrivals,
                restart_at,
                full: full_from..full_from + full_for,
            }
        },
    )
}

fn play(run: &Run) -> TestScheduler {
    let mut config = config();
    config.schedule.page_size = run.page_size;
    config.schedule.disable_radix_cache = !run.radix;
    config.schedule.policy = run.policy;
    config.schedule.max_running_requests = run.max_running;
    config.schedule.chunked_prefill_size = run.chunk;
    config.schedule.max_prefill_tokens = run.max_prefill;
    if run.adaptive && run.width > 1 {
        config.spec = Some(restless(run.width as u32 - 1));
    }
    let script = Script {
        kv_slots: run.kv_pages * run.page_size as usize,
        accept: run.accept.clone(),
        ..if run.width > 1 { speculative(run.width) } else { Script::default() }
    };
    let mut scheduler = scheduler(config, script);
    if run.optimistic {
        scheduler.admission.expect_short_answers();
    }
    for turn in 0..90 {
        for arrival in run.arrivals.iter().filter(|arrival| arrival.at == turn) {
            scheduler.submit(arrival.input.clone());
        }
        for arrival in &run.arrivals {
            if arrival.abort_after.is_some_and(|after| arrival.at + after == turn) {
                scheduler.abort_rid(&arrival.input.rid.0);
            }
        }
        if run.restart_at == Some(turn) {
            scheduler
                .handle(Event::Detokenizer(Lane(0), LinkEvent::Up { peer: Incarnation(9), restarted: true }));
        }
        scheduler.recorder_mut().full = run.full.contains(&turn);
        scheduler.turn();
    }
    scheduler.recorder_mut().full = false;
    scheduler.settle();
    scheduler
}

/// Rows of one request, up to its first end: a restarted detokenizer is told ends again.
fn check_answers(run: &Run, scheduler: &TestScheduler) -> Result<(), TestCaseError> {
    let mut rows = scheduler.recorder().rows.clone();
    let mut ended = std::collections::HashSet::new();
    rows.retain(|row| match row.progress.finished_reason {
        Some(_) => ended.insert(row.progress.rid.clone()),
        None => true,
    });
    let answers = join(&rows);
    let capacity = scheduler.admission.request_capacity();
    for Arrival { input, abort_after, .. } in &run.arrivals {
        let rid = &input.rid.0;
        if let Some(reason) = scheduler.refused(rid) {
            prop_assert_eq!(reason.kind(), "abort");
            prop_assert!(
                answers.get(rid).is_none_or(|answer| answer.finish.is_none()),
                "{} ended twice",
                rid
            );
            continue;
        }
        let answer = &answers[rid];
        let alone = solo(input, capacity);
        if abort_after.is_some() && matches!(answer.finish, Some(FinishReason::Abort { .. })) {
            prop_assert!(alone.ids.starts_with(&answer.ids), "{} strayed before its abort", rid);
        } else {
            prop_assert_eq!(&answer.ids, &alone.ids, "{} differs from its solo run", rid);
            prop_assert_eq!(&answer.finish, &alone.finish);
            prop_assert_eq!(
                answer.logprobs.input_token_logprobs_idx.len()
                    % alone.logprobs.input_token_logprobs_idx.len().max(1),
                0
            );
        }
    }
    Ok(())
}

/// The identities of every request, and that the totals are their sum.
fn check_counters(scheduler: &TestScheduler) -> Result<(), TestCaseError> {
    let mut sum = SpecCounters::default();
    for request in scheduler.outbox.ended() {
        let (spec, made) = (&request.spec, request.made);
        prop_assert_eq!(spec.check(), Ok(()));
        let made_by_all = made.by_prefill + made.plain + made.bonuses + spec.delivered_drafts as usize;
        prop_assert_eq!(request.output_len(), made_by_all, "{:?} {:?}", made, spec);
        prop_assert!(made.bonuses as u64 <= spec.verify_ct);
        prop_assert!(made.by_prefill <= 1 + request.retractions as usize);
        prop_assert!(request.cached_len <= request.prompt_len());
        sum.add(spec);
    }
    prop_assert_eq!(scheduler.metrics.totals(), &sum);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_mix_gives_every_request_its_solo_answer(run in run()) {
        let scheduler = play(&run);
        check_answers(&run, &scheduler)?;
        check_counters(&scheduler)?;
        prop_assert_eq!(scheduler.admission.cache.usage().used, 0);
        prop_assert_eq!(scheduler.engine.seated(), 0);
        prop_assert!(!scheduler.outbox.has_unsent());
    }
}
