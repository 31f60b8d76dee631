//! The OpenAI routes.

use serde_json::{Value, json};

use crate::fake::{Mode, text};
use crate::server::{start, start_with};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn words(n: usize) -> String {
    (0..n).map(text).collect()
}

fn chat(extra: Value) -> Value {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn choices(events: &[Value]) -> impl Iterator<Item = &Value> {
    events.iter().flat_map(|event| event["choices"].as_array().unwrap())
}

#[test]
fn a_completion_has_the_shape_clients_expect() {
    let server = start();
    let body = json!({"model": "any", "prompt": "Hello world", "max_tokens": 3, "rid": "r", "best_of": 1});
    let answer = server.ok(COMPLETIONS, &body);
    assert_eq!(
        (&answer["id"], &answer["object"], &answer["model"]),
        (&json!("r"), &json!("text_completion"), &json!("any"))
    );
    let choice = json!({"index": 0, "text": words(3), "logprobs": null, "finish_reason": "length", "matched_stop": null});
    assert_eq!(answer["choices"], json!([choice]));
    assert_eq!(answer["usage"]["prompt_tokens"], 2);
    assert_eq!(answer["usage"]["total_tokens"], 5);
    assert!(answer["usage"]["prompt_tokens_details"].is_null());
    assert!(answer.get("sglext").is_none());
    assert_eq!(
        server.ok(COMPLETIONS, &json!({"prompt": "x", "max_tokens": null}))["usage"]["completion_tokens"],
        16
    );
}

#[test]
fn lists_and_copies_are_numbered_and_prompts_counted_once() {
    let server = start_with(|config| config.server.enable_cache_report = true);
    let body = json!({"prompt": [[5, 6], [7]], "n": 2, "max_tokens": 2});
    let answer = server.ok(COMPLETIONS, &body);
    let indices: Vec<_> =
        choices(std::slice::from_ref(&answer)).map(|choice| choice["index"].clone()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    assert_eq!(answer["usage"]["prompt_tokens"], 3);
    assert_eq!(answer["usage"]["completion_tokens"], 8);
    assert_eq!(answer["usage"]["prompt_tokens_details"], json!({"cached_tokens": 4}));
}

#[test]
fn a_streamed_completion_joins_to_the_answer_and_ends_each_choice_once() {
    let server = start();
    let body = json!({
        "prompt": "Hello", "max_tokens": 5, "n": 3, "stream": true,
        "stream_options": {"include_usage": true, "continuous_usage_stats": true},
    });
    let events = server.events(COMPLETIONS, &body);
    for index in 0..3 {
        let own: Vec<&Value> = choices(&events).filter(|choice| choice["index"] == index).collect();
        let joined: String = own.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
        assert_eq!(joined, words(5));
        let ends: Vec<_> = own.iter().map(|choice| !choice["finish_reason"].is_null()).collect();
        assert_eq!(ends.iter().filter(|end| **end).count(), 1);
        assert_eq!(ends.last(), Some(&true));
    }
    let (last, before) = events.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(
        last["usage"],
        json!({"prompt_tokens": 1, "total_tokens": 16, "completion_tokens": 15, "reasoning_tokens": 0})
    );
    assert!(before.iter().all(|event| event["usage"]["completion_tokens"].is_u64()));
}

#[test]
fn without_usage_wanted_no_chunk_is_without_a_choice() {
    let server = start();
    let events = server.events(COMPLETIONS, &json!({"prompt": "Hello", "max_tokens": 3, "stream": true}));
    assert!(
        events
            .iter()
            .all(|event| event["choices"].as_array().unwrap().len() == 1 && event["usage"].is_null())
    );
}

#[test]
fn echo_with_logprobs_lists_prompt_and_answer() {
    let server = start();
    let body =
        json!({"prompt": [100, 101, 102], "max_tokens": 1, "logprobs": 1, "echo": true, "temperature": 0});
    let choice = server.ok(COMPLETIONS, &body)["choices"][0].take();
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["token_logprobs"], json!([null, -1.0, -1.0, -0.5]));
    let tops = logprobs["top_logprobs"].as_array().unwrap();
    assert_eq!(tops.len(), 4);
    assert!(tops[0].is_null() && tops[3].as_object().unwrap().len() == 1);
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 4);
    assert_eq!(logprobs["text_offset"], json!([-1, -1, -1, -1]));
    assert!(choice["text"].as_str().unwrap().ends_with(&words(1)));
    assert!(choice["text"].as_str().unwrap().len() > words(1).len());
}

