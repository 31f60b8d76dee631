//! Tests of what rows mean: first, next, repeated, orphaned, lost, and the life of a state.

use proto::{DecodeRow, Matched, RowProgress, SpecCounters, TokenKind, TokenPiece};

use super::*;

/// Ids 0 to 25 are the letters, 26 a space, 27 a special token.
fn letters() -> TokenBytes {
    let plain = (b'a'..=b'z').chain([b' ']).map(|byte| (vec![byte], false));
    let pieces = plain.chain([(b"<end>".to_vec(), true)]).zip(0..);
    TokenBytes::from_pieces(
        TokenKind::ByteLevel,
        false,
        pieces.map(|((bytes, special), id)| TokenPiece { id, bytes, special }),
    )
}

fn states() -> States {
    States::new(Some(letters().into()))
}

fn ids(text: &str) -> Vec<TokenId> {
    text.bytes().map(|byte| if byte == b' ' { 26 } else { u32::from(byte - b'a') }).collect()
}

/// A row whose own ids are `new`, at `start`; `decode_ids` and `read_offset` as given.
fn row(rid: &str, start: u32, new: &str, decode_ids: Vec<TokenId>, read_offset: u32) -> TokenRow {
    let output_ids = ids(new);
    TokenRow {
        decode: DecodeRow {
            decode_ids,
            read_offset,
            skip_special_tokens: true,
            spaces_between_special_tokens: true,
            no_stop_trim: false,
            stop_strs: Vec::new(),
        },
        progress: RowProgress {
            rid: rid.into(),
            start,
            completion_tokens: start + output_ids.len() as u32,
            output_ids,
            finished_reason: None,
            prompt_tokens: 9,
            cached_tokens: 0,
            retraction_count: 0,
            queue_time: 0.0,
            logprobs: None,
            spec: SpecCounters::default(),
        },
    }
}

/// A first row: two prompt ids, then the whole answer, of which `known` came before.
fn first(rid: &str, known: &str, new: &str) -> TokenRow {
    row(rid, known.len() as u32, new, ids(&format!("xy{known}{new}")), 2)
}

fn next(rid: &str, start: u32, new: &str) -> TokenRow {
    row(rid, start, new, ids(new), 0)
}

fn ended(mut row: TokenRow, reason: FinishReason) -> TokenRow {
    row.progress.finished_reason = Some(reason);
    row
}

#[track_caller]
fn check(decoded: Decoded, text: &str, text_start: u64) {
    match decoded {
        Decoded::Text(row) => assert_eq!((row.text.as_str(), row.text_start), (text, text_start)),
        other => panic!("{other:?} instead of {text:?}"),
    }
}

#[test]
fn deltas_join_to_the_answer() {
    let mut states = states();
    check(states.decode(first("r", "", "on")), "on", 0);
    check(states.decode(next("r", 2, "ce ")), "ce ", 2);
    check(states.decode(ended(next("r", 5, "up"), FinishReason::Length { length: 7 })), "up", 5);
    assert!(states.is_empty());
}

#[test]
fn progress_passes_through_unchanged() {
    let sent = ended(first("r", "", "on"), FinishReason::aborted("gone"));
    let Decoded::Text(row) = states().decode(sent.clone()) else { panic!("no text") };
    assert_eq!(row.progress, sent.progress);
}

#[test]
fn a_first_row_with_all_ids_continues_behind_the_known_ones() {
    let mut states = states();
    check(states.decode(first("r", "once ", "up")), "up", 5);
    check(states.decode(next("r", 7, "on")), "on", 7);
}

#[test]
fn a_first_row_replaces_a_state_that_exists() {
    let mut states = states();
    check(states.decode(first("r", "", "once")), "once", 0);
    check(states.decode(first("r", "on", "to")), "to", 2);
    check(states.decode(next("r", 4, "p")), "p", 4);
    assert_eq!(states.len(), 1);
}

#[test]
fn repeated_ids_give_no_text_twice() {
    let mut states = states();
    check(states.decode(first("r", "", "once")), "once", 0);
    check(states.decode(next("r", 2, "ceup")), "up", 4);
    check(states.decode(first("s", "", "once")), "once", 0);
    check(states.decode(next("s", 1, "nce")), "", 4);
}

#[test]
fn a_row_of_an_unknown_request_is_dropped_and_others_go_on() {
    let mut states = states();
    check(states.decode(first("r", "", "once")), "once", 0);
    assert_eq!(states.decode(next("ghost", 3, "up")), Decoded::Orphan("ghost".into()));
    assert_eq!(states.len(), 1, "an orphan leaves no state");
    check(states.decode(next("r", 4, "up")), "up", 4);
}

#[test]
fn missing_ids_fail_that_request_alone() {
    let mut states = states();
    check(states.decode(first("r", "", "once")), "once", 0);
    check(states.decode(first("s", "", "top")), "top", 0);
    let Decoded::Lost(row) = states.decode(next("r", 6, "up")) else { panic!("a gap went unnoticed") };
    assert!(matches!(row.progress.finished_reason, Some(FinishReason::Abort { status_code: Some(500), .. })));
    assert_eq!((row.text.as_str(), row.text_start), ("", 4));
    check(states.decode(next("s", 3, "up")), "up", 3);
    assert_eq!(states.len(), 1);
}

#[test]
fn contradicting_lengths_fail_the_request() {
    let mut states = states();
    check(states.decode(first("r", "", "once")), "once", 0);
    let mut broken = next("r", 4, "up");
    broken.progress.completion_tokens = 5;
    assert!(matches!(states.decode(broken), Decoded::Lost(_)));
    let mut broken = first("s", "", "up");
    broken.decode.read_offset = 99;
    assert!(matches!(states.decode(broken), Decoded::Lost(_)));
    let mut broken = first("s", "", "up");
    (broken.progress.start, broken.progress.completion_tokens) = (u32::MAX, 1);
    assert!(matches!(states.decode(broken), Decoded::Lost(_)));
    assert!(states.is_empty());
}

#[test]
fn no_live_state_is_ever_evicted() {
    const MANY: usize = 70_000;
    let mut states = states();
    for i in 0..MANY {
        check(states.decode(first(&format!("r{i}"), "", "on")), "on", 0);
    }
    assert_eq!(states.len(), MANY);
    for i in 0..MANY {
        let last = ended(next(&format!("r{i}"), 2, "ce"), FinishReason::Length { length: 4 });
        check(states.decode(last), "ce", 2);
    }
    assert!(states.is_empty());
}

#[test]
fn an_end_without_tokens_ends_the_state() {
    let mut states = states();
    check(states.decode(first("r", "", "once")), "once", 0);
    check(states.decode(ended(next("r", 4, ""), FinishReason::aborted("client went away"))), "", 4);
    assert!(states.is_empty());
    check(states.decode(ended(first("s", "", ""), FinishReason::Length { length: 0 })), "", 0);
    assert!(states.is_empty());
}

#[test]
fn without_a_tokenizer_rows_pass_through() {
    let mut states = States::new(None);
    let sent = next("r", 40, "up");
    let Decoded::Text(row) = states.decode(sent.clone()) else { panic!("dropped") };
    assert_eq!((row.text.as_str(), row.progress), ("", sent.progress));
    assert!(states.is_empty());
}

#[test]
fn a_reused_name_starts_afresh() {
    let mut states = states();
    let stop = FinishReason::Stop { matched: Matched::Token(27) };
    check(states.decode(ended(first("r", "", "on"), stop)), "on", 0);
    check(states.decode(first("r", "", "up")), "up", 0);
}
