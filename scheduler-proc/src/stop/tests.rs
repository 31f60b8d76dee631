//! Where answers end: the table of orders, stop strings over block and character borders, and patterns. Every case
//! is scanned in one block and token by token, which must agree.

use proptest::prelude::*;
use proto::{TokenKind, TokenPiece};

use super::*;

const EOS: TokenId = 2;

/// 0..100 are words of one letter or more; 100 is special; 101.. are single bytes of "é" and "€".
fn vocabulary() -> Vocabulary {
    let mut pieces: Vec<(TokenId, Vec<u8>, bool)> = vec![
        (1, b"END".to_vec(), false),
        (2, b"</s>".to_vec(), true),
        (10, b"a".to_vec(), false),
        (11, b"b".to_vec(), false),
        (12, b"c".to_vec(), false),
        (13, b"EN".to_vec(), false),
        (14, b"D rest".to_vec(), false),
        (15, b"xENDyEND".to_vec(), false),
        (20, b"t".to_vec(), false),
        (21, b"u".to_vec(), false),
        (100, b"<tool>".to_vec(), true),
    ];
    pieces.extend("é€".bytes().enumerate().map(|(i, byte)| (101 + i as TokenId, vec![byte], false)));
    let pieces = pieces.into_iter().map(|(id, bytes, special)| TokenPiece { id, bytes, special });
    Vocabulary {
        size: 110,
        eos_token_ids: [EOS].into(),
        bytes: Some(Arc::new(TokenBytes::from_pieces(TokenKind::ByteLevel, false, pieces))),
    }
}

fn params(change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
    let mut params = SamplingParams::default();
    change(&mut params);
    params
}

fn scan_whole(params: &SamplingParams, limit: usize, block: &[TokenId]) -> Scan {
    Stops::new(params, limit, &vocabulary()).expect("valid").scan(block, 0)
}

fn scan_singly(params: &SamplingParams, limit: usize, block: &[TokenId]) -> Scan {
    let mut stops = Stops::new(params, limit, &vocabulary()).expect("valid");
    for (index, id) in block.iter().enumerate() {
        let scan = stops.scan(&[*id], index);
        if scan.reason.is_some() {
            return Scan { kept: index + scan.kept, ..scan };
        }
    }
    Scan { kept: block.len(), reason: None }
}

#[track_caller]
fn check(
    params: &SamplingParams,
    limit: usize,
    block: &[TokenId],
    kept: usize,
    reason: Option<FinishReason>,
) {
    let scan = scan_whole(params, limit, block);
    assert_eq!(scan, Scan { kept, reason });
    assert_eq!(scan_singly(params, limit, block), scan, "token by token");
}

fn token(id: TokenId) -> Option<FinishReason> {
    Some(FinishReason::Stop { matched: Matched::Token(id) })
}

fn string(text: &str) -> Option<FinishReason> {
    Some(FinishReason::Stop { matched: Matched::Str(text.to_owned()) })
}

fn length(length: u32) -> Option<FinishReason> {
    Some(FinishReason::Length { length })
}

#[test]
fn the_earliest_end_wins() {
    let plain = params(|_| {});
    check(&plain, 5, &[10, 11, 12, EOS, 20], 4, token(EOS));
    check(&plain, 4, &[10, 11, 12, 20, EOS], 4, length(4));
    check(&plain, 4, &[10, 11, 12, EOS], 4, token(EOS));
    check(&plain, 9, &[10, 11, 12], 3, None);
    let stop = params(|p| p.stop = vec!["END".to_owned()]);
    check(&stop, 5, &[10, 11, 1, 20, 21], 3, string("END"));
    check(&stop, 2, &[10, 11, 1, 20, 21], 2, length(2));
    check(&stop, 9, &[10, EOS, 1], 2, token(EOS));
}

#[test]
fn a_limit_of_zero_keeps_nothing() {
    assert_eq!(scan_whole(&params(|_| {}), 0, &[10]), Scan { kept: 0, reason: length(0) });
}

#[test]
fn a_stop_string_goes_before_a_stop_token_and_both_before_the_limit() {
    let both = params(|p| (p.stop, p.stop_token_ids) = (vec!["END".to_owned()], vec![1]));
    check(&both, 2, &[10, 1], 2, string("END"));
    let token_only = params(|p| p.stop_token_ids = vec![1]);
    check(&token_only, 2, &[10, 1], 2, token(1));
}

#[test]
fn ignoring_eos_leaves_stop_tokens() {
    let ignore = params(|p| (p.ignore_eos, p.stop_token_ids) = (true, vec![12]));
    check(&ignore, 9, &[10, EOS, 11, 12, 10], 4, token(12));
}

