//! Requests that do not run to their end: clients that leave, aborts, duplicates, floods, and the end of the
//! process.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use proto::child::Phase;
use serde_json::{Value, json};

use crate::fake::Mode;
use crate::server::{Server, start, start_with};

fn long(rid: &str, stream: bool) -> Value {
    json!({"text": "x", "rid": rid, "stream": stream, "sampling_params": {"max_new_tokens": 50}})
}

/// Sends a request from another thread.
fn ask(server: &Server, path: &str, body: Value) -> std::thread::JoinHandle<(u16, String)> {
    let request = server.client.post(format!("{}{path}", server.url)).json(&body);
    std::thread::spawn(move || {
        let response = request.send().unwrap();
        (response.status().as_u16(), response.text().unwrap())
    })
}

#[test]
fn a_client_that_leaves_aborts_its_request() {
    let server = start();
    server.fake.mode(Mode::Hold);
    let hasty = reqwest::blocking::Client::builder().timeout(Duration::from_millis(500)).build().unwrap();
    for (rid, stream) in [("plain", false), ("stream", true)] {
        let response = hasty.post(format!("{}/generate", server.url)).json(&long(rid, stream)).send();
        server.fake.wait_for_request(rid);
        drop(response);
        server.fake.wait_for_abort(rid);
    }
    let response = hasty
        .post(format!("{}/v1/completions", server.url))
        .json(&json!({"prompt": "x", "rid": "n", "n": 2}))
        .send();
    drop(response);
    server.fake.wait_for_abort("n_0");
    server.fake.wait_for_abort("n_1");
    assert!(server.metric("sglang:num_aborted_requests_total").unwrap() >= 4.0);
}

#[test]
fn an_abort_returns_the_answer_so_far_and_matches_exactly() {
    let server = start();
    server.fake.mode(Mode::Hold);
    let first = ask(&server, "/generate", long("job-1", false));
    let other = ask(&server, "/generate", long("job-10", false));
    server.fake.wait_for_request("job-1");
    server.fake.wait_for_request("job-10");
    for _ in 0..2 {
        assert_eq!(server.post("/abort_request", &json!({"rid": "job-1"})).status(), 200);
    }
    let (status, text) = first.join().unwrap();
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &answer["text"]), (200, &json!(" w0")));
    assert_eq!(answer["meta_info"]["finish_reason"]["type"], "abort");
    assert!(!other.is_finished());
    assert_eq!(server.post("/abort_request", &json!({"rid": "unknown"})).status(), 200);
    for bad in [json!({"rid": ""}), json!({}), json!({"rid": null})] {
        server.refused("/abort_request", &bad, 400);
    }
    assert!(!other.is_finished());
    assert_eq!(server.post("/abort_request", &json!({"abort_all": true})).status(), 200);
    assert_eq!(other.join().unwrap().0, 200);
}

#[test]
fn the_name_of_a_batch_aborts_all_of_it() {
    let server = start();
    server.fake.mode(Mode::Hold);
    let body = json!({"text": ["x", "y"], "rid": "b", "sampling_params": {"max_new_tokens": 9}});
    let batch = ask(&server, "/generate", body);
    server.fake.wait_for_request("b_0");
    server.fake.wait_for_request("b_1");
    server.post("/abort_request", &json!({"rid": "b"}));
    assert_eq!(batch.join().unwrap().0, 200);
}

#[test]
fn a_name_in_use_is_refused_and_free_again_afterwards() {
    let server = start();
    server.fake.mode(Mode::Hold);
    let first = ask(&server, "/generate", long("x", false));
    server.fake.wait_for_request("x");
    let error = server.refused("/generate", &long("x", false), 400);
    assert_eq!(error, json!({"error": {"message": "Duplicate request ID x"}}));
    let error = server.refused("/v1/completions", &json!({"prompt": "x", "rid": "x", "stream": true}), 400);
    assert_eq!(error["message"], "Duplicate request ID x");
    server.fake.release();
    let (status, text) = first.join().unwrap();
    assert_eq!(status, 200);
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["meta_info"]["completion_tokens"], 50);
    server.fake.mode(Mode::Echo { row: 1 });
    server.ok("/generate", &long("x", false));
}

