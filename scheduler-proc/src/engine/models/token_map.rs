//! Owns the file of hot tokens: the few ids that a draft head makes logits for, in any of the forms such lists come in.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use candle_core::DType;
use candle_core::pickle::{Object, Stack};
use proto::TokenId;
use rustc_hash::FxHashSet;
use safetensors::SafeTensors;
use zip::ZipArchive;

use crate::engine::EngineError;
use crate::engine::weights::integers;

/// The ids in the file's order, all of them in a vocabulary of `vocab_size`, none twice.
pub fn read(path: &Path, vocab_size: usize) -> Result<Vec<TokenId>, EngineError> {
    let failed = |reason: String| EngineError::Load {
        what: format!("--speculative-token-map {}", path.display()),
        reason,
    };
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let ids = match extension {
        "json" => from_json(path),
        "safetensors" => from_safetensors(path),
        "pt" | "pth" | "bin" => from_torch(path),
        _ => Err("must be a .pt, .safetensors or .json file with one list of token ids".into()),
    };
    checked(&ids.map_err(failed)?, vocab_size).map_err(failed)
}

fn checked(ids: &[i64], vocab_size: usize) -> Result<Vec<TokenId>, String> {
    if ids.is_empty() {
        return Err("names no tokens; list the ids that the draft may propose".into());
    }
    let mut seen = FxHashSet::default();
    let mut checked = Vec::with_capacity(ids.len());
    for (at, &id) in ids.iter().enumerate() {
        match TokenId::try_from(id) {
            Ok(id) if (id as usize) < vocab_size && seen.insert(id) => checked.push(id),
            Ok(id) if (id as usize) < vocab_size => return Err(format!("names token {id} twice")),
            _ => return Err(format!("entry {at} is {id}, outside a vocabulary of {vocab_size}")),
        }
    }
    Ok(checked)
}

fn from_json(path: &Path) -> Result<Vec<i64>, String> {
    let text = std::fs::read(path).map_err(|error| error.to_string())?;
    serde_json::from_slice(&text).map_err(|error| format!("is no JSON list of token ids: {error}"))
}

fn from_safetensors(path: &Path) -> Result<Vec<i64>, String> {
    let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| error.to_string())?;
    match tensors.tensors().as_slice() {
        [(name, view)] if view.shape().len() == 1 => {
            integers(view).map_err(|reason| format!("{name}: {reason}"))
        }
        [(name, view)] => Err(format!("{name} has shape {:?}, not one dimension", view.shape())),
        all => Err(format!("holds {} tensors, not one list of token ids", all.len())),
    }
}

/// What `torch.save` makes of a list of numbers or of a tensor of one dimension.
fn from_torch(path: &Path) -> Result<Vec<i64>, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let mut archive = ZipArchive::new(BufReader::new(file))
        .map_err(|error| format!("is no file of torch.save: {error}"))?;
    let name = archive.file_names().flatten().find(|name| name.ends_with("data.pkl"));
    let name = name.map(std::borrow::Cow::into_owned);
    let name = name.ok_or("holds no data.pkl, so torch.save did not make it")?;
    let object = {
        let mut stack = Stack::empty();
        let part = archive.by_name(&name).map_err(|error| error.to_string())?;
        stack.read_loop(&mut BufReader::new(part)).map_err(unpickled)?;
        stack.finalize().map_err(unpickled)?
    };
    match object {
        Object::List(items) | Object::Tuple(items) => items.into_iter().map(number).collect(),
        object => stored_tensor(object, Path::new(name.trim_end_matches(".pkl")), &mut archive),
    }
}

/// Without the backtrace that may follow.
fn unpickled(error: candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

fn number(item: Object) -> Result<i64, String> {
    item.int_or_long().map_err(|_| "holds a list of something other than whole numbers".into())
}

fn stored_tensor(
    object: Object,
    dir: &Path,
    archive: &mut ZipArchive<BufReader<File>>,
) -> Result<Vec<i64>, String> {
    const OTHER: &str = "holds neither a list of numbers nor a tensor of one dimension";
    let info = object.into_tensor_info(Object::Unicode(String::new()), dir).map_err(unpickled)?;
    let info = info.ok_or(OTHER)?;
    if info.layout.dims().len() != 1 || !info.layout.is_contiguous() {
        return Err(OTHER.into());
    }
    let mut bytes = Vec::new();
    let mut part = archive.by_name(&info.path).map_err(|error| error.to_string())?;
    part.read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if info.dtype != DType::I64 {
        return Err(format!("has type {:?}, not int64", info.dtype));
    }
    // The offset is in bytes here.
    let from = info.layout.start_offset();
    let part = bytes.get(from..from + 8 * info.layout.dims()[0]).ok_or("is cut off")?;
    Ok(part.as_chunks::<8>().0.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect())
}

#[cfg(test)]
mod tests;
