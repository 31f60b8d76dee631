//! EAGLE3's variants: norms, widths, vocabularies, captured layers.

use serde_json::json;

use super::*;
use crate::engine::models::eagle3_head::{Eagle3Head, Eagle3Spec};

const TARGET: &str = "eagle3-tiny";
const TARGET_HIDDEN: usize = 48;
const VOCAB: usize = 512;
const HOT: usize = 64;
const TOKENS: [TokenId; 10] = [7, 300, 12, 511, 44, 9, 130, 77, 260, 3];

/// A head in the making.
struct Variant {
    config: Value,
    tensors: Tensors,
}

/// What the plain computation does where heads differ.
#[derive(Debug, Clone, Copy, Default)]
struct Wiring {
    part_norms: Option<[&'static str; 3]>,
    feature_norm: bool,
    norm_output: bool,
    norm_before_residual: bool,
    no_join: bool,
}

const FC_NORMS: [&str; 3] = ["fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"];
const AUX_NORMS: [&str; 3] = ["aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"];

impl Variant {
    /// A head of that width with a reduced vocabulary.
    fn new(hidden: usize) -> Self {
        tch::manual_seed(hidden as i64);
        let config = json!({
            "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": hidden, "intermediate_size": 56,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
            "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
            "draft_vocab_size": HOT, "target_hidden_size": TARGET_HIDDEN,
        });
        let mut variant = Self { config, tensors: Tensors::default() };
        let width = hidden as i64;
        variant.tensors.random_layer("layers.0.", &variant.shape(), 2 * hidden);
        for norm in ["layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight", "norm.weight"] {
            variant.tensors.random(norm, &[width]);
        }
        variant.tensors.random("fc.weight", &[width, 3 * TARGET_HIDDEN as i64]);
        variant.tensors.random("lm_head.weight", &[HOT as i64, width]);
        // Every eighth token of the target: offsets grow by 7.
        let offsets: Vec<i64> = (0..HOT as i64).map(|id| 7 * id).collect();
        variant.tensors.0.insert("d2t".into(), Tensor::from_slice(&offsets));
        variant
    }

    fn shape(&self) -> HfConfig {
        HfConfig::parse(self.config.to_string().as_bytes()).unwrap()
    }

    fn with(mut self, key: &str, value: Value) -> Self {
        self.config[key] = value;
        self
    }

    fn and(mut self, name: &str, size: &[i64]) -> Self {
        self.tensors.random(name, size);
        self
    }

    fn without(mut self, names: &[&str]) -> Self {
        self.tensors.0.retain(|name, _| !names.contains(&name.as_str()));
        self
    }

    fn load(&self, target: &TargetModel) -> Result<Eagle3Head, String> {
        let dir = self.tensors.store(&self.config);
        let files = files(&dir);
        let shape = HfConfig::read(&target_dir(TARGET)).unwrap();
        let spec = Eagle3Spec::read(&files, &shape).map_err(|error| error.to_string())?;
        Eagle3Head::load(&spec, files, target, (SLOTS, 64), &mut |_, _| {}).map_err(|error| error.to_string())
    }

    /// States and logits as the format's description has them.
    fn expected(&self, wiring: Wiring, features: &Tensor) -> (Tensor, Tensor) {
        let shape = self.shape();
        let (t, eps) = (&self.tensors, f64::from(shape.norm_eps));
        let shared = Tensors::read(&target_dir(TARGET));
        let table = t.find("embed_tokens.weight").unwrap_or(shared.get("model.embed_tokens.weight"));
        let head = match t.find("lm_head.weight") {
            Some(own) => own,
            None if shape.tied => table,
            None => shared.get("lm_head.weight"),
        };
        let mut joined = features.shallow_clone();
        if wiring.feature_norm {
            joined = t.norm("input_norm.weight", &joined, eps);
        }
        if let Some(names) = wiring.part_norms {
            let parts = (0..).zip(names).map(|(part, name)| {
                let part = joined.narrow(1, part * TARGET_HIDDEN as i64, TARGET_HIDDEN as i64);
                t.norm(name, &part, eps)
            });
            joined = Tensor::cat(&parts.collect::<Vec<_>>(), 1);
        }
        if !wiring.no_join {
            joined = t.project("fc", &joined);
        }
        let known = features.size()[0];
        let through = |hidden: &Tensor| {
            let tokens = &TOKENS[..hidden.size()[0] as usize];
            let normed = t.norm("layers.0.hidden_norm.weight", hidden, eps);
            let embedded = t.norm("layers.0.input_layernorm.weight", &embedded(table, tokens), eps);
            let x = Tensor::cat(&[&embedded, &normed], 1);
            let residual = if wiring.norm_before_residual { &normed } else { hidden };
            layer(t, "layers.0.", &shape, &x, residual)
        };
        let output = |states: &Tensor| t.norm("norm.weight", states, eps);
        let passed_on = |states: &Tensor| match wiring.norm_output {
            true => output(states),
            false => states.shallow_clone(),
        };
        let last = passed_on(&through(&joined)).narrow(0, known - 1, 1);
        let states = through(&Tensor::cat(&[&joined, &last], 0));
        (passed_on(&states), output(&states).matmul(&head.transpose(0, 1)))
    }

