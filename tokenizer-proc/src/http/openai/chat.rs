//! Owns `/v1/chat/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use futures::future::try_join_all;
use proto::{TokenId, TopLogprobs};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::messages::check_messages;
use super::types::{Common, Envelope, Report, check_fields, finish_fields, request_name, sampling};
use crate::app::App;
use crate::http::error::{ApiError, ApiJson, Style, json_response, typed};
use crate::http::fields::Prompts;
use crate::http::native::join_keys;
use crate::http::sse::{self, Chunks};
use crate::intake::{Admitted, Ask, Job, LogprobRequest, Prompt};
use crate::mailbox::Update;
use crate::refusal::{Refusal, invalid};
use crate::reply::{Answer, MetaStyle};
use crate::sampling::{Budget, max_draft_tokens};
use crate::tokenize::Codec;
use proto::text::chat_template::RenderRequest;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Extra {
    messages: Option<Vec<Value>>,
    input_ids: Option<Value>,
    logprobs: Option<bool>,
    top_logprobs: Option<i64>,
    max_tokens: Option<i64>,
    max_completion_tokens: Option<i64>,
    tool_choice: Option<Value>,
    modalities: Option<Vec<String>>,
    continue_final_message: Option<bool>,
    add_generation_prompt: Option<bool>,
    reasoning_effort: Option<String>,
    chat_template: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
}

pub(crate) async fn chat_completions(State(app): State<Arc<App>>, ApiJson(body): ApiJson<Value>) -> Response {
    match answer(&app, &body).await {
        Ok(response) => response,
        Err(refusal) => ApiError::from(refusal).respond(Style::OpenAi),
    }
}

async fn answer(app: &Arc<App>, body: &Value) -> Result<Response, Refusal> {
    app.check_serving()?;
    let (common, extra): (Common, Extra) = (typed(body)?, typed(body)?);
    let Some(fields) = body.as_object() else { return invalid!("The body must be a JSON object.") };
    check_fields(fields, &common)?;
    check_extra(&extra)?;
    let prompt = prompt(app, extra.messages.as_deref(), extra.input_ids.as_ref(), &extra).await?;
    let (ask, group) = read_ask(app, fields, &common, &extra, prompt)?;
    let stream = common.stream.unwrap_or_default();
    let codec = app.codec()?.cloned();
    let job = Job { asks: vec![ask], stream, group, probe: false };
    let Admitted { group, tickets, prompts, n } = app.intake.admit(job, codec.as_ref()).await?;
    let object = if stream { "chat.completion.chunk" } else { "chat.completion" };
    let envelope = Envelope::new(group.0, object, common.model.clone(), app);
    let report = Report::new(&common, n, app);
    let choices = tickets.iter().enumerate().map(|(index, ticket)| Choice {
        index,
        answer: Answer::new(ticket.name().clone(), prompts[0].len()),
        logprobs: extra.logprobs.unwrap_or_default(),
        token_ids: common.return_token_ids.unwrap_or_default(),
        prompt_ids: common.return_prompt_token_ids.unwrap_or_default().then(|| Arc::clone(&prompts[0])),
        meta_info: common.return_meta_info.unwrap_or_default(),
        speculative: app.config.spec.is_some(),
        codec: codec.clone(),
        announced: false,
    });
    let choices: Vec<Choice> = choices.collect();
    if stream {
        return sse::respond(tickets, ChatChunks { envelope, report, choices }).await;
    }
    let waiting = tickets.into_iter().zip(choices).map(|(ticket, mut choice)| async move {
        choice.answer.complete(ticket).await?;
        Ok::<_, Refusal>(choice)
    });
    let choices = try_join_all(waiting).await?;
    let answers: Vec<&Answer> = choices.iter().map(|choice| &choice.answer).collect();
    let (usage, extensions) = (report.usage(&answers), report.extensions(&answers));
    let values = choices.iter().map(Choice::whole).collect();
    Ok(json_response(StatusCode::OK, &envelope.whole(values, usage, extensions)))
}

