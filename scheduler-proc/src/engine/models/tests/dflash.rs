//! Blocks of the DFLASH draft model against the reference's hidden states and logits.

use serde_json::json;

use super::*;
use crate::engine::models::dflash_head::DflashHead;
use crate::engine::models::dflash_spec::DflashSpec;
use crate::engine::models::draft::Head;

const CASE: &str = "dflash-tiny";
const BLOCK: usize = 8;
const MASK: TokenId = 5;

/// One block of a reference run, behind a context that is stored call by call.
struct Reference {
    golden: Value,
    tensors: Tensors,
    target: TargetModel,
}

impl Reference {
    fn read() -> Self {
        let case = fixtures().join(CASE);
        let tensors = Tensor::read_safetensors(case.join("golden.safetensors")).unwrap();
        Self {
            golden: serde_json::from_slice(&std::fs::read(case.join("golden.json")).unwrap()).unwrap(),
            tensors: Tensors(tensors.into_iter().collect()),
            target: load_target(&target_dir(CASE)),
        }
    }

    /// The head with some keys of its config changed.
    fn head(&self, changed: &[(&str, Value)]) -> DflashHead {
        let dir = fixtures().join(CASE).join("draft");
        let mut config: Value =
            serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
        for (key, value) in changed {
            config[*key] = value.clone();
        }
        let files = files(&Tensors::read(&dir).store(&config));
        let spec = DflashSpec::read(&files, &HfConfig::read(&target_dir(CASE)).unwrap(), None, None).unwrap();
        DflashHead::load(Head { spec, files }, &self.target, (SLOTS + BLOCK, 128), &mut |_, _| {}).unwrap()
    }

    /// Stores the context of block `index` of a prompt and denoises it.
    fn denoise(&self, head: &DflashHead, prompt: usize, index: usize) -> Tensor {
        let prompts = self.golden["prompts"].as_array().unwrap();
        let golden = prompts.iter().find(|one| one["len"] == prompt).unwrap();
        let step = &golden["steps"][index];
        let start = step["start"].as_u64().unwrap() as usize;
        let features = self.tensors.get(&format!("p{prompt}.block{index}.target_hidden_rows"));
        let rows = features.size()[0] as usize;
        let mut slots: Vec<KvSlot> = (0..start).map(|at| ((at * 7) % SLOTS) as KvSlot).collect();
        slots.extend(SLOTS as KvSlot..(SLOTS + BLOCK) as KvSlot);
        let seen = vec![0; rows];
        let mut block = [MASK; BLOCK];
        block[0] = step["anchor"].as_u64().unwrap() as TokenId;
        let row = |tokens, context_len| ForwardRow {
            tokens,
            context_len,
            kv_slots: &slots,
            parents: None,
            logits: LogitRows::None,
        };
        head.store(&[row(&seen, start - rows)], features).unwrap();
        head.denoise(&[row(&block, start)]).unwrap()
    }
}

#[test]
fn blocks_are_the_references() {
    let reference = Reference::read();
    let head = reference.head(&[]);
    for prompt in [2, 7, 19, 40] {
        for index in [0, 1] {
            let what = format!("p{prompt}.block{index}");
            let states = reference.denoise(&head, prompt, index);
            let expected = reference.tensors.get(&format!("{what}.draft_hidden"));
            assert!(distance(&states, expected) < SAME, "{what}: {}", distance(&states, expected));
            if let Some(expected) = reference.tensors.find(&format!("{what}.draft_logits")) {
                let logits = head.logits(&states).unwrap();
                let logits = Tensor::from_slice(&logits.values).view([BLOCK as i64, -1]);
                assert!(distance(&logits, expected) < SAME, "{what}: {}", distance(&logits, expected));
            }
        }
    }
}

/// A sliding layer is causal unless the config says otherwise; then its window reaches both ways.
#[test]
fn sliding_layers_see_what_the_references_do() {
    let reference = Reference::read();
    let layers = ("layer_types", json!(["sliding_attention", "full_attention"]));
    let window = ("sliding_window", json!(6));
    let mut states = Vec::new();
    for (variant, causal) in [("sliding", Value::Null), ("sliding_noncausal", json!(false))] {
        let head = reference.head(&[layers.clone(), window.clone(), ("is_causal", causal)]);
        states.push(reference.denoise(&head, 19, 0));
        let expected = reference.tensors.get(&format!("variant.{variant}.p19.block0.draft_hidden"));
        let far = distance(states.last().unwrap(), expected);
        assert!(far < SAME, "{variant}: {far}");
    }
    assert!(distance(&states[0], &states[1]) > OTHER);
}
