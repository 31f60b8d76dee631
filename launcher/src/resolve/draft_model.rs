//! Owns the flags of algorithms that draft with a model: which model, how deep and how wide, with SGLang's defaults.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use proto::{
    AcceptanceRule, DflashConfig, DraftModelConfig, ModelConfig, SpecAlgorithm, SpecConfig, Weights,
};

use super::dflash;
use super::model::ModelFiles;
use super::same_tokens;
use super::spec::MAX_DRAFT_TOKENS;
use crate::args::{LoadFormat, SpecArgs};

/// What the model is to its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Eagle,
    Eagle3,
    /// EAGLE with the target's own multi-token-prediction layer, or the one of the draft model that is named.
    Nextn,
    /// EAGLE with such a layer per step.
    MultiLayer,
    Standalone,
    /// A model that denoises blocks.
    Dflash,
}

/// Depth, branches and width of a draft tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) steps: u32,
    pub(super) topk: u32,
    pub(super) width: u32,
}

impl Kind {
    /// What a name means beside `--enable-multi-layer-eagle`, as in SGLang a variant of EAGLE.
    pub(super) fn of(name: &str, multi_layer: bool) -> Result<Option<Self>> {
        match Self::named(name) {
            kind if !multi_layer => Ok(kind),
            Some(Self::Eagle | Self::Nextn) => Ok(Some(Self::MultiLayer)),
            _ => bail!(
                "--enable-multi-layer-eagle needs --speculative-algorithm EAGLE or NEXTN, not {name}: it drafts with \
                 several multi-token-prediction layers"
            ),
        }
    }

    fn named(name: &str) -> Option<Self> {
        match name {
            "EAGLE" => Some(Self::Eagle),
            "EAGLE3" => Some(Self::Eagle3),
            "NEXTN" => Some(Self::Nextn),
            "STANDALONE" => Some(Self::Standalone),
            "DFLASH" => Some(Self::Dflash),
            _ => None,
        }
    }

    fn algorithm(
        self,
        draft: DraftModelConfig,
        args: &SpecArgs,
        model: &ModelConfig,
    ) -> Result<SpecAlgorithm> {
        Ok(match self {
            Self::Dflash => SpecAlgorithm::Dflash(DflashConfig {
                mask_token: dflash::mask_token(&draft.weights, model)?,
                model: draft,
                fixed_block: args.speculative_dflash_fixed_block,
            }),
            Self::Eagle | Self::Nextn => SpecAlgorithm::Eagle(draft),
            Self::MultiLayer => SpecAlgorithm::MultiLayerEagle(draft),
            Self::Eagle3 => SpecAlgorithm::Eagle3(draft),
            Self::Standalone => SpecAlgorithm::Standalone(draft),
        })
    }

    /// SGLang's choice where the user makes none.
    fn defaults(self, architectures: &[String]) -> Shape {
        let llama = architectures.iter().any(|name| name == "LlamaForCausalLM");
        match self {
            Self::Eagle | Self::Eagle3 | Self::Nextn if llama => Shape { steps: 5, topk: 4, width: 8 },
            _ => Shape { steps: 3, topk: 1, width: 4 },
        }
    }
}

/// The configuration, and what was changed of what the user asked for.
pub(super) fn resolve(
    kind: Kind,
    args: &SpecArgs,
    model: &ModelConfig,
) -> Result<(SpecConfig, Option<String>)> {
    let draft = draft(kind, args, model)?;
    let (shape, note) = match kind {
        Kind::Dflash => dflash::shape(args, &draft.weights)?,
        _ => shape(args, kind.defaults(&model.architectures))?,
    };
    ensure!(
        kind != Kind::MultiLayer || shape.topk == 1,
        "--speculative-eagle-topk {} must be 1 with --enable-multi-layer-eagle, which drafts chains",
        shape.topk
    );
    let config = SpecConfig {
        algorithm: kind.algorithm(draft, args, model)?,
        num_steps: shape.steps,
        eagle_topk: shape.topk,
        num_draft_tokens: shape.width,
        acceptance: AcceptanceRule::default(),
        adaptive: None,
        ngram_first: None,
    };
    Ok((config, note))
}

fn draft(kind: Kind, args: &SpecArgs, model: &ModelConfig) -> Result<DraftModelConfig> {
    let token_map = token_map(kind, args)?;
    let Some(path) = args.speculative_draft_model_path.as_deref() else {
        ensure!(
            matches!(kind, Kind::Nextn | Kind::MultiLayer),
            "--speculative-algorithm with a draft model needs --speculative-draft-model-path; NGRAM needs none, nor does \
             NEXTN with a model that brings a multi-token-prediction layer along"
        );
        ensure!(
            args.speculative_draft_load_format.is_none(),
            "--speculative-draft-load-format needs --speculative-draft-model-path: without, NEXTN drafts with the \
             model's own layer"
        );
        return Ok(DraftModelConfig {
            path: model.model_path.clone(),
            weights: model.weights.clone(),
            token_map,
        });
    };
    let weights = weights(kind, path, args.speculative_draft_load_format)?;
    if let (Kind::Standalone, Some(tokenizer)) = (kind, &model.tokenizer_dir) {
        same_tokens::check(tokenizer, &weights)?;
    }
    Ok(DraftModelConfig { path: path.display().to_string(), weights, token_map })
}

