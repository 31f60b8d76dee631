use serde_json::json;

use super::*;

const LIMITS: Limits = Limits { vocab_size: 100, has_tokenizer: true };

fn read(object: Value) -> Result<ValidSampling, Refusal> {
    RawSampling::from_object(object.as_object().unwrap())?.validate(LIMITS)
}

/// `expect` is the error's text.
fn refused(object: Value, expect: &str) {
    assert_eq!(read(object.clone()).unwrap_err().to_string(), expect, "{object}");
}

#[test]
fn nothing_said_means_the_defaults() {
    let valid = read(json!({})).unwrap();
    assert_eq!(valid.params, SamplingParams::default());
    assert_eq!((valid.budget, valid.seed, valid.n), (Budget::Default(128), None, 1));
}

#[test]
fn null_is_absent_except_for_the_limit() {
    let nulls = json!({"temperature": null, "stop": null, "top_k": null, "sampling_seed": null, "n": null, "regex": null});
    assert_eq!(read(nulls).unwrap(), read(json!({})).unwrap());
    assert_eq!(read(json!({"max_new_tokens": null})).unwrap().budget, Budget::Rest);
    assert_eq!(read(json!({"max_new_tokens": 0})).unwrap().budget, Budget::Exact(0));
}

#[test]
fn small_temperatures_are_greedy() {
    for temperature in [0.0, -0.0, 1e-30, 1e-8, 9e-7] {
        let params = read(json!({"temperature": temperature})).unwrap().params;
        assert!(params.is_greedy() && params.temperature.is_sign_positive(), "{temperature}");
    }
    assert_eq!(read(json!({"temperature": 1e-4})).unwrap().params.temperature, 1e-4);
    assert_eq!(read(json!({"temperature": 5})).unwrap().params.temperature, 5.0);
    for temperature in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let raw = RawSampling { temperature: Some(temperature), ..RawSampling::default() };
        assert!(raw.validate(LIMITS).is_err(), "{temperature}");
    }
}

#[test]
fn the_ends_of_ranges_are_inside() {
    let inside = json!({
        "top_p": 1, "top_k": 1, "min_p": 1, "frequency_penalty": -2, "presence_penalty": 2,
        "repetition_penalty": 2, "n": 128, "logit_bias": {"0": 1, "99": -1}, "stop_token_ids": [0, 99],
        "min_new_tokens": 5, "max_new_tokens": 5, "sampling_seed": -1,
    });
    let valid = read(inside).unwrap();
    assert_eq!(valid.params.logit_bias, [(0, 1.0), (99, -1.0)]);
    assert_eq!(valid.params.top_k, Some(1));
    assert_eq!(valid.seed, Some(u64::MAX));
}

#[test]
fn outside_of_a_range_the_message_names_it() {
    refused(json!({"top_p": 0}), "top_p must be in (0, 1], got 0.");
    refused(json!({"min_p": 1.5}), "min_p must be in [0, 1], got 1.5.");
    refused(json!({"top_k": 0}), "top_k must be -1 (disable) or at least 1, got 0.");
    refused(json!({"repetition_penalty": 2.5}), "repetition_penalty must be in (0, 2], got 2.5.");
    refused(json!({"max_new_tokens": -1}), "max_new_tokens must be at least 0, got -1.");
    refused(json!({"min_new_tokens": 129}), "min_new_tokens must be in [0, max_new_tokens(128)], got 129.");
    refused(json!({"n": 0}), "n must be in [1, 128], got 0.");
    refused(json!({"logit_bias": {"100": 1}}), "logit_bias must have keys in [0, 99], got 100.");
    refused(json!({"stop_token_ids": [100]}), "stop_token_ids must lie in [0, 99], got 100.");
    refused(json!({"stream_interval": 0}), "stream_interval must be at least 1, got 0.");
    refused(json!({"tempreature": 1}), "unexpected sampling parameter 'tempreature'");
    refused(json!({"ebnf": "x"}), "sampling parameter 'ebnf' is not supported by this server");
}

#[test]
fn patterns_must_compile_and_stay_small() {
    assert_eq!(read(json!({"stop_regex": ["a+", ""]})).unwrap().params.stop_regex, ["a+"]);
    assert!(read(json!({"stop_regex": "("})).is_err());
    assert!(read(json!({"stop_regex": "a".repeat(257)})).is_err());
    assert!(read(json!({"stop_regex": "((a{100}){100}){100}"})).is_err());
}

#[test]
fn speculation_can_be_limited_and_turned_off() {
    let read = |value: Value| max_draft_tokens(Some(&value));
    assert_eq!(max_draft_tokens(None), Ok(None));
    assert_eq!(read(json!(null)), Ok(None));
    assert_eq!(read(json!(true)), Ok(None));
    assert_eq!(read(json!(false)), Ok(Some(0)));
    assert_eq!(read(json!({"max_draft_tokens": 3})), Ok(Some(3)));
    for bad in [json!(1), json!("x"), json!({}), json!({"max_draft_tokens": -1}), json!({"depth": 3})] {
        assert!(read(bad.clone()).is_err(), "{bad}");
    }
}
