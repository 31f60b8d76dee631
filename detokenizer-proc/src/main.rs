//! The detokenizer process.

use std::process::ExitCode;

fn main() -> ExitCode {
    proto::child::child_main(proto::Role::Detokenizer, detokenizer_proc::run)
}
