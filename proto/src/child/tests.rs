//! Tests of the children's common part that need no processes.

use std::ffi::OsString;

use super::args::{Args, ArgsError};
use super::*;

fn parse(args: &[&str]) -> Result<Args, ArgsError> {
    Args::parse(args.iter().map(OsString::from))
}

#[test]
fn command_lines() {
    let ok = |config: &str, listen_fd| {
        Ok(Args { config: config.into(), number: None, listen_fd, successor: false })
    };
    assert_eq!(parse(&["--config", "c.json"]), ok("c.json", None));
    assert_eq!(parse(&["--listen-fd", "3", "--config", "c.json"]), ok("c.json", Some(3)));
    assert!(parse(&["--successor", "--config", "c.json"]).unwrap().successor);
    assert_eq!(parse(&["--number", "2", "--config", "c.json"]).unwrap().number, Some(2));
    assert_eq!(parse(&["--config", "c", "--number", "256"]), Err(ArgsError::BadNumber("256".into())));
    assert_eq!(parse(&[]), Err(ArgsError::NoConfig));
    assert_eq!(parse(&["--config"]), Err(ArgsError::NoValue("--config")));
    assert_eq!(parse(&["--config", "c", "--listen-fd"]), Err(ArgsError::NoValue("--listen-fd")));
    assert_eq!(parse(&["--config", "c", "--listen-fd", "-1"]), Err(ArgsError::BadFd("-1".into())));
    assert_eq!(parse(&["--config", "c", "--listen-fd", "x"]), Err(ArgsError::BadFd("x".into())));
    assert_eq!(parse(&["--verbose"]), Err(ArgsError::Unknown("--verbose".into())));
}

#[test]
fn phases_only_grow() {
    let (sender, shutdown) = Shutdown::new();
    assert_eq!(shutdown.phase(), Phase::Running);
    sender.advance(Phase::Stopping);
    sender.advance(Phase::Draining);
    assert_eq!(shutdown.phase(), Phase::Stopping);
}
