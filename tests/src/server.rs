//! Owns one server under test, from its start to the proof that it left nothing behind.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::http::{Http, Reply, Stream};
use crate::logs::Logs;
use crate::metrics::Metrics;
use crate::process::{bound_to_this_process, children_of, is_alive, spawn, wait_until};

/// From the start of the launcher to the announced address: the model is loaded from a cold disk at worst.
const START: Duration = Duration::from_secs(120);
/// From SIGTERM to the last process, with nothing running.
const END: Duration = Duration::from_secs(20);

/// What a server is started with.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ServerOptions {
    model: PathBuf,
    flags: Vec<String>,
    api_key: Option<String>,
}

impl ServerOptions {
    /// The default model with plain decoding.
    pub fn plain() -> Self {
        // One thread each: several servers run at a time, and threads that outnumber the CPUs wait for each other.
        let flags = ["--port", "0", "--enable-metrics", "--random-seed", "1", "--num-threads", "1"];
        let flags = flags.map(str::to_owned).to_vec();
        Self { model: repository().join("models/SmolLM2-135M-Instruct"), flags, api_key: None }
    }

    /// The same with its weights decoded to bfloat16 at load.
    pub fn plain_bfloat16() -> Self {
        Self::plain().with(&["--quantization", "none"])
    }

    /// The default model with n-gram speculation.
    pub fn ngram() -> Self {
        Self::plain().with(&["--speculative-algorithm", "NGRAM"])
    }

    /// The default model with the EAGLE head that lies beside it, in trees of the default shape.
    pub fn eagle() -> Self {
        Self::with_map("EAGLE", "SmolLM2-135M-Instruct-EAGLE")
    }

    /// As `make run` serves.
    pub fn as_run() -> Self {
        let tree = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "4"];
        Self::eagle_and_ngram().with(&tree).with(&["--speculative-num-draft-tokens", "8"])
    }

    /// The same with the EAGLE3 head.
    pub fn eagle3() -> Self {
        Self::plain().drafting("EAGLE3", &repository().join("models/SmolLM2-135M-Instruct-EAGLE3"))
    }

    /// The same with three layers, one for each draft step.
    pub fn multi_layer_eagle() -> Self {
        Self::nextn().with(&["--enable-multi-layer-eagle"])
    }

    /// The same with the first of these layers alone.
    pub fn nextn() -> Self {
        Self::with_map("NEXTN", "SmolLM2-135M-Instruct-MTP")
    }

    /// The same with a model that denoises blocks.
    pub fn dflash() -> Self {
        Self::with_map("DFLASH", "SmolLM2-135M-Instruct-DFlash")
    }

    /// The EAGLE head behind the n-gram trie.
    pub fn eagle_and_ngram() -> Self {
        Self::with_map("EAGLE+NGRAM", "SmolLM2-135M-Instruct-EAGLE")
    }

    /// The same with itself as its draft, which agrees with it and is as slow.
    pub fn standalone() -> Self {
        Self::plain().drafting("STANDALONE", &repository().join("models/SmolLM2-135M-Instruct"))
    }

    fn with_map(algorithm: &str, head: &str) -> Self {
        let head = repository().join("models").join(head);
        let map = head.join("token_map.json").display().to_string();
        Self::plain().drafting(algorithm, &head).with(&["--speculative-token-map", &map])
    }

    fn drafting(self, algorithm: &str, head: &Path) -> Self {
        let head = head.display().to_string();
        self.with(&["--speculative-algorithm", algorithm, "--speculative-draft-model-path", &head])
    }

    /// A model of random weights that loads at once, with a tokenizer and room for 512 tokens.
    pub fn tiny() -> Self {
        Self::plain().model(&golden().join("llama-tiny/target")).with(&["--dtype", "float32"])
    }

    /// The same with a draft head that guesses well.
    pub fn tiny_eagle() -> Self {
        let draft = golden().join("eagle1-tiny/draft").display().to_string();
        Self::tiny().with(&["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", &draft])
    }

    /// Threads of the model's arithmetic, in place of the one that tests share a machine with.
    pub fn threads(mut self, threads: usize) -> Self {
        let at =
            self.flags.iter().position(|flag| flag == "--num-threads").expect("every server has the flag");
        self.flags[at + 1] = threads.to_string();
        self
    }

    pub fn with(mut self, flags: &[&str]) -> Self {
        self.flags.extend(flags.iter().map(|flag| (*flag).to_owned()));
        self
    }

    pub fn model(mut self, path: &Path) -> Self {
        self.model = path.to_owned();
        self
    }

    pub fn api_key(mut self, key: &str) -> Self {
        self.api_key = Some(key.to_owned());
        self.with(&["--api-key", key])
    }
}

/// A launcher that was started, whether or not it came to serve.
struct Launcher {
    process: Child,
    logs: Logs,
    collectors: Vec<JoinHandle<()>>,
    /// Home and temporary folder in one; run directories appear in it.
    home: tempfile::TempDir,
}

/// A server that serves.
pub struct Server {
    launcher: Launcher,
    http: Http,
    /// By the name of the binary, and number, as found when it began to serve.
    children: BTreeMap<String, Pid>,
    /// Every process that was ever seen of it.
    seen: Mutex<BTreeSet<Pid>>,
}

