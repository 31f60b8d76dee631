//! Owns the scheduler's Prometheus series: their names, once, and how facts become values.

use std::collections::HashMap;

use prometheus::core::Collector;
use prometheus::{Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry};
use proto::{FinishReason, ServeConfig};

use super::report::{Load, StepReport};
use super::window::{Tick, share};
use crate::engine::EngineLimits;

/// SGLang's bounds of `queue_time_seconds`.
const QUEUE_TIME_BUCKETS: &[f64] = &[
    0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
    50.0, 60.0, 70.0, 80.0, 90.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 900.0, 1000.0,
    1200.0, 1400.0, 1600.0, 1800.0, 2000.0, 2500.0, 3000.0,
];

const GIB: f64 = (1u64 << 30) as f64;

/// All series of one scheduler.
pub(super) struct Series {
    pub(super) registry: Registry,
    running: IntGauge,
    queued: IntGauge,
    gen_throughput: Gauge,
    cache_hit_rate: Gauge,
    decode_sum_seq_lens: IntGauge,
    token_usage: Gauge,
    used_tokens: IntGauge,
    kv_used: IntGauge,
    kv_available: IntGauge,
    kv_evictable: IntGauge,
    new_token_ratio: Gauge,
    retracted_now: IntGauge,
    retracted: IntCounter,
    retracted_input: IntCounter,
    retracted_output: IntCounter,
    evicted: IntCounter,
    queue_time: Histogram,
    tokens: IntCounterVec,
    spec_accept_length: Gauge,
    spec_accept_rate: Gauge,
    spec_num_steps: IntGauge,
    spec_num_draft_tokens: IntGauge,
    spec_verify_steps: IntCounter,
    spec_proposed: IntCounter,
    spec_accepted: IntCounter,
    spec_delivered: IntCounter,
    spec_proposed_at: IntCounterVec,
    spec_accepted_at: IntCounterVec,
    refused: IntCounter,
    constants: Vec<(IntGauge, fn(&Constants) -> i64)>,
    weight_gb: Gauge,
    kv_gb: Gauge,
}

/// What never changes while the scheduler runs.
pub(super) struct Constants {
    capacity: usize,
    page_size: usize,
    context_len: usize,
    max_running: usize,
}

