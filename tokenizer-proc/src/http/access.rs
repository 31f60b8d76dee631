//! Owns what happens to every request before and after its handler: the key check, counting, and the
//! word that a process on its way out adds.

use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use serde_json::json;

use super::error::json_response;
use crate::app::App;

/// Paths that probes and scrapers reach without a key.
const OPEN: &[&str] = &["/health", "/ready", "/metrics"];

/// Lets requests with the right key pass.
pub(super) async fn check_key(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let Some(key) = &app.config.server.api_key else { return next.run(request).await };
    let path = request.uri().path();
    let open = request.method() == Method::OPTIONS || OPEN.iter().any(|prefix| path.starts_with(prefix));
    let given = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let given = given.and_then(|value| value.strip_prefix(b"Bearer "));
    if open || given.is_some_and(|given| same(given, key.as_bytes())) {
        return next.run(request).await;
    }
    json_response(StatusCode::UNAUTHORIZED, &json!({"error": "Unauthorized"}))
}

/// Compares without telling by its duration how much was right.
fn same(given: &[u8], key: &[u8]) -> bool {
    given.len() == key.len() && given.iter().zip(key).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

/// Tells clients of a process on its way out not to send their next request here.
pub(super) async fn say_goodbye(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    if app.is_leaving() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Counts requests by route. Paths and methods that a client made up share one label value.
pub(super) async fn count(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let endpoint = request.extensions().get::<MatchedPath>().cloned();
    let method = known_method(request.method());
    let endpoint = endpoint.as_ref().map_or("other", MatchedPath::as_str).to_owned();
    let active = Active { app: Arc::clone(&app), endpoint, method, status: 499 };
    app.metrics.http_request(&active.endpoint, method);
    let response = next.run(request).await;
    let mut active = active;
    active.status = response.status().as_u16();
    response
}

/// Counts the response when it is there, or 499 when the client left before.
struct Active {
    app: Arc<App>,
    endpoint: String,
    method: &'static str,
    status: u16,
}

impl Drop for Active {
    fn drop(&mut self) {
        self.app.metrics.http_response(&self.endpoint, self.method, self.status);
    }
}

fn known_method(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}
