//! Owns one running front end in a temporary directory, and the client's side of its HTTP.

use std::net::TcpListener;
use std::os::fd::IntoRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use proto::child::{Child, Phase, Shutdown, ShutdownSender, StatusReporter};
use proto::link::LinkThread;
use proto::{
    AcceptanceRule, DeviceKind, Dtype, Endpoints, Incarnation, ModelConfig, NgramConfig, NgramMatchType,
    Role, ScheduleConfig, SchedulePolicy, ServeConfig, ServerConfig, SpecAlgorithm, SpecConfig, Weights,
};
use reqwest::blocking::{Client, Response};
use serde_json::{Map, Value, json};

use crate::fake::Fake;

pub(crate) const VOCAB: u32 = 49152;
pub(crate) const CONTEXT: u32 = 256;

pub(crate) struct Server {
    pub url: String,
    pub client: Client,
    pub fake: Fake,
    pub shutdown: ShutdownSender,
    /// The listening socket as a launcher keeps it, for successors.
    pub listener: TcpListener,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
    _dir: tempfile::TempDir,
}

pub(crate) fn start() -> Server {
    start_with(|_| {})
}

pub(crate) fn start_with(change: impl FnOnce(&mut ServeConfig)) -> Server {
    let dir = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut config = config(dir.path(), port);
    change(&mut config);
    std::fs::create_dir_all(config.metrics_dir()).unwrap();
    let fake = Fake::start(&Endpoints::new(dir.path()));
    let kept = listener.try_clone().unwrap();
    let (sender, shutdown) = Shutdown::new();
    let child = Child {
        config: Arc::new(config),
        member: Role::Tokenizer.into(),
        incarnation: Incarnation::now(),
        links: LinkThread::start(Role::Tokenizer, Incarnation::now()).unwrap(),
        shutdown,
        status: StatusReporter::detached(),
        health: proto::child::HealthView::default(),
        listen_fd: Some(listener.into_raw_fd()),
        successor: false,
    };
    let thread = std::thread::spawn(move || tokenizer_proc::run(child));
    let client = Client::builder().timeout(Duration::from_secs(30)).build().unwrap();
    let server = Server {
        url: format!("http://127.0.0.1:{port}"),
        client,
        fake,
        shutdown: sender,
        listener: kept,
        thread: Some(thread),
        _dir: dir,
    };
    server.wait_until("ready", || server.get("/ready").status() == 200);
    server
}

/// A folder with the tokenizer of the default model.
pub(crate) fn tokenizer_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/golden/detok/smollm2")
}

fn config(run_dir: &Path, port: u16) -> ServeConfig {
    let server_args: Map<String, Value> =
        json!({"api_key": "secret", "tokenizer_path": "tok", "speculative_num_steps": 3})
            .as_object()
            .unwrap()
            .clone();
    ServeConfig {
        run_dir: run_dir.to_owned(),
        topology: proto::Topology::default(),
        server: ServerConfig {
            host: "127.0.0.1".to_owned(),
            port,
            served_model_name: "smol/model".to_owned(),
            api_key: None,
            enable_metrics: true,
            enable_cache_report: false,
            stream_interval: 1,
            incremental_streaming_output: false,
            skip_tokenizer_init: false,
            max_queued_requests: 100,
            log_level: "info".to_owned(),
        },
        model: ModelConfig {
            model_path: "models/smol".to_owned(),
            weights: Weights::Dummy { dir: run_dir.to_owned(), seed: 0 },
            tokenizer_dir: Some(tokenizer_dir()),
            architectures: vec!["LlamaForCausalLM".to_owned()],
            model_type: "llama".to_owned(),
            vocab_size: VOCAB,
            context_length: CONTEXT,
            eos_token_ids: vec![2],
            bos_token_id: Some(1),
            dtype: Dtype::Float32,
            device: DeviceKind::Cpu,
            quantization: proto::Quantization::default(),
            generation_defaults: json!({"temperature": 0.25, "top_k": 7}).as_object().unwrap().clone(),
        },
        schedule: ScheduleConfig {
            max_running_requests: 16,
            max_total_tokens: Some(4096),
            mem_fraction_static: 0.5,
            page_size: 1,
            chunked_prefill_size: 512,
            max_prefill_tokens: 4096,
            policy: SchedulePolicy::Fcfs,
            disable_radix_cache: false,
            decode_log_interval: 40,
            random_seed: 7,
            num_threads: 1,
            watchdog_timeout_s: 60.0,
        },
        spec: Some(SpecConfig {
            algorithm: SpecAlgorithm::Ngram(NgramConfig {
                min_bfs_breadth: 1,
                max_bfs_breadth: 8,
                match_type: NgramMatchType::Bfs,
                max_trie_depth: 18,
                capacity: 1000,
            }),
            num_steps: 3,
            eagle_topk: 1,
            num_draft_tokens: 4,
            acceptance: AcceptanceRule::Equality,
            adaptive: None,
            ngram_first: None,
        }),
        server_args,
    }
}

