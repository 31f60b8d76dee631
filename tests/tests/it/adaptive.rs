//! Depth that adapts, on real servers: answers stay the plain ones, numbers stay exact, and operators see it move.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tests::{Metrics, Server, ServerOptions, wait_until};

use crate::support::number;
use crate::told::Told;
use crate::workers::{
    DFLASH, EAGLE, EAGLE_TREE, EAGLE3, MIXED, MULTI_LAYER, NEXTN, NGRAM, STANDALONE, Worker, ask,
    assert_same, together, with,
};

/// A server whose depth adapts by a file of slots.
struct Adaptive {
    server: Server,
    _folder: tempfile::TempDir,
}

impl Adaptive {
    fn start(worker: Worker, slots: &Value) -> Self {
        let (options, folder) = options(worker.options(), slots);
        Self { server: Server::start(options), _folder: folder }
    }
}

fn options(options: ServerOptions, slots: &Value) -> (ServerOptions, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("slots.json");
    std::fs::write(&path, slots.to_string()).unwrap();
    let path = path.to_str().expect("temporary folders have plain names").to_owned();
    (options.with(&["--speculative-adaptive", "--speculative-adaptive-config", &path]), folder)
}

/// Depths that change at nearly every step, by the last step alone.
fn restless(worker: Worker) -> Value {
    let deepest = if worker.is_ngram() || worker.is_dflash() { worker.nodes() } else { worker.steps };
    let all: Vec<usize> = (0..=deepest).collect();
    json!({
        "ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1, "min_dwell": 0, "max_backoff": 0,
        "cost_margin": null, "isolate_depths": false,
        "1": {"candidate_steps": all}, "3": {"candidate_steps": [0, deepest]},
    })
}

fn bodies(worker: Worker) -> Vec<Value> {
    let prompts = worker.prompts();
    let body = |index: usize| {
        let params = json!({"temperature": (index % 3) as f64 * 0.5, "sampling_seed": index});
        let mut body = with(ask(&prompts[index % prompts.len()], 10 + 7 * (index % 5)), params);
        if index % 5 == 4 {
            body["speculative"] = json!({"max_draft_tokens": index % 2});
        }
        body
    };
    (0..10).map(body).collect()
}

/// Alone and together, at all depths in turn; and what clients are told adds up to what is counted.
fn moves_and_changes_nothing(worker: Worker) {
    let adaptive = Adaptive::start(worker, &restless(worker));
    let plain = worker.plain();
    let bodies = bodies(worker);
    let expected: Vec<_> = bodies.iter().map(|body| plain.generate(body)).collect();
    let mut told = Told::default();
    let mut check = |replies: Vec<Value>| {
        for (index, (reply, expected)) in replies.iter().zip(&expected).enumerate() {
            assert_same(reply, expected, &format!("row {index} of {worker:?}"));
            told.add(&reply["meta_info"]);
        }
    };
    check(together(&adaptive.server, &bodies));
    check(bodies.iter().map(|body| adaptive.server.generate(body)).collect());
    let metrics = told.arrive_at(&adaptive.server);
    let steps = metrics.by_label("sglang:spec_steps_at_depth_total", "steps");
    assert!(steps.len() >= 3, "{worker:?}: {steps:?}");
    assert!(metrics.sum("sglang:spec_depth_switches_total") >= 5.0, "{worker:?}");
}

#[test]
fn eagle_moves_and_changes_nothing() {
    moves_and_changes_nothing(EAGLE);
}

#[test]
fn an_eagle_tree_moves_and_changes_nothing() {
    moves_and_changes_nothing(EAGLE_TREE);
}

#[test]
fn eagle3_moves_and_changes_nothing() {
    moves_and_changes_nothing(EAGLE3);
}

#[test]
fn nextn_moves_and_changes_nothing() {
    moves_and_changes_nothing(NEXTN);
}

#[test]
fn standalone_moves_and_changes_nothing() {
    moves_and_changes_nothing(STANDALONE);
}

#[test]
fn ngram_moves_and_changes_nothing() {
    moves_and_changes_nothing(NGRAM);
}

#[test]
fn dflash_moves_and_changes_nothing() {
    moves_and_changes_nothing(DFLASH);
}

#[test]
fn multi_layer_eagle_moves_and_changes_nothing() {
    moves_and_changes_nothing(MULTI_LAYER);
}

#[test]
fn n_grams_before_eagle_move_and_change_nothing() {
    moves_and_changes_nothing(MIXED);
}

/// What an operator reads in one moment.
fn depth(server: &Server) -> (f64, Metrics) {
    let metrics = server.metrics();
    (metrics.sum("sglang:spec_num_steps"), metrics)
}

/// Waits for a depth: snapshots are written at intervals.
fn wait_for(server: &Server, steps: f64) -> Metrics {
    assert!(wait_until(Duration::from_secs(5), || depth(server).0 == steps), "{}", server.logs());
    depth(server).1
}

