//! Owns the draft heads that a checkpoint brings along: its multi-token-prediction layers, the first of them used again
//! and again, or each for a draft step of its own.

use std::rc::Rc;

use proto::TokenId;
use tch::Tensor;

use super::draft::{DraftModel, DraftSpec, Head, Inherited, values};
use super::draft_block::{BlockSpec, DraftBlock};
use super::draft_config::DraftFiles;
use super::draft_output::DraftOutput;
use super::eagle_head::{check_target, load_embedding, no_hidden};
use super::mtp_layout::{MtpPlace, Norm};
use crate::engine::EngineError;
use crate::engine::attention::plan::AttentionPlan;
use crate::engine::hf_config::HfConfig;
use crate::engine::layers::embedding::Embedding;
use crate::engine::layers::linear::Linear;
use crate::engine::layers::norm::RmsNorm;
use crate::engine::layers::rope::RopeTables;
use crate::engine::model::{Features, TargetModel};
use crate::engine::shim::InferenceMode;
use crate::engine::target::{ForwardRow, Logits};
use crate::engine::weights::{Loader, Parameter};

/// Published checkpoints repeat the target's tables under each layer; they need not.
const EMBEDDING: &str = "embed_tokens.weight";
const HEAD: &str = "shared_head.head.weight";
const INPUT_NORM: &str = "input_layernorm.weight";

/// What of a layer is known before anything is loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct MtpSpec {
    place: MtpPlace,
    block: BlockSpec,
    own_embedding: bool,
    own_head: bool,
    features: Features,
    hot: Option<Vec<TokenId>>,
}

impl MtpSpec {
    /// The first such layer of a checkpoint, if it has one; refused if it is none for this target. `hot` are the
    /// tokens it may draft, where not all.
    pub fn find(
        files: &DraftFiles,
        target: &HfConfig,
        hot: Option<&[TokenId]>,
    ) -> Result<Option<Self>, EngineError> {
        Self::find_layer(files, target, hot, 0)
    }

    fn find_layer(
        files: &DraftFiles,
        target: &HfConfig,
        hot: Option<&[TokenId]>,
        index: usize,
    ) -> Result<Option<Self>, EngineError> {
        let source = files.source.as_ref();
        let Some(place) = MtpPlace::find(source, files.shape.layers, index) else { return Ok(None) };
        check_target(files, target)?;
        let has = |name: &str| source.shape(&place.name(name)).is_some();
        let hidden = files.shape.hidden_size;
        Ok(Some(Self {
            block: BlockSpec {
                mlp_norm: place.layout.mlp_norm,
                norms_from_one: place.layout.norms_from_one(&files.shape.architecture),
                ..BlockSpec::new(&files.shape, &place.layer_prefix, hidden, source)
            },
            own_embedding: has(EMBEDDING),
            own_head: has(HEAD),
            features: match place.layout.takes {
                Norm::Before => Features::Layers(vec![target.layers]),
                Norm::After => Features::Final,
            },
            hot: hot.map(<[TokenId]>::to_vec),
            place,
        }))
    }

    /// A new layer of this shape for draft step `index`, to be published by itself: chained to the one before, with
    /// the target's embedding and head.
    pub fn new(shape: HfConfig, index: usize) -> Self {
        let (hidden, target_layers) = (shape.hidden_size, shape.layers);
        let place = MtpPlace::alone(index);
        Self {
            block: BlockSpec { prefix: place.layer_prefix.clone(), ..BlockSpec::plain(shape, hidden) },
            own_embedding: false,
            own_head: false,
            features: Features::Layers(vec![target_layers]),
            hot: None,
            place,
        }
    }

