//! Owns the model's chat template: where it is found, and how messages become a prompt. Templates are written for
//! transformers (Jinja2 with Python values), so that is what they get.

use std::path::Path;

use anyhow::Context;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value as Jinja};
use minijinja::{Environment, ErrorKind};
use regex::Regex;
use serde_json::{Map, Value};

mod clock;
mod json;
#[cfg(test)]
mod tests;

/// One model's templates, compiled.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token` and the like, as the templates see them.
    special_tokens: Map<String, Value>,
}

/// What a template is given.
pub struct RenderRequest<'a> {
    /// A list of messages.
    pub messages: &'a Value,
    pub tools: Option<&'a Value>,
    pub add_generation_prompt: bool,
    /// The prompt ends with the last message's own text, to be continued.
    pub continue_final_message: bool,
    /// Further variables (`chat_template_kwargs`).
    pub kwargs: &'a Map<String, Value>,
}

/// Why messages cannot be rendered: the request's fault, as far as anyone can tell.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template itself refused.
    #[error("{0}")]
    Raised(String),
    #[error("the chat template cannot render these messages: {0}")]
    Failed(#[from] minijinja::Error),
    #[error("continue_final_message does not go with add_generation_prompt")]
    ContinuesAndStarts,
    #[error("continue_final_message needs a last message with text")]
    NothingToContinue,
    #[error("the chat template changes the last message, so it cannot be continued")]
    FinalMessageChanged,
}

/// Carries `raise_exception`'s message through the template engine.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

const DEFAULT: &str = "default";
const WITH_TOOLS: &str = "tool_use";

impl ChatTemplate {
    /// Finds the template of a model folder: `chat_template.jinja`, else `chat_template.json`, else the entry of
    /// `tokenizer_config.json` (a string, or a list of named ones). `None` where there is none.
    pub fn load(tokenizer_dir: &Path) -> anyhow::Result<Option<Self>> {
        let config = read_json(&tokenizer_dir.join("tokenizer_config.json"))?;
        let mut special_tokens = Map::new();
        collect_special_tokens(
            &read_json(&tokenizer_dir.join("special_tokens_map.json"))?,
            &mut special_tokens,
        );
        collect_special_tokens(&config, &mut special_tokens);
        let templates = match read_text(&tokenizer_dir.join("chat_template.jinja"))? {
            Some(template) => vec![(DEFAULT.to_owned(), template)],
            None => {
                let own_file = read_json(&tokenizer_dir.join("chat_template.json"))?;
                let found = named_templates(&own_file["chat_template"])?;
                if found.is_empty() { named_templates(&config["chat_template"])? } else { found }
            }
        };
        if templates.is_empty() {
            return Ok(None);
        }
        Self::compile(templates, special_tokens).map(Some).context("the model's chat template")
    }

    fn compile(
        templates: Vec<(String, String)>,
        special_tokens: Map<String, Value>,
    ) -> Result<Self, minijinja::Error> {
        let mut environment = environment()?;
        let only = (templates.len() == 1).then_some(DEFAULT);
        for (name, source) in templates {
            let name = only.map_or(name, str::to_owned);
            environment.add_template_owned(name, without_generation_tags(&source))?;
        }
        environment.get_template(DEFAULT)?;
        Ok(Self { environment, special_tokens })
    }

    /// The prompt for these messages.
    pub fn render(&self, request: &RenderRequest<'_>) -> Result<String, TemplateError> {
        if request.continue_final_message && request.add_generation_prompt {
            return Err(TemplateError::ContinuesAndStarts);
        }
        let template = match request.tools {
            Some(_) => self.environment.get_template(WITH_TOOLS),
            None => self.environment.get_template(DEFAULT),
        };
        let template = template.or_else(|_| self.environment.get_template(DEFAULT))?;
        let text = template.render(self.context(request)).map_err(refusal)?;
        if request.continue_final_message { through_final_message(text, request.messages) } else { Ok(text) }
    }

    fn context(&self, request: &RenderRequest<'_>) -> Jinja {
        let mut variables = self.special_tokens.clone();
        variables.extend(request.kwargs.clone());
        variables.insert("messages".into(), without_null_content(request.messages));
        variables.insert("tools".into(), request.tools.cloned().unwrap_or_default());
        variables.insert("documents".into(), variables.get("documents").cloned().unwrap_or_default());
        variables.insert("add_generation_prompt".into(), request.add_generation_prompt.into());
        Jinja::from(Serde(variables))
    }
}