/// A server that has ended.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub logs: String,
}

impl Server {
    /// Starts a server and waits until it is ready; panics with all logs when it does not get there.
    pub fn start(options: ServerOptions) -> Self {
        match Self::try_start(options) {
            Ok(server) => server,
            Err(ended) => panic!("the server did not start: {}\n{}", ended.status, ended.logs),
        }
    }

    /// As [`Server::start`]; a server that ends instead of serving is handed back.
    pub fn try_start(options: ServerOptions) -> Result<Self, Ended> {
        let key = options.api_key.clone();
        let mut launcher = Launcher::spawn(&options);
        let logs = launcher.logs.clone();
        let address = logs.wait_for(
            START,
            |line| line.strip_prefix("serving on ").map(str::to_owned),
            || matches!(launcher.process.try_wait(), Ok(Some(_))),
        );
        let Some(base) = address else { return Err(launcher.end(Signal::SIGKILL)) };
        let http = Http::new(base, key);
        let children = children_of(launcher.pid());
        let seen = Mutex::new(children.values().copied().collect());
        let server = Self { launcher, http, children, seen };
        let ready = wait_until(START, || server.http.get("/ready").is_ok_and(|reply| reply.status == 200));
        assert!(ready, "/ready is not 200 though the address was announced");
        Ok(server)
    }

    pub fn base(&self) -> &str {
        self.http.base()
    }

    pub fn get(&self, path: &str) -> Reply {
        self.http.get(path).unwrap_or_else(|error| panic!("GET {path}: {error}"))
    }

    /// As [`Server::get`], with what the client accepts.
    pub fn get_as(&self, path: &str, accept: &str) -> Reply {
        self.http.get_as(path, accept).unwrap_or_else(|error| panic!("GET {path}: {error}"))
    }

    pub fn try_get(&self, path: &str) -> Option<Reply> {
        self.http.get(path).ok()
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.try_post(path, body).unwrap_or_else(|error| panic!("POST {path}: {error}"))
    }

    /// A request that may fail with its connection.
    pub fn try_post(&self, path: &str, body: &Value) -> reqwest::Result<Reply> {
        self.http.post(path, body)
    }

    pub fn post_raw(&self, path: &str, content_type: &str, body: &[u8]) -> Reply {
        self.http.post_raw(path, content_type, body).unwrap_or_else(|error| panic!("POST {path}: {error}"))
    }

    pub fn stream(&self, path: &str, body: &Value) -> Stream {
        self.http.stream(path, body).unwrap_or_else(|error| panic!("POST {path}: {error}"))
    }

    /// A stream whose connection may fail.
    pub fn try_stream(&self, path: &str, body: &Value) -> reqwest::Result<Stream> {
        self.http.stream(path, body)
    }

    /// `/generate`, with status 200.
    pub fn generate(&self, body: &Value) -> Value {
        self.post("/generate", body).ok()
    }

    pub fn metrics(&self) -> Metrics {
        let reply = self.get("/metrics");
        assert_eq!(reply.status, 200, "{reply:?}");
        Metrics::parse(&reply.body)
    }

    /// The scheduler's entry in `/server_info`.
    pub fn internal_state(&self) -> Value {
        self.get("/server_info").ok()["internal_states"][0].clone()
    }

    /// Requests the scheduler holds, running or queued.
    pub fn requests_held(&self) -> u64 {
        let state = self.internal_state();
        let count = |name: &str| state[name].as_u64().unwrap_or_else(|| panic!("no {name} in {state}"));
        count("num_running_reqs") + count("num_queue_reqs")
    }

    /// Waits until the scheduler holds no request.
    pub fn wait_idle(&self) {
        let idle = wait_until(Duration::from_secs(10), || self.requests_held() == 0);
        assert!(idle, "requests are still held: {}", self.internal_state());
    }

    /// What all processes have written so far. Lines are on their way for a moment.
    pub fn logs(&self) -> String {
        self.launcher.logs.text()
    }

