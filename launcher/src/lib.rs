//! Starts a server and ends it: the command line, one resolved configuration, the child processes, the listening
//! socket. Never touches a request.
//!
//! Layers, bottom up: `args` and `unsupported` (what was typed), `resolve` (what it means), `plan` (which processes
//! follow), `run_dir`, `console`, `child`, `board`, `metrics` (the outside world), `shutdown` and `supervise` (what to
//! do when), `admin` (operators), `sample_chat` (newcomers), `serve` (the loop that ties them).

mod admin;
mod args;
mod board;
mod child;
mod console;
mod metrics;
mod metrics_port;
mod plan;
mod resolve;
mod run_dir;
mod sample_chat;
mod serve;
mod shutdown;
mod signals;
mod supervise;
mod unsupported;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

pub use args::Args;
pub use resolve::{Machine, Resolved, resolve};
pub use serve::run;
pub use supervise::{EXIT_FAILED, EXIT_FORCED, EXIT_OK, EXIT_REFUSED, Outcome};

/// Parses the command line, serves until the end, and returns the exit code.
pub fn main(argv: impl IntoIterator<Item = OsString>) -> ExitCode {
    let argv: Vec<OsString> = argv.into_iter().collect();
    if admin::is_command(&argv) {
        return admin::main(argv);
    }
    if let Some(refusal) =
        unsupported::refusal(argv.iter().skip(1).map(|argument| argument.to_string_lossy()))
    {
        eprintln!("error: {refusal}");
        return EXIT_REFUSED.into();
    }
    let args = match Args::try_parse_from(argv) {
        Ok(args) => args,
        // Help and version are "errors" that go to stdout and end well.
        Err(error) => {
            let _ = error.print();
            return (error.exit_code() as u8).into();
        }
    };
    match run(&args) {
        Ok(outcome) => {
            if let Some(reason) = outcome.reason {
                eprintln!("error: {reason}");
            }
            outcome.code.into()
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            EXIT_REFUSED.into()
        }
    }
}
