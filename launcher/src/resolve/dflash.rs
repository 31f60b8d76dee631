//! Owns the flags of DFLASH: how long a block is, by flag or by the draft model's own config.

use anyhow::{Result, bail, ensure};
use proto::Weights;
use serde_json::Value;

use super::draft_model::Shape;
use super::model::read_json;
use super::spec::MAX_DRAFT_TOKENS;
use crate::args::SpecArgs;

/// SGLang's, where neither flag nor config says.
const DEFAULT_BLOCK: u32 = 16;

/// As SGLang shows it: a block is one step of one branch, as wide as it is long.
pub(super) fn shape(args: &SpecArgs, draft: &Weights) -> Result<(Shape, Option<String>)> {
    for (flag, value) in [
        ("--speculative-num-steps", args.speculative_num_steps),
        ("--speculative-eagle-topk", args.speculative_eagle_topk),
    ] {
        ensure!(
            value.is_none_or(|value| value == 1),
            "{flag} has no effect with DFLASH, whose draft is one block; choose its length with \
             --speculative-dflash-block-size"
        );
    }
    let named = flag(args)?;
    let own = own_block(draft)?;
    let width = named.or(own).unwrap_or(DEFAULT_BLOCK);
    ensure!(
        (2..=MAX_DRAFT_TOKENS).contains(&width),
        "--speculative-dflash-block-size {width} must be 2 to {MAX_DRAFT_TOKENS}: one token is the last committed one, \
         the others are drafts"
    );
    let note = own.filter(|&own| own != width).map(|own| {
        format!(
            "--speculative-dflash-block-size {width}: the draft model was made for blocks of {own} tokens"
        )
    });
    Ok((Shape { steps: 1, topk: 1, width }, note))
}

/// SGLang has two names for it.
fn flag(args: &SpecArgs) -> Result<Option<u32>> {
    match (args.speculative_dflash_block_size, args.speculative_num_draft_tokens) {
        (Some(block), Some(width)) if block != width => bail!(
            "--speculative-dflash-block-size {block} and --speculative-num-draft-tokens {width} are two names for one \
             number with DFLASH; leave one out"
        ),
        (block, width) => Ok(block.or(width)),
    }
}

/// What the draft model's config says, in `dflash_config` or beside it.
fn own_block(draft: &Weights) -> Result<Option<u32>> {
    let Weights::Safetensors(dir) = draft else { return Ok(None) };
    let Some(config) = read_json(&dir.join("config.json"))? else { return Ok(None) };
    let block = [&config["dflash_config"]["block_size"], &config["block_size"]];
    Ok(block.into_iter().find_map(Value::as_u64).and_then(|block| u32::try_from(block).ok()))
}

pub(super) fn refuse_flags(args: &SpecArgs, algorithm: &str) -> Result<()> {
    let given = [
        ("--speculative-dflash-block-size", args.speculative_dflash_block_size.is_some()),
        ("--speculative-dflash-fixed-block", args.speculative_dflash_fixed_block),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) => {
            bail!("{flag} needs --speculative-algorithm DFLASH and has no effect with {algorithm}")
        }
        None => Ok(()),
    }
}
