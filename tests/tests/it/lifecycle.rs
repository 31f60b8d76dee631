//! Starting, ending and dying.

use std::net::TcpListener;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::json;
use tests::{Server, ServerOptions, is_alive, wait_until};

use crate::support::{STORY, greedy, output_ids};

/// A refusal must come before anything is started.
fn refused(options: ServerOptions) -> String {
    match Server::try_start(options) {
        Ok(_) => panic!("the server started"),
        Err(ended) => {
            assert_eq!(ended.status.code(), Some(2), "{}", ended.logs);
            ended.logs
        }
    }
}

#[test]
fn sigterm_leaves_nothing_behind() {
    let server = Server::start(ServerOptions::ngram());
    assert_eq!(server.children().len(), 3, "{:?}", server.children());
    assert!(!server.leftovers().is_empty(), "the run directory lies elsewhere");
    server.generate(&greedy(STORY, 4));
    let port = server.base().rsplit(':').next().unwrap().parse::<u16>().unwrap();
    let home = server.leftovers();
    let ended = server.end(Signal::SIGTERM);
    assert_eq!(ended.status.code(), Some(0), "{}", ended.logs);
    assert_eq!(home.len(), 1, "{home:?}");
    TcpListener::bind(("127.0.0.1", port)).expect("the port is free again");
}

#[test]
fn sigterm_lets_a_running_request_finish() {
    let server = Server::start(ServerOptions::ngram());
    let reply = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| server.try_post("/generate", &greedy(STORY, 12)));
        assert!(wait_until(Duration::from_secs(10), || server.requests_held() == 1));
        server.signal(Signal::SIGTERM);
        waiting.join().unwrap()
    });
    let reply = reply.expect("the connection survives the drain").ok();
    assert_eq!(output_ids(&reply).len(), 12);
    let mut server = server;
    assert_eq!(server.wait_for_end().status.code(), Some(0));
    assert_eq!(server.leftovers(), [""; 0]);
}

#[test]
fn ctrl_c_ends_within_seconds_whatever_runs() {
    let server = Server::start(ServerOptions::ngram());
    std::thread::scope(|scope| {
        scope.spawn(|| server.try_post("/generate", &greedy(STORY, 8000)));
        assert!(wait_until(Duration::from_secs(10), || server.requests_held() == 1));
        server.signal(Signal::SIGINT);
        assert!(wait_until(Duration::from_secs(8), || server.has_ended()), "still there after 8 s");
    });
    let mut server = server;
    assert_eq!(server.wait_for_end().status.code(), Some(0));
}

#[test]
fn children_follow_a_killed_launcher_and_its_port_is_free() {
    let server = Server::start(ServerOptions::tiny().with(&["--tokenizer-worker-num", "2"]));
    assert_eq!(server.children().len(), 4, "{:?}", server.children());
    let port = server.base().rsplit(':').next().unwrap().parse::<u16>().unwrap();
    server.signal(Signal::SIGKILL);
    let gone = wait_until(Duration::from_secs(3), || !server.children().values().any(|pid| is_alive(*pid)));
    assert!(gone, "orphans: {:?}", server.children());
    // Its other threads, which share the socket, may end later than the one that is looked at.
    let mut server = server;
    server.wait_for_end();
    let free = wait_until(Duration::from_secs(3), || TcpListener::bind(("127.0.0.1", port)).is_ok());
    assert!(free, "somebody holds port {port}");
}

#[test]
fn a_model_that_cannot_be_loaded_ends_with_the_schedulers_reason() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({
        "architectures": ["NoSuchForCausalLM"], "model_type": "nosuch", "vocab_size": 64, "hidden_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 128, "eos_token_id": 0,
        "intermediate_size": 32,
    });
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let options =
        ServerOptions::plain().model(dir.path()).with(&["--load-format", "dummy", "--skip-tokenizer-init"]);
    let Err(ended) = Server::try_start(options) else { panic!("the server started") };
    assert_eq!(ended.status.code(), Some(1), "{}", ended.logs);
    let reason = ended.logs.lines().find(|line| line.starts_with("error: scheduler: "));
    assert!(reason.is_some_and(|line| line.contains("NoSuchForCausalLM")), "{}", ended.logs);
}

#[test]
fn a_port_in_use_and_a_missing_model_are_refused_by_name() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let said = refused(ServerOptions::plain().with(&["--port", &port]));
    assert!(said.contains(&format!("--port {port} is in use")), "{said}");
    let said = refused(ServerOptions::plain().model("/nowhere/model".as_ref()));
    assert!(said.contains("--model-path /nowhere/model does not exist"), "{said}");
    let said = refused(ServerOptions::plain().with(&["--tp-size", "2"]));
    assert!(said.contains("--tp-size is not supported"), "{said}");
}

#[test]
fn servers_live_side_by_side() {
    let servers: Vec<Server> = std::thread::scope(|scope| {
        let starts: Vec<_> = (0..2).map(|_| scope.spawn(|| Server::start(ServerOptions::plain()))).collect();
        starts.into_iter().map(|start| start.join().unwrap()).collect()
    });
    let answers: Vec<_> =
        servers.iter().map(|server| output_ids(&server.generate(&greedy(STORY, 6)))).collect();
    assert_eq!(answers[0], answers[1]);
}
