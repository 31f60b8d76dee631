//! Owns the one match on the algorithm's name: what each draft worker needs, checked before the target is loaded.

use proto::{
    DflashConfig, DraftModelConfig, Dtype, ServeConfig, SpecAlgorithm, SpecConfig, TokenId, Weights,
};
use tch::Kind;

use crate::engine::EngineError;
use crate::engine::hf_config::HfConfig;
use crate::engine::model::{self, Features, Neighbour, TargetModel};
use crate::engine::models::dflash_spec::DflashSpec;
use crate::engine::models::draft::{DraftSpec, Head};
use crate::engine::models::draft_config::{DraftFiles, HeadKind};
use crate::engine::models::eagle_head::EagleSpec;
use crate::engine::models::eagle3_head::Eagle3Spec;
use crate::engine::models::mtp_head::{MtpLayers, MtpSpec};
use crate::engine::models::token_map;
use crate::engine::spec::dflash::{BlockShape, DflashPlan};
use crate::engine::spec::draft_model::{DraftShape, ModelPlan};
use crate::engine::spec::mixed::MixedPlan;
use crate::engine::spec::multi_layer::MultiLayerPlan;
use crate::engine::spec::ngram::NgramDrafter;
use crate::engine::spec::plan::{BoxedDrafter, WorkerPlan};
use crate::engine::spec::standalone::StandaloneSpec;

/// What names the draft model.
const FLAG: &str = "--speculative-draft-model-path";

/// A draft worker before it is loaded.
pub(super) struct DraftPlan {
    worker: Box<dyn WorkerPlan>,
}

impl DraftPlan {
    /// Reads configs and tensor names, and refuses what does not fit the target.
    pub(super) fn new(config: &ServeConfig, spec: &SpecConfig) -> Result<Self, EngineError> {
        let shape = DraftShape {
            steps: spec.num_steps as usize,
            topk: spec.eagle_topk as usize,
            draft_tokens: spec.num_draft_tokens as usize,
            rows: config.schedule.max_running_requests as usize,
        };
        let worker = match &spec.algorithm {
            SpecAlgorithm::Ngram(ngram) => {
                Ok(Box::new(NgramDrafter::new(ngram, shape.draft_tokens, shape.steps)) as _)
            }
            SpecAlgorithm::Eagle(draft) => eagle(config, draft, shape),
            SpecAlgorithm::Eagle3(draft) => eagle3(config, draft, shape),
            SpecAlgorithm::Standalone(draft) => standalone(config, &draft.weights, shape),
            SpecAlgorithm::MultiLayerEagle(draft) => multi_layer(config, draft, shape),
            SpecAlgorithm::Dflash(draft) => dflash(config, draft, shape),
        };
        let worker = worker.map_err(naming_the_flag)?;
        let worker = match &spec.ngram_first {
            None => worker,
            Some(first) => Box::new(MixedPlan {
                model: worker,
                ngram: NgramDrafter::new(&first.ngram, shape.draft_tokens, shape.steps)
                    .from_matches_of(first.min_match as usize),
            }),
        };
        Ok(Self { worker })
    }

    /// What the target's passes must leave.
    pub(super) fn features(&self) -> Features {
        self.worker.features()
    }

    /// The memory it takes beside the target.
    pub(super) fn neighbour(&self, config: &ServeConfig) -> Neighbour {
        let memory = self.worker.memory();
        let bytes = value_bytes(config.model.dtype);
        let slot_bytes = memory.per_slot as u64 * bytes;
        Neighbour {
            slot_bytes,
            weight_bytes: memory.weights as u64 * bytes,
            buffer_bytes: memory.scratch_slots as u64 * slot_bytes,
        }
    }

    /// Whether its acceptance says anything: random weights agree on nothing.
    pub(super) fn needs_check(&self, config: &ServeConfig) -> bool {
        let dummy = matches!(config.model.weights, Weights::Dummy { .. });
        !dummy && self.worker.may_disagree()
    }

