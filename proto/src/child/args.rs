//! Owns a child's command line, which only the launcher writes.

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::PathBuf;

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Args {
    pub(super) config: PathBuf,
    /// Which one it is, where its role has several.
    pub(super) number: Option<u8>,
    pub(super) listen_fd: Option<RawFd>,
    pub(super) successor: bool,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ArgsError {
    #[error("--config is missing")]
    NoConfig,
    #[error("{0} needs a value")]
    NoValue(&'static str),
    #[error("--number takes a number below 256, not {0:?}")]
    BadNumber(OsString),
    #[error("--listen-fd takes a number of 0 or more, not {0:?}")]
    BadFd(OsString),
    #[error("unknown argument {0:?}")]
    Unknown(OsString),
}

impl Args {
    pub(super) fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Self, ArgsError> {
        let (mut config, mut number, mut listen_fd, mut successor) = (None, None, None, false);
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            match arg.to_str() {
                Some("--config") => {
                    config = Some(args.next().ok_or(ArgsError::NoValue("--config"))?.into());
                }
                Some("--number") => {
                    let value = args.next().ok_or(ArgsError::NoValue("--number"))?;
                    let parsed = value.to_str().and_then(|text| text.parse().ok());
                    number = Some(parsed.ok_or(ArgsError::BadNumber(value))?);
                }
                Some("--listen-fd") => {
                    let value = args.next().ok_or(ArgsError::NoValue("--listen-fd"))?;
                    let fd = value.to_str().and_then(|text| text.parse().ok()).filter(|fd| *fd >= 0);
                    listen_fd = Some(fd.ok_or(ArgsError::BadFd(value))?);
                }
                Some("--successor") => successor = true,
                _ => return Err(ArgsError::Unknown(arg)),
            }
        }
        Ok(Self { config: config.ok_or(ArgsError::NoConfig)?, number, listen_fd, successor })
    }
}
