//! The default model, read from its GGUF file, against reference outputs.

use proto::Quantization;

use super::*;

#[derive(Deserialize)]
struct Golden {
    prompts: Vec<GoldenPrompt>,
}

#[derive(Deserialize)]
struct GoldenPrompt {
    prompt_ids: Vec<TokenId>,
    output_ids: Vec<TokenId>,
    margins: Vec<f32>,
}

/// Where a reference's best two tokens lie closer than this, either is right.
const NEAR_TIE: f32 = 1e-3;

fn default_model() -> PathBuf {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/SmolLM2-135M-Instruct");
    let mut files = std::fs::read_dir(&dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let found = files.find(|path| path.extension().is_some_and(|extension| extension == "gguf"));
    found.unwrap_or_else(|| panic!("no .gguf file in {}; run `make model`", dir.display()))
}

fn load(dtype: Dtype) -> TargetModel {
    let mut config = config(Weights::Gguf(default_model()), dtype);
    config.model.context_length = 1024;
    TargetModel::load(&config, &mut |_, _| {}).unwrap()
}

#[test]
fn greedy_outputs_in_float32_are_the_reference_ones() {
    let text = std::fs::read(fixtures().join("smollm2-greedy.json")).unwrap();
    let golden: Golden = serde_json::from_slice(&text).unwrap();
    let mut model = load(Dtype::Float32);
    for prompt in &golden.prompts {
        // One pass over prompt and answer: each position must choose the next token of the answer.
        let sequence: Vec<TokenId> = prompt.prompt_ids.iter().chain(&prompt.output_ids).copied().collect();
        let slots = scattered_slots(sequence.len(), 0);
        let logits = model.forward(&[chain(&sequence, 0, &slots)]).unwrap();
        for (index, &expected) in prompt.output_ids.iter().enumerate() {
            let chosen = argmax(logits.row(prompt.prompt_ids.len() - 1 + index));
            let tie = prompt.margins[index] < NEAR_TIE;
            assert!(chosen == expected || tie, "token {index}: {chosen}, not {expected}");
        }
    }
    // That decoding step by step gives the same is tested bit by bit; here a few as a user would see them.
    for prompt in
        golden.prompts.iter().filter(|prompt| prompt.margins.iter().all(|&margin| margin > NEAR_TIE)).take(2)
    {
        let slots = scattered_slots(prompt.prompt_ids.len() + prompt.output_ids.len(), 1);
        let tokens = greedy(&mut model, &prompt.prompt_ids, prompt.output_ids.len(), &slots);
        assert_eq!(tokens, prompt.output_ids);
    }
}

#[test]
fn blocks_serve_the_bits_of_what_they_stand_for() {
    let mut logits = [Quantization::None, Quantization::Gguf].map(|quantization| {
        let mut config = config(Weights::Gguf(default_model()), Dtype::Bfloat16);
        config.model.context_length = 1024;
        config.model.quantization = quantization;
        let mut model = TargetModel::load(&config, &mut |_, _| {}).unwrap();
        let size = std::fs::metadata(default_model()).unwrap().len();
        let fits = model.limits().weight_bytes < size;
        assert_eq!(fits, quantization == Quantization::Gguf, "{:?}", model.limits().weight_types);
        let sequence: Vec<TokenId> = (0..50).map(|index| (index * 613 + 40) % 49152).collect();
        run_chunks(&mut model, &sequence, &scattered_slots(50, 0), 7)
    });
    let [plain, blocks] = &mut logits;
    assert!(plain == blocks);
}

#[test]
fn bits_do_not_depend_on_the_way_in_full_size() {
    for dtype in [Dtype::Float32, Dtype::Bfloat16] {
        let mut model = load(dtype);
        let vocab_size = model.vocab_size();
        let sequence: Vec<TokenId> = (0..70).map(|index| (index * 613 + 40) % 49152).collect();
        let whole = run_chunks(&mut model, &sequence, &scattered_slots(70, 0), 70);
        for chunk in [1, 9, 33] {
            let chunked = run_chunks(&mut model, &sequence, &scattered_slots(70, 1), chunk);
            let differing = whole.iter().zip(&chunked).filter(|(a, b)| a != b).count();
            assert_eq!(differing, 0, "{dtype:?} in chunks of {chunk}, of {}", 70 * vocab_size);
        }
    }
}