impl Server {
    pub(crate) fn get(&self, path: &str) -> Response {
        self.client.get(format!("{}{path}", self.url)).send().unwrap()
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Response {
        self.client.post(format!("{}{path}", self.url)).json(body).send().unwrap()
    }

    /// Sends bytes as they are, said to be JSON.
    pub(crate) fn post_raw(&self, path: &str, body: impl Into<reqwest::blocking::Body>) -> Response {
        let request = self.client.post(format!("{}{path}", self.url));
        request.header("content-type", "application/json").body(body).send().unwrap()
    }

    /// The answer to a request that must succeed.
    pub(crate) fn ok(&self, path: &str, body: &Value) -> Value {
        let response = self.post(path, body);
        let (status, text) = (response.status(), response.text().unwrap());
        assert_eq!(status, 200, "{path} {body}: {text}");
        serde_json::from_str(&text).unwrap()
    }

    /// The error of a request that must fail with `status`.
    pub(crate) fn refused(&self, path: &str, body: &Value, status: u16) -> Value {
        let response = self.post(path, body);
        let (got, text) = (response.status(), response.text().unwrap());
        assert_eq!(got, status, "{path} {body}: {text}");
        serde_json::from_str(&text).unwrap_or_else(|_| panic!("not JSON: {text}"))
    }

    /// The events of a stream that must end with the end mark.
    pub(crate) fn events(&self, path: &str, body: &Value) -> Vec<Value> {
        let response = self.post(path, body);
        let status = response.status();
        let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
        let text = response.text().unwrap();
        assert_eq!(status, 200, "{path} {body}: {text}");
        assert!(kind.starts_with("text/event-stream"), "{kind}");
        let mut events: Vec<&str> = text.split("\n\n").filter(|event| !event.is_empty()).collect();
        assert_eq!(events.pop(), Some("data: [DONE]"), "{text}");
        let value = |event: &&str| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
        events.iter().map(value).collect()
    }

    pub(crate) fn metric(&self, series: &str) -> Option<f64> {
        let page = self.get("/metrics").text().unwrap();
        let line = page.lines().find(|line| line.starts_with(series))?;
        line.rsplit(' ').next().unwrap().parse().ok()
    }

    pub(crate) fn wait_until(&self, what: &str, mut reached: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(15);
        while !reached() {
            assert!(Instant::now() < deadline, "never {what}");
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }

    /// Ends the process and returns what `run` returned.
    pub(crate) fn stop(&mut self, phase: Phase) -> anyhow::Result<()> {
        self.shutdown.advance(phase);
        self.thread.take().expect("stopped once").join().expect("run does not panic")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown.advance(Phase::Stopping);
        if let Some(thread) = self.thread.take() {
            // A test that already failed has its own message.
            let _ = thread.join();
        }
    }
}
