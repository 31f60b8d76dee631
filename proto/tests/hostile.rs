//! Bytes that are no message: always an error, never a panic, and never much more memory than there are bytes.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.
#![allow(unsafe_code)] // An allocator that counts.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fmt::Debug;

use common::Filler;
use proptest::prelude::*;
use proto::wire::{self, WireError};
use proto::{Command, Status, ToDetokenizer, ToScheduler, ToTokenizer};
use serde::{Serialize, de::DeserializeOwned};

thread_local! {
    static LIVE: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: all work is the system allocator's; the counters neither allocate nor have destructors.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.set(LIVE.get().wrapping_add(layout.size()));
        PEAK.set(PEAK.get().max(LIVE.get()));
        // SAFETY: as for the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        LIVE.set(LIVE.get().wrapping_sub(layout.size()));
        // SAFETY: as for the caller.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Decodes, and checks the memory that it took at most.
fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    LIVE.set(1 << 40);
    PEAK.set(1 << 40);
    let message = wire::decode(bytes);
    let taken = PEAK.get() - (1 << 40);
    let most = (64 << 10) + 512 * bytes.len().min(1 << 20);
    assert!(taken <= most, "{taken} bytes were allocated for a message of {}", bytes.len());
    message
}

/// As every type: none may panic or ask for much.
fn decode_as_all(bytes: &[u8]) -> [bool; 5] {
    [
        decode::<ToScheduler>(bytes).is_ok(),
        decode::<ToDetokenizer>(bytes).is_ok(),
        decode::<ToTokenizer>(bytes).is_ok(),
        decode::<Status>(bytes).is_ok(),
        decode::<Command>(bytes).is_ok(),
    ]
}

fn refused(bytes: &[u8]) {
    assert_eq!(decode_as_all(bytes), [false; 5], "{:02x?}", &bytes[..bytes.len().min(64)]);
}

