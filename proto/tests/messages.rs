//! Every field of every message survives the wire, and the bytes on the wire stay what they were.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use std::fmt::Debug;
use std::path::PathBuf;

use common::Filler;
use proptest::prelude::*;
use proto::{BatchStrOutput, BatchTokenIDOutput, RaggedBatch, ToScheduler, wire};
use serde::{Serialize, de::DeserializeOwned};

fn survives<T: Serialize + DeserializeOwned + PartialEq + Debug>(
    family: &str,
    messages: Vec<(&'static str, T)>,
) {
    for (variant, message) in messages {
        let bytes = wire::encode(&message).unwrap();
        assert_eq!(wire::decode::<T>(&bytes).unwrap(), message, "{family}.{variant}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_field_survives_a_round_trip(seed: u64) {
        for_all_messages!(Filler::new(seed), survives);
    }

    #[test]
    fn rows_survive_a_batch(seed: u64) {
        let rows = Filler::new(seed).token_rows();
        prop_assert_eq!(BatchTokenIDOutput::from_rows(rows.clone()).into_rows(), Ok(rows));
        let rows = Filler::new(seed).text_rows();
        prop_assert_eq!(BatchStrOutput::from_rows(rows.clone()).into_rows(), Ok(rows));
    }
}

fn fixture(family: &str, variant: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(format!("{family}.{variant}.hex"))
}

fn to_hex(bytes: &[u8]) -> String {
    let lines =
        bytes.chunks(32).map(|line| line.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    lines.collect::<Vec<_>>().join("\n") + "\n"
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().filter_map(|digit| digit.to_digit(16)).collect();
    digits.chunks(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect()
}

/// `WRITE_FIXTURES=1` writes them anew: only for a new message, or together with a new protocol version.
fn matches_golden<T: Serialize + DeserializeOwned + PartialEq + Debug>(
    family: &str,
    messages: Vec<(&'static str, T)>,
) {
    for (variant, message) in messages {
        let path = fixture(family, variant);
        let bytes = wire::encode(&message).unwrap();
        if std::env::var_os("WRITE_FIXTURES").is_some() {
            std::fs::write(&path, to_hex(&bytes)).unwrap();
        }
        let golden =
            from_hex(&std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}")));
        assert_eq!(wire::decode::<T>(&golden).unwrap(), message, "{family}.{variant} reads differently");
        assert_eq!(to_hex(&bytes), to_hex(&golden), "{family}.{variant} is written differently");
    }
}

#[test]
fn golden_frames() {
    for_all_messages!(Filler::new(7), matches_golden);
}

/// A reader of this version skips what a later version adds, and defaults what an earlier one lacked.
#[test]
fn versions_can_differ_by_optional_fields() {
    let json = serde_json::json!({"Generate": {
        "rid": "r", "input_ids": [1, 2], "added_later": {"deep": [1, 2, {"x": null}]},
        "sampling_params": serde_json::to_value(proto::SamplingParams::default()).unwrap(),
        "stream": true, "return_logprob": false, "logprob_start_len": null, "top_logprobs_num": 0,
        "token_ids_logprob": [], "log_metrics": true,
    }});
    let ToScheduler::Generate(request) = wire::decode(&wire::encode(&json).unwrap()).unwrap() else {
        panic!("not a Generate");
    };
    assert_eq!(
        (request.input_ids.as_slice(), request.output_ids.len(), request.attempt),
        (&[1, 2][..], 0, 0)
    );
}

#[test]
fn ragged_batches_are_refused_by_the_name_of_the_list() {
    let mut batch = BatchTokenIDOutput::from_rows(Filler::new(3).token_rows());
    let rids = batch.rids.len();
    batch.queue_time.push(1.0);
    assert_eq!(batch.into_rows(), Err(RaggedBatch { list: "queue_time", len: rids + 1, rids }));
    let mut batch = BatchStrOutput::from_rows(Filler::new(3).text_rows());
    let rids = batch.rids.len();
    batch.output_strs.clear();
    assert_eq!(batch.into_rows(), Err(RaggedBatch { list: "output_strs", len: 0, rids }));
}
