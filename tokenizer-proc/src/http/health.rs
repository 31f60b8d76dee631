//! Owns the routes that say how the server is doing. All but the probe answer from memory, whatever the load.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use proto::{ProcessHealth, Role, ServerHealth};
use serde_json::{Map, Value, json};

use super::error::json_response;
use crate::app::App;

/// The processes by their heartbeats. Busy is not dead: 200 as long as requests are served, which takes all processes
/// but one's siblings: the one that answers is a tokenizer process that works.
pub(super) async fn health(State(app): State<Arc<App>>) -> Response {
    let told = app.health.current();
    let ready = app.check_ready();
    let away = |health: &ServerHealth, sibling| {
        let mut processes = health.processes.iter();
        processes.any(|p| !p.ready && sibling == (app.has_siblings() && p.process.role == Role::Tokenizer))
    };
    let needed_away = told.as_ref().is_some_and(|health| away(health, false));
    let sibling_away = told.as_ref().is_some_and(|health| away(health, true));
    let status = match &ready {
        _ if app.is_stopping() => "stopping",
        Ok(()) if !needed_away && sibling_away => "degraded",
        Ok(()) if !needed_away => "ok",
        // It has served already.
        _ if app.check_serving().is_ok() => "restarting",
        _ => "starting",
    };
    let mut body = Map::new();
    body.insert("status".to_owned(), json!(status));
    body.insert("in_flight".to_owned(), json!(app.in_flight()));
    if let Err(why) = ready {
        body.insert("reason".to_owned(), json!(why.to_string()));
    }
    if let Some(health) = told {
        let processes = health.processes.iter().map(|p| (p.process.to_string(), process(p)));
        body.insert("processes".to_owned(), Value::Object(processes.collect()));
    }
    let code =
        if ["ok", "degraded"].contains(&status) { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json_response(code, &Value::Object(body))
}

fn process(process: &ProcessHealth) -> Value {
    json!({
        "alive": process.alive,
        "ready": process.ready,
        "busy": process.heartbeat.in_flight > 0,
        "restarts": process.restarts,
        "heartbeat_age_ms": process.heartbeat_age_ms,
    })
}

/// One token through all processes.
pub(super) async fn health_generate(State(app): State<Arc<App>>) -> StatusCode {
    if app.check_ready().is_ok() && app.probe.run(&app).await {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    }
}

pub(super) async fn ready(State(app): State<Arc<App>>) -> StatusCode {
    if app.check_admits().is_ok() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}
