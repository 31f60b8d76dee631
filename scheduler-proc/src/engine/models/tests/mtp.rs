//! Layers that a checkpoint brings along, in each layout.

use serde_json::json;

use super::*;
use crate::engine::models::mtp_head::{MtpHead, MtpSpec};

const CASE: &str = "mtp-tiny";

/// Writes the golden target with another layout's names in place of MiMo's.
pub(in crate::engine) fn mtp_checkpoint(to: &Path, layout: &str) {
    let dir = target_dir(CASE);
    let mut tensors = Tensors::read(&dir);
    tensors.0.retain(|name, _| !name.contains("mtp_layers"));
    let layers = fixtures().join(CASE).join(format!("layout_{layout}/model_mtp.safetensors"));
    tensors.0.extend(Tensor::read_safetensors(layers).unwrap());
    let config = std::fs::read(dir.join("config.json")).unwrap();
    tensors.store_in(to, &serde_json::from_slice(&config).unwrap());
}

fn load(dir: &Path, target: &TargetModel, hot: Option<&[TokenId]>) -> MtpHead {
    let files = DraftFiles::open(dir).unwrap();
    let spec = MtpSpec::find(&files, &HfConfig::read(dir).unwrap(), hot).unwrap().expect("it has a layer");
    MtpHead::load(&spec, files, target, (SLOTS, 64), &mut |_, _| {}).unwrap()
}

/// The prompt of 19, and the token after it.
fn golden_tokens() -> Vec<TokenId> {
    let text = std::fs::read(fixtures().join(CASE).join("golden.json")).unwrap();
    let golden: Value = serde_json::from_slice(&text).unwrap();
    let prompt = golden["prompts"].as_array().unwrap().iter().find(|prompt| prompt["len"] == 19).unwrap();
    let ids = |key: &str| prompt[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as TokenId);
    ids("ids").chain(ids("greedy").take(1)).collect()
}

/// What the first layer leaves for every row of a prompt, and the logits it drafts from.
fn check_golden(dir: &Path, variant: &str) {
    let mut target = load_target(dir);
    let tokens = golden_tokens();
    let slots: Vec<KvSlot> = (0..19).collect();
    let row = ForwardRow {
        tokens: &tokens[..19],
        context_len: 0,
        kv_slots: &slots,
        parents: None,
        logits: LogitRows::None,
    };
    let output = target.forward_hidden(std::slice::from_ref(&row), &[3]).unwrap();
    let hidden = if variant.starts_with("mimo7b") { &output.hidden } else { &output.captured[0] };
    let mut head = load(dir, &target, None);
    let row = ForwardRow { tokens: &tokens[1..], ..row };
    let states = head.forward(&[row], Some(Inherited::Target(hidden))).unwrap();
    let expected = Tensor::read_safetensors(fixtures().join(CASE).join("golden.safetensors")).unwrap();
    let expected = Tensors(expected.into_iter().collect());
    let all_rows = expected.get(&format!("{variant}.p19.layer0_all_rows_hidden"));
    assert!(distance(&states, all_rows) < SAME, "{variant}: {}", distance(&states, all_rows));
    let logits = head.logits(&states.narrow(0, 18, 1)).unwrap();
    let last = expected.get(&format!("{variant}.p19.last_row_logits")).narrow(0, 0, 1);
    assert!(distance(&Tensor::from_slice(&logits.values).view([1, -1]), &last) < SAME, "{variant}");
}

#[test]
fn states_and_logits_are_the_references_in_every_layout() {
    check_golden(&target_dir(CASE), "mimo7b.ar1");
    let dir = tempfile::tempdir().unwrap();
    mtp_checkpoint(dir.path(), "nextn");
    check_golden(dir.path(), "nextn.chain3");
    let dir = tempfile::tempdir().unwrap();
    mtp_checkpoint(dir.path(), "mimo_v2");
    check_golden(dir.path(), "mimo_v2.nonchain3");
}