#[test]
fn a_full_queue_answers_every_request() {
    let server = start_with(|config| config.server.max_queued_requests = 0);
    server.fake.mode(Mode::Hold);
    let running: Vec<_> = (0..16).map(|i| ask(&server, "/generate", long(&format!("r{i}"), false))).collect();
    (0..16).for_each(|i| server.fake.wait_for_request(&format!("r{i}")));
    for _ in 0..4 {
        let response = server.post("/generate", &json!({"text": "x"}));
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()["retry-after"], "1");
        assert_eq!(response.json::<Value>().unwrap()["message"], "The request queue is full.");
    }
    assert_eq!(server.get("/ready").status(), 503);
    server.fake.release();
    running.into_iter().for_each(|request| assert_eq!(request.join().unwrap().0, 200));
}

#[test]
fn the_cache_is_flushed_when_idle_and_refused_when_busy() {
    let server = start();
    let response = server.post("/flush_cache?timeout=1", &json!({}));
    assert_eq!(response.status(), 200);
    assert!(response.text().unwrap().starts_with("Cache flushed.\n"));
    server.fake.mode(Mode::Hold);
    let running = ask(&server, "/generate", long("x", false));
    server.fake.wait_for_request("x");
    assert_eq!(server.get("/flush_cache").status(), 400);
    assert_eq!(server.get("/flush_cache?timeout=NaN").status(), 400);
    server.fake.release();
    running.join().unwrap();
}

#[test]
fn a_huge_prompt_does_not_hold_up_small_ones() {
    let server = start();
    let huge = ask(&server, "/generate", json!({"text": "many different words ".repeat(500_000)}));
    for _ in 0..20 {
        server.ok("/generate", &json!({"text": "x", "sampling_params": {"max_new_tokens": 1}}));
        assert_eq!(server.get("/health").status(), 200);
    }
    assert!(!huge.is_finished(), "the huge prompt was too small to show anything");
    assert_eq!(huge.join().unwrap().0, 400);
}

#[test]
fn draining_finishes_what_runs_and_admits_nothing() {
    let mut server = start();
    server.fake.mode(Mode::Hold);
    let running = ask(&server, "/generate", long("x", true));
    server.fake.wait_for_request("x");
    server.shutdown.advance(Phase::Draining);
    server.refused("/generate", &json!({"text": "x"}), 503);
    assert_eq!(server.get("/ready").status(), 503);
    assert_eq!(server.get("/health").status(), 503);
    server.fake.release();
    let (status, text) = running.join().unwrap();
    assert_eq!(status, 200);
    assert!(text.ends_with("data: [DONE]\n\n") && text.contains("\"completion_tokens\":50"), "{text}");
    server.stop(Phase::Draining).unwrap();
}

/// Asks over a connection of its own; gives the whole reply.
fn get_over(mut stream: TcpStream) -> String {
    stream.write_all(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    reply
}

#[test]
fn retiring_serves_who_is_inside_and_leaves_the_rest_to_a_successor() {
    let mut server = start();
    server.fake.mode(Mode::Hold);
    let running = ask(&server, "/generate", long("x", true));
    server.fake.wait_for_request("x");
    let address = server.listener.local_addr().unwrap();
    let inside = TcpStream::connect(address).unwrap();
    // Connections are taken in their order: with this one's answer, the one before is inside.
    let mut next = TcpStream::connect(address).unwrap();
    next.write_all(b"GET /ready HTTP/1.0\r\n\r\n").unwrap();
    next.read_to_string(&mut String::new()).unwrap();
    server.shutdown.advance(Phase::Retiring);
    let mut clients = Vec::new();
    server.wait_until("left to a successor", || {
        server.listener.accept().is_ok() || {
            clients.push(TcpStream::connect(address).unwrap());
            false
        }
    });
    let reply = get_over(inside);
    assert!(reply.starts_with("HTTP/1.1 200 ") && reply.contains("connection: close\r\n"), "{reply}");
    server.fake.release();
    let (status, text) = running.join().unwrap();
    assert!(status == 200 && text.ends_with("data: [DONE]\n\n"), "{text}");
    server.stop(Phase::Retiring).unwrap();
}

#[test]
fn stopping_gives_every_waiting_client_an_error() {
    let mut server = start();
    server.fake.mode(Mode::Silent);
    let waiting: Vec<_> = ["/generate", "/v1/completions"]
        .into_iter()
        .map(|path| {
            ask(&server, path, json!({if path == "/generate" { "text" } else { "prompt" }: "x", "rid": path}))
        })
        .collect();
    server.fake.wait_for_request("/generate");
    server.fake.wait_for_request("/v1/completions");
    server.stop(Phase::Stopping).unwrap();
    for request in waiting {
        let (status, text) = request.join().unwrap();
        assert_eq!(status, 503, "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["object"], "error");
    }
}
