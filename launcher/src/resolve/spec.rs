//! Owns the speculative flags: defaults as SGLang's, impossible combinations refused with the relation spelled out.

use anyhow::{Result, bail, ensure};
use proto::{
    AcceptanceRule, ModelConfig, NgramConfig, NgramFirst, NgramMatchType, SpecAlgorithm, SpecConfig,
};

use super::{acceptance, adaptive, dflash, draft_model};
use crate::args::{MatchTypeArg, SpecArgs};
use crate::unsupported;

/// Nodes that a trie index can name.
const MAX_CAPACITY: u64 = 1 << 31;
/// Width of a verify step that no model gains from; wider is a slip of the finger.
pub(super) const MAX_DRAFT_TOKENS: u32 = 256;
const KNOWN: &str =
    "DFLASH, EAGLE, EAGLE3, NEXTN, STANDALONE and NGRAM are here, and each of the others with +NGRAM";
/// Behind the name of an algorithm with a draft model.
const NGRAM_FIRST: &str = "+NGRAM";
/// A single token is followed by too much; from two on, what came of it decides (docs/speculation.md has numbers).
const MIN_MATCH: u32 = 2;

/// The algorithm with its settings, and what was changed of what the user asked for.
pub(super) fn resolve(args: &SpecArgs, model: &ModelConfig) -> Result<(Option<SpecConfig>, Vec<String>)> {
    let (mut config, note) = algorithm(args, model)?;
    let mut notes = Vec::from_iter(note);
    if let Some(config) = &mut config {
        config.acceptance = acceptance::resolve(args, config)?;
        notes.extend(acceptance::note(config.acceptance));
        adaptive::resolve(args, config)?;
        if config.ngram_first.is_some() {
            // How the model branches is known only now.
            config.ngram_first = Some(ngram_first(args, config.eagle_topk)?);
        }
    }
    Ok((config, notes))
}

fn algorithm(args: &SpecArgs, model: &ModelConfig) -> Result<(Option<SpecConfig>, Option<String>)> {
    let name = args.speculative_algorithm.as_deref().map(str::to_uppercase);
    match name.as_deref() {
        None | Some("NONE") => refuse_orphans(args).map(|()| (None, None)),
        Some("NGRAM") => {
            ensure!(
                args.speculative_ngram_min_match.is_none(),
                "--speculative-ngram-min-match needs an algorithm with {NGRAM_FIRST}, as in EAGLE{NGRAM_FIRST}, and has no \
                 effect with NGRAM alone"
            );
            refuse_draft_model(args)?;
            ensure!(
                !args.enable_multi_layer_eagle,
                "--enable-multi-layer-eagle needs --speculative-algorithm EAGLE or NEXTN, not NGRAM"
            );
            dflash::refuse_flags(args, "NGRAM")?;
            Ok((Some(ngram(args)?), None))
        }
        Some(whole) => {
            let model_alone = whole.strip_suffix(NGRAM_FIRST);
            let name = model_alone.unwrap_or(whole);
            let Some(kind) = draft_model::Kind::of(name, args.enable_multi_layer_eagle)? else {
                match unsupported::algorithm_hint(name) {
                    Some(hint) => bail!("--speculative-algorithm {whole} {hint}; {KNOWN}"),
                    None => bail!("--speculative-algorithm {whole} is unknown; {KNOWN}"),
                }
            };
            if model_alone.is_none() {
                refuse_ngram(args, name)?;
            }
            if kind != draft_model::Kind::Dflash {
                dflash::refuse_flags(args, name)?;
            }
            let (mut config, note) = draft_model::resolve(kind, args, model)?;
            if model_alone.is_some() {
                config.ngram_first = Some(ngram_first(args, config.eagle_topk)?);
            }
            Ok((Some(config), note))
        }
    }
}

