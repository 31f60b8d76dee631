//! Owns the EAGLE-1/2 draft head: one layer over the target's final hidden states and token embeddings.

use std::rc::Rc;

use proto::TokenId;
use tch::Tensor;

use super::draft::{DraftModel, DraftSpec, Head, Inherited, values};
use super::draft_block::{self, BlockSpec, DraftBlock};
use super::draft_config::{DraftFiles, HeadKind};
use super::draft_output::DraftOutput;
use crate::engine::EngineError;
use crate::engine::attention::plan::AttentionPlan;
use crate::engine::hf_config::HfConfig;
use crate::engine::layers::embedding::Embedding;
use crate::engine::layers::linear::Linear;
use crate::engine::model::{Features, TargetModel};
use crate::engine::shim::InferenceMode;
use crate::engine::target::{ForwardRow, Logits};
use crate::engine::weights::{Loader, Parameter};

const EMBEDDING: &str = "embed_tokens.weight";
const ARCHITECTURES: [&str; 2] = ["LlamaForCausalLMEagle", "LlamaForCausalLM"];

/// What of a head is known before anything is loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct EagleSpec {
    block: BlockSpec,
    bias: bool,
    own_embedding: bool,
    hot: Option<Vec<TokenId>>,
}

impl EagleSpec {
    /// Refuses what is no EAGLE head, or none for this target. `hot` are the tokens it may draft, where not all.
    pub fn read(files: &DraftFiles, target: &HfConfig, hot: Option<&[TokenId]>) -> Result<Self, EngineError> {
        let shape = &files.shape;
        let has = |name: &str| files.source.shape(name).is_some();
        let failed = |reason: String| EngineError::Load { what: files.source.describe(), reason };
        match files.kind() {
            HeadKind::Eagle => {}
            HeadKind::Eagle3 => {
                return Err(failed("is an EAGLE3 head; use --speculative-algorithm EAGLE3".into()));
            }
            HeadKind::Dflash => {
                return Err(failed("is a DFLASH draft model; use --speculative-algorithm DFLASH".into()));
            }
            HeadKind::Mtp | HeadKind::None => {
                return Err(failed(
                    "has no fc.weight, so it is no EAGLE head; for a whole smaller model use \
                     --speculative-algorithm STANDALONE"
                        .into(),
                ));
            }
        }
        if !ARCHITECTURES.contains(&shape.architecture.as_str()) {
            return Err(failed(format!(
                "architecture {:?} is no EAGLE head; known are {}",
                shape.architecture,
                ARCHITECTURES.join(", ")
            )));
        }
        if shape.layers != 1 {
            return Err(failed(format!("has {} layers; an EAGLE head has 1", shape.layers)));
        }
        check_target(files, target)?;
        let source = files.source.as_ref();
        Ok(Self {
            block: BlockSpec::new(shape, draft_block::PREFIX, shape.hidden_size, source),
            bias: has("fc.bias"),
            own_embedding: has(EMBEDDING),
            hot: hot.map(<[TokenId]>::to_vec),
        })
    }

    /// A new head of this shape, which takes the target's embedding.
    pub fn new(shape: HfConfig) -> Self {
        let hidden = shape.hidden_size;
        Self { block: BlockSpec::plain(shape, hidden), bias: true, own_embedding: false, hot: None }
    }

    pub fn block(&self) -> &BlockSpec {
        &self.block
    }

    /// Values of the head it has for hot tokens, beside its parameters.
    fn hot_values(&self) -> usize {
        self.hot.as_ref().map_or(0, Vec::len) * self.block.shape.hidden_size
    }

    pub fn parameters(&self) -> Vec<Parameter> {
        let hidden = self.block.shape.hidden_size;
        let mut all = self.block.parameters();
        let mut add = |name: &str, shape: Vec<usize>| all.push(Parameter { name: name.into(), shape });
        add("fc.weight", vec![hidden, 2 * hidden]);
        if self.bias {
            add("fc.bias", vec![hidden]);
        }
        if self.own_embedding {
            add(EMBEDDING, vec![self.block.shape.vocab_size, hidden]);
        }
        all
    }
}

