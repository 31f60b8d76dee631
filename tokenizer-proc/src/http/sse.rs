//! Owns event streams: the updates of several requests merged, rendered into `data:` lines, with the end mark.
//! The stream owns the tickets, so a client that leaves drops them, and dropping aborts.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use futures::stream::{self, BoxStream, SelectAll, Stream, StreamExt};
use serde_json::{Value, json};

use crate::mailbox::Update;
use crate::refusal::Refusal;
use crate::registry::Ticket;

/// Turns updates into the chunks of one dialect.
pub(super) trait Chunks: Send + 'static {
    /// Chunks for what is new in answer `index`. The error ends the stream.
    fn update(&mut self, index: usize, update: Update) -> Result<Vec<Value>, Refusal>;

    /// Chunks after the end of all answers.
    fn finish(&mut self) -> Vec<Value>;
}

/// Updates of all answers as they come, with the answer's index.
type Updates = SelectAll<BoxStream<'static, (usize, Update)>>;

fn merge(tickets: Vec<Ticket>) -> Updates {
    let follow = |(index, ticket): (usize, Ticket)| {
        stream::unfold(ticket, move |mut ticket| async move {
            let update = ticket.next().await?;
            Some(((index, update), ticket))
        })
        .boxed()
    };
    stream::select_all(tickets.into_iter().enumerate().map(follow))
}

/// Answers with an event stream. Waits for the first update, so that a refusal before the first token is an
/// error status and not an event.
pub(super) async fn respond(tickets: Vec<Ticket>, mut chunks: impl Chunks) -> Result<Response, Refusal> {
    let mut updates = merge(tickets);
    let mut first = Vec::new();
    if let Some((index, update)) = updates.next().await {
        let refusal = update.end.as_ref().and_then(|end| Refusal::from_finish(&end.reason));
        if let Some(refusal) = refusal {
            return Err(refusal);
        }
        for chunk in chunks.update(index, update)? {
            event(&mut first, &chunk);
        }
    }
    let body = stream::once(async move { first }).chain(rest(updates, chunks));
    let body = body.filter(|bytes| std::future::ready(!bytes.is_empty()));
    let mut response =
        Response::new(Body::from_stream(body.map(|bytes| Ok::<_, Infallible>(Bytes::from(bytes)))));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(response)
}

fn rest(updates: Updates, chunks: impl Chunks) -> impl Stream<Item = Vec<u8>> + Send {
    stream::unfold(Some((updates, chunks)), |state| async move {
        let (mut updates, mut chunks) = state?;
        let mut bytes = Vec::new();
        let more = match updates.next().await {
            Some((index, update)) => match chunks.update(index, update) {
                Ok(values) => {
                    values.iter().for_each(|value| event(&mut bytes, value));
                    true
                }
                Err(refusal) => {
                    event(&mut bytes, &json!({"error": refusal.object()}));
                    false
                }
            },
            None => {
                chunks.finish().iter().for_each(|value| event(&mut bytes, value));
                false
            }
        };
        if !more {
            bytes.extend_from_slice(b"data: [DONE]\n\n");
        }
        Some((bytes, more.then_some((updates, chunks))))
    })
}

fn event(bytes: &mut Vec<u8>, value: &Value) {
    bytes.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *bytes, value).expect("a JSON value is written to memory");
    bytes.extend_from_slice(b"\n\n");
}