    pub fn family(&self) -> &'static str {
        self.place.layout.family
    }

    pub fn block(&self) -> &BlockSpec {
        &self.block
    }

    /// The projection of token and hidden state.
    pub fn join(&self) -> String {
        self.place.name(self.place.layout.join)
    }

    pub fn token_norm(&self) -> String {
        self.place.name(self.place.layout.token_norm)
    }

    pub fn hidden_norm(&self) -> String {
        self.place.name(self.place.layout.hidden_norm)
    }

    pub fn input_norm(&self) -> String {
        self.place.layer_name(INPUT_NORM)
    }

    pub fn output_norm(&self) -> String {
        self.place.name(self.place.layout.output_norm)
    }

    /// Values of the head it has for hot tokens, beside its parameters.
    fn hot_values(&self) -> usize {
        self.hot.as_ref().map_or(0, Vec::len) * self.block.shape.hidden_size
    }

    pub fn parameters(&self) -> Vec<Parameter> {
        let HfConfig { hidden_size: hidden, vocab_size, .. } = self.block.shape;
        let layout = self.place.layout;
        let mut all = self.block.parameters();
        let mut add = |name: &str, shape: &[usize]| {
            all.push(Parameter { name: self.place.name(name), shape: shape.to_vec() });
        };
        add(layout.join, &[hidden, 2 * hidden]);
        for norm in [layout.token_norm, layout.hidden_norm, layout.output_norm] {
            add(norm, &[hidden]);
        }
        for (name, present) in [(EMBEDDING, self.own_embedding), (HEAD, self.own_head)] {
            if present {
                add(name, &[vocab_size, hidden]);
            }
        }
        all.push(Parameter { name: self.place.layer_name(INPUT_NORM), shape: vec![hidden] });
        all
    }
}

impl DraftSpec for Head<MtpSpec> {
    fn features(&self) -> Features {
        self.spec.features.clone()
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
        Ok(Box::new(MtpHead::load(&self.spec, self.files, target, room, progress)?))
    }
}

/// One layer per draft step.
pub struct MtpLayers {
    specs: Vec<MtpSpec>,
    files: DraftFiles,
}

impl MtpLayers {
    /// The first `count` such layers of a checkpoint; refused where it has fewer.
    pub fn find(
        files: DraftFiles,
        target: &HfConfig,
        hot: Option<&[TokenId]>,
        count: usize,
    ) -> Result<Self, EngineError> {
        let mut specs = Vec::with_capacity(count);
        for index in 0..count {
            match MtpSpec::find_layer(&files, target, hot, index)? {
                Some(spec) => specs.push(spec),
                None => {
                    let reason = match index {
                        0 => "has no multi-token-prediction layers, which --enable-multi-layer-eagle drafts with; \
                              leave it out"
                            .into(),
                        _ => format!(
                            "has {index} multi-token-prediction layers, and with --enable-multi-layer-eagle each \
                             drafts one step; set --speculative-num-steps {index}"
                        ),
                    };
                    return Err(EngineError::Load { what: files.source.describe(), reason });
                }
            }
        }
        Ok(Self { specs, files })
    }

    pub fn family(&self) -> &'static str {
        self.specs[0].family()
    }

    pub fn count(&self) -> usize {
        self.specs.len()
    }

    /// Whether each layer takes what the one before left.
    pub fn are_chained(&self) -> bool {
        self.specs[0].place.layout.chained
    }

    pub fn features(&self) -> Features {
        self.specs[0].features.clone()
    }

    /// Numbers they keep per slot: keys, values and one hidden state of the target.
    pub fn slot_values(&self) -> usize {
        let layers = self.specs.iter().map(|spec| spec.block.slot_values()).sum::<usize>();
        layers + self.specs[0].block.shape.hidden_size
    }

    pub fn weight_values(&self) -> usize {
        self.specs.iter().map(|spec| values(&spec.parameters()) + spec.hot_values()).sum()
    }

    /// `slots` and `positions` are what every layer must have.
    pub fn load(
        self,
        target: &TargetModel,
        (slots, positions): (usize, usize),
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Vec<Box<dyn DraftModel>>, EngineError> {
        let Self { specs, files } = self;
        let parameters: Vec<_> = specs.iter().flat_map(MtpSpec::parameters).collect();
        let mut loader = Loader::new(files.source, &parameters, target.placement(), progress)?;
        let tables = specs[0].block.rope_tables(positions, loader.device());
        let load = |spec: &MtpSpec| {
            Ok(Box::new(MtpHead::load_layer(spec, target, slots, &tables, &mut loader)?) as _)
        };
        specs.iter().map(load).collect()
    }
}