    /// As wired, and not as any other way.
    fn check(&self, what: &str, wiring: Wiring, width: usize) {
        let target = load_target(&target_dir(TARGET));
        let features = Tensor::randn([TOKENS.len() as i64 - 1, width as i64], (Kind::Float, Device::Cpu));
        let mut head = self.load(&target).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(head.feature_width(), width, "{what}");
        let (states, logits) = run(&mut head, &TOKENS, &features);
        let (expected_states, expected_logits) = self.expected(wiring, &features);
        assert!(distance(&states, &expected_states) < SAME, "{what}: states");
        assert!(distance(&logits, &expected_logits) < SAME, "{what}: logits");
        if wiring.no_join {
            return;
        }
        let others = [
            Wiring { part_norms: None, ..wiring },
            Wiring { feature_norm: false, ..wiring },
            Wiring { norm_output: !wiring.norm_output, ..wiring },
            Wiring { norm_before_residual: !wiring.norm_before_residual, ..wiring },
        ];
        for other in others.into_iter().filter(|other| format!("{other:?}") != format!("{wiring:?}")) {
            let (_, logits) = self.expected(other, &features);
            assert!(distance(&logits, &expected_logits) > OTHER, "{what} looks like {other:?}");
        }
    }
}

const WIDTH: usize = 3 * TARGET_HIDDEN;
const PART: [i64; 1] = [TARGET_HIDDEN as i64];

fn plain() -> Variant {
    Variant::new(TARGET_HIDDEN)
}

fn part_normed(names: [&str; 3]) -> Variant {
    names.into_iter().fold(plain(), |variant, name| variant.and(name, &PART))
}

#[test]
fn a_plain_head_is_the_plain_computation() {
    plain().check("plain", Wiring::default(), WIDTH);
    plain().and("fc.bias", &[TARGET_HIDDEN as i64]).check("with a bias", Wiring::default(), WIDTH);
}

#[test]
fn norms_before_the_projection_are_applied_in_either_spelling() {
    let normed = |names| Wiring { part_norms: Some(names), ..Wiring::default() };
    part_normed(FC_NORMS).with("fc_norm", json!(true)).check("fc_norm", normed(FC_NORMS), WIDTH);
    part_normed(FC_NORMS).check("fc_norm by its tensors", normed(FC_NORMS), WIDTH);
    part_normed(AUX_NORMS).with("use_aux_norm", json!(true)).check("aux_norm", normed(AUX_NORMS), WIDTH);
    let both = Wiring { feature_norm: true, ..normed(FC_NORMS) };
    part_normed(FC_NORMS).and("input_norm.weight", &[WIDTH as i64]).check("both", both, WIDTH);
    let over_all = Wiring { feature_norm: true, ..Wiring::default() };
    for (key, value) in [("eagle_config", json!({"norm_before_fc": true})), ("norm_before_fc", json!(true))] {
        let variant = plain().and("input_norm.weight", &[WIDTH as i64]).with(key, value);
        variant.check("norm_before_fc", over_all, WIDTH);
    }
}

#[test]
fn the_config_decides_on_norms_that_it_names() {
    let target = load_target(&target_dir(TARGET));
    let missing = |variant: Variant| variant.load(&target).err().expect("a norm is missing");
    assert!(missing(plain().with("norm_before_fc", json!(true))).contains("input_norm.weight is missing"));
    assert!(missing(plain().with("fc_norm", json!(true))).contains("fc_norm.2.weight is missing"));
    let partly = plain().and("fc_norm.0.weight", &PART);
    assert!(missing(partly).contains("fc_norm.1.weight is missing"));
    let off = plain().and("input_norm.weight", &[WIDTH as i64]).with("norm_before_fc", json!(false));
    off.check("switched off", Wiring::default(), WIDTH);
}

#[test]
fn norms_behind_and_before_the_residual_stream_are_applied() {
    let output = Wiring { norm_output: true, ..Wiring::default() };
    plain().with("norm_output", json!(true)).check("norm_output", output, WIDTH);
    let residual = Wiring { norm_before_residual: true, ..Wiring::default() };
    plain().with("norm_before_residual", json!(true)).check("norm_before_residual", residual, WIDTH);
}

#[test]
fn a_head_has_its_own_width() {
    let narrow = || Variant::new(32).and("embed_tokens.weight", &[VOCAB as i64, 32]);
    narrow().check("32 wide", Wiring::default(), WIDTH);
    let tied = narrow().with("tie_word_embeddings", json!(true)).with("draft_vocab_size", json!(null));
    tied.without(&["lm_head.weight", "d2t"]).check("tied to its own table", Wiring::default(), WIDTH);
}

#[test]
fn what_a_narrow_head_cannot_share_it_must_bring() {
    let target = load_target(&target_dir(TARGET));
    let refused = |variant: Variant| variant.load(&target).err().expect("cannot be shared");
    assert!(refused(Variant::new(32)).contains("no embed_tokens.weight, and the target's is 48 wide"));
    let headless = Variant::new(32).and("embed_tokens.weight", &[VOCAB as i64, 32]);
    let headless = headless.without(&["lm_head.weight", "d2t"]).with("draft_vocab_size", json!(null));
    assert!(refused(headless).contains("no lm_head.weight, and the target's (512 x 48)"));
    let other = plain().with("target_hidden_size", json!(64));
    assert!(refused(other).contains("made for a target of hidden size 64"));
}

#[test]
fn a_whole_vocabulary_needs_no_map_and_shares_the_targets_head() {
    let whole = || plain().with("draft_vocab_size", json!(null)).without(&["lm_head.weight", "d2t"]);
    whole().check("the target's head", Wiring::default(), WIDTH);
    let own = whole().and("lm_head.weight", &[VOCAB as i64, TARGET_HIDDEN as i64]);
    own.check("a head of its own", Wiring::default(), WIDTH);
    whole().with("tie_word_embeddings", json!(true)).check("tied", Wiring::default(), WIDTH);
}

#[test]
fn features_as_wide_as_the_head_are_not_projected() {
    let last = plain().with("eagle_config", json!({"use_aux_hidden_state": false})).without(&["fc.weight"]);
    let wiring = Wiring { no_join: true, ..Wiring::default() };
    last.check("the final hidden state", wiring, TARGET_HIDDEN);
}

#[test]
fn captured_layers_must_be_the_targets() {
    let target = load_target(&target_dir(TARGET));
    let ids = |ids: Value| plain().with("eagle_config", json!({"eagle_aux_hidden_state_layer_ids": ids}));
    assert!(ids(json!([0, 3, 7])).load(&target).is_ok());
    let refused = |variant: Variant| variant.load(&target).err().expect("out of range");
    let error = refused(ids(json!([0, 3, 8])));
    assert!(error.contains("output of layer 8") && error.contains("layers 0 to 7"), "{error}");
    let error = refused(plain().with("num_aux_hidden_states", json!(4)));
    assert!(error.contains("num_aux_hidden_states 4"), "{error}");
}

#[test]
fn the_map_of_the_vocabulary_must_fit() {
    let target = load_target(&target_dir(TARGET));
    let mapped = |offsets: Vec<i64>| {
        let mut variant = plain();
        variant.tensors.0.insert("d2t".into(), Tensor::from_slice(&offsets));
        variant.load(&target).err().expect("a map that does not fit")
    };
    assert!(mapped(vec![0; HOT - 1]).contains("d2t has shape [63], not [64]"));
    assert!(mapped(vec![460; HOT]).contains("d2t maps draft token 52 to 512, outside a vocabulary of 512"));
    let whole = plain().without(&["d2t"]).load(&target).err().expect("no map");
    assert!(whole.contains("64 draft tokens for a vocabulary of 512 and no d2t"), "{whole}");
}
