//! A request that nobody waits for any more stops at once.

use std::time::Duration;

use serde_json::{Value, json};
use tests::{Server, ServerOptions, shared, wait_until};

use crate::support::{STORY, greedy, number, output_ids};

/// Aborts are watched by what the scheduler holds, so these tests have a server without other guests.
fn long(rid: &str) -> Value {
    let mut body = greedy(STORY, 4000);
    body["rid"] = json!(rid);
    body
}

fn server() -> std::sync::Arc<Server> {
    shared(ServerOptions::ngram().with(&["--stream-interval", "1"]))
}

#[test]
fn a_client_that_leaves_takes_its_request_along() {
    let server = Server::start(ServerOptions::ngram());
    let mut body = long("leaver");
    body["stream"] = json!(true);
    let mut stream = server.stream("/generate", &body);
    stream.next().unwrap();
    assert_eq!(server.requests_held(), 1);
    drop(stream);
    let gone = wait_until(Duration::from_secs(2), || server.requests_held() == 0);
    assert!(gone, "the request runs on: {}", server.internal_state());
    // The slot and the id are free again.
    body["sampling_params"]["max_new_tokens"] = json!(2);
    assert_eq!(server.stream("/generate", &body).all().len(), 2);
}

#[test]
fn a_client_that_leaves_without_streaming_does_too() {
    let server = Server::start(ServerOptions::ngram());
    let body = long("silent").to_string();
    let address = server.base().strip_prefix("http://").unwrap();
    let mut connection = std::net::TcpStream::connect(address).unwrap();
    let head = format!(
        "POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    std::io::Write::write_all(&mut connection, format!("{head}{body}").as_bytes()).unwrap();
    assert!(wait_until(Duration::from_secs(5), || server.requests_held() == 1), "the request never ran");
    drop(connection);
    let gone = wait_until(Duration::from_secs(2), || server.requests_held() == 0);
    assert!(gone, "the request runs on: {}", server.internal_state());
}

#[test]
fn an_aborted_request_returns_what_it_has() {
    let server = server();
    let reply = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| server.generate(&long("target")));
        assert!(wait_until(Duration::from_secs(10), || server.requests_held() >= 1));
        // A name that merely begins the same is another request.
        assert_eq!(server.post("/abort_request", &json!({"rid": "tar"})).status, 200);
        assert_eq!(server.post("/abort_request", &json!({"rid": "target"})).status, 200);
        waiting.join().unwrap()
    });
    let meta = &reply["meta_info"];
    assert_eq!(meta["finish_reason"]["type"], "abort", "{meta}");
    assert_eq!(number(meta, "completion_tokens") as usize, output_ids(&reply).len());
    assert!(output_ids(&reply).len() < 4000);
}

#[test]
fn aborting_the_unknown_changes_nothing() {
    let server = server();
    for body in [json!({"rid": "nobody"}), json!({"rid": "nobody"}), json!({"rid": "HEALTH"})] {
        assert_eq!(server.post("/abort_request", &body).status, 200, "{body}");
    }
    assert_eq!(output_ids(&server.generate(&greedy(STORY, 3))).len(), 3);
}
