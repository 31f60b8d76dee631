//! Bad input: every body here is refused before it reaches the scheduler, with the right status and shape, and
//! the server goes on.

use serde_json::{Value, json};

use crate::fake::Mode;
use crate::server::{Server, VOCAB, start, start_with};

/// A body that must get 400 on `/generate`, and a word of the message.
fn native(server: &Server, body: Value, word: &str) {
    for stream in [false, true] {
        let mut body = body.clone();
        body["stream"] = json!(stream);
        let error = server.refused("/generate", &body, 400).to_string();
        assert!(error.contains(word), "{body}: '{word}' is not in {error}");
    }
}

fn openai(server: &Server, route: &str, body: Value, word: &str) {
    for stream in [false, true] {
        let mut body = body.clone();
        body["stream"] = json!(stream);
        let error = server.refused(route, &body, 400);
        assert_eq!((&error["object"], &error["code"]), (&json!("error"), &json!(400)), "{error}");
        assert!(error["message"].as_str().unwrap().contains(word), "{body}: '{word}' is not in {error}");
    }
}

fn check_alive(server: &Server) {
    assert!(server.fake.requests().is_empty(), "a bad request reached the scheduler");
    server.ok("/generate", &json!({"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}));
}

#[test]
fn sampling_parameters_out_of_range_look_the_same_in_both_dialects() {
    let server = start();
    let cases = [
        (json!({"temperature": -0.1}), "temperature"),
        (json!({"top_p": 0}), "top_p must be in (0, 1]"),
        (json!({"top_p": 1.5}), "top_p must be in (0, 1]"),
        (json!({"top_k": 0}), "top_k must be -1 (disable) or at least 1, got 0."),
        (json!({"top_k": -2}), "top_k"),
        (json!({"min_p": 2}), "min_p must be in [0, 1], got 2."),
        (json!({"frequency_penalty": 100}), "frequency_penalty must be in [-2, 2], got 100."),
        (json!({"presence_penalty": -3}), "presence_penalty must be in [-2, 2], got -3."),
        (json!({"repetition_penalty": 0}), "repetition_penalty must be in (0, 2], got 0."),
        (json!({"n": 0}), "n must be in"),
        (json!({"n": 1_000_000}), "n must be in"),
        (
            json!({"logit_bias": {VOCAB.to_string(): 1}}),
            "logit_bias must have keys in [0, 49151], got 49152.",
        ),
        (json!({"logit_bias": {"-1": 1}}), "logit_bias"),
        (json!({"logit_bias": {"2147483648": 1}}), "logit_bias"),
        (json!({"logit_bias": {"abc": 1}}), "logit_bias"),
        (json!({"stop": vec!["x"; 33]}), "stop holds at most 32 strings, got 33."),
        (json!({"stop": vec!["x"; 500_000]}), "stop holds at most 32"),
        (json!({"stop_regex": "("}), "stop_regex"),
        (json!({"stop_token_ids": [VOCAB]}), "stop_token_ids"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"stop": 5}), "stop"),
    ];
    for (params, word) in cases {
        native(&server, json!({"text": "x", "sampling_params": params}), word);
        let mut body = json!({"prompt": "x"});
        body.as_object_mut().unwrap().extend(params.as_object().unwrap().clone());
        openai(&server, "/v1/completions", body, word);
    }
    native(
        &server,
        json!({"text": "x", "sampling_params": {"max_new_tokens": -1}}),
        "max_new_tokens must be at least 0",
    );
    native(
        &server,
        json!({"text": "x", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 8}}),
        "min_new_tokens",
    );
    native(
        &server,
        json!({"text": "x", "sampling_params": {"max_tokens": 8}}),
        "unexpected sampling parameter 'max_tokens'",
    );
    native(&server, json!({"text": "x", "sampling_params": {"json_schema": "{}"}}), "json_schema");
    openai(&server, "/v1/completions", json!({"prompt": "x", "max_tokens": 0}), "max_tokens");
    openai(&server, "/v1/completions", json!({"prompt": "x", "max_tokens": -5}), "max_");
    check_alive(&server);
}

#[test]
fn numbers_that_are_none_are_refused() {
    let server = start();
    for number in ["NaN", "1e400", "-1e400", "Infinity"] {
        let body = format!("{{\"text\": \"x\", \"sampling_params\": {{\"temperature\": {number}}}}}");
        assert_eq!(server.post_raw("/generate", body).status(), 400, "{number}");
    }
    check_alive(&server);
    for tiny in ["1e-8", "1e-30", "0", "-0.0"] {
        let body = format!("{{\"prompt\": \"x\", \"temperature\": {tiny}}}");
        assert_eq!(server.post_raw("/v1/completions", body).status(), 200, "{tiny}");
        assert!(server.fake.requests().pop().unwrap().sampling_params.is_greedy(), "{tiny}");
    }
}

