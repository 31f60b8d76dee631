//! Owns `/v1/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use futures::future::try_join_all;
use proto::{RowLogprobs, TokenId, TopLogprobs};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::types::{Common, Envelope, Report, check_fields, finish_fields, request_name, sampling};
use crate::app::App;
use crate::http::error::{ApiError, ApiJson, Style, json_response, typed};
use crate::http::fields::Prompts;
use crate::http::native::join_keys;
use crate::http::sse::{self, Chunks};
use crate::intake::{Admitted, Ask, Job, LogprobRequest, Prompt};
use crate::mailbox::Update;
use crate::refusal::{Refusal, invalid};
use crate::reply::Answer;
use crate::sampling::{Budget, max_draft_tokens};
use crate::tokenize::Codec;

const DEFAULT_MAX_TOKENS: u32 = 16;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Extra {
    echo: Option<bool>,
    logprobs: Option<i64>,
}

pub(crate) async fn completions(State(app): State<Arc<App>>, ApiJson(body): ApiJson<Value>) -> Response {
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
    let (asks, group) = read_asks(app, fields, &common, &extra)?;
    let stream = common.stream.unwrap_or_default();
    let codec = app.codec()?.cloned();
    let echo = extra.echo.unwrap_or_default();
    let echoes = if echo { echoes(&asks, codec.as_ref()).await? } else { Vec::new() };
    let admitted = app.intake.admit(Job { asks, stream, group, probe: false }, codec.as_ref()).await?;
    let Admitted { group, tickets, prompts, n } = admitted;
    let envelope = Envelope::new(group.0, "text_completion", common.model.clone(), app);
    let report = Report::new(&common, n, app);
    let wants_ids = common.return_token_ids.unwrap_or_default();
    let choices = tickets.iter().enumerate().map(|(index, ticket)| {
        let prompt = &prompts[index / n];
        let mut answer = Answer::new(ticket.name().clone(), prompt.len());
        answer.text = echoes.get(index / n).cloned().unwrap_or_default();
        Choice {
            index,
            answer,
            logprobs: extra.logprobs.is_some(),
            token_ids: wants_ids,
            prompt_ids: wants_ids.then(|| Arc::clone(prompt)),
            codec: codec.clone(),
        }
    });
    let choices: Vec<Choice> = choices.collect();
    if stream {
        return sse::respond(tickets, CompletionChunks { envelope, report, choices }).await;
    }
    let waiting = tickets.into_iter().zip(choices).map(|(ticket, mut choice)| async move {
        choice.answer.complete(ticket).await?;
        Ok::<_, Refusal>(choice)
    });
    let choices = try_join_all(waiting).await?;
    let answers: Vec<&Answer> = choices.iter().map(|choice| &choice.answer).collect();
    let (usage, extensions) = (report.usage(&answers), report.extensions(&answers));
    let values = choices.iter().map(Choice::value).collect();
    Ok(json_response(StatusCode::OK, &envelope.whole(values, usage, extensions)))
}

fn read_asks(
    app: &App,
    body: &Map<String, Value>,
    common: &Common,
    extra: &Extra,
) -> Result<(Vec<Ask>, Option<String>), Refusal> {
    let Some(prompt) = body.get("prompt").filter(|prompt| !prompt.is_null()) else {
        return invalid!("Prompt cannot be empty");
    };
    let (prompts, listed) = Prompts::read("prompt", prompt)?.into_list();
    if prompts.iter().any(|prompt| matches!(prompt, Prompt::Ids(ids) if ids.is_empty())) {
        return invalid!("Prompt cannot be empty");
    }
    let rids = request_name(body, listed)?;
    let mut sampling = sampling(body, &Map::new())?.validate(app.intake.limits())?;
    match sampling.budget {
        Budget::Default(_) | Budget::Rest => sampling.budget = Budget::Default(DEFAULT_MAX_TOKENS),
        Budget::Exact(0) => return invalid!("max_tokens must be greater than 0."),
        Budget::Exact(_) => {}
    }
    let echo = extra.echo.unwrap_or_default();
    let logprobs = LogprobRequest {
        return_logprob: extra.logprobs.is_some(),
        start_len: Some(if echo && extra.logprobs.is_some() { 0 } else { -1 }),
        top_num: extra.logprobs.unwrap_or_default(),
        token_ids: Vec::new(),
    };
    let max_draft_tokens = max_draft_tokens(common.speculative.as_ref())?;
    let asks = prompts.into_iter().enumerate().map(|(index, prompt)| Ask {
        prompt,
        sampling: sampling.clone(),
        logprobs: logprobs.clone(),
        rid: rids.each.get(index).cloned(),
        extra_key: join_keys(common.extra_key.clone(), common.cache_salt.clone()),
        max_draft_tokens,
        log_metrics: common.log_metrics.unwrap_or(true),
    });
    Ok((asks.collect(), rids.group))
}

