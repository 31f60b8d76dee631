//! Owns talking to a server under test: JSON in, JSON or events out, with failures that show the whole reply.

use std::time::Duration;

use reqwest::blocking::{Client, RequestBuilder, Response};
use serde_json::Value;

use crate::sse::Events;

/// Long enough for a loaded machine, short enough that a hang is noticed.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A whole reply.
#[derive(Debug, Clone)]
pub struct Reply {
    pub status: u16,
    pub body: String,
}

impl Reply {
    /// The JSON of a reply; panics with the reply when it is none.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    /// The JSON of a reply with status 200.
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{self:?}");
        self.json()
    }
}

/// A reply that comes in events.
pub struct Stream {
    pub status: u16,
    events: Events<Response>,
}

impl Stream {
    /// The next event; `None` when the stream has ended. Dropping the stream closes the connection.
    #[allow(clippy::should_implement_trait, reason = "named after what it returns, and it panics")]
    pub fn next(&mut self) -> Option<Value> {
        let data = self.events.next()?;
        Some(serde_json::from_str(&data).unwrap_or_else(|error| panic!("{error} in event {data}")))
    }

    /// Whether the stream has ended with `[DONE]`.
    pub fn is_done(&self) -> bool {
        self.events.done
    }

    /// All events; panics when the stream does not end with `[DONE]`.
    pub fn all(mut self) -> Vec<Value> {
        assert_eq!(self.status, 200);
        let events = std::iter::from_fn(|| self.next()).collect();
        assert!(self.events.done, "the stream broke off before [DONE]");
        events
    }
}

/// Requests to one server.
#[derive(Clone)]
pub(crate) struct Http {
    client: Client,
    base: String,
    key: Option<String>,
}

impl Http {
    pub(crate) fn new(base: String, key: Option<String>) -> Self {
        // A connection of its own for every request: one that is kept may lead to a process that has died since.
        let client = Client::builder().timeout(TIMEOUT).no_proxy().pool_max_idle_per_host(0).build();
        let client = client.expect("the client needs no files");
        Self { client, base, key }
    }

    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    pub(crate) fn get(&self, path: &str) -> reqwest::Result<Reply> {
        reply(self.with_key(self.client.get(self.url(path))))
    }

    pub(crate) fn get_as(&self, path: &str, accept: &str) -> reqwest::Result<Reply> {
        reply(self.with_key(self.client.get(self.url(path)).header("accept", accept)))
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> reqwest::Result<Reply> {
        reply(self.with_key(self.client.post(self.url(path)).json(body)))
    }

    /// A body that need not be JSON.
    pub(crate) fn post_raw(&self, path: &str, content_type: &str, body: &[u8]) -> reqwest::Result<Reply> {
        let request =
            self.client.post(self.url(path)).header("content-type", content_type).body(body.to_vec());
        reply(self.with_key(request))
    }

    pub(crate) fn stream(&self, path: &str, body: &Value) -> reqwest::Result<Stream> {
        let response = self.with_key(self.client.post(self.url(path)).json(body)).send()?;
        Ok(Stream { status: response.status().as_u16(), events: Events::new(response) })
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    fn with_key(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }
}

fn reply(request: RequestBuilder) -> reqwest::Result<Reply> {
    let response = request.send()?;
    Ok(Reply { status: response.status().as_u16(), body: response.text()? })
}