fn check_extra(extra: &Extra) -> Result<(), Refusal> {
    match &extra.tool_choice {
        None | Some(Value::Null) => {}
        Some(Value::String(choice)) if choice == "none" || choice == "auto" => {}
        Some(_) => return invalid!("'tool_choice' is not supported by this server."),
    }
    if extra.modalities.iter().flatten().any(|modality| modality != "text") {
        return invalid!("'modalities' other than text are not supported by this server.");
    }
    let in_kwargs = extra.chat_template_kwargs.iter().any(|kwargs| kwargs.contains_key("chat_template"));
    if in_kwargs || extra.chat_template.as_ref().is_some_and(|template| !template.is_null()) {
        return invalid!("'chat_template' in a request is not accepted.");
    }
    if extra.top_logprobs.is_some_and(|count| count != 0) && !extra.logprobs.unwrap_or_default() {
        return invalid!("top_logprobs needs logprobs to be true.");
    }
    Ok(())
}

/// Renders the messages with the model's template, off the event loop; ids given by the client bypass it.
async fn prompt(
    app: &Arc<App>,
    messages: Option<&[Value]>,
    input_ids: Option<&Value>,
    extra: &Extra,
) -> Result<Prompt, Refusal> {
    if let Some(ids) = input_ids.filter(|ids| !ids.is_null()) {
        return match Prompts::read("input_ids", ids)? {
            Prompts::One(prompt @ Prompt::Ids(_)) => Ok(prompt),
            _ => invalid!("input_ids must be a list of token ids."),
        };
    }
    let messages = check_messages(messages.unwrap_or_default())?;
    let continues = extra.continue_final_message.unwrap_or_default();
    let last_role = messages.last().and_then(|message| message["role"].as_str());
    if continues && last_role != Some("assistant") {
        return invalid!("continue_final_message needs a last message from the assistant.");
    }
    let mut kwargs = extra.chat_template_kwargs.clone().unwrap_or_default();
    if let Some(effort) = &extra.reasoning_effort {
        kwargs.entry("reasoning_effort").or_insert_with(|| json!(effort));
    }
    let add_generation_prompt = extra.add_generation_prompt.unwrap_or(true) && !continues;
    let app = Arc::clone(app);
    let rendering = tokio::task::spawn_blocking(move || {
        let Some(template) = app.template()? else {
            return invalid!(
                "The server has no chat template (none in the model, or --skip-tokenizer-init); use /v1/completions, or a model whose tokenizer_config.json has one."
            );
        };
        let request = RenderRequest {
            messages: &Value::Array(messages),
            tools: None,
            add_generation_prompt,
            continue_final_message: continues,
            kwargs: &kwargs,
        };
        template.render(&request).map_err(|error| Refusal::Invalid(error.to_string()))
    });
    let text = rendering
        .await
        .unwrap_or_else(|error| Err(Refusal::Internal(format!("template failed: {error}"))))?;
    Ok(Prompt::Rendered(text))
}

fn read_ask(
    app: &App,
    body: &Map<String, Value>,
    common: &Common,
    extra: &Extra,
    prompt: Prompt,
) -> Result<(Ask, Option<String>), Refusal> {
    let rids = request_name(body, None)?;
    let mut raw = sampling(body, &app.config.model.generation_defaults)?;
    raw.max_new_tokens = Some(extra.max_completion_tokens.or(extra.max_tokens));
    let sampling = raw.validate(app.intake.limits())?;
    let context = app.config.model.context_length;
    if let Budget::Exact(asked) = sampling.budget
        && asked > context
    {
        return invalid!(
            "max_completion_tokens is too large: {asked}.This model supports at most {context} completion tokens."
        );
    }
    let ask = Ask {
        prompt,
        sampling,
        logprobs: LogprobRequest {
            return_logprob: extra.logprobs.unwrap_or_default(),
            start_len: None,
            top_num: extra.top_logprobs.unwrap_or_default(),
            token_ids: Vec::new(),
        },
        rid: None,
        extra_key: join_keys(common.extra_key.clone(), common.cache_salt.clone()),
        max_draft_tokens: max_draft_tokens(common.speculative.as_ref())?,
        log_metrics: common.log_metrics.unwrap_or(true),
    };
    Ok((ask, rids.group))
}

/// One choice in the making. While streaming, `answer` holds the parts that were not handed out yet.
struct Choice {
    index: usize,
    answer: Answer,
    logprobs: bool,
    token_ids: bool,
    prompt_ids: Option<Arc<Vec<TokenId>>>,
    meta_info: bool,
    speculative: bool,
    codec: Option<Codec>,
    /// Whether the chunk with the role is out.
    announced: bool,
}