/// The layer, and what it shares with the target.
pub struct MtpHead {
    place: MtpPlace,
    embedding: Rc<Embedding>,
    token_norm: RmsNorm,
    hidden_norm: RmsNorm,
    join: Linear,
    input_norm: RmsNorm,
    block: DraftBlock,
    output_norm: RmsNorm,
    output: DraftOutput,
    width: usize,
}

impl MtpHead {
    /// `slots` and `positions` are what the layer must have.
    pub fn load(
        spec: &MtpSpec,
        files: DraftFiles,
        target: &TargetModel,
        (slots, positions): (usize, usize),
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, EngineError> {
        let mut loader = Loader::new(files.source, &spec.parameters(), target.placement(), progress)?;
        let tables = spec.block.rope_tables(positions, loader.device());
        Self::load_layer(spec, target, slots, &tables, &mut loader)
    }

    fn load_layer(
        spec: &MtpSpec,
        target: &TargetModel,
        slots: usize,
        tables: &Rc<RopeTables>,
        loader: &mut Loader<'_>,
    ) -> Result<Self, EngineError> {
        let _inference = InferenceMode::enter();
        let MtpSpec { place, block, .. } = spec;
        let layout = place.layout;
        let own_embedding = spec.own_embedding.then(|| place.name(EMBEDDING));
        let embedding = load_embedding(own_embedding.as_deref(), target, loader)?;
        let table = spec.own_head.then(|| loader.load(&place.name(HEAD))).transpose()?;
        let mut norm = |name: String| block.norm_format().load(&name, loader);
        Ok(Self {
            place: place.clone(),
            embedding,
            token_norm: norm(place.name(layout.token_norm))?,
            hidden_norm: norm(place.name(layout.hidden_norm))?,
            input_norm: norm(place.layer_name(INPUT_NORM))?,
            output_norm: norm(place.name(layout.output_norm))?,
            join: Linear::new(&loader.load(&place.name(layout.join))?, None)?,
            block: DraftBlock::load(block, slots, tables, loader)?,
            output: DraftOutput::over_target(table, spec.hot.as_deref(), target)?,
            width: block.shape.hidden_size,
        })
    }

    /// Token and hidden state as one input of the layer.
    fn joined(
        &self,
        rows: &[ForwardRow<'_>],
        plan: &AttentionPlan,
        hidden: &Tensor,
    ) -> Result<Tensor, EngineError> {
        let layout = self.place.layout;
        let mut embedded = self.embedding.forward(rows.iter().flat_map(|row| row.tokens))?;
        if layout.blind_start && plan.positions().contains(&0) {
            let seen: Vec<f32> = plan.positions().iter().map(|&at| f32::from(u8::from(at > 0))).collect();
            let seen = Tensor::from_slice(&seen).to_device(embedded.device()).to_kind(embedded.kind());
            embedded *= seen.unsqueeze(1);
        }
        let (token, hidden) = (self.token_norm.forward(&embedded)?, self.hidden_norm.forward(hidden)?);
        let parts = if layout.hidden_first { [hidden, token] } else { [token, hidden] };
        self.join.forward(&Tensor::cat(&parts, 1))
    }
}

impl DraftModel for MtpHead {
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
        let mut residual = self.joined(rows, &plan, hidden)?;
        let x = self.input_norm.forward(&residual)?;
        self.block.forward(&x, &mut residual, &plan)?;
        match self.place.layout.passes_on {
            Norm::Before => Ok(residual),
            Norm::After => self.output_norm.forward(&residual),
        }
    }

    fn logits(&self, states: &Tensor) -> Result<Logits, EngineError> {
        let _inference = InferenceMode::enter();
        match self.place.layout.passes_on {
            Norm::Before => self.output.logits(&self.output_norm.forward(states)?),
            Norm::After => self.output.logits(states),
        }
    }

    fn vocabulary(&self) -> Option<&[TokenId]> {
        self.output.vocabulary()
    }
}
