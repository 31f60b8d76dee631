//! Children as real processes: this binary plays the launcher, and with `PLAY` set one of the parts below.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child as Process, Command as Start, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use proto::child::{CLOSE_DEADLINE, Child, Phase, child_main};
use proto::link::{AckMode, LinkEvent, LinkHandle, LinkSpec, LinkThread, Side};
use proto::{
    Command, DeviceKind, Dtype, Endpoints, Heartbeat, Incarnation, ModelConfig, Role, ScheduleConfig,
    SchedulePolicy, ServeConfig, ServerConfig, Status, Topology, Weights,
};

const DEADLINE: Duration = Duration::from_secs(60);
const ROLE: Role = Role::Detokenizer;

fn main() -> ExitCode {
    match std::env::var("PLAY").as_deref() {
        Ok("middle") => middle(),
        Ok(_) => child_main(ROLE, play),
        Err(_) => {
            let tests: [(&str, fn()); 6] = [
                ("drains_on_command", drains_on_command),
                ("drains_on_sigterm_and_ignores_sigint", drains_on_sigterm_and_ignores_sigint),
                ("reports_a_failure_with_its_causes", reports_a_failure_with_its_causes),
                ("reports_a_panic", reports_a_panic),
                ("dies_with_its_launcher", dies_with_its_launcher),
                ("refuses_bad_command_lines", refuses_bad_command_lines),
            ];
            for (name, test) in tests {
                println!("test {name} ...");
                test();
            }
            println!("all {} ok", tests.len());
            ExitCode::SUCCESS
        }
    }
}

/// The child's part.
fn play(child: Child) -> Result<(), Failure> {
    match std::env::var("PLAY").unwrap().as_str() {
        "fail" => return Err(Failure),
        "panic" => panic!("the roof is on fire"),
        _ => {}
    }
    child.status.progress("load", 1, 2);
    child.status.ready("all set");
    child.status.alive(Heartbeat { in_flight: 1, queued: 2, progress: 3 });
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(child.shutdown.reached(Phase::Draining));
    child.status.progress("drain", 0, 1);
    runtime.block_on(child.shutdown.reached(Phase::Stopping));
    child.links.close(CLOSE_DEADLINE);
    Ok(())
}

struct Failure;

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if f.alternate() { "cannot load: no such file" } else { "cannot load" })
    }
}

/// A launcher in the middle, which is going to be killed.
fn middle() -> ExitCode {
    let config = PathBuf::from(std::env::var_os("CONFIG").unwrap());
    let mut child = start("stay", &config).spawn().unwrap();
    println!("{}", child.id());
    let _ = child.wait();
    ExitCode::SUCCESS
}

fn start(part: &str, config: &Path) -> Start {
    let mut start = Start::new(std::env::current_exe().unwrap());
    start.env("PLAY", part).arg("--config").arg(config);
    start
}

struct Launcher {
    dir: tempfile::TempDir,
    config: PathBuf,
    _links: LinkThread,
    commands: LinkHandle<Command>,
    statuses: Receiver<Status>,
}

impl Launcher {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        config.store().unwrap();
        let links = LinkThread::start(Role::Launcher, Incarnation::now()).unwrap();
        let spec = LinkSpec {
            path: Endpoints::new(dir.path()).control(ROLE.into()),
            side: Side::Bind,
            peer: ROLE,
            ack: AckMode::Auto,
        };
        let (sender, statuses) = channel();
        let commands = links.open(spec, move |event| {
            if let LinkEvent::Message { message, .. } = event {
                let _ = sender.send(message);
            }
        });
        Self { config: config.path(), dir, _links: links, commands, statuses }
    }

    fn start(&self, part: &str) -> Process {
        start(part, &self.config).stderr(Stdio::null()).spawn().unwrap()
    }

    fn wait_for(&self, wanted: impl Fn(&Status) -> bool) -> Status {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let status = self.statuses.recv_timeout(deadline - Instant::now()).expect("the status in time");
            if wanted(&status) {
                return status;
            }
        }
    }

    fn wait_for_work(&self) {
        assert!(matches!(
            self.wait_for(|status| !matches!(status, Status::Heartbeat(_))),
            Status::Progress { done: 1, total: 2, .. }
        ));
        self.wait_for(|status| *status == Status::Ready { detail: "all set".into() });
        let heartbeat = Heartbeat { in_flight: 1, queued: 2, progress: 3 };
        self.wait_for(|status| *status == Status::Heartbeat(heartbeat.clone()));
    }

    fn wait_for_drain(&self) {
        self.wait_for(|status| matches!(status, Status::Progress { stage, .. } if stage == "drain"));
    }

    fn failure(&self) -> String {
        match self.wait_for(|status| matches!(status, Status::Failed { .. })) {
            Status::Failed { reason } => reason,
            _ => unreachable!("just waited for it"),
        }
    }
}

