//! Owns how errors look: one status and one JSON shape per kind and route family, and the extractor that reads
//! JSON bodies with errors of that shape.

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::refusal::Refusal;

/// Bodies above this are parsed off the event loop.
const PARSE_INLINE_BYTES: usize = 64 << 10;
/// Seconds after which a refused client may try again.
const RETRY_AFTER: &str = "1";

/// The two dialects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    Native,
    OpenAi,
}

/// What a handler returns instead of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ApiError {
    Refused(Refusal),
    /// A field that the route does not know or cannot do.
    Contract(String),
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl ApiError {
    pub(super) fn respond(self, style: Style) -> Response {
        match (self, style) {
            (Self::Contract(message), Style::Native) => {
                json_response(StatusCode::BAD_REQUEST, &json!({"error": message}))
            }
            (Self::Refused(Refusal::Invalid(message)), Style::Native) => {
                json_response(StatusCode::BAD_REQUEST, &json!({"error": {"message": message}}))
            }
            (Self::Contract(message), Style::OpenAi) => flat(&Refusal::Invalid(message)),
            (Self::Refused(refusal), _) => flat(&refusal),
        }
    }
}

impl Refusal {
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Invalid(_) => StatusCode::BAD_REQUEST,
            Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The flat error object of the OpenAI routes.
    pub(crate) fn object(&self) -> Value {
        let (kind, message) = match self {
            Self::Invalid(message) => ("BadRequestError", message.clone()),
            Self::Unavailable(message) => ("503", message.clone()),
            Self::Internal(message) => ("InternalServerError", format!("Internal server error: {message}")),
        };
        error_object(self.status(), kind, &message)
    }
}

fn error_object(status: StatusCode, kind: &str, message: &str) -> Value {
    json!({"object": "error", "message": message, "type": kind, "param": null, "code": status.as_u16()})
}

fn flat(refusal: &Refusal) -> Response {
    let mut response = json_response(refusal.status(), &refusal.object());
    if matches!(refusal, Refusal::Unavailable(_)) {
        response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static(RETRY_AFTER));
    }
    response
}

pub(super) fn json_response(status: StatusCode, body: &Value) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

/// An error of the body itself; looks the same on all routes.
pub(super) fn bad_body(status: StatusCode, message: &str) -> Response {
    json_response(status, &error_object(status, "Bad Request", message))
}

/// As [`bad_body`], for a body that was not read to its end: what follows on the connection is no request, and a
/// client must not send its next one there.
fn unread_body(status: StatusCode, message: &str) -> Response {
    let mut response = bad_body(status, message);
    response.headers_mut().insert(header::CONNECTION, header::HeaderValue::from_static("close"));
    response
}

/// A JSON body as a value of `T`.
pub(super) struct ApiJson<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send + 'static> FromRequest<S> for ApiJson<T> {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        if !says_json(request.headers()) {
            let message = "Unsupported Media Type: Only 'application/json' is allowed";
            return Err(unread_body(StatusCode::BAD_REQUEST, message));
        }
        let bytes = Bytes::from_request(request, state).await.map_err(|rejection| {
            let status = match rejection.status() {
                StatusCode::PAYLOAD_TOO_LARGE => StatusCode::PAYLOAD_TOO_LARGE,
                _ => StatusCode::BAD_REQUEST,
            };
            unread_body(status, &rejection.body_text())
        })?;
        let parsed = if bytes.len() <= PARSE_INLINE_BYTES {
            parse(&bytes)
        } else {
            tokio::task::spawn_blocking(move || parse(&bytes))
                .await
                .unwrap_or_else(|error| Err(error.to_string()))
        };
        parsed.map(ApiJson).map_err(|message| bad_body(StatusCode::BAD_REQUEST, &message))
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    let mut input = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut input).map_err(|error| at_path(&error))?;
    input.end().map_err(|error| error.to_string())?;
    Ok(value)
}

/// Reads a part of a body that was parsed already.
pub(super) fn typed<T: DeserializeOwned>(value: &Value) -> Result<T, Refusal> {
    serde_path_to_error::deserialize(value).map_err(|error| Refusal::Invalid(at_path(&error)))
}

fn at_path<E: std::fmt::Display>(error: &serde_path_to_error::Error<E>) -> String {
    match error.path().to_string().as_str() {
        "." => error.inner().to_string(),
        path => format!("{path}: {}", error.inner()),
    }
}

fn says_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}