    pub(super) fn load(
        self,
        target: &TargetModel,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<BoxedDrafter, EngineError> {
        self.worker.load(target, progress).map_err(naming_the_flag)
    }
}

fn ahead<S: DraftSpec + 'static>(model: S, shape: DraftShape) -> Result<Box<dyn WorkerPlan>, EngineError> {
    check_shape(shape)?;
    Ok(Box::new(ModelPlan { model, shape }))
}

/// A head in EAGLE's format, or a checkpoint's multi-token-prediction layer: the target's own, or another's.
fn eagle(
    config: &ServeConfig,
    draft: &DraftModelConfig,
    shape: DraftShape,
) -> Result<Box<dyn WorkerPlan>, EngineError> {
    let files = layer_files(config, draft)?;
    let target = model::shape_of(&config.model.weights)?;
    let hot = hot_tokens(draft, &target, shape.topk)?;
    if let Some(spec) = MtpSpec::find(&files, &target, hot.as_deref())? {
        tracing::info!(family = spec.family(), "drafting with the checkpoint's multi-token-prediction layer");
        return ahead(Head { spec, files }, shape);
    }
    if is_own(config, draft) {
        return Err(no_mtp_layer());
    }
    let spec = EagleSpec::read(&files, &target, hot.as_deref())?;
    ahead(Head { spec, files }, shape)
}

/// A checkpoint's multi-token-prediction layers, each for one step.
fn multi_layer(
    config: &ServeConfig,
    draft: &DraftModelConfig,
    shape: DraftShape,
) -> Result<Box<dyn WorkerPlan>, EngineError> {
    if shape.topk != 1 {
        return Err(EngineError::Load {
            what: "--speculative-eagle-topk".into(),
            reason: format!(
                "must be 1 with --enable-multi-layer-eagle, which drafts chains, not {}",
                shape.topk
            ),
        });
    }
    check_shape(shape)?;
    let files = layer_files(config, draft)?;
    let target = model::shape_of(&config.model.weights)?;
    let hot = hot_tokens(draft, &target, shape.topk)?;
    let layers = MtpLayers::find(files, &target, hot.as_deref(), shape.steps)?;
    tracing::info!(
        family = layers.family(),
        layers = layers.count(),
        "drafting with the checkpoint's multi-token-prediction layers"
    );
    Ok(Box::new(MultiLayerPlan { layers, rows: shape.rows }))
}

fn eagle3(
    config: &ServeConfig,
    draft: &DraftModelConfig,
    shape: DraftShape,
) -> Result<Box<dyn WorkerPlan>, EngineError> {
    let files = DraftFiles::open(head_folder(&draft.weights)?)?;
    let spec = Eagle3Spec::read(&files, &model::shape_of(&config.model.weights)?)?;
    ahead(Head { spec, files }, shape)
}

fn dflash(
    config: &ServeConfig,
    draft: &DflashConfig,
    shape: DraftShape,
) -> Result<Box<dyn WorkerPlan>, EngineError> {
    let files = DraftFiles::open(head_folder(&draft.model.weights)?)?;
    let target = model::shape_of(&config.model.weights)?;
    let hot = hot_tokens(&draft.model, &target, 1)?;
    let spec = DflashSpec::read(&files, &target, draft.mask_token, hot.as_deref())?;
    let shape = BlockShape { block: shape.draft_tokens, fixed: draft.fixed_block, rows: shape.rows };
    if shape.block < 2 {
        return Err(EngineError::Load {
            what: "the draft worker".into(),
            reason:
                "--speculative-dflash-block-size must be at least 2: the last committed token and a draft"
                    .into(),
        });
    }
    Ok(Box::new(DflashPlan::new(Head { spec, files }, shape)))
}

/// Whatever is wrong with a draft's files, a flag chose them.
fn naming_the_flag(error: EngineError) -> EngineError {
    match error {
        EngineError::Load { what, reason } if !what.starts_with("--") => {
            EngineError::Load { what: format!("{FLAG} {what}"), reason }
        }
        error => error,
    }
}

