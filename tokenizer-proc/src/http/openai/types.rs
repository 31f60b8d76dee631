//! Owns what the OpenAI endpoints share: the fields both read, sampling parameters under OpenAI's names, usage,
//! and the extensions under `sglext`.

use std::time::{SystemTime, UNIX_EPOCH};

use proto::{FinishReason, Matched};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::http::fields::first_used;
use crate::refusal::{Refusal, invalid};
use crate::reply::{Answer, spec_details};
use crate::sampling::RawSampling;

/// Fields that OpenAI or SGLang have and this server does not; unused values (null, false, empty) pass.
const UNSUPPORTED: &[&str] = &[
    "tools",
    "functions",
    "function_call",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "lora_path",
    "session_id",
    "session_params",
    "custom_logit_processor",
    "custom_params",
    "return_hidden_states",
    "return_routed_experts",
    "routed_dp_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "suffix",
    "audio",
    "prediction",
    "web_search_options",
    "priority",
];

/// Sampling parameters: OpenAI's name, SGLang's name.
const SAMPLING: &[(&str, &str)] = &[
    ("max_tokens", "max_new_tokens"),
    ("min_tokens", "min_new_tokens"),
    ("seed", "sampling_seed"),
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("top_k", "top_k"),
    ("min_p", "min_p"),
    ("frequency_penalty", "frequency_penalty"),
    ("presence_penalty", "presence_penalty"),
    ("repetition_penalty", "repetition_penalty"),
    ("stop", "stop"),
    ("stop_token_ids", "stop_token_ids"),
    ("stop_regex", "stop_regex"),
    ("ignore_eos", "ignore_eos"),
    ("skip_special_tokens", "skip_special_tokens"),
    ("spaces_between_special_tokens", "spaces_between_special_tokens"),
    ("no_stop_trim", "no_stop_trim"),
    ("n", "n"),
    ("logit_bias", "logit_bias"),
    ("stream_interval", "stream_interval"),
];

/// The fields both endpoints read, besides sampling.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Common {
    pub model: Option<String>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub best_of: Option<i64>,
    pub response_format: Option<Value>,
    pub extra_key: Option<String>,
    pub cache_salt: Option<String>,
    pub log_metrics: Option<bool>,
    pub speculative: Option<Value>,
    pub return_spec_tokens_details: Option<bool>,
    pub return_cached_tokens_details: Option<bool>,
    pub return_token_ids: Option<bool>,
    pub return_prompt_token_ids: Option<bool>,
    pub return_meta_info: Option<bool>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(super) struct StreamOptions {
    pub include_usage: Option<bool>,
    pub continuous_usage_stats: Option<bool>,
}

/// Refuses what cannot be honoured.
pub(super) fn check_fields(body: &Map<String, Value>, common: &Common) -> Result<(), Refusal> {
    if let Some(name) = first_used(body, UNSUPPORTED) {
        return invalid!("'{name}' is not supported by this server.");
    }
    let format = common.response_format.as_ref();
    let kind = format.map(|format| format.get("type").and_then(Value::as_str));
    match kind {
        None | Some(Some("text")) => {}
        Some(Some(kind @ ("json_object" | "json_schema" | "structural_tag"))) => {
            return invalid!("'response_format' of type '{kind}' is not supported by this server.");
        }
        Some(_) => {
            return invalid!(
                "response_format must be an object whose type is text, json_object, json_schema or structural_tag."
            );
        }
    }
    match common.best_of {
        None | Some(1) => Ok(()),
        Some(best_of) => invalid!("'best_of' above 1 is not supported by this server, got {best_of}."),
    }
}

/// Reads the sampling parameters; `defaults` fill in what the client left out.
pub(super) fn sampling(
    body: &Map<String, Value>,
    defaults: &Map<String, Value>,
) -> Result<RawSampling, Refusal> {
    let mut object = Map::new();
    for (theirs, ours) in SAMPLING {
        let given = body.get(*theirs).filter(|value| !value.is_null());
        if let Some(value) = given.or_else(|| defaults.get(*theirs)) {
            object.insert((*ours).to_owned(), value.clone());
        }
    }
    RawSampling::from_object(&object).map_err(|refusal| {
        let mut message = refusal.to_string();
        for (theirs, ours) in SAMPLING.iter().filter(|(theirs, ours)| theirs != ours) {
            message = message.replace(&format!("sampling_params.{ours}"), theirs);
        }
        Refusal::Invalid(message.replace("sampling_params.", ""))
    })
}

/// The request's name, if the client chose one for all of it or for each prompt.
pub(super) fn request_name(body: &Map<String, Value>, listed: Option<usize>) -> Result<Rids, Refusal> {
    match body.get("rid") {
        None | Some(Value::Null) => Ok(Rids::default()),
        Some(Value::String(rid)) if rid.is_empty() => Ok(Rids::default()),
        Some(Value::String(rid)) => Ok(Rids { group: Some(rid.clone()), each: Vec::new() }),
        Some(Value::Array(rids)) if listed == Some(rids.len()) => {
            let name = |rid: &Value| rid.as_str().filter(|rid| !rid.is_empty()).map(str::to_owned);
            match rids.iter().map(name).collect::<Option<Vec<_>>>() {
                Some(each) => Ok(Rids { group: None, each }),
                None => invalid!("rid must hold strings that are not empty."),
            }
        }
        Some(Value::Array(rids)) => {
            invalid!("rid has {} entries for {} prompts.", rids.len(), listed.unwrap_or(1))
        }
        Some(_) => invalid!("rid must be a string or a list of strings."),
    }
}