/// The text of every prompt, as it is put before the answer.
async fn echoes(asks: &[Ask], codec: Option<&Codec>) -> Result<Vec<String>, Refusal> {
    let mut texts = Vec::with_capacity(asks.len());
    for ask in asks {
        texts.push(match (&ask.prompt, codec) {
            (Prompt::Text(text) | Prompt::Rendered(text), _) => text.clone(),
            (Prompt::Ids(ids), Some(codec)) => {
                // Ids outside the vocabulary are refused later; here they are only no text.
                let ids = ids.iter().filter_map(|&id| TokenId::try_from(id).ok()).collect();
                codec.decode(ids, true).await?
            }
            (Prompt::Ids(_), None) => {
                return invalid!("echo needs a tokenizer, and the server runs with --skip-tokenizer-init");
            }
        });
    }
    Ok(texts)
}

/// One choice in the making. `answer` holds the parts that were not handed out yet.
struct Choice {
    index: usize,
    answer: Answer,
    logprobs: bool,
    token_ids: bool,
    prompt_ids: Option<Arc<Vec<TokenId>>>,
    codec: Option<Codec>,
}

impl Choice {
    fn value(&self) -> Value {
        let (finish_reason, matched_stop) = finish_fields(&self.answer);
        let logprobs = self.logprobs.then(|| logprobs_object(&self.answer.logprobs, self.codec.as_ref()));
        let mut value = json!({
            "index": self.index, "text": self.answer.text, "logprobs": logprobs,
            "finish_reason": finish_reason, "matched_stop": matched_stop,
        });
        if self.token_ids {
            value["token_ids"] = json!(self.answer.output_ids);
        }
        if let Some(ids) = &self.prompt_ids {
            value["prompt_token_ids"] = json!(ids);
        }
        value
    }
}

/// OpenAI's legacy lists: prompt positions first, the first of them with nothing to say.
fn logprobs_object(columns: &RowLogprobs, codec: Option<&Codec>) -> Value {
    let label = |id: TokenId| codec.map_or_else(|| id.to_string(), |codec| codec.token_label(id));
    let by_text = |top: &TopLogprobs| -> Value {
        let mut texts = Map::new();
        for &(logprob, id) in top {
            // Best first: of two tokens with one text, the likelier stays.
            texts.entry(label(id)).or_insert_with(|| json!(logprob));
        }
        Value::Object(texts)
    };
    let inputs = columns.input_token_logprobs_idx.iter().zip(&columns.input_token_logprobs_val);
    let outputs = columns.output_token_logprobs_idx.iter().zip(&columns.output_token_logprobs_val);
    let all: Vec<(TokenId, Option<f32>)> = inputs
        .map(|(&id, &logprob)| (id, logprob))
        .chain(outputs.map(|(&id, &logprob)| (id, Some(logprob))))
        .collect();
    let tops = columns.input_top_logprobs.iter().map(|top| top.as_ref().map_or(Value::Null, by_text));
    let tops: Vec<Value> = tops.chain(columns.output_top_logprobs.iter().map(by_text)).collect();
    json!({
        "text_offset": vec![-1; all.len()],
        "token_logprobs": all.iter().map(|(_, logprob)| logprob).collect::<Vec<_>>(),
        "tokens": all.iter().map(|(id, _)| label(*id)).collect::<Vec<_>>(),
        "top_logprobs": tops,
    })
}

struct CompletionChunks {
    envelope: Envelope,
    report: Report,
    choices: Vec<Choice>,
}

impl Chunks for CompletionChunks {
    fn update(&mut self, index: usize, update: Update) -> Result<Vec<Value>, Refusal> {
        let choice = &mut self.choices[index];
        choice.answer.extend(update.delta, update.end);
        if let Some(refusal) = choice.answer.finish_reason().and_then(Refusal::from_finish) {
            return Err(refusal);
        }
        // Text that is held back takes its tokens' log-probabilities with it.
        if choice.answer.text.is_empty() && choice.answer.end.is_none() {
            return Ok(Vec::new());
        }
        let chunk = self.envelope.chunk(json!([choice.value()]), self.report.chunk_usage(&choice.answer));
        choice.answer.clear_parts();
        choice.prompt_ids = None;
        Ok(vec![chunk])
    }

    fn finish(&mut self) -> Vec<Value> {
        let answers: Vec<&Answer> = self.choices.iter().map(|choice| &choice.answer).collect();
        self.envelope.closing(&self.report, &answers)
    }
}
