//! Owns `/generate`: SGLang's own request and response.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use futures::future::try_join_all;
use proto::TokenId;
use serde_json::{Map, Value, json};

use super::error::{ApiError, ApiJson, Style, json_response};
use super::fields::{PerPrompt, Prompts, first_used};
use super::sse::{self, Chunks};
use crate::app::App;
use crate::intake::{Ask, Job, LogprobRequest};
use crate::mailbox::Update;
use crate::refusal::Refusal;
use crate::registry::Ticket;
use crate::reply::{Answer, MetaStyle};
use crate::sampling::{RawSampling, max_draft_tokens};
use crate::tokenize::Codec;

/// Fields with an effect, and those that may be given because leaving them out changes nothing here.
const KNOWN: &[&str] = &[
    "text",
    "input_ids",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_text_in_logprobs",
    "stream",
    "rid",
    "log_metrics",
    "return_prompt_token_ids",
    "extra_key",
    "cache_salt",
    "speculative",
    "no_logs",
    "conversation_id",
    "external_trace_header",
    "model",
];

/// Fields that SGLang has and this server does not; unused values (null, false, empty) pass.
const UNSUPPORTED: &[&str] = &[
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "modalities",
    "return_flat_raw_top_logprobs",
    "return_flat_raw_output_top_logprobs",
    "return_flat_raw_top_logprobs_b64",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "return_hidden_states",
    "return_routed_experts",
    "return_indexer_topk",
    "return_entropy",
    "return_bytes",
    "session_id",
    "session_params",
    "lora_path",
    "custom_logit_processor",
    "priority",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "background",
    "custom_labels",
    "require_reasoning",
    "max_thinking_tokens",
    "kv_hints",
];

pub(super) async fn generate(
    State(app): State<Arc<App>>,
    ApiJson(body): ApiJson<Map<String, Value>>,
) -> Response {
    match answer(&app, &body).await {
        Ok(response) => response,
        Err(error) => error.respond(Style::Native),
    }
}

async fn answer(app: &Arc<App>, body: &Map<String, Value>) -> Result<Response, ApiError> {
    app.check_serving()?;
    check_fields(body)?;
    let (asks, listed) = read_asks(app, body)?;
    let stream = flag(body, "stream")?;
    let group = match (&listed, body.get("rid")) {
        (Some(_), Some(Value::String(rid))) => Some(rid.clone()),
        _ => None,
    };
    let views: Vec<_> = asks.iter().map(|ask| ask.logprobs.clone()).collect();
    let admitted = app.intake.admit(Job { asks, stream, group, probe: false }, app.codec()?).await?;
    let texts = flag(body, "return_text_in_logprobs")?;
    let prompt_ids = flag(body, "return_prompt_token_ids")?;
    let batch = listed.is_some() || admitted.n > 1;
    let answers = admitted.tickets.iter().enumerate().map(|(index, ticket)| {
        let prompt = index / admitted.n;
        One {
            answer: Answer::new(ticket.name().clone(), admitted.prompts[prompt].len()),
            logprobs: views[prompt].clone(),
            prompt_ids: prompt_ids.then(|| Arc::clone(&admitted.prompts[prompt])),
        }
    });
    let render = Render {
        speculative: app.config.spec.is_some(),
        has_text: !app.config.server.skip_tokenizer_init,
        token_texts: if texts { app.codec()?.cloned() } else { None },
    };
    if stream {
        let incremental = app.config.server.incremental_streaming_output;
        let chunks = NativeChunks { answers: answers.collect(), render, batch, incremental };
        return Ok(sse::respond(admitted.tickets, chunks).await?);
    }
    let answers: Vec<One> = answers.collect();
    let waiting = admitted.tickets.into_iter().zip(answers).map(|(ticket, one)| one.complete(ticket));
    let answers = try_join_all(waiting).await?;
    let mut values: Vec<Value> = answers.iter().map(|one| render.value(one)).collect();
    let body = if batch { Value::Array(values) } else { values.swap_remove(0) };
    Ok(json_response(StatusCode::OK, &body))
}

fn check_fields(body: &Map<String, Value>) -> Result<(), ApiError> {
    if let Some(name) = first_used(body, UNSUPPORTED) {
        return Err(ApiError::Contract(format!("Field '{name}' is not supported by this server.")));
    }
    let unknown =
        body.keys().find(|key| !KNOWN.contains(&key.as_str()) && !UNSUPPORTED.contains(&key.as_str()));
    match unknown {
        Some(name) => Err(ApiError::Contract(format!("Unknown field '{name}'."))),
        None => Ok(()),
    }
}

fn flag(body: &Map<String, Value>, name: &str) -> Result<bool, Refusal> {
    PerPrompt { name, value: body.get(name), listed: None }.scalar(0).map(Option::unwrap_or_default)
}

