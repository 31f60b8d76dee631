//! Owns the routes about the server itself: information, cache, aborts, tokenizer.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use proto::metrics::Format;
use proto::{RequestId, TokenId};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::error::{ApiError, ApiJson, Style, json_response};
use super::openai::check_messages;
use crate::app::App;
use crate::refusal::{Refusal, invalid};
use crate::sampling::token_ids;
use crate::tokenize::{Codec, SpecialTokens};
use proto::text::chat_template::RenderRequest;

/// How long `/server_info` waits for the scheduler; it answers between steps.
const STATE_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_FLUSH_TIMEOUT_S: f64 = 600.0;
/// Settings that must not be told.
const SECRETS: &[&str] = &["api_key", "admin_api_key", "ssl_keyfile_password"];

pub(super) async fn model_info(State(app): State<Arc<App>>) -> Response {
    let config = &app.config;
    let arg = |name: &str| config.server_args.get(name).cloned().unwrap_or(Value::Null);
    let tokenizer_path = match arg("tokenizer_path") {
        Value::Null => json!(config.model.model_path),
        path => path,
    };
    let info = json!({
        "model_path": config.model.model_path,
        "served_model_name": config.server.served_model_name,
        "tokenizer_path": tokenizer_path,
        "is_generation": true,
        "preferred_sampling_params": null,
        "weight_version": "default",
        "load_format": arg("load_format"),
        "reasoning_parser": null,
        "tool_call_parser": null,
        "disaggregation_mode": "null",
        "has_image_understanding": false,
        "has_audio_understanding": false,
        "model_type": config.model.model_type,
        "architectures": config.model.architectures,
    });
    json_response(StatusCode::OK, &info)
}

pub(super) async fn server_info(State(app): State<Arc<App>>) -> Response {
    let mut args: Map<String, Value> = app.config.server_args.clone();
    SECRETS.iter().for_each(|secret| {
        args.remove(*secret);
    });
    let view = app.scheduler.borrow().clone();
    let mut info = args.clone();
    if let Some(scheduler) = &view.info {
        merge(&mut info, &json!(scheduler));
    }
    info.insert("status".to_owned(), json!(if app.check_ready().is_ok() { "ready" } else { "starting" }));
    let states = match app.bridge.internal_state(STATE_TIMEOUT).await {
        Ok(state) => {
            args.insert("world_size".to_owned(), json!(1));
            merge(&mut args, &json!(state));
            vec![Value::Object(args)]
        }
        Err(_) => Vec::new(),
    };
    info.insert("internal_states".to_owned(), Value::Array(states));
    info.insert("version".to_owned(), json!(env!("CARGO_PKG_VERSION")));
    info.insert("frontend".to_owned(), json!("rust"));
    json_response(StatusCode::OK, &Value::Object(info))
}

fn merge(into: &mut Map<String, Value>, from: &Value) {
    into.extend(from.as_object().into_iter().flatten().map(|(key, value)| (key.clone(), value.clone())));
}

#[derive(Debug, Deserialize)]
pub(super) struct FlushQuery {
    timeout: Option<f64>,
}

