//! Owns where clients come in: the listening socket, which is the launcher's and may be shared with other tokenizer
//! processes, and when this one stops accepting.

use std::io;
use std::net::SocketAddr;

use anyhow::Context;
use axum::serve::Listener;
use proto::child::{Phase, Shutdown};
use tokio::net::{TcpListener, TcpStream};

/// The listening socket until this process retires. From then on new connections are left in the socket's backlog, to
/// others or to a successor; those that were accepted are served. A process that drains goes on accepting: there is
/// nobody else to tell clients that the server is stopping.
pub(crate) struct Door {
    listener: Option<TcpListener>,
    address: SocketAddr,
    shutdown: Shutdown,
}

impl Door {
    /// Must be called in the runtime that serves.
    pub(crate) fn open(listener: std::net::TcpListener, shutdown: Shutdown) -> anyhow::Result<Self> {
        let prepare = || {
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?;
            Ok::<_, io::Error>((TcpListener::from_std(listener)?, address))
        };
        let (listener, address) = prepare().context("preparing the listening socket")?;
        Ok(Self { listener: Some(listener), address, shutdown })
    }
}

impl Listener for Door {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        while let Some(listener) = &mut self.listener {
            match self.shutdown.phase() {
                Phase::Running => tokio::select! {
                    () = self.shutdown.reached(Phase::Retiring) => {}
                    came = Listener::accept(listener) => return came,
                },
                Phase::Retiring => self.listener = None,
                Phase::Draining | Phase::Stopping => return Listener::accept(listener).await,
            }
        }
        std::future::pending().await
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}
