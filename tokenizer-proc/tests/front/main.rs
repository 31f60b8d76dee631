//! The front end over real sockets, against a fake scheduler and detokenizer that speak the real wire.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod access;
mod fake;
mod generate;
mod lifecycle;
mod openai;
mod refusals;
mod server;
