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
    chained: false,
};

static LAYOUTS: [&MtpLayout; 3] = [&NEXTN, &MIMO, &MIMO_V2];

/// One such layer of one checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MtpPlace {
    pub(super) layout: &'static MtpLayout,
    /// What the names of its tensors begin with.
    pub(super) prefix: String,
}

impl MtpPlace {
    /// Layer `index` behind a model of `layers` layers, if the checkpoint has it. A checkpoint of such layers alone
    /// counts them from 0.
    pub(super) fn find(source: &dyn WeightSource, layers: usize, index: usize) -> Option<Self> {
        let prefixes = |layout: &'static MtpLayout| match layout.place {
            Place::BehindLayers => vec![layers + index, index]
                .into_iter()
                .map(|layer| format!("model.layers.{layer}."))
                .collect::<Vec<_>>(),
            Place::Under(folder) => vec![format!("{folder}{index}.")],
        };
        let places = LAYOUTS
            .iter()
            .flat_map(|&layout| prefixes(layout).into_iter().map(move |prefix| Self { layout, prefix }));
        places.into_iter().find(|place| source.shape(&place.name(place.layout.join)).is_some())
    }

    /// Layer `index` of a checkpoint of such layers alone, in the layout whose layers are chained.
    pub(super) fn alone(index: usize) -> Self {
        Self { layout: &NEXTN, prefix: format!("model.layers.{index}.") }
    }

    pub(super) fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}