/// What says which draft model, and whether it was given.
fn draft_model_flags(args: &SpecArgs) -> [(&'static str, bool); 3] {
    [
        ("--speculative-draft-model-path", args.speculative_draft_model_path.is_some()),
        ("--speculative-draft-load-format", args.speculative_draft_load_format.is_some()),
        ("--speculative-token-map", args.speculative_token_map.is_some()),
    ]
}

fn refuse_draft_model(args: &SpecArgs) -> Result<()> {
    match draft_model_flags(args).into_iter().find(|(_, given)| *given) {
        None => Ok(()),
        Some((flag, _)) => bail!(
            "{flag} has no effect with --speculative-algorithm NGRAM, which has no draft model; use DFLASH, \
             EAGLE, EAGLE3, NEXTN or STANDALONE"
        ),
    }
}

/// A speculative setting without an algorithm has no effect, so its author means something else.
fn refuse_orphans(args: &SpecArgs) -> Result<()> {
    let shape = [
        ("--enable-multi-layer-eagle", args.enable_multi_layer_eagle),
        ("--speculative-num-steps", args.speculative_num_steps.is_some()),
        ("--speculative-eagle-topk", args.speculative_eagle_topk.is_some()),
        ("--speculative-num-draft-tokens", args.speculative_num_draft_tokens.is_some()),
        ("--speculative-adaptive", args.speculative_adaptive),
        ("--speculative-adaptive-config", args.speculative_adaptive_config.is_some()),
        ("--speculative-use-rejection-sampling", args.speculative_use_rejection_sampling),
        ("--speculative-accept-threshold-single", args.speculative_accept_threshold_single != 1.0),
        ("--speculative-accept-threshold-acc", args.speculative_accept_threshold_acc != 1.0),
    ];
    match draft_model_flags(args).into_iter().chain(shape).find(|(_, given)| *given) {
        Some((flag, _)) => {
            bail!("{flag} needs --speculative-algorithm (DFLASH, EAGLE, EAGLE3, NEXTN, STANDALONE or NGRAM)")
        }
        None => refuse_ngram(args, "NONE").and_then(|()| dflash::refuse_flags(args, "NONE")),
    }
}

fn refuse_ngram(args: &SpecArgs, algorithm: &str) -> Result<()> {
    let given = [
        ("--speculative-ngram-min-bfs-breadth", args.speculative_ngram_min_bfs_breadth.is_some()),
        ("--speculative-ngram-max-bfs-breadth", args.speculative_ngram_max_bfs_breadth.is_some()),
        ("--speculative-ngram-match-type", args.speculative_ngram_match_type.is_some()),
        ("--speculative-ngram-max-trie-depth", args.speculative_ngram_max_trie_depth.is_some()),
        ("--speculative-ngram-capacity", args.speculative_ngram_capacity.is_some()),
        ("--speculative-ngram-min-match", args.speculative_ngram_min_match.is_some()),
    ];
    match given.iter().find(|(_, given)| *given) {
        Some((flag, _)) => {
            bail!(
                "{flag} needs --speculative-algorithm NGRAM, alone or behind another as in EAGLE{NGRAM_FIRST}, and has no \
                 effect with {algorithm}"
            )
        }
        None => Ok(()),
    }
}

fn ngram(args: &SpecArgs) -> Result<SpecConfig> {
    let config = trie(args, 10)?;
    let topk = args.speculative_eagle_topk.unwrap_or(config.max_bfs_breadth);
    let width = args.speculative_num_draft_tokens.unwrap_or(12);
    let steps = args.speculative_num_steps.unwrap_or_else(|| (width / topk.max(1)).max(1));
    ensure!(
        (2..=MAX_DRAFT_TOKENS).contains(&width),
        "--speculative-num-draft-tokens {width} must be 2 to {MAX_DRAFT_TOKENS}: one token is the last committed \
         one, the others are drafts"
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
        acceptance: AcceptanceRule::default(),
        adaptive: None,
        ngram_first: None,
    })
}

/// The trie of n-grams, following so many continuations after the shortest match unless a flag says otherwise.
fn trie(args: &SpecArgs, breadth: u32) -> Result<NgramConfig> {
    let config = NgramConfig {
        min_bfs_breadth: args.speculative_ngram_min_bfs_breadth.unwrap_or(1),
        max_bfs_breadth: args.speculative_ngram_max_bfs_breadth.unwrap_or(breadth),
        match_type: match args.speculative_ngram_match_type {
            None | Some(MatchTypeArg::Bfs) => NgramMatchType::Bfs,
            Some(MatchTypeArg::Prob) => NgramMatchType::Prob,
        },
        max_trie_depth: args.speculative_ngram_max_trie_depth.unwrap_or(18),
        capacity: args.speculative_ngram_capacity.unwrap_or(10_000_000),
    };
    let NgramConfig { min_bfs_breadth: min, max_bfs_breadth: max, max_trie_depth: depth, capacity, .. } =
        config;
    ensure!(min >= 1, "--speculative-ngram-min-bfs-breadth {min} must be at least 1");
    ensure!(
        min <= max,
        "--speculative-ngram-min-bfs-breadth {min} must be at most --speculative-ngram-max-bfs-breadth {max}"
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
    Ok(config)
}

/// Beside a draft model the trie branches as it does: chains stay chains.
fn ngram_first(args: &SpecArgs, topk: u32) -> Result<NgramFirst> {
    let ngram = trie(args, topk)?;
    let min_match = args.speculative_ngram_min_match.unwrap_or(MIN_MATCH.min(ngram.max_trie_depth - 1));
    ensure!(
        (1..ngram.max_trie_depth).contains(&min_match),
        "--speculative-ngram-min-match {min_match} must be at least 1 and less than --speculative-ngram-max-trie-depth \
         {}, which holds a match and what follows it",
        ngram.max_trie_depth
    );
    Ok(NgramFirst { ngram, min_match })
}
