//! Owns the question whether two models mean the same by their token ids, asked of their tokenizers' files.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, Result, bail};
use candle_core::quantized::gguf_file::Content;
use proto::{TokenBytes, TokenId, Weights};

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

/// Every id with its token; nothing where there is no `tokenizer.json`, or none that says so.
fn tokens(dir: &Path) -> Result<Option<BTreeMap<TokenId, String>>> {
    let Some(tokenizer) = read_json(&dir.join("tokenizer.json"))? else { return Ok(None) };
    let Ok(names) = TokenBytes::names(&tokenizer) else { return Ok(None) };
    Ok(Some(names.into_iter().map(|(id, token)| (id, token.to_owned())).collect()))
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
