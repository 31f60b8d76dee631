//! Owns a server that is not ours, for comparisons: one process that talks HTTP and says when it is ready.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::http::{Http, Reply, Stream};
use crate::process::{bound_to_this_process, descendants_of, spawn, wait_until};

/// From SIGTERM to SIGKILL.
const END: Duration = Duration::from_secs(20);

pub struct OtherServer {
    process: Child,
    http: Http,
}

impl OtherServer {
    /// Starts it and waits until `path` answers 200. What it writes is thrown away.
    pub fn start(command: Command, port: u16, path: &str, within: Duration) -> Result<Self, String> {
        let mut bound = bound_to_this_process(Path::new(command.get_program()));
        bound.args(command.get_args()).stdout(Stdio::null()).stderr(Stdio::null());
        let set = command.get_envs().filter_map(|(name, value)| Some((name, value?)));
        bound.envs(set);
        let process = spawn(bound).map_err(|error| error.to_string())?;
        let mut server = Self { process, http: Http::new(format!("http://127.0.0.1:{port}"), None) };
        let mut ended = None;
        let settled = wait_until(within, || {
            ended = server.process.try_wait().ok().flatten();
            ended.is_some() || server.http.get(path).is_ok_and(|reply| reply.status == 200)
        });
        match (settled, ended) {
            (_, Some(status)) => Err(format!("it ended: {status}")),
            (false, None) => Err(format!("it is not ready after {} s", within.as_secs())),
            (true, None) => Ok(server),
        }
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.http.post(path, body).unwrap_or_else(|error| panic!("POST {path}: {error}"))
    }

    pub fn stream(&self, path: &str, body: &Value) -> Stream {
        self.http.stream(path, body).unwrap_or_else(|error| panic!("POST {path}: {error}"))
    }

    /// Itself and all it started.
    pub fn processes(&self) -> Vec<Pid> {
        let own = self.pid();
        let mut all = descendants_of(own);
        all.push(own);
        all
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.process.id().cast_signed())
    }
}

impl Drop for OtherServer {
    fn drop(&mut self) {
        let _ = kill(self.pid(), Signal::SIGTERM);
        if !wait_until(END, || matches!(self.process.try_wait(), Ok(Some(_)))) {
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}