#[derive(Debug, Default)]
pub(super) struct Rids {
    pub group: Option<String>,
    pub each: Vec<String>,
}

/// What all parts of one response have in common.
#[derive(Debug, Clone)]
pub(super) struct Envelope {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
}

impl Envelope {
    pub(super) fn new(id: String, object: &'static str, model: Option<String>, app: &App) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        let model = model.unwrap_or_else(|| app.config.server.served_model_name.clone());
        Self { id, object, created, model }
    }

    /// One chunk of a stream.
    pub(super) fn chunk(&self, choices: Value, usage: Option<Value>) -> Value {
        json!({
            "id": self.id, "object": self.object, "created": self.created, "model": self.model,
            "choices": choices, "usage": usage,
        })
    }

    /// The whole answer.
    pub(super) fn whole(&self, choices: Value, usage: Value, extensions: Option<Value>) -> Value {
        let mut body = self.chunk(choices, Some(usage));
        body["metadata"] = json!({"weight_version": "default"});
        if let Some(extensions) = extensions {
            body["sglext"] = extensions;
        }
        body
    }
}

/// How usage and extensions are reported for one response.
#[derive(Debug, Clone, Copy)]
pub(super) struct Report {
    pub include_usage: bool,
    pub continuous_usage: bool,
    pub cached_tokens: bool,
    pub cached_details: bool,
    pub spec_details: bool,
    /// Answers per prompt.
    pub n: usize,
}

impl Report {
    pub(super) fn new(common: &Common, n: usize, app: &App) -> Self {
        let options = common.stream_options.unwrap_or_default();
        Self {
            include_usage: options.include_usage.unwrap_or_default(),
            continuous_usage: options.continuous_usage_stats.unwrap_or_default(),
            cached_tokens: app.config.server.enable_cache_report,
            cached_details: common.return_cached_tokens_details.unwrap_or_default(),
            spec_details: common.return_spec_tokens_details.unwrap_or_default() && app.config.spec.is_some(),
            n,
        }
    }

    /// Usage of all answers; each prompt counts once.
    pub(super) fn usage(&self, answers: &[&Answer]) -> Value {
        let firsts = || answers.iter().step_by(self.n.max(1));
        let prompt: u64 = firsts().map(|answer| u64::from(answer.progress.prompt_tokens)).sum();
        let cached: u64 = firsts().map(|answer| u64::from(answer.progress.cached_tokens)).sum();
        let made: u64 = answers.iter().map(|answer| u64::from(answer.progress.completion_tokens)).sum();
        json!({
            "prompt_tokens": prompt,
            "total_tokens": prompt + made,
            "completion_tokens": made,
            "prompt_tokens_details": self.cached_tokens.then(|| json!({"cached_tokens": cached})),
            "reasoning_tokens": 0,
            "completion_tokens_details": null,
        })
    }

    /// Usage so far, for one choice's chunk.
    pub(super) fn chunk_usage(&self, answer: &Answer) -> Option<Value> {
        self.continuous_usage.then(|| self.usage(&[answer]))
    }

    /// The usage chunk at the end of a stream, without the fields that are null.
    pub(super) fn final_usage(&self, answers: &[&Answer]) -> Option<Value> {
        self.include_usage.then(|| {
            let mut usage = self.usage(answers);
            if let Some(fields) = usage.as_object_mut() {
                fields.retain(|_, value| !value.is_null());
            }
            usage
        })
    }

    /// `sglext`, if the client asked for anything in it: an object for one answer, a list for several.
    pub(super) fn extensions(&self, answers: &[&Answer]) -> Option<Value> {
        fn one_or_list(mut values: Vec<Value>) -> Value {
            if values.len() == 1 { values.swap_remove(0) } else { Value::Array(values) }
        }
        let mut extensions = Map::new();
        if self.spec_details {
            let details = answers.iter().map(|answer| {
                Value::Object(spec_details(&answer.progress.spec, answer.progress.completion_tokens))
            });
            extensions.insert("spec_tokens_details".to_owned(), one_or_list(details.collect()));
        }
        if self.cached_details {
            let details =
                answers.iter().map(|answer| json!({"device": answer.progress.cached_tokens, "host": 0}));
            extensions.insert("cached_tokens_details".to_owned(), one_or_list(details.collect()));
        }
        (!extensions.is_empty()).then_some(Value::Object(extensions))
    }
}

/// What ended a choice, in OpenAI's words.
pub(super) fn finish_fields(answer: &Answer) -> (Value, Value) {
    let Some(reason) = answer.finish_reason() else { return (Value::Null, Value::Null) };
    let matched = match reason {
        FinishReason::Stop { matched: Matched::Token(id) } => json!(id),
        FinishReason::Stop { matched: Matched::Str(text) | Matched::Regex(text) } => json!(text),
        _ => Value::Null,
    };
    (json!(reason.kind()), matched)
}

impl Envelope {
    /// The chunks after the last choice: extensions, then usage, each if asked for.
    pub(super) fn closing(&self, report: &Report, answers: &[&Answer]) -> Vec<Value> {
        let extensions = report.extensions(answers).map(|extensions| {
            let mut chunk = self.chunk(json!([]), None);
            chunk["sglext"] = extensions;
            chunk
        });
        let usage = report.final_usage(answers).map(|usage| self.chunk(json!([]), Some(usage)));
        extensions.into_iter().chain(usage).collect()
    }
}