#[test]
fn an_unknown_id_is_not_delivered() {
    let scan = scan_whole(&params(|_| {}), 9, &[10, 110, 11]);
    assert_eq!(scan.kept, 1);
    assert!(matches!(scan.reason, Some(FinishReason::Abort { status_code: Some(500), .. })));
}

#[test]
fn stop_strings_span_tokens_and_are_found_early_in_a_long_block() {
    let stop = params(|p| p.stop = vec!["END".to_owned()]);
    check(&stop, 99, &[13, 14, 10, 10, 10, 10, 10, 10], 2, string("END"));
    let mut stops = Stops::new(&stop, 99, &vocabulary()).expect("valid");
    assert_eq!(stops.scan(&[10, 13], 0), Scan { kept: 2, reason: None });
    assert_eq!(stops.scan(&[14, 10, 10, 10, 10, 10], 2), Scan { kept: 1, reason: string("END") });
}

#[test]
fn of_several_strings_in_one_token_the_first_in_the_text_is_told() {
    let stop = params(|p| p.stop = vec!["yEN".to_owned(), "END".to_owned(), String::new()]);
    check(&stop, 9, &[15], 1, string("END"));
}

#[test]
fn hidden_special_tokens_neither_match_nor_interrupt() {
    let hidden = params(|p| p.stop = vec!["END".to_owned(), "<tool>".to_owned()]);
    check(&hidden, 9, &[100, 13, 100, 14], 4, string("END"));
    let shown = params(|p| {
        p.stop = vec!["END".to_owned(), "<tool>".to_owned()];
        p.skip_special_tokens = false;
    });
    check(&shown, 9, &[100, 13, 100, 14], 1, string("<tool>"));
}

#[test]
fn characters_in_several_tokens_match_as_a_whole() {
    let stop = params(|p| p.stop = vec!["€".to_owned()]);
    check(&stop, 9, &[101, 102, 103, 104, 105, 10], 5, string("€"));
}

#[test]
fn patterns_report_themselves_and_know_the_start_of_the_answer() {
    let pattern = |text: &str| params(|p| p.stop_regex = vec![text.to_owned()]);
    let matched = |text: &str| Some(FinishReason::Stop { matched: Matched::Regex(text.to_owned()) });
    check(&pattern("b+c"), 9, &[10, 11, 11, 12, 10], 4, matched("b+c"));
    check(&pattern("^b"), 9, &[10, 11, 10], 3, None);
    check(&pattern("^ab"), 9, &[10, 11, 10], 2, matched("^ab"));
    // Far beyond the window, what is kept does not look like a start.
    let long = vec![10; 6 * REGEX_WINDOW];
    check(&pattern("^ab"), usize::MAX >> 40, &[&[11], &long[..], &[11]].concat(), long.len() + 2, None);
    let far = [&long[..], &[11, 12]].concat();
    check(&pattern("abc"), far.len() + 9, &far, far.len(), matched("abc"));
}

#[test]
fn a_bad_pattern_and_a_missing_tokenizer_are_errors() {
    let bad = params(|p| p.stop_regex = vec!["(".to_owned()]);
    assert!(matches!(Stops::new(&bad, 9, &vocabulary()), Err(StopError::Pattern { .. })));
    let stop = params(|p| p.stop = vec!["x".to_owned()]);
    let blind = Vocabulary { bytes: None, ..vocabulary() };
    assert!(matches!(Stops::new(&stop, 9, &blind), Err(StopError::NoTokenizer)));
    assert!(Stops::new(&params(|_| {}), 9, &blind).is_ok());
}

proptest! {
    #[test]
    fn any_cutting_into_blocks_ends_at_the_same_token(
        ids in prop::collection::vec(prop::sample::select(vec![1u32, 2, 10, 11, 12, 13, 14, 100, 101, 102]), 1..40),
        cuts in prop::collection::vec(1usize..9, 40),
        limit in 0usize..40,
    ) {
        let params = params(|p| {
            p.stop = vec!["END".to_owned(), "aab".to_owned(), "é".to_owned()];
            p.stop_regex = vec!["b.c".to_owned()];
        });
        let alone = scan_singly(&params, limit, &ids);
        let mut stops = Stops::new(&params, limit, &vocabulary()).expect("valid");
        let mut done = 0;
        let mut joined = Scan { kept: ids.len(), reason: None };
        for cut in cuts {
            let block = &ids[done..(done + cut).min(ids.len())];
            if block.is_empty() {
                break;
            }
            let scan = stops.scan(block, done);
            if scan.reason.is_some() {
                joined = Scan { kept: done + scan.kept, ..scan };
                break;
            }
            done += block.len();
        }
        prop_assert_eq!(joined, alone);
    }
}
