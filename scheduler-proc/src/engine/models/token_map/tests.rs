//! Every form of a list of hot tokens, and everything that is none.

use std::path::PathBuf;

use tch::Tensor;

use super::*;

const IDS: [TokenId; 6] = [5, 0, 70_000, 511, 12, 300];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/token_map").join(name)
}

fn written(name: &str, text: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    (dir, path)
}

#[test]
fn all_forms_give_the_same_ids() {
    let (_dir, json) = written("a.json", "[5, 0, 70000, 511, 12, 300]");
    assert_eq!(read(&json, 70_001).unwrap(), IDS);
    // As torch.save writes them: a list, a tensor, a part of a longer tensor.
    for name in ["list.pt", "tensor.pt", "slice.pt"] {
        assert_eq!(read(&fixture(name), 70_001).unwrap(), IDS, "{name}");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    let ids = Tensor::from_slice(&IDS.map(i64::from));
    Tensor::write_safetensors(&[("ids", &ids)], &path).unwrap();
    assert_eq!(read(&path, 70_001).unwrap(), IDS);
}

#[test]
fn what_is_no_list_of_the_vocabularys_tokens_is_refused() {
    let check = |path: &Path, part: &str| {
        let error = read(path, 70_000).unwrap_err().to_string();
        assert!(error.contains("--speculative-token-map") && error.contains(part), "{error}");
    };
    check(&fixture("list.pt"), "entry 2 is 70000, outside a vocabulary of 70000");
    check(&fixture("words.pt"), "something other than whole numbers");
    check(&fixture("matrix.pt"), "neither a list of numbers nor a tensor of one dimension");
    check(&fixture("nowhere.pt"), "No such file");
    let (_dir, path) = written("a.pt", "not a zip");
    check(&path, "is no file of torch.save");
    for (name, content, part) in [
        ("a.json", "[]", "names no tokens"),
        ("a.json", "[1, -1]", "entry 1 is -1"),
        ("a.json", "[1, 2, 1]", "names token 1 twice"),
        ("a.json", r#"{"ids": [1]}"#, "is no JSON list"),
        ("a.txt", "1 2 3", "must be a .pt, .safetensors or .json file"),
    ] {
        let (_dir, path) = written(name, content);
        check(&path, part);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    let ids = Tensor::from_slice(&[1i64, 2]);
    Tensor::write_safetensors(&[("a", &ids), ("b", &ids)], &path).unwrap();
    check(&path, "holds 2 tensors");
    Tensor::write_safetensors(&[("a", &ids.view([1, 2]))], &path).unwrap();
    check(&path, "not one dimension");
    Tensor::write_safetensors(&[("a", &ids.to_kind(tch::Kind::Float))], &path).unwrap();
    check(&path, "F32");
}
