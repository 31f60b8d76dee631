//! `/generate`.

use serde_json::{Value, json};

use crate::fake::{Mode, text};
use crate::server::{start, start_with};

fn words(n: usize) -> String {
    (0..n).map(text).collect()
}

fn params(n: u32) -> Value {
    json!({"max_new_tokens": n, "temperature": 0})
}

#[test]
fn one_answer_has_text_ids_and_numbers_that_add_up() {
    let server = start();
    let body = json!({"text": "Hello world", "sampling_params": params(4), "rid": "a"});
    let answer = server.ok("/generate", &body);
    assert_eq!(answer["text"], words(4));
    assert_eq!(answer["output_ids"], json!([1000, 1001, 1002, 1003]));
    let meta = &answer["meta_info"];
    assert_eq!(meta["id"], "a");
    assert_eq!(meta["finish_reason"], json!({"type": "length", "length": 4}));
    assert_eq!((&meta["prompt_tokens"], &meta["completion_tokens"]), (&json!(2), &json!(4)));
    assert!(meta["e2e_latency"].as_f64().unwrap() > 0.0);
    let expected = json!({
        "spec_verify_ct": 2, "spec_accepted_drafts": 2, "spec_proposed_drafts": 6, "spec_delivered_drafts": 2,
        "spec_accept_histogram": [0, 2], "spec_accept_rate": 2.0 / 6.0, "spec_accept_length": 2.0,
        "spec_num_correct_drafts": 2, "spec_num_proposed_drafts": 6, "spec_correct_drafts_histogram": [0, 2],
    });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&meta[key], value, "{key}");
    }
    assert!(meta.get("input_token_logprobs").is_none());
}

#[test]
fn a_request_without_speculation_shows_no_rate() {
    let server = start();
    for speculative in [json!(false), json!({"max_draft_tokens": 0})] {
        let body = json!({"input_ids": [5], "sampling_params": params(4), "speculative": speculative});
        let meta = server.ok("/generate", &body)["meta_info"].take();
        assert_eq!(meta["spec_verify_ct"], 0);
        assert!(meta.get("spec_accept_rate").is_none() && meta.get("spec_accept_length").is_none());
    }
    assert_eq!(server.fake.requests()[0].sampling_params.max_draft_tokens, Some(0));
}

#[test]
fn without_an_algorithm_there_are_no_spec_keys() {
    let server = start_with(|config| config.spec = None);
    let meta =
        server.ok("/generate", &json!({"input_ids": [5], "sampling_params": params(2)}))["meta_info"].take();
    assert!(meta.as_object().unwrap().keys().all(|key| !key.starts_with("spec_")), "{meta}");
}

#[test]
fn a_stream_is_cumulative_and_ends_with_the_whole_answer() {
    let server = start();
    server.fake.mode(Mode::Echo { row: 2 });
    let body = json!({"text": "Hello", "sampling_params": params(5), "stream": true, "rid": "a"});
    let events = server.events("/generate", &body);
    for event in &events {
        let made = event["meta_info"]["completion_tokens"].as_u64().unwrap() as usize;
        assert_eq!(event["text"], words(made));
        assert_eq!(event["output_ids"].as_array().unwrap().len(), made);
    }
    let (last, before) = events.split_last().unwrap();
    assert!(before.iter().all(|event| event["meta_info"]["finish_reason"].is_null()));
    let mut whole =
        server.ok("/generate", &json!({"text": "Hello", "sampling_params": params(5), "rid": "a"}));
    let mut last = last.clone();
    for value in [&mut whole, &mut last] {
        value["meta_info"].as_object_mut().unwrap().remove("e2e_latency").unwrap();
    }
    assert_eq!(whole, last);
}

#[test]
fn incremental_chunks_join_to_the_answer() {
    let server = start_with(|config| config.server.incremental_streaming_output = true);
    let body = json!({
        "text": "Hello", "sampling_params": params(6), "stream": true, "return_logprob": true, "top_logprobs_num": 2,
    });
    let events = server.events("/generate", &body);
    let joined: String = events.iter().map(|event| event["text"].as_str().unwrap()).collect();
    assert_eq!(joined, words(6));
    let count = |path: fn(&Value) -> &Value| -> usize {
        events.iter().map(|event| path(event).as_array().unwrap().len()).sum()
    };
    assert_eq!(count(|event| &event["output_ids"]), 6);
    assert_eq!(count(|event| &event["meta_info"]["output_token_logprobs"]), 6);
    assert_eq!(count(|event| &event["meta_info"]["output_top_logprobs"]), 6);
}

