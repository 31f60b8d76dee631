//! The trained forward against the serving heads, on the same inputs: every draft step of a chain from every position.

use std::path::PathBuf;

use proto::{Dtype, TokenId, Weights};
use tch::Tensor;

use super::*;
use crate::batch::KvSlot;
use crate::engine::model::tests::{config, fixtures};
use crate::engine::model::{Features, TargetModel};
use crate::engine::models::dflash_head::DflashHead;
use crate::engine::models::draft::{DraftModel, Head};
use crate::engine::models::draft_config::DraftFiles;
use crate::engine::models::eagle_head::EagleHead;
use crate::engine::models::eagle3_head::Eagle3Head;
use crate::engine::models::mtp_head::MtpLayers;
use crate::engine::target::{ForwardRow, LogitRows, Target};
use crate::engine::train::checkpoint::{Checkpoint, head_shape};
use crate::engine::train::vocabulary::Vocabulary;

const TOKENS: usize = 12;
const STEPS: usize = 4;

/// A head as it serves, and as it is trained.
struct Both {
    serving: Box<dyn DraftModel>,
    net: HeadNet,
    params: Params,
    table: Tensor,
    target: TargetModel,
    tables: TrainTables,
}

fn both(target: &str, draft: &str) -> Both {
    let weights = Weights::Safetensors(fixtures().join(target).join("target"));
    let mut model = TargetModel::load(&config(weights.clone(), Dtype::Float32), &mut |_, _| {}).unwrap();
    let tables = TrainTables::read(&weights, Kind::Float).unwrap();
    let shape = crate::engine::model::shape_of(&weights).unwrap();
    let dir: PathBuf = fixtures().join(draft);
    let files = DraftFiles::open(&dir).unwrap();
    let room = (512, 64);
    let (spec, serving): (HeadSpec, Box<dyn DraftModel>) = match draft.starts_with("eagle3") {
        false => {
            let spec = EagleSpec::read(&files, &shape, None).unwrap();
            model.leave(Features::Final);
            let head = EagleHead::load(&spec, files, &model, room, &mut |_, _| {}).unwrap();
            (HeadSpec::Eagle(spec), Box::new(head))
        }
        true => {
            let spec = Eagle3Spec::read(&files, &shape).unwrap();
            model.leave(Features::Layers(spec.captured().unwrap().to_vec()));
            let head = Eagle3Head::load(&spec, files, &model, room, &mut |_, _| {}).unwrap();
            (HeadSpec::Eagle3(spec), Box::new(head))
        }
    };
    let mut source = DraftFiles::open(&dir).unwrap().source;
    let read = |parameter: Parameter| {
        let tensor = source.read(&parameter.name).unwrap().to_kind(Kind::Float);
        (parameter.name, tensor)
    };
    let params = Params::new(spec.parameters().into_iter().map(read).collect());
    let table = params.find("lm_head.weight").unwrap_or(&tables.head).shallow_clone();
    Both { serving, net: HeadNet::new(spec, 64, &tables), params, table, target: model, tables }
}

/// What the target leaves for these tokens.
fn features(target: &mut TargetModel, tokens: &[TokenId]) -> Tensor {
    let slots: Vec<KvSlot> = (0..tokens.len() as KvSlot).collect();
    let row = ForwardRow { tokens, context_len: 0, kv_slots: &slots, parents: None, logits: LogitRows::None };
    target.run(&[row]).unwrap().1.unwrap()
}

/// What serving leaves and says for a chain along `tokens`, whose root is the token after `root`: per draft step.
fn served(both: &mut Both, tokens: &[TokenId], features: &Tensor, root: usize) -> Vec<Vec<f32>> {
    let slots: Vec<KvSlot> = (0..64).collect();
    let mut logits = Vec::new();
    let mut left: Option<Tensor> = None;
    for step in 0..STEPS {
        let (from, to) = if step == 0 { (0, root + 1) } else { (root + step, root + step + 1) };
        let row = ForwardRow {
            tokens: &tokens[from + 1..to + 1],
            context_len: from,
            kv_slots: &slots,
            parents: None,
            logits: LogitRows::None,
        };
        let target = features.narrow(0, 0, root as i64 + 1);
        let inherited = match &left {
            None => Inherited::Target(&target),
            Some(left) => Inherited::Own(left),
        };
        let states = both.serving.forward(&[row], Some(inherited)).unwrap();
        let last = states.narrow(0, states.size()[0] - 1, 1);
        logits.push(both.serving.logits(&last).unwrap().values);
        left = Some(last);
    }
    logits
}

