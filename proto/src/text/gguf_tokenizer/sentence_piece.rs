//! Owns turning a SentencePiece vocabulary into one of merges: SentencePiece joins the two neighbours whose joined
//! piece scores best, which is a list of merges in order of the joined piece's score.

use std::cmp::Reverse;
use std::collections::HashMap;

use serde_json::{Value, json};

use super::metadata::TokenType;

/// Every way to make a normal piece of two others, best first; among equals the one with the longer left part.
pub(super) fn merges(tokens: &[String], types: &[TokenType], scores: &[f32]) -> Vec<[String; 2]> {
    let ids: HashMap<&str, usize> = tokens.iter().zip(0..).map(|(token, id)| (token.as_str(), id)).collect();
    let mut merges = Vec::new();
    for ((token, kind), &score) in tokens.iter().zip(types).zip(scores) {
        if *kind != TokenType::Normal {
            continue;
        }
        let mut ways: Vec<(usize, usize)> = token
            .char_indices()
            .skip(1)
            .filter_map(|(at, _)| Some((*ids.get(&token[..at])?, *ids.get(&token[at..])?)))
            .collect();
        ways.sort_unstable();
        merges.extend(ways.into_iter().map(|way| (score, way)));
    }
    let length = |id: usize| tokens[id].chars().count();
    merges.sort_by(|(score, (left, right)), (other, (other_left, other_right))| {
        let by_score = other.total_cmp(score);
        by_score.then_with(|| {
            let key = Reverse((length(*left), length(*right)));
            key.cmp(&Reverse((length(*other_left), length(*other_right))))
        })
    });
    merges.into_iter().map(|(_, (left, right))| [tokens[left].clone(), tokens[right].clone()]).collect()
}

/// Spaces are U+2581, and a text starts with one of its own.
pub(super) fn normalizer(space_prefix: bool) -> Value {
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let prepend = space_prefix.then(|| json!({"type": "Prepend", "prepend": "▁"}));
    let steps: Vec<Value> = prepend.into_iter().chain([replace]).collect();
    json!({"type": "Sequence", "normalizers": steps})
}

pub(super) fn decoder(space_prefix: bool) -> Value {
    let mut steps = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if space_prefix {
        steps.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    json!({"type": "Sequence", "decoders": steps})
}