impl Series {
    /// Registers everything; fails only when two series have one name.
    pub(super) fn new(config: &ServeConfig) -> prometheus::Result<Self> {
        let labels = HashMap::from_iter(
            [
                ("model_name", config.server.served_model_name.as_str()),
                ("engine_type", "unified"),
                ("tp_rank", "0"),
                ("pp_rank", "0"),
                ("moe_ep_rank", "0"),
            ]
            .map(|(name, value)| (name.to_owned(), value.to_owned())),
        );
        let make = Maker { registry: Registry::new(), labels };
        Ok(Self {
            running: make.int_gauge("num_running_reqs", "Requests that hold a seat")?,
            queued: make.int_gauge("num_queue_reqs", "Requests that wait")?,
            gen_throughput: make.gauge(
                "gen_throughput",
                "Tokens made per second over the last log window, bonus tokens included",
            )?,
            cache_hit_rate: make.gauge(
                "cache_hit_rate",
                "Prompt tokens found in the cache, as a share, at the last prefill",
            )?,
            decode_sum_seq_lens: make
                .int_gauge("decode_sum_seq_lens", "Sum of the lengths of decoding sequences")?,
            token_usage: make.gauge("token_usage", "KV slots in use, as a share")?,
            used_tokens: make.int_gauge("num_used_tokens", "KV slots in use")?,
            kv_used: make.int_gauge("kv_used_tokens", "KV slots in use")?,
            kv_available: make.int_gauge("kv_available_tokens", "KV slots that are free")?,
            kv_evictable: make
                .int_gauge("kv_evictable_tokens", "KV slots that are cached and may be evicted")?,
            new_token_ratio: make.gauge(
                "new_token_ratio",
                "Share of its remaining answer that a request is expected to need",
            )?,
            retracted_now: make.int_gauge("num_retracted_reqs", "Requests retracted in the last step")?,
            retracted: make.counter("num_retracted_requests_total", "Retractions")?,
            retracted_input: make
                .counter("num_retracted_input_tokens_total", "Prompt tokens of retracted requests")?,
            retracted_output: make
                .counter("num_retracted_output_tokens_total", "Answer tokens of retracted requests")?,
            evicted: make.counter("evicted_tokens_total", "Cached tokens evicted to make room")?,
            queue_time: make.histogram(
                "queue_time_seconds",
                "Seconds between arrival and first admission",
                QUEUE_TIME_BUCKETS,
            )?,
            tokens: make.counters(
                "realtime_tokens_total",
                "Tokens by what made them; decode counts one per row and every accepted draft",
                "mode",
            )?,
            spec_accept_length: make.gauge(
                "spec_accept_length",
                "Tokens per verify step over the last log window, bonus included; 0 without one",
            )?,
            spec_accept_rate: make.gauge(
                "spec_accept_rate",
                "Accepted / proposed drafts over the last log window, bonus excluded; 0 without one",
            )?,
            spec_num_steps: make
                .int_gauge("spec_num_steps", "Draft depth in force; 0 without a draft worker")?,
            spec_num_draft_tokens: make.int_gauge(
                "spec_num_draft_tokens",
                "Width of a verify step in force, root included; 0 without a draft worker",
            )?,
            spec_verify_steps: make
                .counter("spec_verify_steps_total", "Verify steps, one per request and step")?,
            spec_proposed: make.counter("spec_proposed_drafts_total", "Drafts submitted to verification")?,
            spec_accepted: make
                .counter("spec_accepted_drafts_total", "Drafts accepted by verification, bonus excluded")?,
            spec_delivered: make
                .counter("spec_delivered_drafts_total", "Accepted drafts that reached an answer")?,
            spec_proposed_at: make.counters(
                "spec_proposed_drafts_at_position_total",
                "Drafts submitted, by depth from 1",
                "position",
            )?,
            spec_accepted_at: make.counters(
                "spec_accepted_drafts_at_position_total",
                "Drafts accepted, by depth from 1",
                "position",
            )?,
            refused: make
                .counter("num_refused_requests_total", "Requests that ended before they could run")?,
            constants: vec![
                (make.int_gauge("max_total_num_tokens", "KV slots")?, |it| it.capacity as i64),
                (make.int_gauge("page_size", "KV slots per page")?, |it| it.page_size as i64),
                (make.int_gauge("num_pages", "KV pages")?, |it| (it.capacity / it.page_size) as i64),
                (make.int_gauge("context_len", "Longest sequence")?, |it| it.context_len as i64),
                (make.int_gauge("max_running_requests_under_SLO", "Requests that may run together")?, |it| {
                    it.max_running as i64
                }),
            ],
            weight_gb: make.gauge("weight_memory_usage_gb", "Memory of the weights, in GiB")?,
            kv_gb: make.gauge("kv_cache_memory_usage_gb", "Memory of the KV pool, in GiB")?,
            registry: make.registry,
        })
    }

    pub(super) fn constants(&self, limits: &EngineLimits, config: &ServeConfig, capacity: usize) {
        let constants = Constants {
            capacity,
            page_size: config.schedule.page_size.max(1) as usize,
            context_len: limits.context_len,
            max_running: config.schedule.max_running_requests as usize,
        };
        self.constants.iter().for_each(|(gauge, value)| gauge.set(value(&constants)));
        self.weight_gb.set(limits.weight_bytes as f64 / GIB);
        self.kv_gb.set(limits.kv_bytes as f64 / GIB);
        // Shown from the start, so that a rate over them is defined.
        ["prefill_compute", "prefill_cache", "decode"]
            .iter()
            .for_each(|mode| self.tokens.with_label_values(&[*mode]).inc_by(0));
    }