#[test]
fn prompts_that_are_none_are_refused_and_token_zero_is_one() {
    let server = start();
    for empty in [json!(""), json!([]), json!([""]), json!([[]])] {
        openai(&server, "/v1/completions", json!({"prompt": empty}), "Prompt cannot be empty");
    }
    native(&server, json!({"text": ""}), "empty");
    native(&server, json!({"text": []}), "empty");
    native(&server, json!({"text": ["a", ""]}), "empty");
    native(&server, json!({"input_ids": []}), "input_ids cannot be empty.");
    native(&server, json!({"input_ids": [[1], []]}), "input_ids cannot be empty.");
    let neither = "Either text, input_ids or input_embeds should be provided.";
    native(&server, json!({}), neither);
    native(&server, json!({"text": "x", "input_ids": [1]}), neither);
    native(&server, json!({"text": null}), neither);
    native(&server, json!({"text": 5}), "text");
    native(&server, json!({"text": ["a", 5]}), "text");
    for bad in [json!([VOCAB]), json!([-1]), json!([1u64 << 40]), json!([1, "a"]), json!([1.5])] {
        native(&server, json!({"input_ids": bad}), "input_ids");
        openai(&server, "/v1/completions", json!({"prompt": bad}), "");
    }
    check_alive(&server);
    server.ok("/v1/completions", &json!({"prompt": [0]}));
    server.ok("/v1/completions", &json!({"prompt": [0, 0]}));
}

#[test]
fn prompts_over_the_context_are_refused_with_both_lengths() {
    let server = start();
    for (len, word) in [
        (256, "The input (256 tokens) is longer than the model's context length (256 tokens)."),
        (1256, "The input (1256 tokens) is longer than the model's context length (256 tokens)."),
        (201, "Input length (201 tokens) exceeds the maximum allowed length (200 tokens)."),
    ] {
        native(&server, json!({"input_ids": vec![1; len]}), word);
        openai(&server, "/v1/completions", json!({"prompt": vec![1; len]}), word);
    }
    check_alive(&server);
}

#[test]
fn logprob_wishes_out_of_range_are_refused() {
    let server = start();
    let with = |field: &str, value: Value| json!({"text": "x", "return_logprob": true, field: value});
    native(&server, with("top_logprobs_num", json!(1_000_000_000)), "top_logprobs_num");
    native(&server, with("top_logprobs_num", json!(-1)), "top_logprobs_num");
    native(&server, with("token_ids_logprob", json!([-1])), "token_ids_logprob");
    native(&server, with("token_ids_logprob", json!([VOCAB])), "token_ids_logprob");
    native(&server, with("logprob_start_len", json!(50)), "logprob_start_len");
    openai(&server, "/v1/completions", json!({"prompt": "x", "logprobs": 1_000_000}), "top_logprobs");
    check_alive(&server);
}

#[test]
fn lists_of_the_wrong_shape_are_refused() {
    let server = start();
    native(&server, json!({"text": "x", "rid": ["a"]}), "rid");
    native(&server, json!({"text": ["x", "y"], "rid": ["a"]}), "rid has 1 entries for 2 prompts.");
    native(&server, json!({"text": ["x", "y"], "rid": ["a", "a"]}), "Duplicate request ID a");
    native(&server, json!({"text": ["x", "y"], "sampling_params": [{}]}), "sampling_params has 1 entries");
    native(
        &server,
        json!({"text": ["x", "y"], "sampling_params": [{"n": 1}, {"n": 2}]}),
        "n must be the same",
    );
    native(&server, json!({"text": vec!["x"; 5000]}), "at most 4096 answers");
    openai(&server, "/v1/completions", json!({"prompt": "x", "rid": ["a"]}), "rid");
    check_alive(&server);
}

#[test]
fn fields_that_cannot_be_honoured_are_named() {
    let server = start();
    let error = server.refused("/generate", &json!({"text": "x", "lora_path": "l"}), 400);
    assert!(error["error"].as_str().unwrap().contains("lora_path"));
    let error = server.refused("/generate", &json!({"text": "x", "txet": "l"}), 400);
    assert!(error["error"].as_str().unwrap().contains("txet"));
    native(&server, json!({"text": "x", "speculative": "no"}), "speculative");
    native(&server, json!({"text": "x", "speculative": {"max_draft_tokens": -1}}), "speculative");
    let messages = json!([{"role": "user", "content": "x"}]);
    for (field, value) in [
        ("tools", json!([{"type": "function", "function": {"name": "f"}}])),
        ("tool_choice", json!("required")),
        ("response_format", json!({"type": "json_object"})),
        ("response_format", json!({"type": "foo"})),
        ("response_format", json!("text")),
        ("response_format", json!({"type": 5})),
        ("ebnf", json!("root ::= x")),
        ("regex", json!("x+")),
        ("custom_logit_processor", json!("x")),
    ] {
        openai(&server, "/v1/chat/completions", json!({"messages": messages, field: value}), field);
    }
    check_alive(&server);
    let blank = json!({
        "input_ids": [1], "lora_path": null, "return_routed_experts": false, "image_data": [], "stream": null,
        "rid": null, "sampling_params": {"stop": null, "sampling_seed": null, "regex": null},
    });
    server.ok("/generate", &blank);
    let body = json!({"messages": messages, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}});
    server.ok("/v1/chat/completions", &body);
}