impl DraftSpec for Head<EagleSpec> {
    fn features(&self) -> Features {
        Features::Final
    }

    fn slot_values(&self) -> usize {
        self.spec.block.slot_values() + self.spec.block.shape.hidden_size
    }

    fn weight_values(&self) -> usize {
        values(&self.spec.parameters()) + self.spec.hot_values()
    }

    fn load(
        self,
        target: &TargetModel,
        room: (usize, usize),
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn DraftModel>, EngineError> {
        Ok(Box::new(EagleHead::load(&self.spec, self.files, target, room, progress)?))
    }
}

/// The head, and what it shares with the target.
pub struct EagleHead {
    embedding: Rc<Embedding>,
    join: Linear,
    block: DraftBlock,
    output: DraftOutput,
    width: usize,
}

impl EagleHead {
    /// `slots` and `positions` are what the layer must have.
    pub fn load(
        spec: &EagleSpec,
        files: DraftFiles,
        target: &TargetModel,
        (slots, positions): (usize, usize),
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, EngineError> {
        let _inference = InferenceMode::enter();
        let mut loader = Loader::new(files.source, &spec.parameters(), target.placement(), progress)?;
        let own_embedding = spec.own_embedding.then_some(EMBEDDING);
        let embedding = load_embedding(own_embedding, target, &mut loader)?;
        let tables = spec.block.rope_tables(positions, loader.device());
        let bias = spec.bias.then(|| loader.load("fc.bias")).transpose()?;
        Ok(Self {
            embedding,
            join: Linear::new(&loader.load("fc.weight")?, bias)?,
            block: DraftBlock::load(&spec.block, slots, &tables, &mut loader)?,
            output: DraftOutput::over_target(None, spec.hot.as_deref(), target)?,
            width: spec.block.shape.hidden_size,
        })
    }
}

/// Whether a head goes with a target: as wide, and over the same vocabulary.
pub(super) fn check_target(files: &DraftFiles, target: &HfConfig) -> Result<(), EngineError> {
    let shape = &files.shape;
    if (shape.hidden_size, shape.vocab_size) == (target.hidden_size, target.vocab_size) {
        return Ok(());
    }
    Err(EngineError::Load {
        what: files.source.describe(),
        reason: format!(
            "has hidden size {} and a vocabulary of {}, but the model given by --model has {} and {}: a head must have \
             been trained for its model",
            shape.hidden_size, shape.vocab_size, target.hidden_size, target.vocab_size
        ),
    })
}

/// The file's table of that name, or the target's where the file has none or has the same: a table is large.
pub(super) fn load_embedding(
    own: Option<&str>,
    target: &TargetModel,
    loader: &mut Loader<'_>,
) -> Result<Rc<Embedding>, EngineError> {
    let shared = target.embedding();
    let Some(name) = own else { return Ok(shared) };
    let table = loader.load(name)?;
    Ok(if shared.holds(&table)? { shared } else { Rc::new(Embedding::new(table)) })
}

impl DraftModel for EagleHead {
    fn lead(&self) -> usize {
        1
    }

    fn feature_width(&self) -> usize {
        self.width
    }

    fn forward(
        &mut self,
        rows: &[ForwardRow<'_>],
        inherited: Option<Inherited<'_>>,
    ) -> Result<Tensor, EngineError> {
        let _inference = InferenceMode::enter();
        let (Inherited::Target(hidden) | Inherited::Own(hidden)) = inherited.ok_or_else(no_hidden)?;
        let plan = AttentionPlan::new(rows);
        let embedded = self.embedding.forward(rows.iter().flat_map(|row| row.tokens))?;
        let x = self.join.forward(&Tensor::cat(&[&embedded, hidden], 1))?;
        let mut residual = x.copy();
        self.block.forward(&x, &mut residual, &plan)?;
        Ok(residual)
    }

    fn logits(&self, states: &Tensor) -> Result<Logits, EngineError> {
        self.output.logits(states)
    }

    fn vocabulary(&self) -> Option<&[TokenId]> {
        self.output.vocabulary()
    }
}

pub(super) fn no_hidden() -> EngineError {
    EngineError::Step { stage: "draft", reason: "the head got no hidden states".into() }
}
