//! Owns the question whether two models mean the same by their token ids, asked of their tokenizers' files.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, bail};
use proto::TokenId;
use serde_json::Value;

use super::model::read_json;

/// Refuses a draft model that comes with a tokenizer of other tokens. Ids that only one of the two knows are fine:
/// vocabularies are often padded.
pub(super) fn check(target: &Path, draft: &Path) -> Result<()> {
    let (Some(target), Some(drafts)) = (tokens(target)?, tokens(draft)?) else { return Ok(()) };
    let differs = |(id, token): &(&TokenId, &String)| target.get(id).is_some_and(|known| known != *token);
    match drafts.iter().find(differs) {
        None => Ok(()),
        Some((id, token)) => bail!(
            "--speculative-draft-model-path {} has another tokenizer than the model: token {id} is {token:?} there and \
             {:?} here; STANDALONE needs a draft model of the same tokenizer",
            draft.display(),
            target[id]
        ),
    }
}

/// Every id with its token; nothing where there is no `tokenizer.json`.
fn tokens(dir: &Path) -> Result<Option<BTreeMap<TokenId, String>>> {
    if !dir.is_dir() {
        return Ok(None);
    }
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