#[test]
fn messages_that_would_be_dropped_are_refused() {
    let server = start();
    let cases = [
        (json!([]), "Messages cannot be empty."),
        (json!(null), "Messages cannot be empty."),
        (json!([{"role": "foo", "content": "x"}]), "role"),
        (json!([{"role": "User", "content": "x"}]), "role"),
        (json!([{"role": "assistent", "content": "x"}, {"role": "user", "content": "x"}]), "role"),
        (json!([{"content": "x"}]), "role"),
        (json!(["x"]), "messages[0]"),
        (json!([{"role": "user"}]), "content"),
        (json!([{"role": "user", "content": 5}]), "content"),
        (
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]),
            "image_url",
        ),
    ];
    for (messages, word) in cases {
        openai(&server, "/v1/chat/completions", json!({"messages": messages}), word);
    }
    openai(&server, "/v1/chat/completions", json!({}), "Messages cannot be empty.");
    let long = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 300});
    let word = "max_completion_tokens is too large: 300.This model supports at most 256 completion tokens.";
    openai(&server, "/v1/chat/completions", long, word);
    check_alive(&server);
    server.ok(
        "/v1/chat/completions",
        &json!({"messages": [{"role": "assistant", "content": "x"}], "max_tokens": 1}),
    );
}

#[test]
fn a_model_without_a_template_says_what_to_use_instead() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(crate::server::tokenizer_dir().join("tokenizer.json"), dir.path().join("tokenizer.json"))
        .unwrap();
    let server = start_with(|config| config.model.tokenizer_dir = Some(dir.path().to_owned()));
    let body = json!({"messages": [{"role": "user", "content": "x"}]});
    openai(&server, "/v1/chat/completions", body, "/v1/completions");
    server.ok("/v1/completions", &json!({"prompt": "x"}));
}

#[test]
fn bodies_that_are_no_json_get_a_json_error() {
    let server = start();
    let bodies: [&[u8]; 8] =
        [b"{", b"", b"[]", b"\"x\"", b"{\"text\": \"\\ud800\"}", b"{\"text\": \"\xff\"}", b"{} {}", b"nul"];
    for route in ["/generate", "/v1/completions", "/v1/chat/completions", "/tokenize"] {
        for body in bodies {
            let response = server.post_raw(route, body.to_vec());
            assert_eq!(response.status(), 400, "{route} {body:?}");
            let error: Value = response.json().unwrap();
            assert_eq!(
                (&error["object"], &error["code"]),
                (&json!("error"), &json!(400)),
                "{route} {body:?}"
            );
        }
        let deep = "[".repeat(100_000);
        assert_eq!(server.post_raw(route, deep).status(), 400);
        let plain = server.client.post(format!("{}{route}", server.url)).body("{}").send().unwrap();
        assert_eq!(plain.status(), 400);
        let error: Value = plain.json().unwrap();
        assert_eq!(error["message"], "Unsupported Media Type: Only 'application/json' is allowed");
    }
    check_alive(&server);
    server.ok("/generate", &json!({"text": "a\u{0}b", "sampling_params": {"max_new_tokens": 1}}));
}

#[test]
fn a_body_over_the_limit_is_413() {
    let server = start();
    let body = format!("{{\"text\": \"{}\"}}", "x".repeat(33 << 20));
    // The server may answer and close before it has read everything.
    let request =
        server.client.post(format!("{}/generate", server.url)).header("content-type", "application/json");
    if let Ok(response) = request.body(body).send() {
        assert_eq!(response.status(), 413);
        assert_eq!(response.headers()["connection"], "close");
    }
    check_alive(&server);
}

#[test]
fn stop_has_two_forms_and_empty_ones_mean_nothing() {
    let server = start();
    for (stop, expected) in [
        (json!("ab"), vec!["ab"]),
        (json!(["ab", "", "c d"]), vec!["ab", "c d"]),
        (json!(""), vec![]),
        (json!([""]), vec![]),
    ] {
        server.ok("/v1/completions", &json!({"prompt": "x", "stop": stop}));
        assert_eq!(server.fake.requests().pop().unwrap().sampling_params.stop, expected);
    }
}

#[test]
fn refusals_of_the_scheduler_keep_their_status() {
    let server = start();
    server.fake.mode(Mode::Refuse(503));
    for stream in [false, true] {
        let error = server.refused("/generate", &json!({"text": "x", "stream": stream}), 503);
        assert_eq!((&error["type"], &error["object"]), (&json!("503"), &json!("error")));
        let response = server.post("/v1/completions", &json!({"prompt": "x", "stream": stream}));
        assert_eq!(response.status(), 503);
        assert!(response.headers().contains_key("retry-after"));
    }
    server.fake.mode(Mode::Refuse(400));
    let error = server.refused("/generate", &json!({"text": "x", "stream": true}), 400);
    assert_eq!(error, json!({"error": {"message": "The scheduler refused."}}));
}