/// Jinja2 as transformers sets it up.
fn environment() -> Result<Environment<'static>, minijinja::Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", json::tojson);
    environment.add_function("raise_exception", |message: String| -> Result<Jinja, minijinja::Error> {
        let error = minijinja::Error::new(ErrorKind::InvalidOperation, "raised by the template");
        Err(error.with_source(Raised(message)))
    });
    environment.add_function("strftime_now", |format: String| {
        clock::strftime(&format, std::time::SystemTime::now())
            .map_err(|error| minijinja::Error::new(ErrorKind::InvalidOperation, error))
    });
    Ok(environment)
}

/// transformers' `{% generation %}` marks the assistant's tokens for training and changes no text.
fn without_generation_tags(source: &str) -> String {
    let tag = Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("the pattern is valid");
    let replaced = tag.replace_all(source, |tag: &regex::Captures<'_>| {
        let block = if tag.get(2).is_some() { "endif" } else { "if true" };
        format!("{{%{} {block} {}%}}", &tag[1], &tag[3])
    });
    replaced.into_owned()
}

fn refusal(error: minijinja::Error) -> TemplateError {
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return TemplateError::Raised(message.clone());
        }
        cause = inner.source();
    }
    TemplateError::Failed(error)
}

/// A message whose content is null has none, as in transformers 5.
fn without_null_content(messages: &Value) -> Value {
    let mut messages = messages.clone();
    for message in messages.as_array_mut().into_iter().flatten() {
        if let Value::Object(message) = message
            && message.get("content").is_some_and(Value::is_null)
        {
            message.shift_remove("content");
        }
    }
    messages
}

/// Cuts the prompt behind the last message's text; a template may have trimmed that text.
fn through_final_message(mut prompt: String, messages: &Value) -> Result<String, TemplateError> {
    let last = messages.as_array().and_then(|messages| messages.last());
    let text = last.and_then(|message| final_text(&message["content"])).unwrap_or_default();
    let trimmed = text.trim();
    if trimmed.is_empty() {
        return Err(TemplateError::NothingToContinue);
    }
    let start = prompt.rfind(trimmed).ok_or(TemplateError::FinalMessageChanged)?;
    let untrimmed_end = text.trim_start();
    let kept = if prompt[start..].starts_with(untrimmed_end) { untrimmed_end } else { trimmed };
    prompt.truncate(start + kept.len());
    Ok(prompt)
}

/// The text of a message's content: a string, or the last text part of a list.
fn final_text(content: &Value) -> Option<&str> {
    match content {
        Value::Array(parts) => parts.iter().rev().find_map(|part| part["text"].as_str()),
        content => content.as_str(),
    }
}

fn named_templates(entry: &Value) -> anyhow::Result<Vec<(String, String)>> {
    match entry {
        Value::Null => Ok(Vec::new()),
        Value::String(template) => Ok(vec![(DEFAULT.to_owned(), template.clone())]),
        Value::Array(entries) => entries
            .iter()
            .map(|entry| match (entry["name"].as_str(), entry["template"].as_str()) {
                (Some(name), Some(template)) => Ok((name.to_owned(), template.to_owned())),
                _ => anyhow::bail!("an entry of chat_template has no name or no template"),
            })
            .collect(),
        _ => anyhow::bail!("chat_template is neither a string nor a list of named templates"),
    }
}

/// Every `…_token` entry, written as a string or as a map with `content`, and the list of additional ones.
fn collect_special_tokens(config: &Value, tokens: &mut Map<String, Value>) {
    for (name, entry) in config.as_object().into_iter().flatten() {
        if name.ends_with("_token")
            && let Some(content) = token_content(entry)
        {
            tokens.insert(name.clone(), content.into());
        }
    }
    if let Some(additional) = config["additional_special_tokens"].as_array() {
        let contents: Vec<&str> = additional.iter().filter_map(token_content).collect();
        tokens.insert("additional_special_tokens".into(), contents.into());
    }
}

fn token_content(entry: &Value) -> Option<&str> {
    entry.as_str().or_else(|| entry["content"].as_str())
}

fn read_json(path: &Path) -> anyhow::Result<Value> {
    match read_text(path)? {
        Some(text) => serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display())),
        None => Ok(Value::Null),
    }
}

/// A file's text; `None` where there is no such file.
fn read_text(path: &Path) -> anyhow::Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}
