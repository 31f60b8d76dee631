//! Owns the route table, nothing else.

mod access;
mod admin;
mod error;
mod fields;
mod health;
mod native;
mod openai;
mod sse;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::response::Response;
use axum::routing::{get, post};
use serde_json::json;
use tower_http::cors::CorsLayer;

use crate::app::App;

/// Bytes of a request body; more get 413.
const MAX_BODY_BYTES: usize = 32 << 20;

pub(crate) fn router(app: Arc<App>) -> Router {
    let mut routes = Router::new()
        .route("/health", get(health::health))
        .route("/health_generate", get(health::health_generate))
        .route("/ready", get(health::ready))
        .route("/model_info", get(admin::model_info))
        .route("/get_model_info", get(admin::model_info))
        .route("/server_info", get(admin::server_info))
        .route("/get_server_info", get(admin::server_info))
        .route("/generate", post(native::generate).put(native::generate))
        .route("/v1/completions", post(openai::completions::completions))
        .route("/v1/chat/completions", post(openai::chat::chat_completions))
        .route("/v1/models", get(openai::models::list))
        .route("/v1/models/{*model}", get(openai::models::one))
        .route("/flush_cache", get(admin::flush_cache).post(admin::flush_cache))
        .route("/abort_request", post(admin::abort_request))
        .route("/tokenize", post(admin::tokenize))
        .route("/v1/tokenize", post(admin::tokenize))
        .route("/detokenize", post(admin::detokenize))
        .route("/v1/detokenize", post(admin::detokenize));
    if app.config.server.enable_metrics {
        routes = routes.route("/metrics", get(admin::metrics)).route("/metrics/", get(admin::metrics));
    }
    routes
        .fallback(not_found)
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(from_fn_with_state(Arc::clone(&app), access::check_key))
        .layer(from_fn_with_state(Arc::clone(&app), access::count))
        .layer(from_fn_with_state(Arc::clone(&app), access::say_goodbye))
        .layer(CorsLayer::permissive())
        .with_state(app)
}

async fn not_found() -> Response {
    error::json_response(StatusCode::NOT_FOUND, &json!({"detail": "Not Found"}))
}
