//! Owns the question whether two models mean the same by their token ids, asked of their tokenizers' files.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, Result, bail};
use candle_core::quantized::gguf_file::Content;
use proto::{TokenId, Weights};
use serde_json::Value;

use super::model::read_json;

/// Refuses a draft model that comes with other tokens than those of the tokenizer in `target`. Ids that only one of
/// the two knows are fine: vocabularies are often padded.
pub(super) fn check(target: &Path, draft: &Weights) -> Result<()> {
    let (shown, drafts) = match draft {
        Weights::Safetensors(dir) | Weights::Dummy { dir, .. } => (dir, tokens(dir)?),
        Weights::Gguf(file) => (file, gguf_tokens(file)?),
    };
    let (Some(target), Some(drafts)) = (tokens(target)?, drafts) else { return Ok(()) };
    let differs = |(id, token): &(&TokenId, &String)| target.get(id).is_some_and(|known| known != *token);
    match drafts.iter().find(differs) {
        None => Ok(()),
        Some((id, token)) => bail!(
            "--speculative-draft-model-path {} has another tokenizer than the model: token {id} is {token:?} there and \
             {:?} here; STANDALONE needs a draft model of the same tokenizer",
            shown.display(),
            target[id]
        ),
    }
}

/// Every id with its token; nothing where there is no `tokenizer.json`.
fn tokens(dir: &Path) -> Result<Option<BTreeMap<TokenId, String>>> {
    let Some(tokenizer) = read_json(&dir.join("tokenizer.json"))? else { return Ok(None) };
    let id = |value: &Value| value.as_u64().and_then(|id| TokenId::try_from(id).ok());
    let mut all = BTreeMap::new();
    match &tokenizer["model"]["vocab"] {
        Value::Object(vocab) => {
            all.extend(vocab.iter().filter_map(|(token, value)| Some((id(value)?, token.clone()))));
        }
        // Unigram models list their tokens by id, each with its score.
        Value::Array(vocab) => {
            let named = (0..).zip(vocab).filter_map(|(id, entry)| Some((id, entry[0].as_str()?.to_owned())));
            all.extend(named);
        }
        _ => {}
    }
    for added in tokenizer["added_tokens"].as_array().into_iter().flatten() {
        if let (Some(id), Some(token)) = (id(&added["id"]), added["content"].as_str()) {
            all.insert(id, token.to_owned());
        }
    }
    Ok(Some(all))
}

/// As [`tokens`], from the metadata of a GGUF file.
fn gguf_tokens(file: &Path) -> Result<Option<BTreeMap<TokenId, String>>> {
    let failed = || format!("{} is not a readable GGUF file", file.display());
    let content =
        Content::read(&mut BufReader::new(File::open(file).with_context(failed)?)).with_context(failed)?;
    let tokens = content.metadata.get("tokenizer.ggml.tokens").and_then(|tokens| tokens.to_vec().ok());
    Ok(tokens.map(|tokens| {
        let named = (0..).zip(tokens).filter_map(|(id, token)| Some((id, token.to_string().ok()?.clone())));
        named.collect()
    }))
}
