//! Owns the prompts: the file they come in, and how a conversation becomes ids by the model's own chat template.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use proto::text::chat_template::{ChatTemplate, RenderRequest};
use proto::{TokenBytes, TokenId};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;

/// One line of the prompts file.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Prompt {
    pub id: String,
    #[serde(default)]
    pub split: Split,
    /// What kind of request it is; those that contain "code" are measured apart.
    #[serde(default)]
    pub task: String,
    pub messages: Vec<Value>,
}

/// What a prompt is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Split {
    #[default]
    Train,
    /// Never trained on; the head is measured on these.
    Heldout,
}

#[derive(Debug, Clone)]
pub(super) struct PromptFile {
    pub prompts: Vec<Prompt>,
}

impl PromptFile {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let parse = |(at, line): (usize, &str)| {
            serde_json::from_str(line).with_context(|| format!("{} line {}", path.display(), at + 1))
        };
        let prompts = lines.map(parse).collect::<Result<Vec<Prompt>>>()?;
        if prompts.is_empty() {
            bail!("{} has no prompts", path.display());
        }
        Ok(Self { prompts })
    }

    pub(super) fn of(&self, split: Split) -> impl Iterator<Item = &Prompt> {
        self.prompts.iter().filter(move |prompt| prompt.split == split)
    }
}

/// The model's chat template and tokenizer.
pub(super) struct ChatCodec {
    template: ChatTemplate,
    tokenizer: Tokenizer,
    bytes: TokenBytes,
    end_ids: Vec<TokenId>,
}

impl ChatCodec {
    pub(super) fn load(dir: &Path) -> Result<Self> {
        let shown = dir.display();
        let template = ChatTemplate::load(dir)?
            .with_context(|| format!("{shown} has no chat template, and prompts are messages"))?;
        let tokenizer =
            Tokenizer::from_file(dir.join("tokenizer.json")).map_err(|error| anyhow!("{shown}: {error}"))?;
        let bytes = TokenBytes::load(dir).with_context(|| format!("the vocabulary in {shown}"))?;
        let end_ids = end_ids(dir, &tokenizer)?;
        Ok(Self { template, tokenizer, bytes, end_ids })
    }

    /// Tokens that end an answer.
    pub(super) fn end_ids(&self) -> Vec<TokenId> {
        self.end_ids.clone()
    }

    /// Ids of a conversation, up to where the next answer begins.
    pub(super) fn encode(&self, messages: &[Value]) -> Result<Vec<TokenId>> {
        self.ids(&self.render(messages, true)?)
    }

    /// What follows the text of `answer`, which `messages` called for, when the user says `next`: the end of the
    /// answer, the user's turn, and the begin of the next answer. Nothing if the template rewrites what was said.
    pub(super) fn turn(
        &self,
        messages: &[Value],
        answer: &str,
        next: &str,
    ) -> Result<Option<(Vec<Value>, Vec<TokenId>)>> {
        let said = self.render(messages, true)? + answer;
        let mut messages = messages.to_vec();
        messages.push(json!({"role": "assistant", "content": answer}));
        messages.push(json!({"role": "user", "content": next}));
        let whole = self.render(&messages, true)?;
        match whole.strip_prefix(&said) {
            Some(rest) => Ok(Some((messages, self.ids(rest)?))),
            None => Ok(None),
        }
    }

    pub(super) fn decode(&self, ids: &[TokenId]) -> String {
        self.bytes.decode(ids, true)
    }

    fn render(&self, messages: &[Value], add_generation_prompt: bool) -> Result<String> {
        let request = RenderRequest {
            messages: &Value::Array(messages.to_vec()),
            tools: None,
            add_generation_prompt,
            continue_final_message: false,
            kwargs: &Map::new(),
        };
        Ok(self.template.render(&request)?)
    }

    fn ids(&self, text: &str) -> Result<Vec<TokenId>> {
        let encoding = self.tokenizer.encode_fast(text, false).map_err(|error| anyhow!("{error}"))?;
        Ok(encoding.get_ids().to_vec())
    }
}

/// The end token of the tokenizer, and those of `generation_config.json`.
fn end_ids(dir: &Path, tokenizer: &Tokenizer) -> Result<Vec<TokenId>> {
    let read = |name: &str| -> Result<Value> {
        match std::fs::read(dir.join(name)) {
            Ok(text) => serde_json::from_slice(&text).with_context(|| name.to_owned()),
            Err(_) => Ok(Value::Null),
        }
    };
    let config = read("tokenizer_config.json")?;
    let name = config["eos_token"].as_str().or_else(|| config["eos_token"]["content"].as_str());
    let mut ids: Vec<TokenId> = name.and_then(|name| tokenizer.token_to_id(name)).into_iter().collect();
    let listed = read("generation_config.json")?["eos_token_id"].clone();
    let listed = listed.as_array().cloned().unwrap_or_else(|| vec![listed]);
    ids.extend(listed.iter().filter_map(Value::as_u64).map(|id| id as TokenId));
    ids.sort_unstable();
    ids.dedup();
    if ids.is_empty() {
        bail!("{} names no end token", dir.display());
    }
    Ok(ids)
}
