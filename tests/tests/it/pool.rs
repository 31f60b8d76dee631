//! Memory under speculation: drafts that are refused leave nothing behind, whatever the page size, and a request that
//! loses its memory comes back with the same answer and the same books.

use serde_json::{Value, json};
use tests::Server;

use crate::support::{check_identities, number, output_ids};
use crate::told::{Told, acceptance};
use crate::workers::{EAGLE, EAGLE_TREE, Worker, ask, assert_same, in_one_request, together, with};

/// Slots that are used, cached and free.
fn slots(server: &Server) -> (u64, u64, u64) {
    server.wait_idle();
    let memory = &server.internal_state()["memory_usage"];
    let [used, cached, free] = ["used", "cached", "free"].map(|name| number(memory, name));
    assert_eq!(used + cached + free, number(memory, "token_capacity"), "{memory}");
    (used, cached, free)
}

/// Prompts and limits that leave pages part full and cut blocks.
fn ragged() -> Vec<Value> {
    let body = |index: u64| {
        let prompt: Vec<u64> = (0..(index * 7) % 50 + 1).map(|at| 5 + (at * 31 + index) % 490).collect();
        ask(&prompt, 1 + (index as usize * 5) % 33)
    };
    (0..12).map(body).collect()
}

/// A pool for two of eight requests, in pages: they lose their memory again and again, end with the same answers and
/// the right counts, and give every slot back.
pub(crate) fn small_pool(worker: Worker) {
    let plain = worker.plain();
    let room = ["--max-total-tokens", "320", "--max-running-requests", "6"];
    let server = Server::start(worker.options().with(&room));
    let all = slots(&server).2;
    let mut told = Told::default();
    together(&server, &ragged()).iter().for_each(|reply| told.add(&reply["meta_info"]));
    let prompts = worker.prompts();
    let body = |index: usize| {
        let params = json!({"temperature": (index % 2) as f64 * 0.8, "sampling_seed": index});
        with(ask(&prompts[index % prompts.len()], 150), params)
    };
    let bodies: Vec<Value> = (0..8).map(body).collect();
    let mut retractions = 0;
    for (body, reply) in bodies.iter().zip(in_one_request(&server, &bodies)) {
        let what = format!("{body} for {worker:?}");
        assert_same(&reply, &plain.generate(body), &what);
        let meta = &reply["meta_info"];
        assert!(number(meta, "cached_tokens") <= number(meta, "prompt_tokens"), "{what}: {meta}");
        retractions += number(meta, "num_retractions");
        told.add(meta);
    }
    assert!(retractions > 0, "nothing was retracted, {worker:?}");
    let metrics = told.arrive_at(&server);
    assert_eq!(metrics.sum("sglang:num_retracted_requests_total"), retractions as f64);
    let (used, cached, _) = slots(&server);
    assert!(used == 0 && cached > 0, "{used} used, {cached} cached, {worker:?}");
    assert_eq!(server.post("/flush_cache", &json!({})).status, 200);
    assert_eq!(slots(&server), (0, 0, all), "{worker:?}");
}

#[test]
fn all_slots_come_back_at_every_page_size() {
    for page in ["1", "16", "64"] {
        let server = Server::start(EAGLE_TREE.options().with(&["--page-size", page]));
        let all = slots(&server).2;
        together(&server, &ragged()).iter().for_each(|reply| check_identities(&reply["meta_info"]));
        let (used, cached, _) = slots(&server);
        assert!(used == 0 && cached > 0, "{used} used, {cached} cached with pages of {page}");
        assert_eq!(server.post("/flush_cache", &json!({})).status, 200);
        assert_eq!(slots(&server), (0, 0, all), "pages of {page}");
    }
}

/// The cache holds the prompt and the delivered answer but for its last token, which never ran, in whole pages.
pub(crate) fn second_turn(worker: Worker) {
    let (server, plain) = (worker.server(), worker.plain());
    let mut prompt = worker.prompts().pop().unwrap();
    prompt[0] = 79;
    for limit in [7, 12, 25] {
        prompt[1] = 100 + limit as u64;
        let first = server.generate(&ask(&prompt, limit));
        let turn = [prompt.clone(), output_ids(&first), vec![9, 4, 7]].concat();
        let second = server.generate(&ask(&turn, 20));
        let cached = number(&second["meta_info"], "cached_tokens") as usize;
        let ran = prompt.len() + limit - 1;
        let page: usize = worker.page_size.parse().unwrap();
        assert_eq!(cached, ran / page * page, "limit {limit}, {worker:?}");
        assert_same(&second, &plain.generate(&ask(&turn, 20)), &format!("{worker:?}"));
    }
}

/// Requests that share a prefix, some of them cut off in the middle of a block: what they leave in the cache is right.
pub(crate) fn cut_off(worker: Worker) {
    let (server, plain) = (worker.server(), worker.plain());
    let prompt = worker.prompts().pop().unwrap();
    let expected = plain.generate(&ask(&prompt, 60));
    for round in 0..6 {
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
}

/// A stop cuts a block: the drafts behind it are counted as accepted, not as delivered.
#[test]
fn what_a_stop_cuts_off_is_accepted_but_not_delivered() {
    let (server, plain) = (Server::start(EAGLE.options()), EAGLE.plain());
    let mut told = Told::default();
    for prompt in EAGLE.prompts() {
        let whole = output_ids(&plain.generate(&ask(&prompt, 20)));
        for stop in &whole[1..16] {
            told.add(
                &server.generate(&with(ask(&prompt, 60), json!({"stop_token_ids": [stop]})))["meta_info"],
            );
        }
    }
    told.arrive_at(&server);
    let [_, _, accepted, delivered] = acceptance(&server.metrics());
    assert!(0.0 < delivered && delivered < accepted, "{delivered} of {accepted} were delivered");
}
