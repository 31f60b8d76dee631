//! Owns the routes that say how the server is doing. All but the probe answer from memory, whatever the load.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use proto::ProcessHealth;
use serde_json::{Map, Value, json};

use super::error::json_response;
use crate::app::App;

/// The processes by their heartbeats. Busy is not dead: 200 as long as all of them do their work.
pub(super) async fn health(State(app): State<Arc<App>>) -> Response {
    let told = app.health.current();
    let ready = app.check_ready();
    let all_ready = told.as_ref().is_none_or(|health| health.processes.iter().all(|process| process.ready));
    let status = match &ready {
        _ if app.is_stopping() => "stopping",
        Ok(()) if all_ready => "ok",
        // It has served already.
        _ if app.check_serving().is_ok() => "restarting",
        _ => "starting",
    };
    let mut body = Map::new();
    body.insert("status".to_owned(), json!(status));
    body.insert("in_flight".to_owned(), json!(app.registry.len()));
    if let Err(why) = ready {
        body.insert("reason".to_owned(), json!(why.to_string()));
    }
    if let Some(health) = told {
        let processes = health.processes.iter().map(|p| (p.role.to_string(), process(p)));
        body.insert("processes".to_owned(), Value::Object(processes.collect()));
    }
    let code = if status == "ok" { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
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
