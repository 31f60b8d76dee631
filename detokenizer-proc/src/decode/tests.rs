//! Tests of decoding against the golden records: every record, every prefix, any cutting, both settings of
//! `skip_special_tokens`; and what ends an answer.

use std::path::PathBuf;
use std::sync::OnceLock;

use proptest::prelude::*;
use proto::{TokenKind, TokenPiece};
use serde_json::Value;

use super::*;

/// One tokenizer of the golden data.
struct Golden {
    name: &'static str,
    tokens: TokenBytes,
    json: Value,
}

fn goldens() -> &'static [Golden] {
    static ALL: OnceLock<Vec<Golden>> = OnceLock::new();
    ALL.get_or_init(|| {
        ["smollm2", "spm_legacy", "spm_metaspace_first"]
            .map(|name| {
                let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/golden/detok");
                let dir = root.join(name);
                let json = std::fs::read(dir.join("golden.json")).unwrap();
                Golden {
                    name,
                    tokens: TokenBytes::load(&dir).unwrap(),
                    json: serde_json::from_slice(&json).unwrap(),
                }
            })
            .into()
    })
}

/// One record under one setting of `skip_special_tokens`.
struct Case<'a> {
    label: String,
    tokens: &'a TokenBytes,
    ids: Vec<TokenId>,
    skip: bool,
    full: &'a str,
    /// Longest text, in characters, that may be out after each id.
    stable: Vec<usize>,
    /// Shortest text that should be out after each id, where the golden data says so.
    conservative: Option<Vec<usize>>,
}

fn cases() -> Vec<Case<'static>> {
    let records = goldens().iter().flat_map(|golden| {
        golden.json["records"].as_array().unwrap().iter().map(move |record| (golden, record))
    });
    records.flat_map(|(golden, record)| [true, false].map(|skip| case(golden, record, skip))).collect()
}

/// Runs of byte tokens are decoded part by part, each broken part one U+FFFD, so that a finished character can be
/// shown; the golden data calls that `lossy_runs` and leaves it out where it makes no difference.
fn case(golden: &'static Golden, record: &'static Value, skip: bool) -> Case<'static> {
    let suffix = if skip { "skip" } else { "keep" };
    let field = |name: &str| &record[format!("{name}_{suffix}")];
    let full = field("full_lossy_runs").as_str().or(field("full").as_str()).unwrap();
    let stable = match field("stable_lossy_len_chars") {
        Value::Null => numbers(field("stable_len_chars")),
        lossy => numbers(lossy),
    };
    let conservative = field("conservative_len_chars");
    Case {
        label: format!("{}/{} ({suffix})", golden.name, record["name"].as_str().unwrap()),
        tokens: &golden.tokens,
        ids: ids(&record["ids"]),
        skip,
        full,
        stable: stable.into_iter().map(|n| n as usize).collect(),
        conservative: (!conservative.is_null())
            .then(|| numbers(conservative).into_iter().map(|n| n as usize).collect()),
    }
}

fn numbers(list: &Value) -> Vec<u64> {
    list.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
}

fn ids(list: &Value) -> Vec<TokenId> {
    numbers(list).into_iter().map(|n| n as TokenId).collect()
}

fn row(prompt: &[TokenId], skip_special_tokens: bool, stops: &[&str]) -> DecodeRow {
    DecodeRow {
        decode_ids: prompt.to_vec(),
        read_offset: prompt.len() as u32,
        skip_special_tokens,
        spaces_between_special_tokens: true,
        no_stop_trim: false,
        stop_strs: stops.iter().map(|&stop| stop.to_owned()).collect(),
    }
}

const LENGTH: FinishReason = FinishReason::Length { length: 0 };

#[test]
fn every_prefix_of_every_record_is_between_the_bounds() {
    for case in cases() {
        let mut state = DecodeState::new(case.tokens, &row(&[], case.skip, &[]));
        let mut text = String::new();
        for (at, &id) in case.ids.iter().enumerate() {
            text += &state.push(case.tokens, &[id]);
            let (label, out) = (&case.label, text.chars().count());
            assert!(
                case.full.starts_with(&text),
                "{label}: {text:?} after id {at} is not in {:?}",
                case.full
            );
            assert!(
                out <= case.stable[at],
                "{label}: {out} characters after id {at}, {} stable",
                case.stable[at]
            );
            let least = case.conservative.as_ref().map_or(0, |least| least[at]);
            assert!(out >= least, "{label}: {out} characters after id {at}, {least} could be out");
        }
        text += &state.finish(case.tokens, &[], &LENGTH);
        assert_eq!(text, case.full, "{}", case.label);
    }
}

#[test]
fn every_prefix_ends_as_if_it_were_the_whole() {
    for case in cases() {
        for end in 0..=case.ids.len() {
            let mut state = DecodeState::new(case.tokens, &row(&[], case.skip, &[]));
            let text = state.finish(case.tokens, &case.ids[..end], &LENGTH);
            assert_eq!(text, case.tokens.decode(&case.ids[..end], case.skip), "{} to {end}", case.label);
            assert_eq!(state.text_len(), text.len() as u64);
        }
        assert_eq!(case.tokens.decode(&case.ids, case.skip), case.full, "{}", case.label);
    }
}

