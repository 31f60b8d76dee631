//! Bad requests are refused with a 400 that says why, and the server lives on.

use serde_json::{Value, json};
use tests::{ServerOptions, shared};

use crate::support::{STORY, greedy, ngram, output_ids};

fn with_parameter(name: &str, value: Value) -> Value {
    let mut body = greedy(STORY, 4);
    body["sampling_params"][name] = value;
    body
}

#[test]
fn bad_generate_requests_are_refused() {
    let server = ngram();
    let long = "word ".repeat(9000);
    let bodies = [
        json!({}),
        json!({"text": ""}),
        json!({"text": []}),
        json!({"input_ids": []}),
        json!({"input_ids": [[]]}),
        json!({"input_ids": [49152]}),
        json!({"input_ids": [-1]}),
        json!({"input_ids": [1u64 << 40]}),
        json!({"text": "a", "input_ids": [1]}),
        json!({"text": long}),
        json!({"text": "a", "rid": ["x", "y"]}),
        json!({"text": ["a", "b"], "rid": ["x", "x"]}),
        json!({"text": "a", "return_logprob": true, "top_logprobs_num": 1_000_000_000}),
        json!({"text": "a", "return_logprob": true, "token_ids_logprob": [-1]}),
        with_parameter("max_new_tokens", json!(-1)),
        with_parameter("temperature", json!(-0.5)),
        with_parameter("top_p", json!(0)),
        with_parameter("top_k", json!(0)),
        with_parameter("min_p", json!(2)),
        with_parameter("n", json!(5_000_000)),
        with_parameter("frequency_penalty", json!(100)),
        with_parameter("logit_bias", json!({"49152": 1.0})),
        with_parameter("logit_bias", json!({"abc": 1.0})),
        with_parameter("stop", Value::from(vec!["x"; 1000])),
        with_parameter("stop_regex", json!("(")),
    ];
    for body in bodies {
        let reply = server.post("/generate", &body);
        let shown: String = body.to_string().chars().take(120).collect();
        assert_eq!(reply.status, 400, "{shown}: {}", reply.body);
        assert!(!reply.json()["error"].is_null(), "{shown}: {}", reply.body);
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        assert_eq!(server.post("/generate", &streamed).status, 400, "streamed {shown}");
    }
    assert_eq!(output_ids(&server.generate(&greedy(STORY, 4))).len(), 4);
}

#[test]
fn bodies_that_are_no_json_are_refused() {
    let server = ngram();
    for path in ["/generate", "/v1/completions", "/v1/chat/completions"] {
        for body in [&b"{"[..], b"[1, 2]", b"\xff\xfe", b"", b"{\"text\": \"\\ud800\"}"] {
            let reply = server.post_raw(path, "application/json", body);
            assert_eq!(reply.status, 400, "{path} {body:?}: {}", reply.body);
            reply.json();
        }
    }
    assert_eq!(server.post_raw("/v1/completions", "text/plain", b"{}").status, 400);
}

#[test]
fn bad_openai_requests_are_refused_in_their_shape() {
    let server = ngram();
    let chat = |messages: Value| ("/v1/chat/completions", json!({"model": "x", "messages": messages}));
    let completion = |prompt: Value| ("/v1/completions", json!({"model": "x", "prompt": prompt}));
    let requests = [
        chat(json!([])),
        chat(json!([{"role": "foo", "content": "a"}])),
        chat(json!([{"content": "a"}])),
        completion(json!("")),
        completion(json!([])),
        completion(json!([[]])),
        ("/v1/completions", json!({"model": "x", "prompt": "a", "max_tokens": 0})),
        ("/v1/completions", json!({"model": "x", "prompt": "a", "temperature": -1})),
        ("/v1/completions", json!({"model": "x", "prompt": "a", "max_tokens": 1_000_000})),
    ];
    for (path, body) in requests {
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 400, "{path} {body}: {}", reply.body);
        let error = reply.json();
        assert_eq!((&error["object"], &error["code"]), (&json!("error"), &json!(400)), "{path} {body}");
    }
}

#[test]
fn null_means_absent_and_zero_is_a_token() {
    let server = ngram();
    let body = json!({
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 2, "stop": null, "temperature": 0, "sampling_seed": null},
    });
    assert!(!output_ids(&server.generate(&body)).is_empty());
}

#[test]
fn a_key_guards_everything_but_the_probes() {
    let server = shared(ServerOptions::plain().api_key("open-sesame"));
    assert_eq!(output_ids(&server.generate(&greedy(STORY, 2))).len(), 2);
    let bare = reqwest::blocking::Client::new();
    let status = |path: &str| bare.get(format!("{}{path}", server.base())).send().unwrap().status().as_u16();
    assert_eq!(status("/v1/models"), 401);
    assert_eq!((status("/ready"), status("/metrics")), (200, 200));
}