fn token_map(kind: Kind, args: &SpecArgs) -> Result<Option<PathBuf>> {
    let Some(path) = &args.speculative_token_map else { return Ok(None) };
    match kind {
        Kind::Eagle | Kind::Nextn | Kind::MultiLayer | Kind::Dflash => {}
        Kind::Eagle3 => bail!(
            "--speculative-token-map has no effect with EAGLE3, whose heads bring their own reduced vocabulary (d2t); \
             leave it out"
        ),
        Kind::Standalone => {
            bail!(
                "--speculative-token-map has no effect with STANDALONE, which drafts all tokens; leave it out"
            )
        }
    }
    ensure!(path.is_file(), "--speculative-token-map {} is no file", path.display());
    Ok(Some(std::path::absolute(path)?))
}

fn weights(kind: Kind, path: &Path, format: Option<LoadFormat>) -> Result<Weights> {
    let shown = path.display();
    ensure!(path.exists(), "--speculative-draft-model-path {shown} does not exist");
    let standalone = kind == Kind::Standalone;
    match format.unwrap_or(LoadFormat::Auto) {
        LoadFormat::Gguf if !standalone => {
            bail!("--speculative-draft-load-format gguf is for STANDALONE: draft heads come as .safetensors")
        }
        LoadFormat::Dummy => {
            bail!(
                "--speculative-draft-load-format dummy is not supported: what is drafted at random is never accepted"
            )
        }
        format => match ModelFiles::find(path, format) {
            Ok(ModelFiles::Folder(dir)) => Ok(Weights::Safetensors(dir)),
            Ok(ModelFiles::Gguf(file)) if standalone => Ok(Weights::Gguf(file)),
            _ => bail!(
                "--speculative-draft-model-path {shown} holds no config.json with .safetensors files{}",
                if standalone { " and no single .gguf file" } else { "" }
            ),
        },
    }
}

/// All three settings are SGLang's choice, or the depth is given and the others follow it.
fn shape(args: &SpecArgs, defaults: Shape) -> Result<(Shape, Option<String>)> {
    let (topk, width) = (args.speculative_eagle_topk, args.speculative_num_draft_tokens);
    let Some(steps) = args.speculative_num_steps else {
        ensure!(
            topk.is_none() && width.is_none(),
            "--speculative-eagle-topk and --speculative-num-draft-tokens need --speculative-num-steps too"
        );
        return Ok((defaults, None));
    };
    let topk = topk.unwrap_or(1);
    ensure!(steps >= 1, "--speculative-num-steps {steps} must be at least 1");
    ensure!(topk >= 1, "--speculative-eagle-topk {topk} must be at least 1");
    if topk == 1 {
        let chain = Shape { steps, topk, width: steps.saturating_add(1) };
        ensure!(
            chain.width <= MAX_DRAFT_TOKENS,
            "--speculative-num-steps {steps} must be less than {MAX_DRAFT_TOKENS}"
        );
        let note = width.filter(|&width| width != chain.width).map(|width| {
            format!(
                "--speculative-num-draft-tokens is {}, not {width}: with --speculative-eagle-topk 1 a draft is a chain \
                 of --speculative-num-steps tokens behind the last committed one",
                chain.width
            )
        });
        return Ok((chain, note));
    }
    let width = width.context("--speculative-eagle-topk above 1 needs --speculative-num-draft-tokens too")?;
    let tried = u64::from(topk) + u64::from(steps - 1) * u64::from(topk) * u64::from(topk);
    ensure!(
        (2..=MAX_DRAFT_TOKENS).contains(&width),
        "--speculative-num-draft-tokens {width} must be 2 to {MAX_DRAFT_TOKENS}"
    );
    ensure!(
        topk < width,
        "--speculative-eagle-topk {topk} must be less than --speculative-num-draft-tokens {width}: the tree holds one \
         node less, for the last committed token"
    );
    ensure!(
        u64::from(width) - 1 <= tried,
        "--speculative-num-draft-tokens {width} is more than a tree of --speculative-num-steps {steps} and \
         --speculative-eagle-topk {topk} can fill: at most {}",
        tried + 1
    );
    Ok((Shape { steps, topk, width }, None))
}
