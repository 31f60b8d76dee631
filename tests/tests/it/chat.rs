//! The OpenAI routes, by their JSON.

use serde_json::{Value, json};

use crate::support::{STORY, greedy, ngram, number};

fn question() -> Value {
    json!({
        "model": "default", "temperature": 0, "max_tokens": 24,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    })
}

#[test]
fn a_question_is_answered_as_the_golden_says() {
    let reply = ngram().post("/v1/chat/completions", &question()).ok();
    assert_eq!(reply["object"], "chat.completion");
    let choice = &reply["choices"][0];
    assert_eq!(choice["message"]["content"], "The capital of France is Paris.");
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["finish_reason"], "stop");
    let usage = &reply["usage"];
    assert_eq!(number(usage, "prompt_tokens"), 37);
    assert_eq!(
        number(usage, "total_tokens"),
        number(usage, "prompt_tokens") + number(usage, "completion_tokens")
    );
}

#[test]
fn a_streamed_answer_has_one_role_one_finish_and_the_same_text() {
    let mut body = question();
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let chunks = ngram().stream("/v1/chat/completions", &body).all();
    let deltas: Vec<&Value> = chunks.iter().filter_map(|chunk| chunk["choices"].get(0)).collect();
    assert_eq!(deltas[0]["delta"]["role"], "assistant");
    let text: String = deltas.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
    assert_eq!(text, "The capital of France is Paris.");
    let finishes: Vec<&Value> =
        deltas.iter().map(|choice| &choice["finish_reason"]).filter(|f| !f.is_null()).collect();
    assert_eq!(finishes, ["stop"]);
    let usage = &chunks.last().unwrap()["usage"];
    assert_eq!(number(usage, "prompt_tokens"), 37);
}

#[test]
fn completions_go_on_where_the_prompt_ends() {
    let server = ngram();
    let native = server.generate(&greedy(STORY, 16));
    let body = json!({"model": "x", "prompt": STORY, "temperature": 0, "max_tokens": 16, "ignore_eos": true});
    let reply = server.post("/v1/completions", &body).ok();
    assert_eq!(reply["object"], "text_completion");
    assert_eq!(reply["choices"][0]["text"], native["text"]);
    assert_eq!(reply["choices"][0]["finish_reason"], "length");

    let body = json!({"model": "x", "prompt": [STORY, "The sea"], "n": 2, "temperature": 0, "max_tokens": 4});
    let reply = server.post("/v1/completions", &body).ok();
    let indices: Vec<u64> =
        reply["choices"].as_array().unwrap().iter().map(|choice| number(choice, "index")).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
}

#[test]
fn echoed_logprobs_are_what_an_evaluation_harness_reads() {
    let body = json!({"model": "x", "prompt": STORY, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": true});
    let reply = ngram().post("/v1/completions", &body).ok();
    let logprobs = &reply["choices"][0]["logprobs"];
    let tokens = logprobs["token_logprobs"].as_array().unwrap();
    let usage = &reply["usage"];
    assert_eq!(tokens.len() as u64, number(usage, "prompt_tokens") + number(usage, "completion_tokens"));
    assert!(tokens[0].is_null() && tokens[1..].iter().all(Value::is_number), "{logprobs}");
}

#[test]
fn the_model_is_listed() {
    let server = ngram();
    let card = &server.get("/v1/models").ok()["data"][0];
    assert_eq!(card["owned_by"], "sglang");
    assert_eq!(number(card, "max_model_len"), 8192);
    let missing = server.get("/v1/models/nobody");
    assert_eq!((missing.status, &missing.json()["error"]["code"]), (404, &json!("model_not_found")));
}