/// A NextN layer with everything that is optional, beside a target with norms over heads.
fn complete(target: &Path) -> (Tensors, Value) {
    tch::manual_seed(5);
    let shape = HfConfig::read(target).unwrap();
    let (mut tensors, hidden) = (Tensors::read(target), shape.hidden_size as i64);
    let prefix = format!("model.layers.{}.", shape.layers);
    tensors.random_layer(&prefix, &shape, shape.hidden_size);
    for norm in ["enorm", "hnorm", "shared_head.norm", "input_layernorm"] {
        tensors.random(&format!("{prefix}{norm}.weight"), &[hidden]);
    }
    for norm in ["q_norm", "k_norm"] {
        tensors.random(&format!("{prefix}self_attn.{norm}.weight"), &[shape.head_dim as i64]);
    }
    tensors.random(&format!("{prefix}eh_proj.weight"), &[hidden, 2 * hidden]);
    for table in ["embed_tokens", "shared_head.head"] {
        tensors.random(&format!("{prefix}{table}.weight"), &[shape.vocab_size as i64, hidden]);
    }
    let config = std::fs::read(target.join("config.json")).unwrap();
    (tensors, serde_json::from_slice(&config).unwrap())
}

/// `passes_normed` says that what goes on to the next step went through the last norm.
fn expected(
    t: &Tensors,
    shape: &HfConfig,
    tokens: &[TokenId],
    features: &Tensor,
    passes_normed: bool,
) -> (Tensor, Tensor) {
    let prefix = format!("model.layers.{}.", shape.layers);
    let name = |part: &str| format!("{prefix}{part}.weight");
    let eps = f64::from(shape.norm_eps);
    let table = t.find(&name("embed_tokens")).unwrap_or(t.get("model.embed_tokens.weight"));
    let head = t.find(&name("shared_head.head")).unwrap_or(t.get("model.embed_tokens.weight"));
    let through = |hidden: &Tensor| {
        let embedded = embedded(table, &tokens[..hidden.size()[0] as usize]);
        let parts = [t.norm(&name("enorm"), &embedded, eps), t.norm(&name("hnorm"), hidden, eps)];
        let joined = t.project(&format!("{prefix}eh_proj"), &Tensor::cat(&parts, 1));
        let out = layer(t, &prefix, shape, &t.norm(&name("input_layernorm"), &joined, eps), &joined);
        if passes_normed { t.norm(&name("shared_head.norm"), &out, eps) } else { out }
    };
    let last = through(features).narrow(0, features.size()[0] - 1, 1);
    let states = through(&Tensor::cat(&[features, &last], 0));
    let normed = match passes_normed {
        true => states.shallow_clone(),
        false => t.norm(&name("shared_head.norm"), &states, eps),
    };
    (states, normed.matmul(&head.transpose(0, 1)))
}

#[test]
fn tables_and_norms_of_the_layers_own_are_used_where_the_file_has_them() {
    let base = target_dir("qwen3-tiny");
    let tokens = [7, 300, 12, 511, 44, 9, 130];
    let features = Tensor::randn([6, 48], (Kind::Float, Device::Cpu));
    for left_out in [
        &[][..],
        &["embed_tokens", "shared_head.head"],
        &["shared_head.head", "self_attn.q_norm", "self_attn.k_norm"],
    ] {
        let (mut tensors, config) = complete(&base);
        let shape = HfConfig::read(&base).unwrap();
        let is_left_out =
            |name: &str| left_out.iter().any(|part| name == format!("model.layers.3.{part}.weight"));
        tensors.0.retain(|name, _| !is_left_out(name));
        let dir = tensors.store(&config);
        let target = load_target(dir.path());
        let (states, logits) = run(&mut load(dir.path(), &target, None), &tokens, &features);
        let (expected_states, expected_logits) = expected(&tensors, &shape, &tokens, &features, false);
        assert!(distance(&states, &expected_states) < SAME, "without {left_out:?}");
        assert!(distance(&logits, &expected_logits) < SAME, "without {left_out:?}");
        // Hot tokens are rows of the same head.
        let hot = [500, 3, 77, 78];
        let (_, few) = run(&mut load(dir.path(), &target, Some(&hot)), &tokens, &features);
        let rows = Tensor::from_slice(&hot.map(i64::from));
        assert!(distance(&few, &expected_logits.index_select(1, &rows)) < SAME, "hot without {left_out:?}");
    }
}

