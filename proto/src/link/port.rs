//! Owns the ZeroMQ sockets of one link: a new one for every connection, because a socket of the crate neither
//! reconnects nor gives back what it has queued for a peer that is gone.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::channel::mpsc::Receiver;
use zeromq::{DealerSocket, Socket, SocketEvent, SocketOptions, ZmqError};

use super::Side;

/// First and longest time for a connection's handshake. It grows with every failure, because on a machine that is
/// short of processors the handshake itself takes long.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(100);
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(1);

pub(super) enum Port {
    Bind { path: PathBuf, listener: Option<Listener> },
    Connect { path: PathBuf, timeout: Duration },
}

/// The listening socket, kept for as long as the link: peers that connect between two of our sockets wait in it.
pub(super) struct Listener {
    socket: UnixListener,
    inode: u64,
}

pub(super) struct Fresh {
    pub(super) socket: DealerSocket,
    pub(super) events: Receiver<SocketEvent>,
}

impl Port {
    pub(super) fn new(path: PathBuf, side: Side) -> Self {
        match side {
            Side::Bind => Self::Bind { path, listener: None },
            Side::Connect => Self::Connect { path, timeout: CONNECT_TIMEOUT },
        }
    }

    pub(super) fn side(&self) -> Side {
        match self {
            Self::Bind { .. } => Side::Bind,
            Self::Connect { .. } => Side::Connect,
        }
    }

    /// A socket that listens, or one that is connected.
    pub(super) async fn fresh(&mut self) -> Result<Fresh, ZmqError> {
        match self {
            Self::Bind { path, listener } => {
                let listener = match listener {
                    Some(listener) => listener,
                    None => listener.insert(Listener::bind(path)?),
                };
                let mut socket = DealerSocket::new();
                let events = socket.monitor();
                socket.bind_listener(listener.socket.try_clone()?).await?;
                Ok(Fresh { socket, events })
            }
            Self::Connect { path, timeout } => {
                // Spares the crate's own retries, which slow down.
                std::fs::metadata(&*path)?;
                let mut options = SocketOptions::default();
                options.connect_timeout(*timeout);
                let mut socket = DealerSocket::with_options(options);
                let events = socket.monitor();
                let connected = socket.connect(&format!("ipc://{}", path.display())).await;
                *timeout = match connected {
                    Ok(()) => CONNECT_TIMEOUT,
                    Err(_) => (2 * *timeout).min(CONNECT_TIMEOUT_MAX),
                };
                connected.map(|()| Fresh { socket, events })
            }
        }
    }
}

impl Listener {
    /// Listens at `path`, in the place of whatever a killed process has left there. The name moves in when it
    /// already works, so no peer finds it dead; and the crate, which deletes the name it was bound to whenever one
    /// of its sockets goes, deletes one that is no more.
    fn bind(path: &Path) -> io::Result<Self> {
        let first_name = path.with_extension("bind");
        match std::fs::remove_file(&first_name) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = UnixListener::bind(&first_name)?;
        let inode = std::fs::metadata(&first_name)?.ino();
        std::fs::rename(&first_name, path)?;
        Ok(Self { socket, inode })
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // Only if no successor has taken the name.
        if let Self::Bind { path, listener: Some(listener) } = self
            && std::fs::metadata(&*path).is_ok_and(|found| found.ino() == listener.inode)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}
