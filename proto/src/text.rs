//! Owns what a model's files say about text: the chat template that makes a prompt of messages, and the tokenizer
//! that a GGUF file carries inside. For the crates that ask for the feature `text`.

pub mod chat_template;
pub mod gguf_tokenizer;