#[test]
fn output_continues_its_prompt() {
    for golden in goldens() {
        for context in golden.json["context"].as_array().unwrap() {
            let (prompt, output) = (ids(&context["prompt_ids"]), ids(&context["output_ids"]));
            let mut state = DecodeState::new(&golden.tokens, &row(&prompt, true, &[]));
            let delta = state.finish(&golden.tokens, &output, &LENGTH);
            assert_eq!(delta, context["delta"].as_str().unwrap(), "{}: after {prompt:?}", golden.name);
            let mut alone = DecodeState::new(&golden.tokens, &row(&[], true, &[]));
            let text = alone.finish(&golden.tokens, &output, &LENGTH);
            assert_eq!(text, context["output_alone"].as_str().unwrap(), "{}: {output:?} alone", golden.name);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_cutting_of_any_record_gives_the_same_text(seed in prop::collection::vec(1usize..7, 40)) {
        for case in cases() {
            let mut state = DecodeState::new(case.tokens, &row(&[], case.skip, &["never this", "\u{fffd}\u{fffd}\u{fffd}!"]));
            let (mut text, mut at) = (String::new(), 0);
            for &size in seed.iter().cycle() {
                let end = (at + size).min(case.ids.len());
                if end == case.ids.len() {
                    break;
                }
                text += &state.push(case.tokens, &case.ids[at..end]);
                prop_assert!(text.chars().count() <= case.stable[end - 1]);
                at = end;
            }
            text += &state.finish(case.tokens, &case.ids[at..], &LENGTH);
            prop_assert_eq!(&text, case.full);
        }
    }

    #[test]
    fn any_ids_decode_and_cutting_does_not_matter(
        golden in 0usize..3,
        all in prop::collection::vec(prop_oneof![0u32..420, 0u32..60_000, any::<u32>()], 0..60),
        cuts in prop::collection::vec(0usize..60, 0..8),
        skip in any::<bool>(),
        stop in prop::option::of("[a-e ]{1,2}"),
    ) {
        let tokens = &goldens()[golden].tokens;
        let stops: Vec<&str> = stop.as_deref().into_iter().collect();
        let mut whole = DecodeState::new(tokens, &row(&[], skip, &stops));
        let expect = whole.finish(tokens, &all, &LENGTH);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(all.len())).collect();
        cuts.sort_unstable();
        let mut state = DecodeState::new(tokens, &row(&[], skip, &stops));
        let (mut text, mut at) = (String::new(), 0);
        for cut in cuts {
            text += &state.push(tokens, &all[at..cut]);
            at = cut;
        }
        text += &state.finish(tokens, &all[at..], &LENGTH);
        prop_assert_eq!(&text, &expect);
        prop_assert_eq!(state.text_len(), text.len() as u64);
        prop_assert_eq!(state.ids(), all.len());
        let unstopped = tokens.decode(&all, skip);
        let cut = stops.iter().filter_map(|stop| unstopped.find(stop)).min().unwrap_or(unstopped.len());
        prop_assert_eq!(text, &unstopped[..cut]);
    }
}

/// Ids 0 to 25 are letters, 26 a space, 27 the special `<e>`, 28 to 31 the bytes of an emoji.
fn small() -> TokenBytes {
    let letters = (b'a'..=b'z').chain([b' ']).map(|byte| (vec![byte], false));
    let bytes = "😀".bytes().map(|byte| (vec![byte], false));
    let all = letters.chain([(b"<e>".to_vec(), true)]).chain(bytes).zip(0..);
    TokenBytes::from_pieces(
        TokenKind::ByteLevel,
        false,
        all.map(|((bytes, special), id)| TokenPiece { id, bytes, special }),
    )
}

fn stop_token(id: TokenId) -> FinishReason {
    FinishReason::Stop { matched: Matched::Token(id) }
}

#[track_caller]
fn check_end(row: DecodeRow, ids: &[TokenId], reason: &FinishReason, expect: &str) {
    let tokens = small();
    let mut state = DecodeState::new(&tokens, &row);
    assert_eq!(state.finish(&tokens, ids, reason), expect, "{ids:?} ended by {reason:?}");
}

#[test]
fn a_stop_token_is_not_shown_unless_asked_for() {
    check_end(row(&[], false, &[]), &[0, 1, 27], &stop_token(27), "ab");
    check_end(row(&[], true, &[]), &[0, 1, 2], &stop_token(2), "ab");
    check_end(row(&[], false, &[]), &[0], &stop_token(0), "");
    let keep = |skip| DecodeRow { no_stop_trim: true, ..row(&[], skip, &[]) };
    check_end(keep(false), &[0, 1, 27], &stop_token(27), "ab<e>");
    check_end(keep(true), &[0, 1, 27], &stop_token(27), "ab");
    check_end(keep(true), &[0, 1, 2], &stop_token(2), "abc");
    check_end(row(&[], false, &[]), &[0, 27], &LENGTH, "a<e>");
}

#[test]
fn a_stop_string_in_a_block_cuts_at_its_first_match() {
    let stop = FinishReason::Stop { matched: Matched::Str("cd".into()) };
    check_end(row(&[], true, &["cd"]), &[0, 1, 2, 3, 4, 2, 3], &stop, "ab");
    let keep = DecodeRow { no_stop_trim: true, ..row(&[], true, &["cd"]) };
    check_end(keep, &[0, 1, 2, 3, 4, 2, 3], &stop, "abcd");
}

#[test]
fn a_stop_string_that_is_a_hidden_token_cuts_nothing() {
    let stop = FinishReason::Stop { matched: Matched::Str("<e>".into()) };
    check_end(row(&[], true, &["<e>"]), &[0, 1, 27], &stop, "ab");
    check_end(row(&[], false, &["<e>"]), &[0, 1, 27], &stop, "ab");
}

#[test]
fn a_stop_pattern_keeps_the_text_whole() {
    let stop = FinishReason::Stop { matched: Matched::Regex("c.".into()) };
    check_end(row(&[], true, &[]), &[0, 1, 2, 3], &stop, "abcd");
}

#[test]
fn any_end_without_a_match_releases_what_was_held() {
    for reason in [LENGTH, FinishReason::aborted("client went away"), stop_token(27)] {
        let tokens = small();
        let mut state = DecodeState::new(&tokens, &row(&[], true, &["abcx"]));
        assert_eq!(state.push(&tokens, &[25, 0, 1, 2]), "z");
        assert_eq!(state.finish(&tokens, &[27], &reason), "abc");
    }
}

#[test]
fn an_open_character_at_the_end_is_one_mark() {
    check_end(row(&[], true, &[]), &[28], &FinishReason::Length { length: 1 }, "\u{fffd}");
    check_end(row(&[], true, &[]), &[0, 28, 29, 30], &LENGTH, "a\u{fffd}");
    check_end(row(&[], true, &[]), &[28, 29, 30, 31, 27], &stop_token(27), "😀");
}

#[test]
fn a_hidden_token_inside_a_character_does_not_break_it() {
    check_end(row(&[], true, &[]), &[28, 29, 27, 30, 31], &LENGTH, "😀");
    check_end(row(&[], false, &[]), &[28, 29, 27, 30, 31], &LENGTH, "\u{fffd}<e>\u{fffd}\u{fffd}");
}

#[test]
fn undefined_ids_are_counted_and_empty() {
    let tokens = small();
    let mut state = DecodeState::new(&tokens, &row(&[], true, &[]));
    assert_eq!(state.push(&tokens, &[0, 99, TokenId::MAX, 28, 99, 29, 30, 31, 1]), "a😀b");
    assert_eq!(state.ids(), 9);
}

/// The letters as SentencePiece pieces, each with and without its space.
#[test]
fn only_the_tokenizers_own_space_is_stripped() {
    let texts = [" a", "a", "  ", " ", "\n    x", ""];
    let pieces = texts.iter().zip(0..);
    let tokens = TokenBytes::from_pieces(
        TokenKind::SentencePiece,
        true,
        pieces.map(|(text, id)| TokenPiece { id, bytes: text.as_bytes().to_vec(), special: false }),
    );
    let text = |prompt: &[TokenId], ids: &[TokenId]| {
        let mut state = DecodeState::new(&tokens, &row(prompt, true, &[]));
        let mut text: String = ids.iter().map(|&id| state.push(&tokens, &[id])).collect();
        text += &state.finish(&tokens, &[], &LENGTH);
        text
    };
    assert_eq!(text(&[], &[0, 0]), "a a");
    assert_eq!(text(&[], &[2, 1]), " a");
    assert_eq!(text(&[], &[3, 3, 1]), " a");
    assert_eq!(text(&[], &[5, 0, 4]), "a\n    x", "an empty piece is not the text's start");
    assert_eq!(text(&[1], &[0, 4]), " a\n    x");
}

#[test]
fn the_cost_of_a_token_does_not_grow() {
    const MANY: usize = 16_384;
    let tokens = small();
    let letters: Vec<TokenId> = (0..MANY as u32).map(|i| i * 7 % 26).collect();
    let emoji: Vec<TokenId> = (0..MANY as u32).map(|i| 28 + i % 4).collect();
    let broken = vec![29; MANY];
    let hidden = vec![27; MANY];
    let undefined = vec![1_000; MANY];
    // "aab" against "aaaa…" keeps a partial match open for ever.
    let held = vec![0; MANY];
    for (name, ids) in [
        ("letters", letters),
        ("emoji", emoji),
        ("broken", broken),
        ("hidden", hidden),
        ("undefined", undefined),
        ("held", held),
    ] {
        let mut state = DecodeState::new(&tokens, &row(&[], true, &["aab", "hello world"]));
        for &id in &ids {
            state.push(&tokens, &[id]);
        }
        let per_token = state.work() as f64 / MANY as f64;
        // Up to 4 bytes looked at again while a character is open, 3 bytes of U+FFFD for each of 2 stop strings.
        assert!(per_token <= 10.0, "{name}: {per_token} bytes per token");
    }
}
