//! When rows are due, and what is in them.

use proto::FinishReason;

use super::*;
use crate::stop::Vocabulary;
use crate::testing;

fn running(stream: bool, interval: Option<u32>, output: &[u32]) -> Request {
    let vocabulary = Vocabulary { size: 64, eos_token_ids: [63].into(), bytes: None };
    let mut input = testing::request("a", (1..=8).collect(), 1000);
    (input.stream, input.sampling_params.stream_interval) = (stream, interval);
    let mut request = Request::new(input, &vocabulary, 10_000).expect("valid");
    request.queue_time = Some(0.5);
    request.append(output);
    request
}

/// After how many tokens a row goes out, when tokens come one by one.
fn sent_at(stream: bool, interval: Option<u32>, server: u32, tokens: usize) -> Vec<usize> {
    let mut request = running(stream, interval, &[1]);
    let mut sent = Vec::new();
    for count in 1..=tokens {
        if is_due(&request, server) {
            sent.push(count);
            mark_sent(&mut request);
        }
        request.append(&[1]);
    }
    sent
}

#[test]
fn the_first_token_goes_at_once_and_then_every_interval() {
    assert_eq!(sent_at(true, None, 1, 4), [1, 2, 3, 4]);
    assert_eq!(sent_at(true, None, 3, 8), [1, 4, 7]);
    assert_eq!(sent_at(true, Some(2), 3, 6), [1, 3, 5], "the request's own interval wins");
    assert_eq!(sent_at(true, Some(0), 0, 3), [1, 2, 3]);
    assert_eq!(sent_at(false, Some(1), 1, 120), [50, 100]);
}

#[test]
fn the_end_is_due_once_whatever_the_interval() {
    let mut request = running(false, None, &[1, 2]);
    assert!(!is_due(&request, 1));
    request.finish = Some(FinishReason::aborted("Aborted"));
    assert!(is_due(&request, 1));
    mark_sent(&mut request);
    assert!(!is_due(&request, 1));
}

#[test]
fn a_first_row_carries_five_prompt_ids_and_later_ones_only_what_is_new() {
    let mut request = running(true, None, &[20, 21]);
    let first = row(&request);
    assert_eq!(first.decode.decode_ids, [4, 5, 6, 7, 8, 20, 21]);
    assert_eq!((first.decode.read_offset, first.progress.start), (5, 0));
    assert_eq!(first, row(&request), "making a row marks nothing");
    mark_sent(&mut request);
    request.append(&[22, 23]);
    let later = row(&request);
    assert_eq!((later.decode.decode_ids, later.progress.output_ids), (vec![22, 23], vec![22, 23]));
    assert_eq!((later.progress.start, later.progress.completion_tokens), (2, 4));
    forget_sent(&mut request);
    let again = row(&request);
    assert_eq!(again.decode.decode_ids, [4, 5, 6, 7, 8, 20, 21, 22, 23]);
    assert_eq!((again.progress.start, again.progress.output_ids.len()), (0, 4));
}