fn is_only_whole<T: Serialize + DeserializeOwned + Debug>(family: &str, messages: Vec<(&'static str, T)>) {
    for (variant, message) in messages {
        let mut bytes = wire::encode(&message).unwrap();
        for length in 0..bytes.len() {
            assert!(decode::<T>(&bytes[..length]).is_err(), "{length} bytes of {family}.{variant}");
        }
        for byte in [0x00, 0x90, 0xc0, 0xc1, 0xff] {
            bytes.push(byte);
            let error = decode::<T>(&bytes).unwrap_err();
            assert!(matches!(error, WireError::Trailing { bytes: 1, .. }), "{family}.{variant}: {error}");
            bytes.pop();
        }
    }
}

#[test]
fn truncated_at_every_length_and_with_a_byte_too_many() {
    for_all_messages!(Filler::new(11), is_only_whole);
}

fn is_of_its_type_alone<T: Serialize>(family: &str, messages: Vec<(&'static str, T)>) {
    for (variant, message) in messages {
        let fits = decode_as_all(&wire::encode(&message).unwrap());
        assert_eq!(fits.iter().filter(|fits| **fits).count(), 1, "{family}.{variant}: {fits:?}");
    }
}

#[test]
fn no_message_passes_for_one_of_another_receiver() {
    for_all_messages!(Filler::new(13), is_of_its_type_alone);
}

#[test]
fn errors_name_the_type_that_was_wanted() {
    let error = decode::<ToScheduler>(&wire::encode(&Command::Drain).unwrap()).unwrap_err();
    assert!(error.to_string().contains("ToScheduler"), "{error}");
}

#[test]
fn wrong_types_and_unknown_variants() {
    let json = |value: serde_json::Value| wire::encode(&value).unwrap();
    for bytes in [
        json(serde_json::json!("Nope")),
        json(serde_json::json!({"Nope": null})),
        json(serde_json::json!({"Generate": null})),
        json(serde_json::json!({"Generate": {}})),
        json(serde_json::json!({"Generate": {"rid": 5}})),
        json(serde_json::json!({"Abort": {"rid": "r", "abort_all": "yes"}})),
        json(serde_json::json!({"FlushCache": {"id": -1, "timeout_s": 1.0}})),
        json(serde_json::json!({"TokenIds": {"rids": "r"}})),
        json(serde_json::json!({"Text": [1, 2, 3]})),
        json(serde_json::json!({"Ready": {"detail": 1.5}, "Failed": {"reason": "x"}})),
        json(serde_json::json!(null)),
        json(serde_json::json!([])),
        json(serde_json::json!(17)),
        vec![0xc1],
        vec![],
    ] {
        refused(&bytes);
    }
}

#[test]
fn lengths_that_lie() {
    let heads: [&[u8]; 12] = [
        &[0xdd, 0xff, 0xff, 0xff, 0xff],
        &[0xdf, 0xff, 0xff, 0xff, 0xff],
        &[0xdb, 0xff, 0xff, 0xff, 0xff],
        &[0xc6, 0xff, 0xff, 0xff, 0xff],
        &[0xc9, 0xff, 0xff, 0xff, 0xff, 0x01],
        &[0xdd, 0x04, 0x00, 0x00, 0x00],
        &[0xdc, 0xff, 0xff],
        &[0xde, 0xff, 0xff],
        &[0xda, 0xff, 0xff],
        &[0xc5, 0xff, 0xff],
        &[0x9f],
        &[0xbf],
    ];
    for head in heads {
        refused(head);
        // Where a list of rows, a list of numbers and an unknown field are read.
        for field in ["rids", "output_ids", "logprobs", "finished_reasons", "start", "unknown"] {
            for variant in ["TokenIds", "Text", "Generate"] {
                let mut bytes = vec![0x81, 0xa0 | variant.len() as u8];
                bytes.extend_from_slice(variant.as_bytes());
                bytes.extend_from_slice(&[0x81, 0xa0 | field.len() as u8]);
                bytes.extend_from_slice(field.as_bytes());
                bytes.extend_from_slice(head);
                refused(&bytes);
                bytes.extend_from_slice(&[0x00; 200]);
                refused(&bytes);
            }
        }
    }
}

#[test]
fn deep_nesting() {
    for depth in [65, 1000, 100_000] {
        for open in [&[0x91][..], &[0x81, 0xa0], &[0x81, 0xa1, b'x']] {
            let mut bytes = open.repeat(depth);
            bytes.push(0xc0);
            refused(&bytes);
            // In a field that nobody reads.
            let mut inside = vec![0x81, 0xa5];
            inside.extend_from_slice(b"Abort");
            inside.extend_from_slice(&[0x83, 0xa3, b'r', b'i', b'd', 0xc0, 0xa9]);
            inside.extend_from_slice(b"abort_all\xc3\xa5later");
            inside.extend_from_slice(&bytes);
            refused(&inside);
        }
    }
}

/// A million empty containers of one byte each would become lists and structs of up to 200 bytes each.
#[test]
fn floods_of_empty_containers() {
    for (filler, count) in [(0x80u8, 1u32 << 20), (0x90, 20 << 20)] {
        let mut bytes = vec![0x81, 0xa8];
        bytes.extend_from_slice(b"TokenIds\x81\xa8logprobs\xdd");
        bytes.extend_from_slice(&count.to_be_bytes());
        bytes.resize(bytes.len() + count as usize, filler);
        let error = decode::<ToDetokenizer>(&bytes).unwrap_err();
        assert!(matches!(error, WireError::Shape { .. }), "{error}");
    }
}

#[test]
fn messages_over_the_limit() {
    let bytes = vec![0xc0; wire::MAX_MESSAGE_BYTES + 1];
    assert!(matches!(decode::<Status>(&bytes), Err(WireError::TooLarge { .. })));
    let status = Status::Failed { reason: "x".repeat(wire::MAX_MESSAGE_BYTES) };
    assert!(matches!(wire::encode(&status), Err(WireError::TooLarge { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        decode_as_all(&bytes);
    }

    /// Real messages with a few bytes changed reach much deeper than random ones.
    #[test]
    fn damaged_messages(seed: u64, changes in proptest::collection::vec((any::<u32>(), any::<u8>()), 1..6)) {
        let damage = |mut bytes: Vec<u8>| {
            for (place, byte) in &changes {
                let place = *place as usize % bytes.len();
                bytes[place] = *byte;
            }
            decode_as_all(&bytes);
        };
        let mut filler = Filler::new(seed);
        filler.to_scheduler().iter().for_each(|(_, message)| damage(wire::encode(message).unwrap()));
        filler.to_detokenizer().iter().for_each(|(_, message)| damage(wire::encode(message).unwrap()));
        filler.to_tokenizer().iter().for_each(|(_, message)| damage(wire::encode(message).unwrap()));
        filler.status().iter().for_each(|(_, message)| damage(wire::encode(message).unwrap()));
    }
}
