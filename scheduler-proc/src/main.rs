//! The scheduler process.

use std::process::ExitCode;

fn main() -> ExitCode {
    proto::child::child_main(proto::Role::Scheduler, scheduler_proc::run)
}
