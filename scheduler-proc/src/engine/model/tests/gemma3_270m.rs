//! A real Gemma, from its GGUF file, against reference outputs; where the file is there.

use super::*;

#[derive(Deserialize)]
struct Golden {
    prompts: Vec<GoldenPrompt>,
}

#[derive(Deserialize)]
struct GoldenPrompt {
    prompt_ids: Vec<TokenId>,
    output_ids: Vec<TokenId>,
}

#[test]
fn greedy_outputs_of_a_real_gemma_are_the_reference_ones() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/gemma-3-270m/gemma-3-270m-q4_k_m.gguf");
    if !file.exists() {
        eprintln!("skipped: Gemma is not here (scripts/gemma.sh models/gemma-3-270m)");
        return;
    }
    let text = std::fs::read(fixtures().join("gemma3-270m.json")).unwrap();
    let golden: Golden = serde_json::from_slice(&text).unwrap();
    let mut model = TargetModel::load(&config(Weights::Gguf(file), Dtype::Float32), &mut |_, _| {}).unwrap();
    for prompt in &golden.prompts {
        let slots = scattered_slots(prompt.prompt_ids.len() + prompt.output_ids.len(), 0);
        let tokens = greedy(&mut model, &prompt.prompt_ids, prompt.output_ids.len(), &slots);
        assert_eq!(tokens, prompt.output_ids);
    }
}
