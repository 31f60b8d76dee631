//! Owns the one match on the algorithm's name: what each draft worker needs, checked before the target is loaded, and
//! the worker itself.

use proto::{DraftModelConfig, Dtype, ServeConfig, SpecAlgorithm, SpecConfig, TokenId, Weights};
use tch::{Kind, Tensor};

use crate::engine::EngineError;
use crate::engine::hf_config::HfConfig;
use crate::engine::model::{self, Features, Neighbour, TargetModel};
use crate::engine::models::draft::DraftModel;
use crate::engine::models::draft_block::BlockSpec;
use crate::engine::models::draft_config::{DraftFiles, HeadKind};
use crate::engine::models::eagle_head::{EagleHead, EagleSpec};
use crate::engine::models::eagle3_head::{Eagle3Head, Eagle3Spec};
use crate::engine::models::mtp_head::{MtpHead, MtpSpec};
use crate::engine::models::token_map;
use crate::engine::spec::Drafter;
use crate::engine::spec::draft_model::{DraftShape, ModelDrafter};
use crate::engine::spec::ngram::NgramDrafter;
use crate::engine::spec::standalone::StandaloneModel;
use crate::engine::weights::Parameter;

/// What names the draft model.
const FLAG: &str = "--speculative-draft-model-path";

/// A draft worker before it is loaded.
pub(super) struct DraftPlan<'a> {
    kind: PlanKind<'a>,
    shape: DraftShape,
}

enum PlanKind<'a> {
    Ngram(NgramDrafter),
    Eagle(EagleSpec, DraftFiles),
    Eagle3(Eagle3Spec, DraftFiles),
    Mtp(MtpSpec, DraftFiles),
    Standalone { weights: &'a Weights, parameters: Vec<Parameter>, slot_values: usize },
}

pub(super) type BoxedDrafter = Box<dyn Drafter<Option<Tensor>>>;

impl<'a> DraftPlan<'a> {
    /// Reads configs and tensor names, and refuses what does not fit the target.
    pub(super) fn new(config: &ServeConfig, spec: &'a SpecConfig) -> Result<Self, EngineError> {
        let shape = DraftShape {
            steps: spec.num_steps as usize,
            topk: spec.eagle_topk as usize,
            draft_tokens: spec.num_draft_tokens as usize,
            rows: config.schedule.max_running_requests as usize,
        };
        let kind = match &spec.algorithm {
            SpecAlgorithm::Ngram(ngram) => {
                Ok(PlanKind::Ngram(NgramDrafter::new(ngram, shape.draft_tokens, shape.steps)))
            }
            SpecAlgorithm::Eagle(draft) => eagle(config, draft, shape.topk),
            SpecAlgorithm::Eagle3(draft) => eagle3(config, draft),
            SpecAlgorithm::Standalone(draft) => standalone(config, &draft.weights),
        };
        let kind = kind.map_err(naming_the_flag)?;
        if !matches!(kind, PlanKind::Ngram(_)) {
            check_shape(shape)?;
        }
        Ok(Self { kind, shape })
    }

    /// What the target's passes must leave.
    pub(super) fn features(&self) -> Features {
        match &self.kind {
            PlanKind::Ngram(_) | PlanKind::Standalone { .. } => Features::None,
            PlanKind::Eagle(..) => Features::Final,
            PlanKind::Mtp(spec, _) => spec.features().clone(),
            PlanKind::Eagle3(spec, _) => {
                spec.captured().map_or(Features::Final, |layers| Features::Layers(layers.to_vec()))
            }
        }
    }

    /// The memory it takes beside the target.
    pub(super) fn neighbour(&self, config: &ServeConfig) -> Neighbour {
        let (slot_values, weights) = match &self.kind {
            PlanKind::Ngram(_) => return Neighbour::default(),
            PlanKind::Eagle(spec, _) => {
                let block = spec.block();
                let weights = values(&spec.parameters()) + spec.hot_values();
                (head_slot_values(block, block.shape.hidden_size), weights)
            }
            PlanKind::Eagle3(spec, _) => {
                (head_slot_values(spec.block(), spec.feature_width()), values(&spec.parameters()))
            }
            PlanKind::Mtp(spec, _) => {
                let block = spec.block();
                let weights = values(&spec.parameters()) + spec.hot_values();
                (head_slot_values(block, block.shape.hidden_size), weights)
            }
            PlanKind::Standalone { parameters, slot_values, .. } => (*slot_values, values(parameters)),
        };
        let bytes = value_bytes(config.model.dtype);
        let slot_bytes = slot_values as u64 * bytes;
        Neighbour {
            slot_bytes,
            weight_bytes: weights as u64 * bytes,
            buffer_bytes: self.shape.scratch_slots() as u64 * slot_bytes,
        }
    }

