//! Owns one server of the comparison, whoever made it: starting it, talking to it, and what it takes of the machine.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::unistd::Pid;
use serde_json::{Value, json};
use tests::{OtherServer, Server, ServerOptions, Stream, peak_mib, repository};

const READY: Duration = Duration::from_secs(120);

/// A server that is ready.
pub(crate) struct Contender {
    name: &'static str,
    ready_after: Duration,
    server: Kind,
}

enum Kind {
    Ours(Server),
    Other(OtherServer),
}

impl Contender {
    pub(crate) fn ours(name: &'static str, options: ServerOptions) -> Self {
        let start = Instant::now();
        let server = Server::start(options);
        Self { name, ready_after: start.elapsed(), server: Kind::Ours(server) }
    }

    fn other(name: &'static str, command: Command, port: u16) -> Option<Self> {
        let start = Instant::now();
        match OtherServer::start(command, port, "/health", READY) {
            Ok(server) => Some(Self { name, ready_after: start.elapsed(), server: Kind::Other(server) }),
            Err(reason) => {
                println!("{name} does not start: {reason}");
                None
            }
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn ready_after(&self) -> Duration {
        self.ready_after
    }

    /// What earlier rounds left in a prefix cache or a trie of n-grams. The others are asked not to use theirs.
    pub(crate) fn forget(&self) {
        if let Kind::Ours(server) = &self.server {
            assert_eq!(server.post("/flush_cache", &json!({})).status, 200, "the server is idle");
        }
    }

    /// The name that requests must give.
    pub(crate) fn model(&self) -> &'static str {
        "m"
    }

    pub(crate) fn stream(&self, path: &str, body: &Value) -> Stream {
        match &self.server {
            Kind::Ours(server) => server.stream(path, body),
            Kind::Other(server) => server.stream(path, body),
        }
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Value {
        match &self.server {
            Kind::Ours(server) => server.post(path, body).ok(),
            Kind::Other(server) => server.post(path, body).ok(),
        }
    }

    /// Most memory that its processes have had, summed: pages they share count for each.
    pub(crate) fn peak_mib(&self) -> u64 {
        match &self.server {
            Kind::Ours(server) => {
                let all = std::iter::once(server.launcher()).chain(server.children().values().copied());
                all.map(peak_mib).sum()
            }
            Kind::Other(server) => server.processes().into_iter().map(|pid: Pid| peak_mib(pid)).sum(),
        }
    }
}

/// What scripts/peers.sh put into a folder.
pub(crate) struct Installed {
    llama: Option<PathBuf>,
}

impl Installed {
    pub(crate) fn find(dir: &Path) -> Self {
        let there = |path: PathBuf, what: &str| {
            let found = path.is_file().then_some(path);
            if found.is_none() {
                println!("{what} is not installed in {} and is skipped", dir.display());
            }
            found
        };
        Self { llama: there(dir.join("llama.cpp/bin/llama-server"), "llama.cpp") }
    }

    pub(crate) fn start(&self, threads: usize) -> Vec<Contender> {
        let mut all = Vec::new();
        if let Some(binary) = &self.llama {
            let bf16 = binary.with_file_name("bf16.gguf");
            let q4 = repository().join("models/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf");
            let ngram: &[&str] = &[
                "--spec-type",
                "ngram-simple",
                "--spec-ngram-simple-size-n",
                "4",
                "--spec-ngram-simple-size-m",
                "8",
            ];
            for (name, weights, flags) in [
                ("llama.cpp Q4_1", &q4, &[][..]),
                ("llama.cpp bf16", &bf16, &[][..]),
                ("llama.cpp bf16 n-gram", &bf16, ngram),
            ] {
                let start = |more: &[&str]| {
                    let port = free_port();
                    Contender::other(
                        name,
                        llama(binary, weights, port, threads, &[flags, more].concat()),
                        port,
                    )
                };
                // Its kernels for matrix tiles crash on some virtual machines that have them.
                all.extend(start(&[]).or_else(|| {
                    println!("{name} is tried again without repacked weights");
                    start(&["--no-repack"])
                }));
            }
        }
        all
    }
}

fn llama(binary: &Path, weights: &Path, port: u16, threads: usize, flags: &[&str]) -> Command {
    let mut command = Command::new(binary);
    let (port, threads) = (port.to_string(), threads.to_string());
    command.arg("--model").arg(weights).args(["--host", "127.0.0.1", "--port", &port, "--threads", &threads]);
    // As many at once as the widest row asks, with room for its answers.
    command.args(["--parallel", "32", "--ctx-size", "40960", "--alias", "m"]).args(flags);
    command
}

/// Free a moment ago.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("the loopback has a free port");
    listener.local_addr().expect("a bound socket has an address").port()
}
