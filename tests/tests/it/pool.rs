//! Memory under speculation: drafts that are refused leave nothing behind, whatever the page size, and a request that
//! loses its memory comes back with the same answer and the same books.

use std::time::Duration;

use serde_json::{Value, json};
use tests::{Server, wait_until};

use crate::support::{check_identities, number, output_ids};
use crate::told::{Told, acceptance};
use crate::workers::{ALL, NGRAM, ask, assert_same, ids, together, with};

/// Slots that are used, cached and free.
fn slots(server: &Server) -> (u64, u64, u64) {
    server.wait_idle();
    let memory = &server.internal_state()["memory_usage"];
    let [used, cached, free] = ["used", "cached", "free"].map(|name| number(memory, name));
    assert_eq!(used + cached + free, number(memory, "token_capacity"), "{memory}");
    (used, cached, free)
}

#[test]
fn all_slots_come_back_at_every_page_size() {
    for worker in ALL {
        for page in ["1", "16", "64"] {
            let server = Server::start(worker.options().with(&["--page-size", page]));
            let all = slots(&server).2;
            // Lengths that leave pages part full, limits that cut blocks.
            let bodies: Vec<Value> = (0..12)
                .map(|index| {
                    let prompt: Vec<u64> = (0..(index * 7) % 50 + 1).map(|at| 5 + (at * 31 + index) % 490).collect();
                    ask(&prompt, 1 + (index as usize * 5) % 33)
                })
                .collect();
            together(&server, &bodies).iter().for_each(|reply| check_identities(&reply["meta_info"]));
            let (used, cached, _) = slots(&server);
            assert!(used == 0 && cached > 0, "{used} used, {cached} cached with pages of {page}, {worker:?}");
            assert_eq!(server.post("/flush_cache", &json!({})).status, 200);
            assert_eq!(slots(&server), (0, 0, all), "pages of {page}, {worker:?}");
        }
    }
}

/// The cache holds the prompt and the delivered answer but for its last token, which never ran.
#[test]
fn a_second_turn_finds_exactly_what_was_said() {
    for worker in ALL.into_iter().filter(|worker| worker.page_size == "1") {
        let server = worker.server();
        let mut prompt = worker.prompts().pop().unwrap();
        prompt[0] = 79;
        for limit in [7, 12, 25] {
            prompt[1] = 100 + limit as u64;
            let first = server.generate(&ask(&prompt, limit));
            let turn = [prompt.clone(), output_ids(&first), vec![9, 4, 7]].concat();
            let second = server.generate(&ask(&turn, 20));
            let cached = number(&second["meta_info"], "cached_tokens") as usize;
            assert_eq!(cached, prompt.len() + limit - 1, "limit {limit}, {worker:?}");
            assert_same(&second, &worker.plain().generate(&ask(&turn, 20)), &format!("{worker:?}"));
        }
    }
}

/// A pool for two of eight requests: they lose their memory again and again.
#[test]
fn retracted_requests_end_with_the_same_answers_and_right_counts() {
    for worker in ALL {
        let options = worker.options().with(&["--max-total-tokens", "320", "--max-running-requests", "6"]);
        let server = Server::start(options);
        let prompts = worker.prompts();
        let body = |index: usize| {
            let params = json!({"temperature": (index % 2) as f64 * 0.8, "sampling_seed": index});
            with(ask(&prompts[index % prompts.len()], 110), params)
        };
        let bodies: Vec<Value> = (0..8).map(body).collect();
        let mut told = Told::default();
        let mut retractions = 0;
        for (body, reply) in bodies.iter().zip(together(&server, &bodies)) {
            let what = format!("{body} for {worker:?}");
            assert_same(&reply, &worker.plain().generate(body), &what);
            let meta = &reply["meta_info"];
            assert!(number(meta, "cached_tokens") <= number(meta, "prompt_tokens"), "{what}: {meta}");
            retractions += number(meta, "num_retractions");
            told.add(meta);
        }
        assert!(retractions > 0, "nothing was retracted, {worker:?}");
        told.arrive_at(&server);
        assert_eq!(server.metrics().sum("sglang:num_retracted_requests_total"), retractions as f64);
        assert_eq!(slots(&server).0, 0, "{worker:?}");
    }
}

/// Requests that share a prefix, some of them cut off in the middle of a block: what they leave in the cache is right.
#[test]
fn cut_off_requests_leave_a_cache_that_others_can_use() {
    for worker in [NGRAM, ALL[0], ALL[1]] {
        let server = worker.server();
        let prompt = worker.prompts().pop().unwrap();
        let expected = worker.plain().generate(&ask(&prompt, 60));
        for round in 0..10 {
            let mut long = with(ask(&prompt, 400), json!({"stream_interval": 1}));
            long["stream"] = json!(true);
            let mut streams: Vec<_> = (0..3).map(|_| server.stream("/generate", &long)).collect();
            for stream in &mut streams {
                // As many chunks as there are, if fewer.
                let _ = (0..=round).map_while(|_| stream.next()).count();
            }
            drop(streams);
            assert_same(&server.generate(&ask(&prompt, 60)), &expected, &format!("round {round}, {worker:?}"));
        }
        assert_eq!(ids(&expected["output_ids"]).len(), 60);
        let gone = wait_until(Duration::from_secs(5), || server.requests_held() == 0);
        assert!(gone, "cut off requests run on: {}", server.internal_state());
    }
}

/// A stop cuts a block: the drafts behind it are counted as accepted, not as delivered.
#[test]
fn what_a_stop_cuts_off_is_accepted_but_not_delivered() {
    let worker = ALL[0];
    let server = Server::start(worker.options());
    let mut told = Told::default();
    for prompt in worker.prompts() {
        let whole = output_ids(&worker.plain().generate(&ask(&prompt, 20)));
        for stop in &whole[1..16] {
            told.add(&server.generate(&with(ask(&prompt, 60), json!({"stop_token_ids": [stop]})))["meta_info"]);
        }
    }
    told.arrive_at(&server);
    let [_, _, accepted, delivered] = acceptance(&server.metrics());
    assert!(0.0 < delivered && delivered < accepted, "{delivered} of {accepted} were delivered");
}