#[test]
fn a_chat_answer_has_the_shape_clients_expect() {
    let server = start();
    let answer =
        server.ok(CHAT, &chat(json!({"logprobs": true, "top_logprobs": 2, "return_meta_info": true})));
    assert_eq!(answer["object"], "chat.completion");
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["message"]["content"], words(4));
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["meta_info"]["spec_verify_ct"], 2);
    let tokens = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), 4);
    assert_eq!(tokens[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert!(tokens[0]["bytes"].as_array().unwrap().iter().all(Value::is_u64));
}

#[test]
fn chat_takes_the_models_sampling_defaults_and_completions_do_not() {
    let server = start();
    server.ok(CHAT, &chat(json!({})));
    server.ok(CHAT, &chat(json!({"temperature": 0.5, "seed": 3, "max_completion_tokens": 2})));
    server.ok(COMPLETIONS, &json!({"prompt": "x"}));
    let params: Vec<_> = server.fake.requests().into_iter().map(|request| request.sampling_params).collect();
    assert_eq!((params[0].temperature, params[0].top_k), (0.25, Some(7)));
    assert_eq!((params[1].temperature, params[1].sampling_seed, params[1].max_new_tokens), (0.5, 3, 2));
    assert_eq!((params[2].temperature, params[2].top_k), (1.0, None));
}

#[test]
fn a_streamed_chat_has_role_content_end_usage_in_that_order() {
    let server = start();
    let options = json!({"stream": true, "n": 2, "stream_options": {"include_usage": true}});
    let events = server.events(CHAT, &chat(options));
    assert!(events.iter().all(|event| event["object"] == "chat.completion.chunk"));
    for index in 0..2 {
        let own: Vec<&Value> = choices(&events).filter(|choice| choice["index"] == index).collect();
        let (first, rest) = own.split_first().unwrap();
        assert_eq!(first["delta"], json!({"role": "assistant", "content": "", "reasoning_content": null}));
        let (last, parts) = rest.split_last().unwrap();
        assert_eq!(last["finish_reason"], "length");
        assert!(last["delta"].get("content").is_none());
        let contents: Vec<&str> =
            parts.iter().map(|part| part["delta"]["content"].as_str().unwrap()).collect();
        assert!(contents.iter().all(|content| !content.is_empty()));
        assert!(parts.iter().all(|part| part["finish_reason"].is_null()));
        assert_eq!(contents.concat(), words(4));
    }
    let usages: Vec<_> =
        events.iter().filter(|event| event["choices"].as_array().unwrap().is_empty()).collect();
    assert_eq!(usages.len(), 1);
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], 8);
}

#[test]
fn held_back_text_makes_no_chunk_and_loses_no_logprobs() {
    let server = start();
    server.fake.mode(Mode::Say(vec!["", "", "ab", "", ""]));
    let events = server.events(CHAT, &chat(json!({"stream": true, "logprobs": true, "max_tokens": 5})));
    let contents: Vec<&str> =
        choices(&events).filter_map(|choice| choice["delta"]["content"].as_str()).collect();
    assert_eq!(contents, ["", "ab"], "the role's chunk and one with content");
    let logprobs: usize =
        choices(&events).filter_map(|c| c["logprobs"]["content"].as_array()).map(Vec::len).sum();
    assert_eq!(logprobs, 5);
    let events =
        server.events(COMPLETIONS, &json!({"prompt": "x", "max_tokens": 5, "stream": true, "logprobs": 0}));
    let texts: Vec<&str> = choices(&events).map(|choice| choice["text"].as_str().unwrap()).collect();
    let (last, before) = texts.split_last().unwrap();
    assert!(before.iter().all(|text| !text.is_empty()), "{texts:?}");
    assert_eq!(before.concat() + last, "ab");
    let logprobs: usize = choices(&events).map(|c| c["logprobs"]["tokens"].as_array().unwrap().len()).sum();
    assert_eq!(logprobs, 5);
}

#[test]
fn acceptance_numbers_come_in_sglext_when_asked_for() {
    let server = start();
    let body = json!({"prompt": "x", "max_tokens": 4, "return_spec_tokens_details": true});
    let details = server.ok(COMPLETIONS, &body)["sglext"]["spec_tokens_details"].take();
    assert_eq!((&details["spec_verify_ct"], &details["spec_proposed_drafts"]), (&json!(2), &json!(6)));
    let events =
        server.events(CHAT, &chat(json!({"stream": true, "n": 2, "return_spec_tokens_details": true})));
    let extended: Vec<_> = events.iter().filter_map(|event| event.get("sglext")).collect();
    assert_eq!(extended.len(), 1);
    assert_eq!(extended[0]["spec_tokens_details"].as_array().unwrap().len(), 2);
    let off = json!({"prompt": "x", "speculative": false, "return_spec_tokens_details": true});
    let details = server.ok(COMPLETIONS, &off)["sglext"]["spec_tokens_details"].take();
    assert_eq!(details["spec_verify_ct"], 0);
    assert!(details.get("spec_accept_rate").is_none());
}

#[test]
fn a_failure_in_the_middle_of_a_stream_is_an_event() {
    let server = start();
    server.fake.mode(Mode::Hold);
    let response = server.post(COMPLETIONS, &json!({"prompt": "x", "stream": true, "rid": "a"}));
    assert_eq!(response.status(), 200);
    server.shutdown.advance(proto::child::Phase::Stopping);
    let text = response.text().unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    let error = text.split("\n\n").find(|event| event.contains("error")).unwrap();
    let error: Value = serde_json::from_str(error.strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(error["error"]["code"], 503);
}

#[test]
fn models_are_listed_and_unknown_ones_are_404() {
    let server = start();
    let list: Value = server.get("/v1/models").json().unwrap();
    assert_eq!(list["data"][0]["id"], "smol/model");
    assert_eq!(list["data"][0]["max_model_len"], 256);
    assert_eq!(server.get("/v1/models/smol/model").status(), 200);
    let missing = server.get("/v1/models/x");
    assert_eq!(missing.status(), 404);
    assert_eq!(missing.json::<Value>().unwrap()["error"]["code"], "model_not_found");
}