fn hot_tokens(
    draft: &DraftModelConfig,
    target: &HfConfig,
    topk: usize,
) -> Result<Option<Vec<TokenId>>, EngineError> {
    let Some(path) = &draft.token_map else { return Ok(None) };
    let hot = token_map::read(path, target.vocab_size)?;
    match hot.len() < topk {
        false => Ok(Some(hot)),
        true => Err(EngineError::Load {
            what: format!("--speculative-token-map {}", path.display()),
            reason: format!(
                "has fewer tokens ({}) than --speculative-eagle-topk {topk} tries after each token; name more or try \
                 fewer",
                hot.len()
            ),
        }),
    }
}

/// Whether the target drafts for itself.
fn is_own(config: &ServeConfig, draft: &DraftModelConfig) -> bool {
    draft.weights == config.model.weights
}

/// The folder of a head, which may be the target's own.
fn layer_files(config: &ServeConfig, draft: &DraftModelConfig) -> Result<DraftFiles, EngineError> {
    if is_own(config, draft) && !matches!(draft.weights, Weights::Safetensors(_)) {
        return Err(no_mtp_layer());
    }
    DraftFiles::open(head_folder(&draft.weights)?)
}

fn no_mtp_layer() -> EngineError {
    EngineError::Load {
        what: "--speculative-algorithm NEXTN".into(),
        reason: "the model given by --model brings no multi-token-prediction layer along; use EAGLE or EAGLE3 with a \
                 head that --speculative-draft-model-path names, or NGRAM, which needs no draft model"
            .into(),
    }
}

fn standalone(
    config: &ServeConfig,
    weights: &Weights,
    shape: DraftShape,
) -> Result<Box<dyn WorkerPlan>, EngineError> {
    if let Weights::Safetensors(dir) = weights {
        let right = match DraftFiles::open(dir)?.kind() {
            HeadKind::Mtp | HeadKind::None => None,
            head => head.algorithm(),
        };
        if let Some(right) = right {
            return Err(refused(format!(
                "is {} {right} head, no whole model; use --speculative-algorithm {right}",
                if right.starts_with('E') { "an" } else { "a" }
            )));
        }
    }
    let target = model::shape_of(&config.model.weights)?;
    let model = model::spec_of(weights)?;
    let HfConfig { vocab_size, .. } = model.shape;
    if vocab_size != target.vocab_size {
        return Err(refused(format!(
            "has a vocabulary of {vocab_size}; the model given by --model has {}",
            target.vocab_size
        )));
    }
    ahead(StandaloneSpec { config: config.clone(), weights: weights.clone(), model }, shape)
}

fn check_shape(shape: DraftShape) -> Result<(), EngineError> {
    let DraftShape { steps, topk, draft_tokens, .. } = shape;
    let tried = topk + steps.saturating_sub(1) * topk * topk;
    if steps == 0 || topk == 0 || draft_tokens < 2 || draft_tokens - 1 > tried || topk > draft_tokens - 1 {
        return Err(EngineError::Load {
            what: "the draft worker".into(),
            reason: format!(
                "--speculative-num-steps {steps} with --speculative-eagle-topk {topk} tries {tried} tokens, which do \
                 not fill --speculative-num-draft-tokens {draft_tokens}"
            ),
        });
    }
    Ok(())
}

fn head_folder(weights: &Weights) -> Result<&std::path::Path, EngineError> {
    match weights {
        Weights::Safetensors(dir) => Ok(dir),
        _ => Err(refused("must be a folder with config.json and model.safetensors".into())),
    }
}

fn refused(reason: String) -> EngineError {
    EngineError::Load { what: FLAG.into(), reason }
}

fn value_bytes(dtype: Dtype) -> u64 {
    let kind = match dtype {
        Dtype::Float32 => Kind::Float,
        Dtype::Bfloat16 => Kind::BFloat16,
        Dtype::Float16 => Kind::Half,
    };
    kind.elt_size_in_bytes() as u64
}
