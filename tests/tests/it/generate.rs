//! `/generate`: what comes back for what was asked.

use serde_json::{Value, json};

use crate::support::{STORY, greedy, ngram, number, output_ids, sampled};

/// The golden greedy answers, token for token, except behind a near tie of the golden's own logits.
#[test]
fn greedy_answers_are_the_golden_ones() {
    let path = tests::repository().join("tests/fixtures/golden/smollm2-greedy.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let server = ngram();
    for prompt in golden["prompts"].as_array().unwrap() {
        let reply = server.generate(&json!({
            "text": prompt["prompt_text"],
            "sampling_params": {"temperature": 0, "max_new_tokens": 96, "skip_special_tokens": true},
        }));
        let expected = output_ids(prompt);
        let got = output_ids(&reply);
        assert_eq!(
            number(&reply["meta_info"], "prompt_tokens") as usize,
            prompt["prompt_ids"].as_array().unwrap().len()
        );
        if let Some(at) = (0..expected.len().max(got.len())).find(|&at| expected.get(at) != got.get(at)) {
            let margin = prompt["margins"][at].as_f64().unwrap_or(f64::INFINITY);
            assert!(margin < 1e-3, "token {at} differs, margin {margin}: {got:?} for {prompt}");
            continue;
        }
        assert_eq!(reply["text"], prompt["text"]);
        assert_eq!(reply["meta_info"]["finish_reason"]["type"], prompt["finish"]);
    }
}

#[test]
fn ids_and_text_of_a_prompt_are_the_same_prompt() {
    let server = ngram();
    let tokens = server.post("/tokenize", &json!({"prompt": STORY})).ok();
    let by_text = server.generate(&greedy(STORY, 12));
    let mut body = greedy("", 12);
    body.as_object_mut().unwrap().remove("text");
    body["input_ids"] = tokens["tokens"].clone();
    let by_ids = server.generate(&body);
    assert_eq!(output_ids(&by_text), output_ids(&by_ids));
    assert_eq!(by_text["text"], by_ids["text"]);
    let back = server.post("/detokenize", &json!({"tokens": tokens["tokens"]})).ok();
    assert_eq!(back["text"], STORY);
}

#[test]
fn a_stream_adds_up_to_the_whole_answer() {
    let server = ngram();
    let whole = server.generate(&sampled(STORY, 40, 7));
    let mut body = sampled(STORY, 40, 7);
    body["stream"] = json!(true);
    let chunks = server.stream("/generate", &body).all();
    let (last, earlier) = chunks.split_last().unwrap();
    assert!(!earlier.is_empty(), "40 tokens came in one chunk");
    assert_eq!(last["text"], whole["text"]);
    assert_eq!(output_ids(last), output_ids(&whole));
    assert_eq!(last["meta_info"]["finish_reason"], json!({"type": "length", "length": 40}));
    let mut text = "";
    for chunk in &chunks {
        let longer = chunk["text"].as_str().unwrap();
        assert!(longer.starts_with(text), "{text:?} was taken back: {longer:?}");
        text = longer;
        assert_eq!(number(&chunk["meta_info"], "completion_tokens") as usize, output_ids(chunk).len());
    }
    assert!(earlier.iter().all(|chunk| chunk["meta_info"]["finish_reason"].is_null()));
}

#[test]
fn a_batch_comes_back_in_order_and_each_as_if_alone() {
    let server = ngram();
    let prompts = ["The sun is", "A cat sat on", "In winter, the"];
    let mut body = greedy("", 16);
    body["text"] = json!(prompts);
    let batch = server.generate(&body);
    let batch = batch.as_array().unwrap();
    assert_eq!(batch.len(), prompts.len());
    for (prompt, reply) in prompts.iter().zip(batch) {
        assert_eq!(output_ids(reply), output_ids(&server.generate(&greedy(prompt, 16))), "{prompt}");
    }
}

#[test]
fn n_makes_copies_that_differ_when_sampled() {
    let server = ngram();
    let mut body = sampled(STORY, 24, 3);
    body["sampling_params"]["n"] = json!(3);
    let replies = server.generate(&body);
    let replies = replies.as_array().unwrap();
    assert_eq!(replies.len(), 3);
    let ids: std::collections::HashSet<_> =
        replies.iter().map(|reply| reply["meta_info"]["id"].to_string()).collect();
    assert_eq!(ids.len(), 3, "request ids repeat");
}

#[test]
fn limits_and_stops_end_an_answer_where_they_say() {
    let server = ngram();
    let none = server.generate(&greedy(STORY, 0));
    assert_eq!((output_ids(&none).len(), none["text"].as_str()), (0, Some("")));

    let whole = server.generate(&greedy(STORY, 32));
    let text = whole["text"].as_str().unwrap();
    let word = text.split_whitespace().nth(4).unwrap();
    let mut body = greedy(STORY, 32);
    body["sampling_params"]["stop"] = json!([word]);
    let stopped = server.generate(&body);
    assert_eq!(stopped["text"].as_str().unwrap(), &text[..text.find(word).unwrap()]);
    assert_eq!(stopped["meta_info"]["finish_reason"], json!({"type": "stop", "matched": word}));

    let id = output_ids(&whole)[5];
    let first = output_ids(&whole).iter().position(|other| *other == id).unwrap();
    let mut body = greedy(STORY, 32);
    body["sampling_params"]["stop_token_ids"] = json!([id]);
    let stopped = server.generate(&body);
    assert_eq!(output_ids(&stopped), output_ids(&whole)[..=first]);
    assert_eq!(stopped["meta_info"]["finish_reason"], json!({"type": "stop", "matched": id}));
}

#[test]
fn logprobs_have_one_entry_per_token() {
    let server = ngram();
    let mut body = greedy(STORY, 8);
    body["return_logprob"] = json!(true);
    body["logprob_start_len"] = json!(0);
    body["top_logprobs_num"] = json!(3);
    let reply = server.generate(&body);
    let meta = &reply["meta_info"];
    let list = |name: &str| meta[name].as_array().unwrap_or_else(|| panic!("no {name} in {meta}")).clone();
    assert_eq!(list("input_token_logprobs").len() as u64, number(meta, "prompt_tokens"));
    assert!(meta["input_token_logprobs"][0][0].is_null(), "nothing predicts the first token");
    let output = list("output_token_logprobs");
    assert_eq!(output.iter().map(|entry| entry[1].as_u64().unwrap()).collect::<Vec<_>>(), output_ids(&reply));
    for (entry, top) in output.iter().zip(list("output_top_logprobs")) {
        assert_eq!(top.as_array().unwrap().len(), 3);
        assert_eq!(top[0][1], entry[1], "greedy takes the likeliest");
        assert!(entry[0].as_f64().unwrap() <= 0.0);
    }
}

#[test]
fn a_repeated_prompt_is_found_in_the_cache_and_answers_the_same() {
    let server = ngram();
    let prompt = format!("{STORY} an old clockmaker who repaired {}", "clocks and ".repeat(20));
    let first = server.generate(&greedy(&prompt, 8));
    let again = server.generate(&greedy(&prompt, 8));
    assert_eq!(output_ids(&first), output_ids(&again));
    assert!(number(&again["meta_info"], "cached_tokens") > 0, "{again}");
    assert!(server.get("/model_info").ok()["model_path"].is_string());
}
