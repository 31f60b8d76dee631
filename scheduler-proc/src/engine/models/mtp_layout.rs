//! Owns what sets published multi-token-prediction layers apart: their names, what they join in which order, and
//! which hidden states go in and on.

use super::draft_block;
use crate::engine::weights::WeightSource;

/// A layer as one group of families stores it in the target's own checkpoint.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MtpLayout {
    /// For messages.
    pub(super) family: &'static str,
    place: Place,
    pub(super) token_norm: &'static str,
    pub(super) hidden_norm: &'static str,
    /// The projection of token and hidden state, side by side.
    pub(super) join: &'static str,
    pub(super) mlp_norm: &'static str,
    pub(super) output_norm: &'static str,
    /// The hidden state comes first in what is joined.
    pub(super) hidden_first: bool,
    /// The row at position 0 sees zeros for its token.
    pub(super) blind_start: bool,
    /// Which of the target's final states it joins.
    pub(super) takes: Norm,
    /// Which of its own it hands to the next draft step.
    pub(super) passes_on: Norm,
    /// Its norms store what is added to 1, whatever the checkpoint's family.
    norms_from_one: bool,
    /// Where there is a layer per draft step: each joins what the one before left, not the target's state.
    pub(super) chained: bool,
}

/// A final hidden state on either side of the norm before the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Norm {
    Before,
    After,
}

#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// Counted on behind the target's own layers.
    BehindLayers,
    Under(&'static str),
    /// Their layers in a folder of what they share.
    Sharing(&'static str),
}

/// DeepSeek's names, and the states that Step-3.5 joins and passes on.
static NEXTN: MtpLayout = MtpLayout {
    family: "NextN",
    place: Place::BehindLayers,
    token_norm: "enorm.weight",
    hidden_norm: "hnorm.weight",
    join: "eh_proj.weight",
    mlp_norm: draft_block::MLP_NORM,
    output_norm: "shared_head.norm.weight",
    hidden_first: false,
    blind_start: false,
    takes: Norm::Before,
    passes_on: Norm::Before,
    norms_from_one: false,
    chained: true,
};

static MIMO: MtpLayout = MtpLayout {
    family: "MiMo",
    place: Place::Under("model.mtp_layers."),
    token_norm: "token_layernorm.weight",
    hidden_norm: "hidden_layernorm.weight",
    join: "input_proj.weight",
    mlp_norm: draft_block::MLP_NORM,
    output_norm: "final_layernorm.weight",
    hidden_first: true,
    blind_start: true,
    takes: Norm::After,
    passes_on: Norm::After,
    norms_from_one: false,
    chained: false,
};

static MIMO_V2: MtpLayout = MtpLayout {
    family: "MiMo-V2",
    place: Place::Under("model.mtp.layers."),
    token_norm: "enorm.weight",
    hidden_norm: "hnorm.weight",
    join: "eh_proj.weight",
    mlp_norm: "pre_mlp_layernorm.weight",
    output_norm: "final_layernorm.weight",
    hidden_first: false,
    blind_start: false,
    takes: Norm::Before,
    passes_on: Norm::After,
    norms_from_one: false,
    chained: false,
};

static QWEN_NEXT: MtpLayout = MtpLayout {
    family: "Qwen3-Next",
    place: Place::Sharing("mtp."),
    token_norm: "pre_fc_norm_embedding.weight",
    hidden_norm: "pre_fc_norm_hidden.weight",
    join: "fc.weight",
    mlp_norm: draft_block::MLP_NORM,
    output_norm: "norm.weight",
    hidden_first: false,
    blind_start: false,
    takes: Norm::After,
    passes_on: Norm::After,
    norms_from_one: true,
    chained: false,
};

static LAYOUTS: [&MtpLayout; 4] = [&NEXTN, &MIMO, &MIMO_V2, &QWEN_NEXT];

/// Families all of whose norms store what is added to 1.
const NORMS_FROM_ONE: [&str; 4] = ["Gemma3", "Qwen3Next", "Qwen3_5", "Step3p5"];

/// One such layer of one checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MtpPlace {
    pub(super) layout: &'static MtpLayout,
    /// What the names of its tensors begin with,
    prefix: String,
    /// and of those that every layer of a model has.
    pub(super) layer_prefix: String,
}

impl MtpPlace {
    /// Layer `index` behind a model of `layers` layers, if the checkpoint has it. A checkpoint of such layers alone
    /// counts them from 0.
    pub(super) fn find(source: &dyn WeightSource, layers: usize, index: usize) -> Option<Self> {
        let places = LAYOUTS.iter().flat_map(|layout| layout.places(layers, index));
        places.into_iter().find(|place| {
            let has = |name: String| source.shape(&name).is_some();
            has(place.name(place.layout.join))
                // What layers share is there for any of them.
                && (place.prefix == place.layer_prefix || has(place.layer_name(place.layout.mlp_norm)))
        })
    }

    /// Layer `index` of a checkpoint of such layers alone, in the layout whose layers are chained.
    pub(super) fn alone(index: usize) -> Self {
        let prefix = format!("model.layers.{index}.");
        Self { layout: &NEXTN, layer_prefix: prefix.clone(), prefix }
    }

    pub(super) fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    pub(super) fn layer_name(&self, name: &str) -> String {
        format!("{}{name}", self.layer_prefix)
    }
}

impl MtpLayout {
    fn places(&'static self, layers: usize, index: usize) -> Vec<MtpPlace> {
        let place = |prefix: String| MtpPlace { layout: self, layer_prefix: prefix.clone(), prefix };
        match self.place {
            Place::BehindLayers => {
                [layers + index, index].map(|layer| place(format!("model.layers.{layer}."))).into()
            }
            Place::Under(folder) => vec![place(format!("{folder}{index}."))],
            Place::Sharing(folder) => vec![MtpPlace {
                layout: self,
                prefix: folder.into(),
                layer_prefix: format!("{folder}layers.{index}."),
            }],
        }
    }

    /// Whether norms store what is added to 1, in a checkpoint of this architecture.
    pub(super) fn norms_from_one(&self, architecture: &str) -> bool {
        self.norms_from_one || NORMS_FROM_ONE.iter().any(|family| architecture.starts_with(family))
    }
}
