//! Owns what the tests of single faults share: a server that may lose many processes, streams under way, and what a
//! client must have in the end.

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tests::{Server, ServerOptions, Stream, is_alive, wait_until};

use crate::support::{number, output_ids};

/// Long enough for any machine; nothing here is about speed.
pub(super) const PATIENCE: Duration = Duration::from_secs(90);

pub(super) fn server(options: ServerOptions) -> Server {
    Server::start(options.with(&["--metrics-port", "0", "--restart-limit", "50"]))
}

/// Starts a streamed request and waits until it has this many tokens.
pub(super) fn under_way(server: &Server, body: &Value, tokens: u64) -> Stream {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let mut stream = server.stream("/generate", &body);
    while number(&stream.next().expect("the stream goes on")["meta_info"], "completion_tokens") < tokens {}
    stream
}

/// The last event of a stream that must end as it should.
pub(super) fn finish(mut stream: Stream) -> Value {
    let mut last = Value::Null;
    while let Some(event) = stream.next() {
        last = event;
    }
    assert!(stream.is_done(), "broke off after {last}");
    last
}

pub(super) fn same(reply: &Value, expected: &Value) {
    assert_eq!(output_ids(reply), output_ids(expected));
    assert_eq!(reply["text"], expected["text"]);
    assert_eq!(reply["meta_info"]["finish_reason"], expected["meta_info"]["finish_reason"]);
}

/// SIGKILL, and until it has done its work: what a dying process still accepts is lost.
pub(super) fn kill_for_good(server: &Server, binary: &str) {
    let dead = server.signal_child(binary, Signal::SIGKILL);
    assert!(wait_until(PATIENCE, || !is_alive(dead)));
}

/// Waits until the process has been replaced so often, and all are at work.
pub(super) fn wait_restarted(server: &Server, role: &str, restarts: u64) {
    assert!(wait_until(PATIENCE, || number(&server.report(role), "restarts") == restarts));
    assert!(wait_until(PATIENCE, || server.report(role)["state"] == "ready"));
    server.wait_ready();
}