    pub fn children(&self) -> &BTreeMap<String, Pid> {
        &self.children
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.launcher.pid(), signal).expect("the launcher is not waited for before it is ended");
    }

    pub fn launcher(&self) -> Pid {
        self.launcher.pid()
    }

    /// The process that plays a role now; `None` while it is dead.
    pub fn child(&self, binary: &str) -> Option<Pid> {
        let pid = children_of(self.launcher.pid()).remove(binary).filter(|pid| is_alive(*pid))?;
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).insert(pid);
        Some(pid)
    }

    pub fn kill_child(&self, binary: &str) {
        self.signal_child(binary, Signal::SIGKILL);
    }

    /// Signals the process that plays a role, as soon as there is one; gives its id.
    pub fn signal_child(&self, binary: &str, signal: Signal) -> Pid {
        let mut hit = None;
        let signalled = wait_until(START, || {
            hit = self.child(binary).filter(|pid| kill(*pid, signal).is_ok());
            hit.is_some()
        });
        assert!(signalled, "there is no {binary}");
        hit.expect("it was just signalled")
    }

    /// The server's run directory.
    pub fn run_dir(&self) -> PathBuf {
        let names = self.launcher.leftovers();
        let name = names.iter().find(|name| name.starts_with("drafthorse-"));
        self.launcher.home.path().join(name.expect("a server has a run directory"))
    }

    /// `launcher ps --json` and its like, as an operator of this server runs them.
    pub fn operate(&self, arguments: &[&str]) -> Output {
        let mut command = std::process::Command::new(target_dir().join("launcher"));
        command
            .args(arguments)
            .env("TMPDIR", self.launcher.home.path())
            .output()
            .expect("it is an executable")
    }

    /// What `launcher ps` says of a process, by its name there.
    pub fn report(&self, process: &str) -> Value {
        let run_dir = self.run_dir().display().to_string();
        let output = self.operate(&["ps", "--json", "--run-dir", &run_dir]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{output:?}");
        let reports: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"));
        let found = reports.as_array().into_iter().flatten().find(|report| report["process"] == process);
        found.unwrap_or_else(|| panic!("no {process} in {text}")).clone()
    }

    /// Waits until all processes do their work.
    pub fn wait_ready(&self) {
        let healthy = wait_until(START, || self.try_get("/health").is_some_and(|reply| reply.status == 200));
        assert!(healthy, "not healthy: {:?}", self.try_get("/health"));
    }

    fn survivors(&self) -> Vec<Pid> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.iter().copied().filter(|pid| is_alive(*pid)).collect()
    }

    /// Whether the launcher has ended.
    pub fn has_ended(&self) -> bool {
        !is_alive(self.launcher.pid())
    }

    /// Signals the launcher, waits for its end, and checks that nothing is left.
    pub fn end(mut self, signal: Signal) -> Ended {
        self.signal(signal);
        self.wait_for_end()
    }

    /// Waits for an end that is under way, and checks that nothing is left.
    pub fn wait_for_end(&mut self) -> Ended {
        let ended = self.launcher.wait();
        let gone = wait_until(END, || self.survivors().is_empty());
        assert!(gone, "processes are left behind: {:?}\n{}", self.survivors(), ended.logs);
        ended
    }

    /// What lies in the temporary folder: empty after a clean end.
    pub fn leftovers(&self) -> Vec<String> {
        self.launcher.leftovers()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let panicking = std::thread::panicking();
        if panicking {
            eprintln!("--- logs of {} ---\n{}\n---", self.base(), self.launcher.logs.text());
        }
        if matches!(self.launcher.process.try_wait(), Ok(Some(_))) {
            return;
        }
        self.signal(Signal::SIGTERM);
        let asked = wait_until(END, || self.has_ended());
        let ended = self.launcher.end(Signal::SIGKILL);
        if !panicking {
            assert!(asked, "SIGTERM did not end the server\n{}", ended.logs);
            let gone = wait_until(END, || self.survivors().is_empty());
            assert!(gone, "processes are left behind: {:?}\n{}", self.survivors(), ended.logs);
            assert_eq!(self.leftovers(), [""; 0], "{}", ended.logs);
        }
    }
}

impl Launcher {
    fn spawn(options: &ServerOptions) -> Self {
        let home = tempfile::tempdir().expect("the temporary folder is writable");
        let binary = target_dir().join("launcher");
        assert!(binary.is_file(), "{} is missing: build the workspace first (make build)", binary.display());
        let mut command = bound_to_this_process(&binary);
        command
            .arg("--model-path")
            .arg(&options.model)
            .args(&options.flags)
            .env("HOME", home.path())
            .env("TMPDIR", home.path())
            .current_dir(home.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        let mut process = spawn(command).expect("the launcher is an executable");
        let logs = Logs::default();
        let collectors = vec![
            logs.collect(process.stdout.take().expect("stdout was piped")),
            logs.collect(process.stderr.take().expect("stderr was piped")),
        ];
        Self { process, logs, collectors, home }
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.process.id() as i32)
    }

    fn end(&mut self, signal: Signal) -> Ended {
        if matches!(self.process.try_wait(), Ok(None)) {
            let _ = kill(self.pid(), signal);
        }
        self.wait()
    }

    fn wait(&mut self) -> Ended {
        let ended = wait_until(END, || matches!(self.process.try_wait(), Ok(Some(_)) | Err(_)));
        assert!(ended, "the launcher did not end\n{}", self.logs.text());
        let status = self.process.wait().expect("the launcher was started by this process");
        // The pipes are the launcher's alone, so they are closed now; the last lines are still being read.
        self.collectors.drain(..).for_each(|collector| drop(collector.join()));
        Ended { status, logs: self.logs.text() }
    }

    fn leftovers(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.home.path()).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }
}

/// The top of the repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the repository").to_owned()
}

fn golden() -> PathBuf {
    repository().join("tests/fixtures/golden")
}

/// Where the binaries are: tests run from the `deps` folder next to them.
pub fn target_dir() -> PathBuf {
    let test = std::env::current_exe().expect("the test is a file");
    test.ancestors().nth(2).expect("the test lies two folders down").to_owned()
}