fn code(mut process: Process) -> Option<i32> {
    process.wait().unwrap().code()
}

fn drains_on_command() {
    let launcher = Launcher::new();
    let child = launcher.start("stay");
    launcher.wait_for_work();
    launcher.commands.send(&Command::Drain).unwrap();
    launcher.wait_for_drain();
    launcher.commands.send(&Command::Stop).unwrap();
    assert_eq!(code(child), Some(0));
}

fn drains_on_sigterm_and_ignores_sigint() {
    let launcher = Launcher::new();
    let child = launcher.start("stay");
    let pid = Pid::from_raw(child.id() as i32);
    launcher.wait_for_work();
    kill(pid, Signal::SIGINT).unwrap();
    kill(pid, Signal::SIGTERM).unwrap();
    launcher.wait_for_drain();
    kill(pid, Signal::SIGTERM).unwrap();
    assert_eq!(code(child), Some(0));
}

fn reports_a_failure_with_its_causes() {
    let launcher = Launcher::new();
    let child = launcher.start("fail");
    assert_eq!(launcher.failure(), "cannot load: no such file");
    assert_eq!(code(child), Some(1));
}

fn reports_a_panic() {
    let launcher = Launcher::new();
    let child = launcher.start("panic");
    let reason = launcher.failure();
    assert!(reason.contains("the roof is on fire"), "{reason}");
    assert_eq!(code(child), Some(1));
}

fn dies_with_its_launcher() {
    let launcher = Launcher::new();
    let mut middle = Start::new(std::env::current_exe().unwrap())
        .env("PLAY", "middle")
        .env("CONFIG", &launcher.config)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(middle.stdout.take().unwrap()).read_line(&mut line).unwrap();
    launcher.wait_for_work();
    middle.kill().unwrap();
    middle.wait().unwrap();
    let stat = PathBuf::from(format!("/proc/{}/stat", line.trim()));
    let deadline = Instant::now() + DEADLINE;
    // Gone, or a zombie that its new parent has not looked after.
    while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
        assert!(Instant::now() < deadline, "the child outlives its launcher");
        std::thread::yield_now();
    }
}

fn refuses_bad_command_lines() {
    let launcher = Launcher::new();
    let run = |args: &[&str]| {
        let mut start = Start::new(std::env::current_exe().unwrap());
        code(start.env("PLAY", "stay").args(args).stderr(Stdio::null()).spawn().unwrap())
    };
    assert_eq!(run(&[]), Some(2));
    assert_eq!(run(&["--config", "/nowhere/config.json"]), Some(1));
    let junk = launcher.dir.path().join("junk.json");
    std::fs::write(&junk, "{}").unwrap();
    assert_eq!(run(&["--config", junk.to_str().unwrap()]), Some(1));
}

fn config(run_dir: &Path) -> ServeConfig {
    ServeConfig {
        run_dir: run_dir.to_owned(),
        topology: Topology::default(),
        server: ServerConfig {
            host: "127.0.0.1".into(),
            port: 1,
            served_model_name: "tiny".into(),
            api_key: None,
            enable_metrics: false,
            enable_cache_report: false,
            stream_interval: 1,
            incremental_streaming_output: false,
            skip_tokenizer_init: true,
            max_queued_requests: 8,
            log_level: "info".into(),
        },
        model: ModelConfig {
            model_path: "tiny".into(),
            weights: Weights::Dummy { dir: run_dir.to_owned(), seed: 1 },
            tokenizer_dir: None,
            architectures: Vec::new(),
            model_type: "llama".into(),
            vocab_size: 8,
            context_length: 8,
            eos_token_ids: Vec::new(),
            bos_token_id: None,
            dtype: Dtype::Float32,
            device: DeviceKind::Cpu,
            quantization: proto::Quantization::default(),
            generation_defaults: serde_json::Map::new(),
        },
        schedule: ScheduleConfig {
            max_running_requests: 1,
            max_total_tokens: None,
            mem_fraction_static: 0.5,
            page_size: 1,
            chunked_prefill_size: 8,
            max_prefill_tokens: 8,
            policy: SchedulePolicy::Fcfs,
            disable_radix_cache: false,
            decode_log_interval: 40,
            random_seed: 1,
            num_threads: 1,
            watchdog_timeout_s: 300.0,
        },
        spec: None,
        server_args: serde_json::Map::new(),
    }
}