    pub(super) fn step(&self, report: &StepReport) {
        let (prefill, decode) = (&report.prefill, &report.decode);
        self.tokens.with_label_values(&["prefill_compute"]).inc_by(prefill.new_tokens as u64);
        self.tokens.with_label_values(&["prefill_cache"]).inc_by(prefill.first_cached_tokens as u64);
        self.tokens.with_label_values(&["decode"]).inc_by(decode.tokens as u64);
        prefill.queue_times.iter().for_each(|&seconds| self.queue_time.observe(seconds));
        if prefill.new_tokens > 0 {
            let all = prefill.new_tokens + prefill.cached_tokens;
            self.cache_hit_rate.set(share(prefill.cached_tokens, all));
        }
        self.spec_verify_steps.inc_by(decode.spec.verify_ct);
        self.spec_proposed.inc_by(decode.spec.proposed_drafts);
        self.spec_accepted.inc_by(decode.spec.accepted_drafts);
        self.spec_delivered.inc_by(decode.spec.delivered_drafts);
        by_position(&self.spec_proposed_at, &decode.proposed_at);
        by_position(&self.spec_accepted_at, &decode.accepted_at);
        self.retracted_now.set(report.retracted.requests as i64);
        self.retracted.inc_by(report.retracted.requests);
        self.retracted_input.inc_by(report.retracted.input_tokens);
        self.retracted_output.inc_by(report.retracted.output_tokens);
        self.evicted.inc_by(report.load.evicted_slots.saturating_sub(self.evicted.get()));
    }

    pub(super) fn load(&self, load: &Load) {
        self.running.set(load.running as i64);
        self.queued.set(load.waiting as i64);
        self.decode_sum_seq_lens.set(load.decode_tokens as i64);
        self.token_usage.set(share(load.usage.used, load.usage.total));
        self.used_tokens.set(load.usage.used as i64);
        self.kv_used.set(load.usage.used as i64);
        self.kv_available.set(load.usage.free as i64);
        self.kv_evictable.set(load.usage.cached as i64);
        self.new_token_ratio.set(load.growth_ratio);
        self.spec_num_steps.set(load.draft.num_steps as i64);
        self.spec_num_draft_tokens.set(load.draft.num_draft_tokens as i64);
    }

    pub(super) fn tick(&self, tick: &Tick) {
        self.gen_throughput.set(tick.gen_throughput);
        self.spec_accept_length.set(tick.accept_length);
        self.spec_accept_rate.set(tick.accept_rate);
    }

    /// Nothing runs any more.
    pub(super) fn idle(&self) {
        self.gen_throughput.set(0.0);
        self.retracted_now.set(0);
    }

    pub(super) fn refused(&self, _reason: &FinishReason) {
        self.refused.inc();
    }
}

/// A position that was not proposed is not observed.
fn by_position(counters: &IntCounterVec, counts: &[u64]) {
    for (index, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        counters.with_label_values(&[(index + 1).to_string().as_str()]).inc_by(count);
    }
}

/// Makes series with the common prefix and labels, registered.
struct Maker {
    registry: Registry,
    labels: HashMap<String, String>,
}

impl Maker {
    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(format!("sglang:{name}"), help).const_labels(self.labels.clone())
    }

    fn register<C: Collector + Clone + 'static>(&self, collector: C) -> prometheus::Result<C> {
        self.registry.register(Box::new(collector.clone()))?;
        Ok(collector)
    }

    fn gauge(&self, name: &str, help: &str) -> prometheus::Result<Gauge> {
        self.register(Gauge::with_opts(self.opts(name, help))?)
    }

    fn int_gauge(&self, name: &str, help: &str) -> prometheus::Result<IntGauge> {
        self.register(IntGauge::with_opts(self.opts(name, help))?)
    }

    fn counter(&self, name: &str, help: &str) -> prometheus::Result<IntCounter> {
        self.register(IntCounter::with_opts(self.opts(name, help))?)
    }

    fn counters(&self, name: &str, help: &str, label: &str) -> prometheus::Result<IntCounterVec> {
        self.register(IntCounterVec::new(self.opts(name, help), &[label])?)
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> prometheus::Result<Histogram> {
        let opts = HistogramOpts::from(self.opts(name, help)).buckets(buckets.to_vec());
        self.register(Histogram::with_opts(opts)?)
    }
}
