//! The trained forward against the serving heads, on the same inputs: every draft step of a chain from every position.

use std::path::PathBuf;

use proto::{Dtype, TokenId, Weights};
use tch::Tensor;

use super::*;
use crate::batch::KvSlot;
use crate::engine::model::tests::{config, fixtures};
use crate::engine::model::{Features, TargetModel};
use crate::engine::models::draft::DraftModel;
use crate::engine::models::draft_config::DraftFiles;
use crate::engine::models::eagle_head::EagleHead;
use crate::engine::models::eagle3_head::Eagle3Head;
use crate::engine::target::{ForwardRow, LogitRows, Target};
use crate::engine::train::tables::TrainTables;

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
    Both { serving, net: HeadNet::new(spec, 64), params, table, target: model, tables }
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
    let tokens: Vec<TokenId> = (0..TOKENS + 1).map(|at| ((at * 97 + 31) % 500) as TokenId).collect();
    let features = features(&mut both.target, &tokens[..TOKENS]);
    let ids: Vec<i64> = tokens[1..].iter().map(|&id| i64::from(id)).collect();
    let embedding = both.params.find("embed_tokens.weight").unwrap_or(&both.tables.embedding);
    let embedded = embedding.index_select(0, &Tensor::from_slice(&ids)).unsqueeze(0);
    let all = Tensor::arange(TOKENS as i64, (Kind::Int64, tch::Device::Cpu));
    let target = features.copy().unsqueeze(0);
    let states = tch::no_grad(|| both.net.unroll(&both.params, &embedded, &target, &all, STEPS));
    for root in [0, 3, 7] {
        let served = served(&mut both, &tokens, &features, root);
        for (step, served) in served.iter().enumerate() {
            let state = states[step].get((root + step) as i64).unsqueeze(0);
            let trained = both.net.before_logits(&both.params, &state).matmul(&both.table.tr());
            let served = Tensor::from_slice(served);
            let difference = f64::try_from((trained.view([-1]) - &served).abs().max()).unwrap();
            let scale = f64::try_from(served.abs().max()).unwrap().max(1.0);
            assert!(
                difference < 1e-4 * scale,
                "{draft}, root {root}, step {step}: differs by {difference:e} at scale {scale}"
            );
        }
    }
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