/// Exports of the layer alone count it from 0.
#[test]
fn a_layer_in_a_checkpoint_of_its_own_is_found() {
    let base = target_dir("qwen3-tiny");
    let (tensors, config) = complete(&base);
    let whole = tensors.store(&config);
    let target = load_target(whole.path());
    let exported = tensors.0.iter().filter_map(|(name, tensor)| {
        let rest = name.strip_prefix("model.layers.3.")?;
        Some((format!("model.layers.0.{rest}"), tensor.shallow_clone()))
    });
    let mut config = config;
    config["num_hidden_layers"] = json!(1);
    let alone = Tensors(exported.collect()).store(&config);
    let tokens = [7, 300, 12, 511, 44];
    let features = Tensor::randn([4, 48], (Kind::Float, Device::Cpu));
    let (_, expected) = run(&mut load(whole.path(), &target, None), &tokens, &features);
    let (_, found) = run(&mut load(alone.path(), &target, None), &tokens, &features);
    assert!(found.equal(&expected));
}

/// The same layer with its norms stored as what is added to 1, under other names.
fn from_one(tensors: &Tensors, rename: impl Fn(&str) -> String) -> Tensors {
    let stored = tensors.0.iter().map(|(name, tensor)| match name.strip_prefix("model.layers.3.") {
        None => (name.clone(), tensor.shallow_clone()),
        Some(part) if part.ends_with("norm.weight") => (rename(part), tensor - 1.0),
        Some(part) => (rename(part), tensor.shallow_clone()),
    });
    Tensors(stored.collect())
}

#[test]
fn norms_that_store_what_is_added_to_one_are_known_by_family_and_by_layout() {
    let base = target_dir("qwen3-tiny");
    let (mut tensors, mut config) = complete(&base);
    tensors.0.retain(|name, _| {
        !["embed_tokens", "shared_head.head"].iter().any(|t| name.ends_with(&format!("3.{t}.weight")))
    });
    let (shape, target) = (HfConfig::read(&base).unwrap(), load_target(&base));
    let tokens = [7, 300, 12, 511, 44, 9, 130];
    let features = Tensor::randn([6, 48], (Kind::Float, Device::Cpu));
    let check = |dir: &Path, passes_normed: bool| {
        let (states, logits) = run(&mut load(dir, &target, None), &tokens, &features);
        let (expected_states, expected_logits) =
            expected(&tensors, &shape, &tokens, &features, passes_normed);
        assert!(distance(&states, &expected_states) < SAME, "normed {passes_normed}");
        assert!(distance(&logits, &expected_logits) < SAME, "normed {passes_normed}");
    };
    let names_of_qwen = |part: &str| match part {
        "enorm.weight" => "mtp.pre_fc_norm_embedding.weight".into(),
        "hnorm.weight" => "mtp.pre_fc_norm_hidden.weight".into(),
        "eh_proj.weight" => "mtp.fc.weight".into(),
        "shared_head.norm.weight" => "mtp.norm.weight".into(),
        part => format!("mtp.layers.0.{part}"),
    };
    check(from_one(&tensors, names_of_qwen).store(&config).path(), true);
    config["architectures"] = json!(["Step3p5ForCausalLM"]);
    check(from_one(&tensors, |part| format!("model.layers.3.{part}")).store(&config).path(), false);
}
