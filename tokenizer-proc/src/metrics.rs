//! Owns the tokenizer process' metrics. Call sites pass facts; names and buckets appear once.

use std::sync::Arc;
use std::time::Instant;

use prometheus::{GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, Registry};
use proto::metrics::{Registrar, names, register_process_metrics};
use proto::{FinishReason, Role, TokenizedGenerateReqInput};

use crate::mailbox::Progress;

/// When things happened to one request.
#[derive(Debug)]
pub(crate) struct RequestClock {
    streaming: bool,
    counted: bool,
    arrived: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

impl RequestClock {
    pub(crate) fn start(streaming: bool, counted: bool) -> Self {
        Self { streaming, counted, arrived: Instant::now(), first_token: None, last_token: None }
    }

    /// Seconds since the request arrived.
    pub(crate) fn elapsed(&self) -> f64 {
        self.arrived.elapsed().as_secs_f64()
    }

    fn streaming_label(&self) -> &'static str {
        if self.streaming { "True" } else { "False" }
    }
}

/// Every series of this process.
pub(crate) struct TokenizerMetrics {
    registry: Registry,
    prompt_tokens: IntCounterVec,
    generation_tokens: IntCounterVec,
    cached_tokens: IntCounterVec,
    spec_verify_calls: IntCounter,
    requests: IntCounterVec,
    outcomes: IntCounterVec,
    aborted: IntCounter,
    prompt_histogram: Histogram,
    uncached_prompt_histogram: Histogram,
    generation_histogram: Histogram,
    time_to_first_token: HistogramVec,
    inter_token_latency: Histogram,
    time_per_output_token: HistogramVec,
    e2e_latency: HistogramVec,
    startup_time: GaugeVec,
    http_requests: IntCounterVec,
    http_responses: IntCounterVec,
    http_active: GaugeVec,
}

impl TokenizerMetrics {
    pub(crate) fn new(model_name: &str) -> prometheus::Result<Arc<Self>> {
        let registry = Registry::new();
        let base = [("model_name", model_name.to_owned()), ("engine_type", "unified".to_owned())];
        let of_model = &Registrar::new(&registry, base);
        let of_process = &Registrar::new(&registry, []);
        register_process_metrics(of_process, Role::Tokenizer)?;
        Ok(Arc::new(Self {
            prompt_tokens: names::PROMPT_TOKENS.register(of_model)?,
            generation_tokens: names::GENERATION_TOKENS.register(of_model)?,
            cached_tokens: names::CACHED_TOKENS.register(of_model)?,
            spec_verify_calls: names::SPEC_VERIFY_CALLS.register(of_model)?,
            requests: names::NUM_REQUESTS.register(of_model)?,
            outcomes: names::REQUEST_OUTCOMES.register(of_model)?,
            aborted: names::NUM_ABORTED_REQUESTS.register(of_model)?,
            prompt_histogram: names::PROMPT_TOKENS_HISTOGRAM.register(of_model)?,
            uncached_prompt_histogram: names::UNCACHED_PROMPT_TOKENS_HISTOGRAM.register(of_model)?,
            generation_histogram: names::GENERATION_TOKENS_HISTOGRAM.register(of_model)?,
            time_to_first_token: names::TIME_TO_FIRST_TOKEN.register(of_model)?,
            inter_token_latency: names::INTER_TOKEN_LATENCY.register(of_model)?,
            time_per_output_token: names::TIME_PER_OUTPUT_TOKEN.register(of_model)?,
            e2e_latency: names::E2E_REQUEST_LATENCY.register(of_model)?,
            startup_time: names::STARTUP_TIME.register(of_model)?,
            http_requests: names::HTTP_REQUESTS.register(of_process)?,
            http_responses: names::HTTP_RESPONSES.register(of_process)?,
            http_active: names::HTTP_REQUESTS_ACTIVE.register(of_process)?,
            registry,
        }))
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// A phase of the start took this many seconds.
    pub(crate) fn started(&self, phase: &str, seconds: f64) {
        self.startup_time.with_label_values(&[phase]).set(seconds);
    }

    /// `count` tokens of a request arrived together.
    pub(crate) fn tokens(&self, clock: &mut RequestClock, count: usize) {
        if count == 0 {
            return;
        }
        let now = Instant::now();
        let first = clock.first_token.is_none();
        clock.first_token.get_or_insert(now);
        let last = clock.last_token.replace(now);
        if !clock.counted {
            return;
        }
        if first {
            let wait = (now - clock.arrived).as_secs_f64();
            self.time_to_first_token.with_label_values(&[clock.streaming_label()]).observe(wait);
        }
        // The first token has no gap before it; those that came along with it waited for nothing.
        let (gap, samples) = last.map_or((0.0, count - 1), |last| ((now - last).as_secs_f64(), count));
        (0..samples).for_each(|_| self.inter_token_latency.observe(gap / count as f64));
    }

    /// A request ended.
    pub(crate) fn finished(
        &self,
        clock: &RequestClock,
        input: &TokenizedGenerateReqInput,
        progress: &Progress,
        reason: &FinishReason,
    ) {
        if !clock.counted {
            return;
        }
        let streaming = &[clock.streaming_label()];
        let outcome = outcome(reason);
        self.outcomes.with_label_values(&[outcome]).inc();
        self.requests.with_label_values(streaming).inc();
        if outcome == "abort" {
            self.aborted.inc();
        }
        let (prompt, made) = (input.input_ids.len() as u64, u64::from(progress.completion_tokens));
        let cached = u64::from(progress.cached_tokens);
        self.prompt_tokens.with_label_values(streaming).inc_by(prompt);
        self.generation_tokens.with_label_values(streaming).inc_by(made);
        for source in ["device", "total"] {
            self.cached_tokens.with_label_values(&[source]).inc_by(cached);
        }
        self.spec_verify_calls.inc_by(progress.spec.verify_ct);
        self.prompt_histogram.observe(prompt as f64);
        self.uncached_prompt_histogram.observe(prompt.saturating_sub(cached) as f64);
        self.generation_histogram.observe(made as f64);
        self.e2e_latency.with_label_values(streaming).observe(clock.elapsed());
        if let (Some(first), Some(last), 2..) = (clock.first_token, clock.last_token, made) {
            let mean = (last - first).as_secs_f64() / (made - 1) as f64;
            self.time_per_output_token.with_label_values(streaming).observe(mean);
        }
    }

    /// An HTTP request came in; `endpoint` is a route of ours, never a path a client made up.
    pub(crate) fn http_request(&self, endpoint: &str, method: &str) {
        self.http_requests.with_label_values(&[endpoint, method]).inc();
        self.http_active.with_label_values(&[endpoint, method]).inc();
    }

    pub(crate) fn http_response(&self, endpoint: &str, method: &str, status: u16) {
        self.http_responses.with_label_values(&[endpoint, &status.to_string(), method]).inc();
        self.http_active.with_label_values(&[endpoint, method]).dec();
    }
}

/// The label of a request's one outcome.
fn outcome(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::Abort { status_code: Some(500), .. } => "error",
        FinishReason::Abort { status_code: Some(_), .. } => "rejected",
        other => other.kind(),
    }
}