fn check(target: &str, draft: &str) {
    let mut both = both(target, draft);
    let tokens = tokens();
    let features = features(&mut both.target, &tokens[..TOKENS]);
    let embedding = both.params.find("embed_tokens.weight").unwrap_or(&both.tables.embedding);
    let embedded = embedded(embedding, &tokens);
    let all = Tensor::arange(TOKENS as i64, (Kind::Int64, tch::Device::Cpu));
    let target = features.copy().unsqueeze(0);
    let passed = Passed { embedded: &embedded, features: &target, rows: &all };
    let drafts = tch::no_grad(|| both.net.drafts(&both.params, passed, STEPS));
    for root in [0, 3, 7] {
        let served = served(&mut both, &tokens, &features, root);
        for (step, served) in served.iter().enumerate() {
            let trained = drafts[step].get((root + step) as i64).unsqueeze(0).matmul(&both.table.tr());
            assert_same(&trained, served, &format!("{draft}, root {root}, step {step}"));
        }
    }
}

fn assert_same(trained: &Tensor, served: &[f32], what: &str) {
    let served = Tensor::from_slice(served);
    let difference = f64::try_from((trained.view([-1]) - &served).abs().max()).unwrap();
    let scale = f64::try_from(served.abs().max()).unwrap().max(1.0);
    assert!(difference < 1e-4 * scale, "{what}: differs by {difference:e} at scale {scale}");
}

fn tokens() -> Vec<TokenId> {
    (0..TOKENS + 1).map(|at| ((at * 97 + 31) % 500) as TokenId).collect()
}

/// The inputs of the trained forward for one sequence.
fn embedded(table: &Tensor, tokens: &[TokenId]) -> Tensor {
    let ids: Vec<i64> = tokens[1..].iter().map(|&id| i64::from(id)).collect();
    table.index_select(0, &Tensor::from_slice(&ids)).unsqueeze(0)
}

#[test]
fn eagle_trains_as_it_serves() {
    check("llama-tiny", "eagle1-tiny/draft");
    check("llama-tiny", "eagle1-tiny/draft_nobias_noembed");
}

#[test]
fn eagle3_trains_as_it_serves() {
    check("eagle3-tiny", "eagle3-tiny/draft");
}

/// A target with what a head's passes and the trained forward need of it.
fn loaded(target: &str) -> (TargetModel, TrainTables, HfConfig) {
    let weights = Weights::Safetensors(fixtures().join(target).join("target"));
    let model = TargetModel::load(&config(weights.clone(), Dtype::Float32), &mut |_, _| {}).unwrap();
    let tables = TrainTables::read(&weights, Kind::Float).unwrap();
    (model, tables, crate::engine::model::shape_of(&weights).unwrap())
}