impl Choice {
    /// The choice of an answer that is not streamed.
    fn whole(&self) -> Value {
        let (finish_reason, matched_stop) = finish_fields(&self.answer);
        let mut value = json!({
            "index": self.index,
            "message": {"role": "assistant", "content": self.answer.text, "reasoning_content": null, "tool_calls": null},
            "logprobs": self.logprobs_object(),
            "finish_reason": finish_reason,
            "matched_stop": matched_stop,
        });
        if self.token_ids {
            value["response_token_ids"] = json!(self.answer.output_ids);
        }
        if let Some(ids) = &self.prompt_ids {
            value["prompt_token_ids"] = json!(ids);
        }
        if self.meta_info {
            value["meta_info"] = self.answer.meta_info(MetaStyle {
                speculative: self.speculative,
                return_logprob: false,
                has_top_logprobs: false,
                has_token_ids: false,
                token_texts: None,
            });
        }
        value
    }

    /// One chunk's choice.
    fn part(&self, delta: Value, logprobs: Option<Value>) -> Value {
        json!({
            "index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": null, "matched_stop": null,
        })
    }

    /// The chunk that ends the choice.
    fn last(&self) -> Value {
        let leftover = !self.answer.logprobs.output_token_logprobs_idx.is_empty();
        let logprobs = if leftover { self.logprobs_object() } else { None };
        let mut choice = self.part(json!({"reasoning_content": null}), logprobs);
        (choice["finish_reason"], choice["matched_stop"]) = finish_fields(&self.answer);
        choice
    }

    fn logprobs_object(&self) -> Option<Value> {
        if !self.logprobs {
            return None;
        }
        let columns = &self.answer.logprobs;
        let no_tops = TopLogprobs::new();
        let chosen = columns.output_token_logprobs_idx.iter().zip(&columns.output_token_logprobs_val);
        let content = chosen.enumerate().map(|(position, (&id, &logprob))| {
            let tops = columns.output_top_logprobs.get(position).unwrap_or(&no_tops);
            let mut token = self.token(id, logprob);
            token["top_logprobs"] = tops.iter().map(|&(logprob, id)| self.token(id, logprob)).collect();
            token
        });
        Some(json!({"content": content.collect::<Vec<_>>()}))
    }

    fn token(&self, id: TokenId, logprob: f32) -> Value {
        let codec = self.codec.as_ref();
        json!({
            "token": codec.map_or_else(|| id.to_string(), |codec| codec.token_text(id)),
            "bytes": codec.map_or(&[][..], |codec| codec.token_bytes(id)),
            "logprob": logprob,
        })
    }
}

struct ChatChunks {
    envelope: Envelope,
    report: Report,
    choices: Vec<Choice>,
}

impl Chunks for ChatChunks {
    fn update(&mut self, index: usize, update: Update) -> Result<Vec<Value>, Refusal> {
        let choice = &mut self.choices[index];
        choice.answer.extend(update.delta, update.end);
        if let Some(refusal) = choice.answer.finish_reason().and_then(Refusal::from_finish) {
            return Err(refusal);
        }
        let mut parts = Vec::new();
        if !std::mem::replace(&mut choice.announced, true) {
            let delta = json!({"role": "assistant", "content": "", "reasoning_content": null});
            parts.push(choice.part(delta, None));
        }
        // No content, no chunk: text that is held back takes its tokens' log-probabilities with it.
        if !choice.answer.text.is_empty() {
            let delta = json!({"content": choice.answer.text, "reasoning_content": null});
            parts.push(choice.part(delta, choice.logprobs_object()));
            choice.answer.clear_parts();
        }
        let usage = self.report.chunk_usage(&choice.answer);
        Ok(parts.into_iter().map(|part| self.envelope.chunk(json!([part]), usage.clone())).collect())
    }

    fn finish(&mut self) -> Vec<Value> {
        let answers: Vec<&Answer> = self.choices.iter().map(|choice| &choice.answer).collect();
        let last = self.choices.iter().map(|choice| {
            self.envelope.chunk(json!([choice.last()]), self.report.chunk_usage(&choice.answer))
        });
        let closing = self.envelope.closing(&self.report, &answers);
        last.chain(closing).collect()
    }
}
