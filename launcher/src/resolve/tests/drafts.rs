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

/// The settings of a model algorithm with n-grams before it, all in one folder that looks like a draft model.
fn mixed(flags: &str) -> Result<ServeConfig> {
    let (target, draft) = (folder(), folder());
    let draft = draft.path().display();
    let flags = format!("--speculative-draft-model-path {draft} {flags}");
    Ok(resolve_in(target.path(), &flags)?.config)
}

#[test]
fn n_grams_go_before_any_draft_model() {
    let check = |name: &str, flags: &str, shown: &str, shape: (u32, u32), breadth: u32| {
        let config = mixed(&format!("--speculative-algorithm {name} {flags}")).unwrap();
        assert_eq!(config.server_args["speculative_algorithm"], shown);
        let spec = config.spec.unwrap();
        assert_eq!((spec.num_steps, spec.num_draft_tokens), shape, "{name} {flags}");
        let first = spec.ngram_first.unwrap();
        assert_eq!((first.ngram.max_bfs_breadth, first.min_match), (breadth, 2), "{name} {flags}");
    };
    check("eagle+ngram", "", "EAGLE+NGRAM", (5, 8), 4);
    check("EAGLE3+NGRAM", "--speculative-num-steps 3", "EAGLE3+NGRAM", (3, 4), 1);
    check("NEXTN+NGRAM", "--speculative-num-steps 2", "EAGLE+NGRAM", (2, 3), 1);
    check("standalone+ngram", "", "STANDALONE+NGRAM", (3, 4), 1);
    check("DFLASH+NGRAM", "--speculative-dflash-block-size 8", "DFLASH+NGRAM", (1, 8), 1);
    // Without a depth of the user's, adaptive depth drafts chains.
    check("EAGLE+NGRAM", "--speculative-adaptive", "EAGLE+NGRAM", (7, 8), 1);
    let config = mixed(
        "--speculative-algorithm EAGLE+NGRAM --speculative-ngram-min-match 5 --speculative-ngram-max-bfs-breadth 3",
    );
    let config = config.unwrap();
    let first = config.spec.unwrap().ngram_first.unwrap();
    assert_eq!((first.ngram.max_bfs_breadth, first.min_match), (3, 5));
    assert_eq!(config.server_args["speculative_ngram_min_match"], 5);
}

#[test]
fn n_grams_beside_a_model_are_refused_where_they_make_no_sense() {
    let refused = |flags: &str, part: &str| {
        let said = format!("{:#}", mixed(flags).unwrap_err());
        assert!(said.contains(part), "{said}");
    };
    refused("--speculative-algorithm NGRAM+NGRAM", "NGRAM+NGRAM is unknown");
    refused("--speculative-algorithm UNO+NGRAM", "UNO+NGRAM is not planned");
    refused("--speculative-algorithm EAGLE+", "EAGLE+ is unknown");
    refused("--speculative-algorithm EAGLE --speculative-ngram-min-match 3", "as in EAGLE+NGRAM");
    refused(
        "--speculative-algorithm EAGLE+NGRAM --speculative-ngram-min-match 18",
        "must be at least 1 and less",
    );
    refused(
        "--speculative-algorithm EAGLE+NGRAM --speculative-eagle-topk 1 --speculative-num-steps 3 \
         --speculative-use-rejection-sampling",
        "remembered, not drawn",
    );
    let alone = refusal("--speculative-algorithm NGRAM --speculative-ngram-min-match 3");
    assert!(alone.contains("no effect with NGRAM alone"), "{alone}");
}