pub(super) async fn flush_cache(State(app): State<Arc<App>>, Query(query): Query<FlushQuery>) -> Response {
    let timeout = query.timeout.unwrap_or(0.0);
    if !timeout.is_finite() || !(0.0..=MAX_FLUSH_TIMEOUT_S).contains(&timeout) {
        let message = format!("timeout must be in [0, {MAX_FLUSH_TIMEOUT_S}] seconds.\n");
        return (StatusCode::BAD_REQUEST, message).into_response();
    }
    match app.bridge.flush_cache(Duration::from_secs_f64(timeout)).await {
        Ok(reply) if reply.success => (
            StatusCode::OK,
            "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting \
             requests, the operation will not be performed.)\n",
        )
            .into_response(),
        Ok(reply) => (StatusCode::BAD_REQUEST, reply.message).into_response(),
        Err(refusal) => (refusal.status(), refusal.to_string()).into_response(),
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct AbortBody {
    rid: Option<String>,
    abort_all: Option<bool>,
}

/// Names are matched exactly; a name that nothing has, or that has ended, is no error.
pub(super) async fn abort_request(
    State(app): State<Arc<App>>,
    ApiJson(body): ApiJson<AbortBody>,
) -> Response {
    let outcome = match body.rid.filter(|rid| !rid.is_empty()) {
        _ if body.abort_all == Some(true) => app.bridge.abort(None),
        Some(rid) => app.bridge.abort(Some(&RequestId(rid))),
        None => Err(Refusal::invalid("rid cannot be empty; use abort_all to abort every request.")),
    };
    match outcome {
        Ok(()) => StatusCode::OK.into_response(),
        Err(refusal) => ApiError::from(refusal).respond(Style::Native),
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct TokenizeBody {
    prompt: Option<Value>,
    messages: Option<Vec<Value>>,
    add_special_tokens: Option<bool>,
    add_generation_prompt: Option<bool>,
}

pub(super) async fn tokenize(State(app): State<Arc<App>>, ApiJson(body): ApiJson<TokenizeBody>) -> Response {
    match tokens_of(&app, body).await {
        Ok(value) => json_response(StatusCode::OK, &value),
        Err(refusal) => ApiError::from(refusal).respond(Style::OpenAi),
    }
}

async fn tokens_of(app: &App, body: TokenizeBody) -> Result<Value, Refusal> {
    let codec = need_codec(app)?;
    let special = match body.add_special_tokens.unwrap_or(body.messages.is_none()) {
        true => SpecialTokens::Add,
        false => SpecialTokens::AsWritten,
    };
    let max_model_len = app.config.model.context_length;
    let prompt = match (body.prompt, body.messages) {
        (Some(prompt), None) => prompt,
        (None, Some(messages)) => {
            let Some(template) = app.template()? else { return invalid!("The model has no chat template.") };
            let request = RenderRequest {
                messages: &Value::Array(check_messages(&messages)?),
                tools: None,
                add_generation_prompt: body.add_generation_prompt.unwrap_or(true),
                continue_final_message: false,
                kwargs: &Map::new(),
            };
            Value::String(template.render(&request).map_err(|error| Refusal::Invalid(error.to_string()))?)
        }
        _ => return invalid!("Exactly one of prompt and messages must be given."),
    };
    match prompt {
        Value::String(text) => {
            let ids = codec.encode(text, special).await?;
            Ok(json!({"tokens": ids, "count": ids.len(), "max_model_len": max_model_len}))
        }
        Value::Array(texts) => {
            let (mut lists, mut counts) = (Vec::new(), Vec::new());
            for text in texts {
                let Value::String(text) = text else { return invalid!("prompt must hold strings.") };
                let ids = codec.encode(text, special).await?;
                counts.push(ids.len());
                lists.push(ids);
            }
            Ok(json!({"tokens": lists, "count": counts, "max_model_len": max_model_len}))
        }
        _ => invalid!("prompt must be a string or a list of strings."),
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct DetokenizeBody {
    tokens: Vec<Value>,
    skip_special_tokens: Option<bool>,
}

pub(super) async fn detokenize(
    State(app): State<Arc<App>>,
    ApiJson(body): ApiJson<DetokenizeBody>,
) -> Response {
    match text_of(&app, body).await {
        Ok(value) => json_response(StatusCode::OK, &value),
        Err(refusal) => ApiError::from(refusal).respond(Style::OpenAi),
    }
}

async fn text_of(app: &App, body: DetokenizeBody) -> Result<Value, Refusal> {
    let codec = need_codec(app)?;
    let skip = body.skip_special_tokens.unwrap_or(true);
    let ids = |items: &[Value]| -> Result<Vec<TokenId>, Refusal> {
        let numbers: Option<Vec<i64>> = items.iter().map(Value::as_i64).collect();
        match numbers {
            Some(numbers) => token_ids("tokens", &numbers, app.config.model.vocab_size),
            None => invalid!("tokens must be token ids, or lists of them."),
        }
    };
    if !body.tokens.first().is_some_and(Value::is_array) {
        return Ok(json!({"text": codec.decode(ids(&body.tokens)?, skip).await?}));
    }
    let mut texts = Vec::with_capacity(body.tokens.len());
    for list in &body.tokens {
        let Some(list) = list.as_array() else { return invalid!("tokens must not mix ids and lists.") };
        texts.push(codec.decode(ids(list)?, skip).await?);
    }
    Ok(json!({"text": texts}))
}

fn need_codec(app: &App) -> Result<&Codec, Refusal> {
    match app.codec()? {
        Some(codec) => Ok(codec),
        None => invalid!("The server runs with --skip-tokenizer-init and has no tokenizer."),
    }
}

/// The page of all processes' series, from snapshots: it never asks another process.
pub(super) async fn metrics(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let accepted: Vec<_> =
        headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    let format = Format::negotiate(Some(&accepted.join(",")));
    match tokio::task::spawn_blocking(move || app.metrics_page(format)).await {
        Ok(page) => ([(header::CONTENT_TYPE, format.content_type())], page).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error:#}\n")).into_response(),
    }
}
