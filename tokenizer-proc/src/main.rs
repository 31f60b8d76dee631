//! The tokenizer process: everything is in the library, so that tests can call it.

use std::process::ExitCode;

use proto::Role;
use proto::child::child_main;

fn main() -> ExitCode {
    child_main(Role::Tokenizer, tokenizer_proc::run)
}