/// The layers of a written checkpoint, chained as the draft worker chains them.
#[test]
fn layers_train_as_they_serve() {
    let (mut target, tables, shape) = loaded("llama-tiny");
    let tokens = tokens();
    target.leave(Features::Final);
    let last = features(&mut target, &tokens[..TOKENS]);
    target.leave(Features::Layers(vec![shape.layers]));
    let before_norm = features(&mut target, &tokens[..TOKENS]);

    let layer_shape = HfConfig { layers: shape.layers, ..head_shape(&shape, "LlamaForCausalLMNextN") };
    let specs = (0..STEPS).map(|index| MtpSpec::new(layer_shape.clone(), index)).collect();
    let net = HeadNet::new(HeadSpec::MultiLayer(specs), 64, &tables);
    tch::manual_seed(5);
    let random = |parameter: Parameter| {
        let size: Vec<i64> = parameter.shape.iter().map(|&size| size as i64).collect();
        let around = if size.len() == 1 { 1.0 } else { 0.0 };
        (parameter.name, Tensor::randn(&size, (Kind::Float, Device::Cpu)) * 0.2 + around)
    };
    let params = net.spec().parameters().into_iter().map(random).collect();
    let params = Params::new(params).cast(Kind::BFloat16).cast(Kind::Float);
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint {
        spec: net.spec(),
        drafts: STEPS,
        target_layers: shape.layers,
        params: &params,
        vocabulary: &Vocabulary::of(&[], 8, shape.vocab_size),
        eos_token_ids: &[2],
    };
    checkpoint.write(dir.path()).unwrap();
    let files = DraftFiles::open(dir.path()).unwrap();
    let layers = MtpLayers::find(files, &shape, None, STEPS).unwrap();
    assert!(layers.are_chained());
    let mut layers = layers.load(&target, (512, 64), &mut |_, _| {}).unwrap();

    let (embedded, all) =
        (embedded(&tables.embedding, &tokens), Tensor::arange(TOKENS as i64, (Kind::Int64, Device::Cpu)));
    let passed = Passed { embedded: &embedded, features: &last.unsqueeze(0), rows: &all };
    let drafts = tch::no_grad(|| net.drafts(&params, passed, STEPS));
    let slots: Vec<KvSlot> = (0..64).collect();
    for root in [0, 3, 7] {
        let mut states = before_norm.narrow(0, 0, root as i64 + 1);
        for (step, layer) in layers.iter_mut().enumerate() {
            let row = ForwardRow {
                tokens: &tokens[step + 1..step + root + 2],
                context_len: 0,
                kv_slots: &slots,
                parents: None,
                logits: LogitRows::None,
            };
            states = layer.forward(&[row], Some(Inherited::Target(&states))).unwrap();
            let served = layer.logits(&states.narrow(0, root as i64, 1)).unwrap().values;
            let trained = drafts[step].get((root + step) as i64).unsqueeze(0).matmul(&tables.head.tr());
            assert_same(&trained, &served, &format!("root {root}, layer {step}"));
        }
    }
}

#[test]
fn dflash_trains_as_it_serves() {
    let (mut target, tables, shape) = loaded("dflash-tiny");
    let tokens = tokens();
    let dir = fixtures().join("dflash-tiny/draft");
    let read = || {
        let files = DraftFiles::open(&dir).unwrap();
        (DflashSpec::read(&files, &shape, None, None).unwrap(), files)
    };
    let (spec, mut files) = read();
    target.leave(spec.features());
    let features = features(&mut target, &tokens[..TOKENS]);
    let parameter = |parameter: Parameter| {
        let tensor = files.source.read(&parameter.name).unwrap().to_kind(Kind::Float);
        (parameter.name, tensor)
    };
    let params = Params::new(spec.parameters().into_iter().map(parameter).collect());
    let mask = spec.mask();
    let net = HeadNet::new(HeadSpec::Dflash(spec), 64, &tables);
    let (spec, files) = read();
    let head = DflashHead::load(Head { spec, files }, &target, (512, 64), &mut |_, _| {}).unwrap();

    let (embedded, all) =
        (embedded(&tables.embedding, &tokens), Tensor::arange(TOKENS as i64, (Kind::Int64, Device::Cpu)));
    let passed = Passed { embedded: &embedded, features: &features.unsqueeze(0), rows: &all };
    let drafts = tch::no_grad(|| net.drafts(&params, passed, STEPS));
    let slots: Vec<KvSlot> = (0..64).collect();
    fn row<'a>(tokens: &'a [TokenId], context_len: usize, kv_slots: &'a [KvSlot]) -> ForwardRow<'a> {
        ForwardRow { tokens, context_len, kv_slots, parents: None, logits: LogitRows::None }
    }
    for root in [0, 3, 7] {
        let context = root + 1;
        head.store(&[row(&tokens[..context], 0, &slots)], &features.narrow(0, 0, context as i64)).unwrap();
        let mut block = [mask; STEPS + 1];
        block[0] = tokens[context];
        let states = head.denoise(&[row(&block, context, &slots)]).unwrap();
        for (step, draft) in drafts.iter().enumerate() {
            let served = head.logits(&states.narrow(0, step as i64 + 1, 1)).unwrap().values;
            let trained = draft.get((root + step) as i64).unsqueeze(0).matmul(&tables.head.tr());
            assert_same(&trained, &served, &format!("root {root}, draft {step}"));
        }
    }
}