    /// Whether its acceptance says anything: random weights agree on nothing.
    pub(super) fn needs_check(&self, config: &ServeConfig) -> bool {
        let dummy = matches!(config.model.weights, Weights::Dummy { .. });
        !dummy && !matches!(self.kind, PlanKind::Ngram(_))
    }

    pub(super) fn load(
        self,
        config: &ServeConfig,
        target: &TargetModel,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<BoxedDrafter, EngineError> {
        let slots = target.limits().kv_slots;
        let room = (slots + self.shape.scratch_slots(), target.limits().context_len + self.shape.steps);
        let model: Box<dyn DraftModel> = match self.kind {
            PlanKind::Ngram(drafter) => return Ok(Box::new(drafter)),
            PlanKind::Eagle(spec, files) => Box::new(EagleHead::load(&spec, files, target, room, progress)?),
            PlanKind::Eagle3(spec, files) => {
                Box::new(Eagle3Head::load(&spec, files, target, room, progress)?)
            }
            PlanKind::Mtp(spec, files) => Box::new(MtpHead::load(&spec, files, target, room, progress)?),
            PlanKind::Standalone { weights, .. } => {
                Box::new(StandaloneModel::load(config, weights, room, progress)?)
            }
        };
        Ok(Box::new(ModelDrafter::new(model, self.shape, slots, target.placement())))
    }
}

/// A head in EAGLE's format, or a checkpoint's multi-token-prediction layer: the target's own, or another's.
fn eagle(
    config: &ServeConfig,
    draft: &DraftModelConfig,
    topk: usize,
) -> Result<PlanKind<'static>, EngineError> {
    let own = draft.weights == config.model.weights;
    if own && !matches!(draft.weights, Weights::Safetensors(_)) {
        return Err(no_mtp_layer());
    }
    let files = DraftFiles::open(head_folder(&draft.weights)?)?;
    let target = model::shape_of(&config.model.weights)?;
    let hot = hot_tokens(draft, &target, topk)?;
    if let Some(spec) = MtpSpec::find(&files, &target, hot.as_deref())? {
        tracing::info!(family = spec.family(), "drafting with the checkpoint's multi-token-prediction layer");
        return Ok(PlanKind::Mtp(spec, files));
    }
    if own {
        return Err(no_mtp_layer());
    }
    Ok(PlanKind::Eagle(EagleSpec::read(&files, &target, hot.as_deref())?, files))
}

fn eagle3<'a>(config: &ServeConfig, draft: &DraftModelConfig) -> Result<PlanKind<'a>, EngineError> {
    let files = DraftFiles::open(head_folder(&draft.weights)?)?;
    let spec = Eagle3Spec::read(&files, &model::shape_of(&config.model.weights)?)?;
    Ok(PlanKind::Eagle3(spec, files))
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

fn no_mtp_layer() -> EngineError {
    EngineError::Load {
        what: "--speculative-algorithm NEXTN".into(),
        reason: "the model given by --model brings no multi-token-prediction layer along; use EAGLE or EAGLE3 with a \
                 head that --speculative-draft-model-path names, or NGRAM, which needs no draft model"
            .into(),
    }
}

fn standalone<'a>(config: &ServeConfig, weights: &'a Weights) -> Result<PlanKind<'a>, EngineError> {
    if let Weights::Safetensors(dir) = weights {
        let right = match DraftFiles::open(dir)?.kind() {
            HeadKind::Eagle => Some("EAGLE"),
            HeadKind::Eagle3 => Some("EAGLE3"),
            HeadKind::Mtp | HeadKind::None => None,
        };
        if let Some(right) = right {
            return Err(refused(format!(
                "is an {right} head, no whole model; use --speculative-algorithm {right}"
            )));
        }
    }
    let target = model::shape_of(&config.model.weights)?;
    let spec = model::spec_of(weights)?;
    let HfConfig { vocab_size, .. } = spec.shape;
    if vocab_size != target.vocab_size {
        return Err(refused(format!(
            "has a vocabulary of {vocab_size}; the model given by --model has {}",
            target.vocab_size
        )));
    }
    let kv = spec.kv_shape();
    let slot_values = 2 * kv.layers * kv.kv_heads * kv.head_dim;
    Ok(PlanKind::Standalone { weights, parameters: spec.parameters(), slot_values })
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

fn values(parameters: &[Parameter]) -> usize {
    parameters.iter().map(|parameter| parameter.shape.iter().product::<usize>()).sum()
}

/// Keys, values and the target's hidden state of a position.
fn head_slot_values(block: &BlockSpec, features: usize) -> usize {
    2 * block.shape.kv_heads * block.shape.head_dim + features
}

fn value_bytes(dtype: Dtype) -> u64 {
    let kind = match dtype {
        Dtype::Float32 => Kind::Float,
        Dtype::Bfloat16 => Kind::BFloat16,
        Dtype::Float16 => Kind::Half,
    };
    kind.elt_size_in_bytes() as u64
}
