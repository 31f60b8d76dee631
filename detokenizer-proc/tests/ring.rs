//! The detokenizer process over its real links, with the test as scheduler and as tokenizer process.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use proto::child::{Child, Phase, ShutdownSender};
use proto::link::{AckMode, LinkEvent, LinkHandle, LinkSpec, LinkThread, Side};
use proto::{
    BatchTokenIDOutput, DecodeRow, Endpoints, FinishReason, Incarnation, Lane, Role, RowProgress,
    ServeConfig, SpecCounters, TextRow, ToDetokenizer, ToTokenizer, TokenRow,
};
use serde_json::json;

const DEADLINE: Duration = Duration::from_secs(20);
/// " world", "!" and " This" in the golden vocabulary.
const IDS: [u32; 3] = [905, 17, 669];

fn config(run_dir: &Path) -> ServeConfig {
    let tokenizer_dir =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/golden/detok/smollm2");
    serde_json::from_value(json!({
        "run_dir": run_dir,
        "server": {
            "host": "127.0.0.1", "port": 1, "served_model_name": "model", "api_key": null,
            "enable_metrics": true, "enable_cache_report": false, "stream_interval": 1,
            "incremental_streaming_output": false, "skip_tokenizer_init": false,
            "max_queued_requests": 1, "log_level": "info",
        },
        "model": {
            "model_path": "model", "weights": {"Safetensors": run_dir}, "tokenizer_dir": tokenizer_dir,
            "architectures": [], "model_type": "llama", "vocab_size": 49152, "context_length": 8192,
            "eos_token_ids": [2], "bos_token_id": 1, "dtype": "float32", "device": "cpu",
            "generation_defaults": {},
        },
        "schedule": {
            "max_running_requests": 1, "max_total_tokens": null, "mem_fraction_static": 0.5, "page_size": 1,
            "chunked_prefill_size": 1, "max_prefill_tokens": 1, "policy": "fcfs",
            "disable_radix_cache": false, "decode_log_interval": 1, "random_seed": 0, "num_threads": 1,
            "watchdog_timeout_s": 1.0,
        },
        "spec": null,
        "server_args": {},
    }))
    .unwrap()
}

/// One end of a link that the test plays.
struct Peer<Out, In> {
    _thread: LinkThread,
    link: LinkHandle<Out>,
    events: Receiver<LinkEvent<In>>,
}

fn bind<Out, In>(path: PathBuf, role: Role) -> Peer<Out, In>
where
    Out: serde::Serialize + Send + 'static,
    In: serde::de::DeserializeOwned + Send + 'static,
{
    let thread = LinkThread::start(role, Incarnation::now()).unwrap();
    let (sender, events) = mpsc::channel();
    let spec = LinkSpec { path, side: Side::Bind, peer: Role::Detokenizer, ack: AckMode::Manual };
    let link = thread.open(spec, move |event| drop(sender.send(event)));
    Peer { _thread: thread, link, events }
}

impl<Out, In> Peer<Out, In> {
    /// The first event that `pick` takes.
    fn wait<T>(&self, what: &str, mut pick: impl FnMut(LinkEvent<In>) -> Option<T>) -> T {
        let end = Instant::now() + DEADLINE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let event =
                self.events.recv_timeout(left).unwrap_or_else(|_| panic!("no {what} in {DEADLINE:?}"));
            if let Some(picked) = pick(event) {
                return picked;
            }
        }
    }
}

fn start(run_dir: &Path) -> (ShutdownSender, JoinHandle<anyhow::Result<()>>) {
    let (child, stop) = Child::detached(Role::Detokenizer, config(run_dir)).unwrap();
    (stop, std::thread::spawn(move || detokenizer_proc::run(child)))
}

/// The ids from `start` to `end` of the answer `IDS`; a first row carries all of them.
fn row(start: usize, end: usize, first: bool, finished_reason: Option<FinishReason>) -> ToDetokenizer {
    let decode_ids = IDS[if first { 0 } else { start }..end].to_vec();
    ToDetokenizer::TokenIds(BatchTokenIDOutput::from_rows([TokenRow {
        decode: DecodeRow {
            decode_ids,
            read_offset: 0,
            skip_special_tokens: true,
            spaces_between_special_tokens: true,
            no_stop_trim: false,
            stop_strs: Vec::new(),
        },
        progress: RowProgress {
            rid: "r".into(),
            start: start as u32,
            output_ids: IDS[start..end].to_vec(),
            finished_reason,
            prompt_tokens: 3,
            completion_tokens: end as u32,
            cached_tokens: 0,
            retraction_count: 0,
            queue_time: 0.0,
            logprobs: None,
            spec: SpecCounters::default(),
        },
    }]))
}

fn text(peer: &Peer<(), ToTokenizer>) -> (u64, TextRow) {
    peer.wait("text", |event| match event {
        LinkEvent::Message { seq, message: ToTokenizer::Text(batch) } => {
            Some((seq, batch.into_rows().unwrap().remove(0)))
        }
        _ => None,
    })
}

#[test]
fn tokens_travel_through_and_survive_the_detokenizers_death() {
    let dir = tempfile::tempdir().unwrap();
    let endpoints = Endpoints::new(dir.path());
    let scheduler: Peer<ToDetokenizer, ()> = bind(endpoints.detokenizer(Lane(0)), Role::Scheduler);
    let tokenizer: Peer<(), ToTokenizer> = bind(endpoints.text(Lane(0)), Role::Tokenizer);
    let (stop, process) = start(dir.path());

    scheduler.link.send(&row(0, 1, true, None)).unwrap();
    let (seq, first) = text(&tokenizer);
    assert_eq!((first.text.as_str(), first.text_start), (" world", 0));
    assert_eq!(scheduler.link.backlog().messages, 1, "the text is not acknowledged yet");
    tokenizer.link.ack(seq);
    scheduler.wait("acknowledgement", |event| matches!(event, LinkEvent::Acked { .. }).then_some(()));
    assert_eq!(scheduler.link.backlog().messages, 0);

    stop.advance(Phase::Stopping);
    process.join().unwrap().unwrap();
    let (stop, process) = start(dir.path());
    let restarted =
        |event: LinkEvent<()>| matches!(event, LinkEvent::Up { restarted: true, .. }).then_some(());
    scheduler.wait("new detokenizer", restarted);
    scheduler.link.send(&row(0, 2, true, None)).unwrap();
    let (seq, again) = text(&tokenizer);
    assert_eq!((again.text.as_str(), again.text_start), (" world!", 0));
    tokenizer.link.ack(seq);

    scheduler.link.send(&row(2, 3, false, Some(FinishReason::Length { length: 3 }))).unwrap();
    let (seq, last) = text(&tokenizer);
    assert_eq!((last.text.as_str(), last.text_start, last.progress.start), (" This", 7, 2));
    tokenizer.link.ack(seq);
    stop.advance(Phase::Stopping);
    process.join().unwrap().unwrap();
    let page =
        proto::metrics::Format::Prometheus.render(&proto::metrics::join(&dir.path().join("metrics"), None));
    assert!(page.contains("sglang:detokenizer_rows_total"), "{page}");
}

#[test]
fn a_vocabulary_that_cannot_be_read_fails_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.model.tokenizer_dir = Some(dir.path().to_owned());
    let (child, _stop) = Child::detached(Role::Detokenizer, config).unwrap();
    let error = format!("{:#}", detokenizer_proc::run(child).unwrap_err());
    assert!(error.contains("tokenizer.json"), "{error}");
}