/// An easy prompt, a hard one, and the easy one again: up, down and up, in the gauges, the counter, the state and the
/// log, within one report.
#[test]
fn depth_follows_the_prompts_and_shows_it() {
    let worker = EAGLE.of_depth(3);
    let slots = json!({
        "ema_alpha": 0.3, "warmup_batches": 1, "update_interval": 1, "min_dwell": 2, "max_backoff": 0,
        "cost_margin": null, "1": {"candidate_steps": [1, 3]},
    });
    let adaptive = Adaptive::start(worker, &slots);
    let server = &adaptive.server;
    let easy = ask(&worker.prompts().pop().unwrap(), 60);
    // Far from all that the draft was trained on.
    let prompt: Vec<u64> = std::iter::once(1).chain((1..8).map(|index| index * 37)).collect();
    let hard = ask(&prompt, 30);
    let mut told = Told::default();
    let mut run = |body: &Value| told.add(&server.generate(body)["meta_info"]);
    run(&hard);
    wait_for(server, 1.0);
    run(&easy);
    let metrics = wait_for(server, 3.0);
    assert_eq!(metrics.sum("sglang:spec_num_draft_tokens"), 4.0);
    run(&hard);
    let metrics = wait_for(server, 1.0);
    assert_eq!(metrics.sum("sglang:spec_num_draft_tokens"), 2.0);
    let state = server.internal_state();
    assert_eq!(
        (number(&state, "speculative_num_steps"), number(&state, "speculative_num_draft_tokens")),
        (1, 2)
    );
    assert_eq!(state["speculative_adaptive"], true);
    let slot = &state["speculative_adaptive_state"][0];
    assert_eq!((number(slot, "batch_size"), number(slot, "num_steps")), (1, 1));
    assert!(slot["candidates"][0]["accepted_drafts"].is_number(), "{slot}");
    // Costs are told relative to plain steps, which are no candidate here.
    assert!(slot["candidates"][0]["step_seconds"].is_null(), "{slot}");
    run(&easy);
    wait_for(server, 3.0);
    let metrics = told.arrive_at(server);
    let switches = |from: &str, to: &str, reason: &str| {
        metrics
            .sum_with("sglang:spec_depth_switches_total", &[("from", from), ("to", to), ("reason", reason)])
    };
    assert!(switches("1", "3", "acceptance_up") >= 2.0);
    assert!(switches("3", "1", "acceptance_down") >= 2.0);
    let logs = server.logs();
    assert!(logs.contains("Adaptive spec params updated: steps 1 -> 3 (ema_accept_len="), "{logs}");
    assert!(logs.contains("reason: acceptance_down, batch size: 1, token/s by steps: 1: "), "{logs}");
}

/// Buffers hold the deepest candidate, also where it is far from where depth begins.
#[test]
fn the_deepest_candidate_fits_at_once() {
    for worker in [EAGLE.of_depth(1), STANDALONE.of_depth(1)] {
        let slots = json!({
            "ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1, "min_dwell": 0, "max_backoff": 0,
            "up_hysteresis": -9.0, "down_hysteresis": -9.0, "cost_margin": null,
            "1": {"candidate_steps": [1, 3, 9]},
        });
        let adaptive = Adaptive::start(worker, &slots);
        let bodies: Vec<_> = worker.prompts().iter().cycle().take(8).map(|prompt| ask(prompt, 40)).collect();
        let expected: Vec<_> = bodies.iter().map(|body| worker.plain().generate(body)).collect();
        for (reply, expected) in together(&adaptive.server, &bodies).iter().zip(&expected) {
            assert_same(reply, expected, &format!("{worker:?}"));
        }
        wait_for(&adaptive.server, 9.0);
    }
}

/// Without a file: SGLang's slots, plain decoding among them; the flags say what it starts with.
#[test]
fn the_defaults_serve() {
    let server = Server::start(NGRAM.options().with(&["--speculative-adaptive"]));
    let info = server.get("/server_info").ok();
    assert_eq!(
        (number(&info, "speculative_num_steps"), number(&info, "speculative_num_draft_tokens")),
        (3, 4)
    );
    let state = server.internal_state();
    let slots = state["speculative_adaptive_state"].as_array().unwrap();
    let sizes: Vec<_> = slots.iter().map(|slot| number(slot, "batch_size")).collect();
    assert_eq!(sizes, [1, 8, 32, 64]);
    let body = ask(&NGRAM.prompts()[0], 100);
    assert_same(&server.generate(&body), &NGRAM.plain().generate(&body), "defaults");
    let refused = Server::try_start(NGRAM.options().with(&["--speculative-adaptive-config", "x.json"]));
    assert!(refused.err().unwrap().logs.contains("needs --speculative-adaptive"));
}
