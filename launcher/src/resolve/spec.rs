//! Owns the speculative flags: defaults as SGLang's, impossible combinations refused with the relation spelled out.

use anyhow::{Result, bail, ensure};
use proto::{NgramConfig, NgramMatchType, SpecAlgorithm, SpecConfig};

use crate::args::{MatchTypeArg, SpecArgs};
use crate::unsupported;

/// Nodes that a trie index can name.
const MAX_CAPACITY: u64 = 1 << 31;
/// Width of a verify step that no model gains from; wider is a slip of the finger.
const MAX_DRAFT_TOKENS: u32 = 256;

pub(super) fn resolve(args: &SpecArgs) -> Result<Option<SpecConfig>> {
    let name = args.speculative_algorithm.as_deref().map(str::to_uppercase);
    match name.as_deref() {
        None | Some("NONE") => refuse_orphans(args).map(|()| None),
        Some("NGRAM") => ngram(args).map(Some),
        Some(other) => match unsupported::algorithm_hint(other) {
            Some(hint) => bail!("--speculative-algorithm {other} {hint}; NGRAM is here"),
            None => bail!("--speculative-algorithm {other} is unknown; NGRAM is here"),
        },
    }
}

/// A speculative setting without an algorithm has no effect, so its author means something else.
fn refuse_orphans(args: &SpecArgs) -> Result<()> {
    let given = [
        ("--speculative-num-steps", args.speculative_num_steps.is_some()),
        ("--speculative-eagle-topk", args.speculative_eagle_topk.is_some()),
        ("--speculative-num-draft-tokens", args.speculative_num_draft_tokens.is_some()),
        ("--speculative-ngram-min-bfs-breadth", args.speculative_ngram_min_bfs_breadth.is_some()),
        ("--speculative-ngram-max-bfs-breadth", args.speculative_ngram_max_bfs_breadth.is_some()),
        ("--speculative-ngram-match-type", args.speculative_ngram_match_type.is_some()),
        ("--speculative-ngram-max-trie-depth", args.speculative_ngram_max_trie_depth.is_some()),
        ("--speculative-ngram-capacity", args.speculative_ngram_capacity.is_some()),
    ];
    match given.iter().find(|(_, given)| *given) {
        Some((flag, _)) => bail!("{flag} needs --speculative-algorithm (NGRAM)"),
        None => Ok(()),
    }
}

fn ngram(args: &SpecArgs) -> Result<SpecConfig> {
    let config = NgramConfig {
        min_bfs_breadth: args.speculative_ngram_min_bfs_breadth.unwrap_or(1),
        max_bfs_breadth: args.speculative_ngram_max_bfs_breadth.unwrap_or(10),
        match_type: match args.speculative_ngram_match_type {
            None | Some(MatchTypeArg::Bfs) => NgramMatchType::Bfs,
            Some(MatchTypeArg::Prob) => NgramMatchType::Prob,
        },
        max_trie_depth: args.speculative_ngram_max_trie_depth.unwrap_or(18),
        capacity: args.speculative_ngram_capacity.unwrap_or(10_000_000),
    };
    let topk = args.speculative_eagle_topk.unwrap_or(config.max_bfs_breadth);
    let width = args.speculative_num_draft_tokens.unwrap_or(12);
    let steps = args.speculative_num_steps.unwrap_or_else(|| (width / topk.max(1)).max(1));

    let NgramConfig { min_bfs_breadth: min, max_bfs_breadth: max, max_trie_depth: depth, capacity, .. } =
        config;
    ensure!(min >= 1, "--speculative-ngram-min-bfs-breadth {min} must be at least 1");
    ensure!(
        min <= max,
        "--speculative-ngram-min-bfs-breadth {min} must be at most --speculative-ngram-max-bfs-breadth {max}"
    );
    ensure!(
        (2..=MAX_DRAFT_TOKENS).contains(&width),
        "--speculative-num-draft-tokens {width} must be 2 to {MAX_DRAFT_TOKENS}: one token is the last committed \
         one, the others are drafts"
    );
    ensure!(
        depth >= 2,
        "--speculative-ngram-max-trie-depth {depth} must be at least 2: a match and what follows it"
    );
    ensure!(
        (u64::from(depth)..=MAX_CAPACITY).contains(&capacity),
        "--speculative-ngram-capacity {capacity} must be at least --speculative-ngram-max-trie-depth {depth} and \
         at most {MAX_CAPACITY}"
    );
    ensure!(topk >= 1, "--speculative-eagle-topk {topk} must be at least 1");
    ensure!(steps >= 1, "--speculative-num-steps {steps} must be at least 1");
    ensure!(
        steps < width,
        "--speculative-num-steps {steps} must be less than --speculative-num-draft-tokens {width}: every step of \
         a draft adds at least one token to the last committed one"
    );
    Ok(SpecConfig {
        algorithm: SpecAlgorithm::Ngram(config),
        num_steps: steps,
        eagle_topk: topk,
        num_draft_tokens: width,
    })
}
