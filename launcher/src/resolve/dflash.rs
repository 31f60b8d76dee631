//! Owns the flags of DFLASH: how long a block is, by flag or by the draft model's own config.

use anyhow::{Context, Result, bail, ensure};
use proto::{ModelConfig, TokenBytes, TokenId, Weights};
use serde_json::Value;

use super::draft_model::Shape;
use super::model::read_json;
use super::spec::MAX_DRAFT_TOKENS;
use crate::args::SpecArgs;

/// SGLang's, where neither flag nor config says.
const DEFAULT_BLOCK: u32 = 16;
const DEFAULT_MASK: &str = "<|MASK|>";
const FLAG: &str = "--speculative-draft-model-path";

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

fn own_block(draft: &Weights) -> Result<Option<u32>> {
    let block = key(draft, "block_size")?.as_u64();
    Ok(block.and_then(|block| u32::try_from(block).ok()))
}

/// What the draft model's config says, in `dflash_config` or beside it; null where it says nothing.
fn key(draft: &Weights, name: &str) -> Result<Value> {
    let Weights::Safetensors(dir) = draft else { return Ok(Value::Null) };
    let config = read_json(&dir.join("config.json"))?.unwrap_or_default();
    let places = [&config["dflash_config"][name], &config[name]];
    Ok(places.into_iter().find(|value| !value.is_null()).cloned().unwrap_or_default())
}

/// The mask where the draft model's config has only its name, or not even that. As in SGLang a name that the tokenizer
/// does not know is the first id behind its own, if the model has a row for it.
pub(super) fn mask_token(draft: &Weights, model: &ModelConfig) -> Result<Option<TokenId>> {
    let (id, name) = (key(draft, "mask_token_id")?, key(draft, "mask_token")?);
    let Some(dir) = model.tokenizer_dir.as_ref().filter(|_| id.is_null()) else { return Ok(None) };
    let name = match &name {
        Value::Null => DEFAULT_MASK,
        name => name.as_str().with_context(|| format!("{FLAG}: mask_token {name} is no string"))?,
    };
    let tokenizer = read_json(&dir.join("tokenizer.json"))?.context("tokenizer.json is missing")?;
    let tokens = TokenBytes::names(&tokenizer)?;
    let known = tokens.iter().rev().find(|(_, token)| *token == name).map(|(id, _)| *id);
    let behind = tokens.iter().map(|(id, _)| id + 1).max().unwrap_or(0);
    let mask = known.unwrap_or(behind);
    ensure!(
        mask < model.vocab_size,
        "{FLAG}: the mask {name:?} is not in the tokenizer's vocabulary, and the model given by --model has no row \
         behind it ({} rows); name it by mask_token_id in the draft model's config.json",
        model.vocab_size
    );
    Ok(Some(mask))
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
