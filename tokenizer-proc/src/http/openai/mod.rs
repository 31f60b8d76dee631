//! Owns the OpenAI dialect: one file per endpoint, and what they share in `types`.

pub(super) mod chat;
pub(super) mod completions;
mod messages;
pub(super) mod models;
mod types;

pub(crate) use messages::check_messages;
