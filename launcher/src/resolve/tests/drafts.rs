//! What a draft model's own files decide.

use super::*;

/// The mask of a draft model whose config says this of it, beside a tokenizer that knows `<end>`, which is 9.
fn mask(vocab_size: u32, says: serde_json::Value) -> Result<Option<u32>> {
    let (target, draft) = (folder(), folder());
    let change = |dir: &tempfile::TempDir, key: &str, value: serde_json::Value| {
        let file = dir.path().join("config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        config[key] = value;
        std::fs::write(file, config.to_string()).unwrap();
    };
    change(&target, "vocab_size", json!(vocab_size));
    change(&draft, "dflash_config", says);
    let flags =
        format!("--speculative-algorithm DFLASH --speculative-draft-model-path {}", draft.path().display());
    match resolve_in(target.path(), &flags)?.config.spec.unwrap().algorithm {
        SpecAlgorithm::Dflash(dflash) => Ok(dflash.mask_token),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_mask_with_no_id_is_looked_up_in_the_tokenizer() {
    assert_eq!(mask(512, json!({"mask_token": "<end>"})).unwrap(), Some(9));
    // The scheduler reads an id itself.
    assert_eq!(mask(512, json!({"mask_token": "<end>", "mask_token_id": 3})).unwrap(), None);
}

#[test]
fn a_mask_that_the_tokenizer_does_not_know_is_the_row_behind_its_own() {
    assert_eq!(mask(512, json!({"mask_token": "<nowhere>"})).unwrap(), Some(10));
    assert_eq!(mask(512, json!({})).unwrap(), Some(10));
    let said = format!("{:#}", mask(10, json!({"mask_token": "<nowhere>"})).unwrap_err());
    assert!(said.contains("\"<nowhere>\"") && said.contains("--speculative-draft-model-path"), "{said}");
    let said = format!("{:#}", mask(512, json!({"mask_token": 7})).unwrap_err());
    assert!(said.contains("no string"), "{said}");
}
