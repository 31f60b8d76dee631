//! The trainer of draft heads.

use clap::Parser;
use scheduler_proc::engine::train::{self, Args};

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    proto::child::init_logging(&args.log_level);
    train::run(&args)
}
