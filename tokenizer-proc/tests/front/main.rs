//! The front end over real sockets, against a fake scheduler and detokenizer that speak the real wire.

mod access;
mod fake;
mod generate;
mod lifecycle;
mod openai;
mod refusals;
mod server;