#[test]
fn a_batch_answers_in_order_with_copies_next_to_each_other() {
    let server = start();
    let body = json!({
        "text": ["one", "two"],
        "sampling_params": [{"max_new_tokens": 2, "n": 2}, {"max_new_tokens": 3, "n": 2, "sampling_seed": 9}],
        "rid": ["x", "y"],
    });
    let answers = server.ok("/generate", &body);
    let ids: Vec<&str> =
        answers.as_array().unwrap().iter().map(|a| a["meta_info"]["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["x_0", "x_1", "y_0", "y_1"]);
    let lengths: Vec<_> =
        answers.as_array().unwrap().iter().map(|a| a["output_ids"].as_array().unwrap().len()).collect();
    assert_eq!(lengths, [2, 2, 3, 3]);
    let seeds: Vec<u64> = server.fake.requests().iter().map(|r| r.sampling_params.sampling_seed).collect();
    assert_eq!(seeds[1], seeds[0].wrapping_add(1));
    assert_eq!(seeds[2..], [9, 10]);
}

#[test]
fn a_streamed_batch_tags_each_chunk() {
    let server = start();
    let body = json!({"input_ids": [[1], [2, 3]], "sampling_params": params(3), "stream": true});
    let events = server.events("/generate", &body);
    for index in 0..2 {
        let own: Vec<&Value> = events.iter().filter(|event| event["index"] == index).collect();
        let ends = own.iter().filter(|event| !event["meta_info"]["finish_reason"].is_null()).count();
        assert_eq!(ends, 1);
        assert_eq!(own.last().unwrap()["text"], words(3));
        assert_eq!(own.last().unwrap()["meta_info"]["prompt_tokens"], index + 1);
    }
}

#[test]
fn logprobs_are_triples_and_the_first_prompt_token_has_none() {
    let server = start();
    let body = json!({
        "input_ids": [10, 11, 12], "sampling_params": params(2), "return_logprob": true, "logprob_start_len": 0,
        "top_logprobs_num": 2, "return_text_in_logprobs": true, "return_prompt_token_ids": true,
    });
    let answer = server.ok("/generate", &body);
    assert_eq!(answer["prompt_token_ids"], json!([10, 11, 12]));
    let meta = &answer["meta_info"];
    let inputs = meta["input_token_logprobs"].as_array().unwrap();
    assert_eq!(inputs.len(), 3);
    assert!(inputs[0][0].is_null() && inputs[0][1] == 10 && inputs[0][2].is_string());
    assert!(meta["input_top_logprobs"][0].is_null());
    assert_eq!(meta["input_top_logprobs"][1].as_array().unwrap().len(), 2);
    assert_eq!(meta["output_token_logprobs"][0][0], -0.5);
    assert_eq!(meta["output_token_logprobs_length"], 2);
    assert_eq!(meta["output_top_logprobs"].as_array().unwrap().len(), 2);
}

#[test]
fn every_request_is_given_a_seed_and_what_the_context_leaves() {
    let server = start();
    server.ok("/generate", &json!({"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}));
    server.ok("/generate", &json!({"input_ids": [0, 0], "sampling_params": {"max_new_tokens": null}}));
    server.ok("/generate", &json!({"input_ids": vec![7; 200]}));
    let requests = server.fake.requests();
    assert_ne!(requests[0].sampling_params.sampling_seed, requests[1].sampling_params.sampling_seed);
    assert_eq!(requests[1].sampling_params.max_new_tokens, 254);
    // The default is cut to the context, an explicit wish is not.
    assert_eq!(requests[2].sampling_params.max_new_tokens, 56);
    let body = json!({"input_ids": vec![7; 200], "sampling_params": {"max_new_tokens": 57}});
    let error = server.refused("/generate", &body, 400);
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("Requested token count exceeds the model's maximum context length of 256 tokens. You requested a total of 257 tokens: 200 tokens from the input messages and 57 tokens for the completion."), "{message}");
}

#[test]
fn nothing_is_made_when_nothing_is_asked_for() {
    let server = start();
    let answer = server.ok("/generate", &json!({"input_ids": [3], "sampling_params": params(0)}));
    assert_eq!((&answer["text"], &answer["output_ids"]), (&json!(""), &json!([])));
    assert_eq!(answer["meta_info"]["finish_reason"]["type"], "length");
}

#[test]
fn put_is_the_same_as_post() {
    let server = start();
    let body = json!({"input_ids": [3], "sampling_params": params(1)});
    let response = server.client.put(format!("{}/generate", server.url)).json(&body).send().unwrap();
    assert_eq!(response.status(), 200);
}

#[test]
fn without_a_tokenizer_ids_work_and_text_is_refused() {
    let server = start_with(|config| config.server.skip_tokenizer_init = true);
    let answer = server.ok("/generate", &json!({"input_ids": [3], "sampling_params": params(1)}));
    assert!(answer.get("text").is_none());
    server.refused("/generate", &json!({"text": "x"}), 400);
    let stop = json!({"input_ids": [3], "sampling_params": {"stop": "x"}});
    let message = server.refused("/generate", &stop, 400);
    assert!(message["error"]["message"].as_str().unwrap().contains("tokenizer"));
}
