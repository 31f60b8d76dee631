//! Logits, hidden states and greedy continuations of every family against the golden files.

use super::*;
use crate::engine::hf_config::GemmaConfig;

#[derive(Deserialize)]
struct Golden {
    prompts: Vec<GoldenPrompt>,
}

#[derive(Deserialize)]
struct GoldenPrompt {
    ids: Vec<TokenId>,
    greedy: Vec<TokenId>,
    argmax_per_position: Vec<TokenId>,
}

const CASES: [&str; 8] = [
    "gemma3-text-tiny",
    "llama-tiny",
    "llama-tiny-untied-llama3rope-sharded",
    "mistral-tiny-swa",
    "qwen2-tiny-tied",
    "qwen2-tiny-untied",
    "qwen3-tiny",
    "qwen3-moe-tiny",
];

fn golden(case: &str) -> (Golden, BTreeMap<String, Tensor>) {
    let dir = fixtures().join(case);
    let json = serde_json::from_slice(&std::fs::read(dir.join("golden.json")).unwrap()).unwrap();
    let tensors = Tensor::read_safetensors(dir.join("golden.safetensors")).unwrap();
    (json, tensors.into_iter().collect())
}

#[track_caller]
fn assert_close(what: &str, actual: &Tensor, expected: &Tensor) {
    let scale = f64::try_from(expected.abs().max()).unwrap().max(1.0);
    let difference = f64::try_from((actual.reshape(expected.size()) - expected).abs().max()).unwrap();
    assert!(difference <= 1e-4 * scale, "{what}: differs by {difference:e} at scale {scale}");
}

fn check_logits(case: &str, model: &mut TargetModel, chunk: usize) {
    let (json, tensors) = golden(case);
    for prompt in &json.prompts {
        let count = prompt.ids.len();
        let values = run_chunks(model, &prompt.ids, &scattered_slots(count, 0), chunk);
        let logits = Tensor::from_slice(&values).reshape([count as i64, -1]);
        let what = format!("{case}, prompt of {count} in chunks of {chunk}");
        match count {
            64 => assert_close(&what, &logits.narrow(0, 48, 16), &tensors["logits.p64.last16"]),
            _ => assert_close(&what, &logits, &tensors[&format!("logits.p{count}")]),
        }
        let best: Vec<TokenId> = values.chunks(512).map(argmax).collect();
        assert_eq!(best, prompt.argmax_per_position, "{what}");
    }
}

#[test]
fn logits_are_the_golden_ones_whole_and_in_chunks() {
    for case in CASES {
        let mut model = tiny(case, Dtype::Float32);
        for chunk in [512, 7, 1] {
            check_logits(case, &mut model, chunk);
        }
    }
}

#[test]
fn a_gemma_from_a_gguf_file_is_the_golden_one() {
    let file = crate::engine::gguf::tests::gemma_file();
    let config = config(Weights::Gguf(file.path().to_owned()), Dtype::Float32);
    let mut model = TargetModel::load(&config, &mut |_, _| {}).unwrap();
    for chunk in [512, 9] {
        check_logits("gemma3-text-tiny", &mut model, chunk);
    }
}

#[test]
fn plain_tensor_operations_give_the_golden_logits_too() {
    for case in CASES {
        let config = config(Weights::Safetensors(fixtures().join(case).join("target")), Dtype::Float32);
        let placement = (Kind::Float, Device::Cpu);
        let mut model = TargetModel::load_with(
            &config,
            placement,
            Box::new(TorchAttention),
            Neighbour::default(),
            &mut |_, _| {},
        )
        .unwrap();
        for chunk in [512, 9] {
            check_logits(case, &mut model, chunk);
        }
    }
}

#[test]
fn greedy_continuations_are_the_golden_ones() {
    for case in CASES {
        let mut model = tiny(case, Dtype::Float32);
        let (json, tensors) = golden(case);
        for prompt in &json.prompts {
            let slots = scattered_slots(prompt.ids.len() + prompt.greedy.len(), 1);
            let tokens = greedy(&mut model, &prompt.ids, prompt.greedy.len(), &slots);
            assert_eq!(tokens, prompt.greedy, "{case}, prompt of {}", prompt.ids.len());
            if prompt.ids.len() == 64 {
                let last = chain(&tokens[tokens.len() - 1..], slots.len() - 1, &slots);
                let logits = Tensor::from_slice(&model.forward(&[last]).unwrap().values);
                assert_close(case, &logits, &tensors["logits_last_after_greedy.p64"]);
            }
        }
    }
}

#[test]
fn hidden_states_are_the_golden_ones() {
    for case in CASES {
        let mut model = tiny(case, Dtype::Float32);
        let (json, tensors) = golden(case);
        let prompt = json.prompts.iter().find(|prompt| prompt.ids.len() == 17).unwrap();
        let expected = &tensors["hidden_states.p17"];
        let layers = expected.size()[0] - 1;
        let capture: Vec<usize> = (0..=layers as usize).collect();
        let slots = scattered_slots(17, 0);
        let output = model.forward_hidden(&[chain(&prompt.ids, 0, &slots)], &capture).unwrap();
        for layer in 0..layers {
            let what = format!("{case}, into layer {layer}");
            assert_close(&what, &output.captured[layer as usize], &expected.get(layer));
        }
        assert_close(case, &output.captured[layers as usize], &tensors["prenorm_last.p17"]);
        assert_close(case, &output.hidden, &expected.get(layers));
    }
}

#[test]
fn both_config_styles_mean_the_same_model() {
    for case in CASES {
        let dir = fixtures().join(case).join("target");
        let read = |name: &str| HfConfig::parse(&std::fs::read(dir.join(name)).unwrap()).unwrap();
        let describe = |config: &HfConfig| models::describe(config).unwrap();
        let (published, rewritten) = (read("config.json"), read("config_v5_style.json"));
        let (mut a, mut b) = (describe(&published), describe(&rewritten));
        // Written differently when switched off; the windows that matter are in the description.
        for spec in [&mut a, &mut b] {
            spec.shape.sliding_window = None;
            spec.shape.sliding_layers = None;
            spec.shape.gemma = GemmaConfig::default();
        }
        assert_eq!(a, b, "{case}");
    }
}