fn read_asks(app: &App, body: &Map<String, Value>) -> Result<(Vec<Ask>, Option<usize>), Refusal> {
    let given = |name: &str| body.get(name).filter(|value| !value.is_null());
    let prompts = match (given("text"), given("input_ids")) {
        (Some(text @ (Value::String(_) | Value::Array(_))), None) => text_prompts(text)?,
        (Some(_), None) => return Err(Refusal::invalid("text must be a string or a list of strings.")),
        (None, Some(ids)) if !ids.is_string() => Prompts::read("input_ids", ids)?,
        (None, Some(_)) => return Err(Refusal::invalid("input_ids must be a list of token ids.")),
        _ => return Err(Refusal::invalid("Either text, input_ids or input_embeds should be provided.")),
    };
    let (prompts, listed) = prompts.into_list();
    let max_draft_tokens = max_draft_tokens(body.get("speculative"))?;
    let read = |(index, prompt)| {
        let field = |name| PerPrompt { name, value: body.get(name), listed };
        let sampling: Option<Map<String, Value>> = field("sampling_params").scalar(index)?;
        let sampling = RawSampling::from_object(&sampling.unwrap_or_default())?;
        // One name for a whole batch is the group's, not the prompt's.
        let one_name = listed.is_some() && body.get("rid").is_some_and(Value::is_string);
        let rid: Option<String> = if one_name { None } else { field("rid").scalar(index)? };
        let extra_key: Option<String> = field("extra_key").scalar(index)?;
        let salt: Option<String> = field("cache_salt").scalar(index)?;
        Ok(Ask {
            prompt,
            sampling: sampling.validate(app.intake.limits())?,
            logprobs: LogprobRequest {
                return_logprob: field("return_logprob").scalar(index)?.unwrap_or_default(),
                start_len: field("logprob_start_len").scalar(index)?,
                top_num: field("top_logprobs_num").scalar(index)?.unwrap_or_default(),
                token_ids: field("token_ids_logprob").list(index)?.unwrap_or_default(),
            },
            rid: rid.filter(|rid| !rid.is_empty()),
            extra_key: join_keys(extra_key, salt),
            max_draft_tokens,
            log_metrics: field("log_metrics").scalar(index)?.unwrap_or(true),
        })
    };
    Ok((prompts.into_iter().enumerate().map(read).collect::<Result<_, Refusal>>()?, listed))
}

fn text_prompts(text: &Value) -> Result<Prompts, Refusal> {
    match text.as_array() {
        Some(items) if items.is_empty() => Err(Refusal::invalid("Prompt cannot be empty")),
        Some(items) if !items.iter().all(Value::is_string) => {
            Err(Refusal::invalid("text must be a string or a list of strings."))
        }
        _ => Prompts::read("text", text),
    }
}

/// Both fields name a part of the prefix cache; together they name their own part.
pub(super) fn join_keys(extra_key: Option<String>, cache_salt: Option<String>) -> Option<String> {
    match (extra_key, cache_salt) {
        (Some(key), Some(salt)) => Some(format!("{key}\u{1f}{salt}")),
        (key, salt) => key.or(salt),
    }
}

/// One answer in the making, with what its client wants to see of it.
struct One {
    answer: Answer,
    logprobs: LogprobRequest,
    prompt_ids: Option<Arc<Vec<TokenId>>>,
}

impl One {
    async fn complete(mut self, ticket: Ticket) -> Result<Self, Refusal> {
        self.answer.complete(ticket).await?;
        Ok(self)
    }
}

struct Render {
    speculative: bool,
    has_text: bool,
    token_texts: Option<Codec>,
}

impl Render {
    fn value(&self, one: &One) -> Value {
        let mut value = Map::new();
        if self.has_text {
            value.insert("text".to_owned(), json!(one.answer.text));
        }
        value.insert("output_ids".to_owned(), json!(one.answer.output_ids));
        if let Some(ids) = &one.prompt_ids {
            value.insert("prompt_token_ids".to_owned(), json!(ids));
        }
        let style = MetaStyle {
            speculative: self.speculative,
            return_logprob: one.logprobs.return_logprob,
            has_top_logprobs: one.logprobs.top_num > 0,
            has_token_ids: !one.logprobs.token_ids.is_empty(),
            token_texts: self.token_texts.as_ref(),
        };
        value.insert("meta_info".to_owned(), one.answer.meta_info(style));
        Value::Object(value)
    }
}

/// Chunks are whole responses, holding everything so far or, incrementally, what is new.
struct NativeChunks {
    answers: Vec<One>,
    render: Render,
    batch: bool,
    incremental: bool,
}

impl Chunks for NativeChunks {
    fn update(&mut self, index: usize, update: Update) -> Result<Vec<Value>, Refusal> {
        let one = &mut self.answers[index];
        if self.incremental {
            one.answer.clear_parts();
        }
        one.answer.extend(update.delta, update.end);
        let mut value = self.render.value(one);
        if self.batch {
            value["index"] = json!(index);
        }
        Ok(vec![value])
    }

    fn finish(&mut self) -> Vec<Value> {
        Vec::new()
    }
}
