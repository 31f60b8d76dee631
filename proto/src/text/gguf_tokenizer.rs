//! Owns rebuilding a tokenizer from a GGUF file's metadata: `tokenizer.json` and `tokenizer_config.json`, as the
//! model's authors publish them.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, Result, bail};
use candle_core::quantized::gguf_file::Content;
use serde_json::{Map, Value, json};

mod metadata;
mod pre;
mod sentence_piece;
#[cfg(test)]
mod tests;

use metadata::{Metadata, TokenType};
use pre::PreTokenizer;

/// Writes the two files into `dest_dir`, which is created where missing.
pub fn write_tokenizer(gguf: &Path, dest_dir: &Path) -> Result<()> {
    let file = File::open(gguf).with_context(|| format!("cannot open {}", gguf.display()))?;
    let content = Content::read(&mut BufReader::new(file))
        .with_context(|| format!("{} is not a GGUF file", gguf.display()))?;
    let metadata = Metadata(&content.metadata);
    let tokenizer = Tokenizer::read(&metadata)?;
    std::fs::create_dir_all(dest_dir).with_context(|| format!("cannot create {}", dest_dir.display()))?;
    let files = [
        ("tokenizer.json", tokenizer.tokenizer_json(&metadata)?),
        ("tokenizer_config.json", tokenizer.config_json(&metadata)?),
    ];
    for (name, json) in files {
        let path = dest_dir.join(name);
        std::fs::write(&path, json.to_string())
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The two kinds of tokenizer that GGUF files of supported models carry.
enum Family {
    /// Byte-level BPE.
    Gpt2(&'static PreTokenizer),
    /// SentencePiece BPE with byte fallback.
    Llama,
}

/// A vocabulary with what its ids mean.
struct Tokenizer {
    family: Family,
    tokens: Vec<String>,
    types: Vec<TokenType>,
    bos: Option<usize>,
    eos: Option<usize>,
    unknown: Option<usize>,
    padding: Option<usize>,
    add_bos: bool,
    add_eos: bool,
}

impl Tokenizer {
    fn read(metadata: &Metadata<'_>) -> Result<Self> {
        let family = match metadata.text("model")? {
            Some("gpt2") => Family::Gpt2(PreTokenizer::find(metadata.text("pre")?)?),
            Some("llama") => Family::Llama,
            Some(other) => bail!("tokenizer.ggml.model is {other:?}; supported are \"gpt2\" and \"llama\""),
            None => bail!("the file carries no tokenizer (tokenizer.ggml.model is missing)"),
        };
        let tokens = metadata.texts("tokens")?.context("tokenizer.ggml.tokens is missing")?;
        let types = match metadata.token_types()? {
            Some(types) if types.len() == tokens.len() => types,
            Some(types) => bail!("{} token types for {} tokens", types.len(), tokens.len()),
            None => vec![TokenType::Normal; tokens.len()],
        };
        let id = |name: &str| match metadata.integer(&format!("{name}_token_id"))? {
            Some(id) if id as usize >= tokens.len() => {
                bail!("tokenizer.ggml.{name}_token_id is {id}, the vocabulary has {} tokens", tokens.len())
            }
            id => Ok(id.map(|id| id as usize)),
        };
        let adds_bos_by_default = match &family {
            Family::Gpt2(pre) => pre.adds_bos,
            Family::Llama => true,
        };
        Ok(Self {
            bos: id("bos")?,
            eos: id("eos")?,
            unknown: id("unknown")?,
            padding: id("padding")?,
            add_bos: metadata.flag("add_bos_token")?.unwrap_or(adds_bos_by_default),
            add_eos: metadata.flag("add_eos_token")?.unwrap_or(false),
            family,
            tokens,
            types,
        })
    }

    fn tokenizer_json(&self, metadata: &Metadata<'_>) -> Result<Value> {
        let mut json = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added_tokens(),
        });
        let parts = match self.family {
            Family::Gpt2(pre) => self.byte_level_parts(pre, metadata)?,
            Family::Llama => self.sentence_piece_parts(metadata)?,
        };
        let whole = json.as_object_mut().expect("it was made as an object");
        whole.extend(parts);
        whole.insert("post_processor".to_owned(), self.post_processor());
        Ok(json)
    }

    fn byte_level_parts(&self, pre: &PreTokenizer, metadata: &Metadata<'_>) -> Result<Map<String, Value>> {
        let merges = metadata.texts("merges")?.context("tokenizer.ggml.merges is missing")?;
        if let Some(merge) = merges.iter().find(|merge| merge.split(' ').count() != 2) {
            bail!("tokenizer.ggml.merges has {merge:?}, which is not two pieces");
        }
        let byte_level = json!({
            "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true
        });
        let mut model = bpe(self.vocab(), json!(merges));
        model["ignore_merges"] = pre.ignore_merges.into();
        Ok(Map::from_iter([
            ("normalizer".to_owned(), pre.normalizer()),
            ("pre_tokenizer".to_owned(), pre.pre_tokenizer()),
            ("decoder".to_owned(), byte_level),
            ("model".to_owned(), model),
        ]))
    }

    fn sentence_piece_parts(&self, metadata: &Metadata<'_>) -> Result<Map<String, Value>> {
        let scores = metadata.scores()?.context("tokenizer.ggml.scores is missing")?;
        if scores.len() != self.tokens.len() {
            bail!("{} scores for {} tokens", scores.len(), self.tokens.len());
        }
        let space_prefix = metadata.flag("add_space_prefix")?.unwrap_or(true);
        let merges = sentence_piece::merges(&self.tokens, &self.types, &scores);
        let mut model = bpe(self.vocab(), json!(merges));
        model["unk_token"] = json!(self.unknown.map(|id| &self.tokens[id]));
        model["fuse_unk"] = true.into();
        model["byte_fallback"] = true.into();
        Ok(Map::from_iter([
            ("normalizer".to_owned(), sentence_piece::normalizer(space_prefix)),
            ("pre_tokenizer".to_owned(), Value::Null),
            ("decoder".to_owned(), sentence_piece::decoder(space_prefix)),
            ("model".to_owned(), model),
        ]))
    }

    fn vocab(&self) -> Value {
        let entries = self.tokens.iter().zip(0u32..);
        Value::Object(entries.map(|(token, id)| (token.clone(), id.into())).collect())
    }

    /// Tokens that text is searched for before anything else. Only control tokens are hidden from answers.
    fn added_tokens(&self) -> Vec<Value> {
        let all = self.tokens.iter().zip(&self.types).enumerate();
        all.filter(|(_, (_, kind))| kind.is_added())
            .map(|(id, (token, kind))| added_token(Some(id), token, kind.is_special()))
            .collect()
    }

    /// Puts the begin and end tokens around a text, where the model wants them.
    fn post_processor(&self) -> Value {
        let bos = self.bos.filter(|_| self.add_bos);
        let eos = self.eos.filter(|_| self.add_eos);
        if bos.is_none() && eos.is_none() {
            return Value::Null;
        }
        let around = |sequence: &str, type_id: u32| {
            let special = |id: usize| json!({"SpecialToken": {"id": self.tokens[id], "type_id": type_id}});
            let text = json!({"Sequence": {"id": sequence, "type_id": type_id}});
            bos.map(special).into_iter().chain([text]).chain(eos.map(special)).collect::<Vec<_>>()
        };
        let definition = |id: usize| {
            let token = &self.tokens[id];
            (token.clone(), json!({"id": token, "ids": [id], "tokens": [token]}))
        };
        let pair = [around("A", 0), around("B", 1)].concat();
        let tokens: Map<String, Value> = bos.into_iter().chain(eos).map(definition).collect();
        json!({
            "type": "TemplateProcessing",
            "single": around("A", 0),
            "pair": pair,
            "special_tokens": tokens,
        })
    }

    fn config_json(&self, metadata: &Metadata<'_>) -> Result<Value> {
        let decoder: Map<String, Value> = {
            let all = self.tokens.iter().zip(&self.types).enumerate();
            all.filter(|(_, (_, kind))| kind.is_added())
                .map(|(id, (token, kind))| (id.to_string(), added_token(None, token, kind.is_special())))
                .collect()
        };
        let mut config = Map::new();
        config.insert("added_tokens_decoder".to_owned(), decoder.into());
        for (name, id) in [
            ("bos_token", self.bos),
            ("eos_token", self.eos),
            ("unk_token", self.unknown),
            ("pad_token", self.padding),
        ] {
            config.extend(id.map(|id| (name.to_owned(), self.tokens[id].clone().into())));
        }
        config.insert("add_bos_token".to_owned(), self.add_bos.into());
        config.insert("add_eos_token".to_owned(), self.add_eos.into());
        config.insert("clean_up_tokenization_spaces".to_owned(), false.into());
        config
            .extend(metadata.context_length()?.map(|length| ("model_max_length".to_owned(), length.into())));
        config.extend(metadata.chat_template()?.map(|template| ("chat_template".to_owned(), template)));
        config.insert("tokenizer_class".to_owned(), "PreTrainedTokenizerFast".into());
        Ok(config.into())
    }
}

fn bpe(vocab: Value, merges: Value) -> Value {
    json!({
        "type": "BPE",
        "dropout": null,
        "unk_token": null,
        "continuing_subword_prefix": null,
        "end_of_word_suffix": null,
        "fuse_unk": false,
        "byte_fallback": false,
        "ignore_merges": false,
        "vocab": vocab,
        "merges": merges,
    })
}

fn added_token(id: Option<usize>, content: &str, special: bool) -> Value {
    let mut token = Map::new();
    token.extend(id.map(|id| ("id".to_owned(), id.into())));
    token.insert("content".to_owned(), content.into());
    for setting in ["single_word", "lstrip", "rstrip", "normalized"] {
        token.insert(setting.to_owned(), false.into());
    }
    token.insert("special".to_owned(), special.into());
    token.into()
}
