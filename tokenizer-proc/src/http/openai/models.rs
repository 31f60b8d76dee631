//! Owns `/v1/models`.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use crate::app::App;
use crate::http::error::json_response;

pub(crate) async fn list(State(app): State<Arc<App>>) -> Response {
    json_response(StatusCode::OK, &json!({"object": "list", "data": [card(&app)]}))
}

pub(crate) async fn one(State(app): State<Arc<App>>, Path(model): Path<String>) -> Response {
    if model == app.config.server.served_model_name {
        return json_response(StatusCode::OK, &card(&app));
    }
    let error = json!({"error": {
        "message": format!("The model '{model}' does not exist"),
        "type": "invalid_request_error", "param": "model", "code": "model_not_found",
    }});
    json_response(StatusCode::NOT_FOUND, &error)
}

fn card(app: &App) -> Value {
    let name = &app.config.server.served_model_name;
    json!({
        "id": name, "object": "model",
        "created": app.started.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        "owned_by": "sglang", "root": name, "parent": null,
        "max_model_len": app.config.model.context_length,
    })
}
