//! Owns the scheduler's Prometheus series, and how facts become values.

use std::cell::Cell;

use prometheus::{Counter, CounterVec, Gauge, GaugeVec, Histogram, IntCounter, IntCounterVec, Registry};
use proto::metrics::{Info, LiveCounts, Registrar, names, register_process_metrics};
use proto::{Role, ServeConfig};

use super::report::{Load, StepReport};
use super::window::{Tick, share};
use crate::batch::DraftSource;
use crate::engine::EngineLimits;

const GIB: f64 = (1u64 << 30) as f64;

/// All series of one scheduler.
pub(super) struct Series {
    pub(super) registry: Registry,
    load: LoadSeries,
    spec: SpecSeries,
    tokens: IntCounterVec,
    cache_hit_rate: Gauge,
    queue_time: Histogram,
    retracted_now: Gauge,
    retracted: IntCounter,
    retracted_input: IntCounter,
    retracted_output: IntCounter,
    engine_seconds: CounterVec,
    idle_seconds: Counter,
    weight_load_seconds: GaugeVec,
}

/// How things stand now.
struct LoadSeries {
    running: Gauge,
    queued: Gauge,
    gen_throughput: Gauge,
    decode_tokens: Gauge,
    token_usage: Gauge,
    full_token_usage: Gauge,
    used_tokens: Gauge,
    kv_used: Gauge,
    kv_evictable: Gauge,
    kv_available: Gauge,
}

struct SpecSeries {
    depth_switches: IntCounterVec,
    steps_at_depth: IntCounterVec,
    accept_length: Gauge,
    accept_rate: Gauge,
    num_steps: Gauge,
    num_draft_tokens: Gauge,
    verify_steps: IntCounter,
    proposed: IntCounter,
    accepted: IntCounter,
    delivered: IntCounter,
    /// Who makes drafts here.
    sources: Vec<DraftSource>,
    proposed_by: IntCounterVec,
    accepted_by: IntCounterVec,
    proposed_at: IntCounterVec,
    accepted_at: IntCounterVec,
    /// Positions observed so far, from 0 on.
    proposed_at_len: Cell<usize>,
    accepted_at_len: Cell<usize>,
}

impl Series {
    /// Registers everything; fails only when two series have one name.
    pub(super) fn new(config: &ServeConfig) -> prometheus::Result<Self> {
        let registry = Registry::new();
        let to = registrar(&registry, config);
        // Of the process, not of the model it serves.
        register_process_metrics(&Registrar::new(&registry, []), Role::Scheduler)?;
        names::NUM_GRAMMAR_QUEUE_REQS.register(&to)?;
        let tokens = names::REALTIME_TOKENS.register(&to)?;
        // Shown from the start, so that a rate over them is defined.
        for mode in ["prefill_compute", "prefill_cache", "decode"] {
            tokens.with_label_values(&[mode]);
        }
        Ok(Self {
            load: LoadSeries::new(&to)?,
            spec: SpecSeries::new(&to, sources(config))?,
            tokens,
            cache_hit_rate: names::CACHE_HIT_RATE.register(&to)?,
            queue_time: names::QUEUE_TIME.register(&to)?,
            retracted_now: names::NUM_RETRACTED_REQS.register(&to)?,
            retracted: names::NUM_RETRACTED_REQUESTS.register(&to)?,
            retracted_input: names::NUM_RETRACTED_INPUT_TOKENS.register(&to)?,
            retracted_output: names::NUM_RETRACTED_OUTPUT_TOKENS.register(&to)?,
            engine_seconds: names::FORWARD_EXECUTION_SECONDS.register(&to)?,
            idle_seconds: names::SCHEDULER_IDLE_SECONDS.register(&to)?,
            weight_load_seconds: names::WEIGHT_LOAD_DURATION.register(&to)?,
            registry,
        })
    }

    /// Registers and sets what never changes.
    pub(super) fn constants(
        &self,
        limits: &EngineLimits,
        config: &ServeConfig,
        capacity: usize,
    ) -> prometheus::Result<()> {
        let to = registrar(&self.registry, config);
        let page_size = config.schedule.page_size.max(1) as usize;
        names::MAX_TOTAL_NUM_TOKENS.register(&to)?.set(capacity as f64);
        names::PAGE_SIZE.register(&to)?.set(page_size as f64);
        names::NUM_PAGES.register(&to)?.set((capacity / page_size) as f64);
        names::CONTEXT_LEN.register(&to)?.set(limits.context_len as f64);
        names::WEIGHT_MEMORY_USAGE_GB.register(&to)?.set(limits.weight_bytes as f64 / GIB);
        names::KV_CACHE_MEMORY_USAGE_GB.register(&to)?.set(limits.kv_bytes as f64 / GIB);
        Ok(())
    }

    pub(super) fn weights_loaded(&self, seconds: f64) {
        self.weight_load_seconds.with_label_values(&["disk"]).set(seconds);
    }

    pub(super) fn step(&self, report: &StepReport) {
        let (prefill, decode, retracted) = (&report.prefill, &report.decode, &report.retracted);
        self.tokens.with_label_values(&["prefill_compute"]).inc_by(prefill.new_tokens as u64);
        self.tokens.with_label_values(&["prefill_cache"]).inc_by(prefill.first_cached_tokens as u64);
        self.tokens.with_label_values(&["decode"]).inc_by(decode.tokens as u64);
        prefill.queue_times.iter().for_each(|&seconds| self.queue_time.observe(seconds));
        if prefill.new_tokens > 0 {
            let all = prefill.new_tokens + prefill.cached_tokens;
            self.cache_hit_rate.set(share(prefill.cached_tokens, all));
        }
        self.spec.step(report);
        if retracted.requests > 0 {
            self.retracted_now.set(retracted.requests as f64);
        }
        self.retracted.inc_by(retracted.requests);
        self.retracted_input.inc_by(retracted.input_tokens);
        self.retracted_output.inc_by(retracted.output_tokens);
        if let Some(category) = report.category() {
            // A clock that steps back must not end the process.
            let seconds = report.timing.total().max(0.0);
            self.engine_seconds.with_label_values(&[category]).inc_by(seconds);
        }
    }

    /// What clients are told in sum.
    pub(super) fn live_counts(&self) -> Vec<LiveCounts> {
        let spec = &self.spec;
        let (proposed_at, accepted_at) = (spec.proposed_at_len.get(), spec.accepted_at_len.get());
        let mode = |mode: &str| (mode.to_owned(), self.tokens.with_label_values(&[mode]).get());
        vec![
            plain(&names::SPEC_VERIFY_STEPS.info, &spec.verify_steps),
            plain(&names::SPEC_PROPOSED_DRAFTS.info, &spec.proposed),
            plain(&names::SPEC_ACCEPTED_DRAFTS.info, &spec.accepted),
            plain(&names::SPEC_DELIVERED_DRAFTS.info, &spec.delivered),
            LiveCounts {
                name: names::REALTIME_TOKENS.info.name.to_owned(),
                label: "mode".to_owned(),
                values: ["prefill_compute", "prefill_cache", "decode"].map(mode).to_vec(),
            },
            spec.by_source(&names::SPEC_PROPOSED_BY_SOURCE.info, &spec.proposed_by),
            spec.by_source(&names::SPEC_ACCEPTED_BY_SOURCE.info, &spec.accepted_by),
            positions(&names::SPEC_PROPOSED_AT_POSITION.info, &spec.proposed_at, proposed_at),
            positions(&names::SPEC_ACCEPTED_AT_POSITION.info, &spec.accepted_at, accepted_at),
        ]
    }

    pub(super) fn load(&self, load: &Load) {
        self.load.set(load);
        self.spec.num_steps.set(load.draft.num_steps as f64);
        self.spec.num_draft_tokens.set(load.draft.num_draft_tokens as f64);
    }

    pub(super) fn tick(&self, tick: &Tick) {
        self.load.gen_throughput.set(tick.gen_throughput);
        self.spec.accept_length.set(tick.accept_length);
        self.spec.accept_rate.set(tick.accept_rate);
    }

    /// Nothing runs any more.
    pub(super) fn idle(&self) {
        self.load.gen_throughput.set(0.0);
        self.retracted_now.set(0.0);
    }

    pub(super) fn was_idle(&self, seconds: f64) {
        self.idle_seconds.inc_by(seconds);
    }
}

/// Every series of a scheduler carries SGLang's labels.
fn registrar(registry: &Registry, config: &ServeConfig) -> Registrar {
    let labels = [
        ("model_name", config.server.served_model_name.as_str()),
        ("engine_type", "unified"),
        ("tp_rank", "0"),
        ("pp_rank", "0"),
        ("moe_ep_rank", "0"),
    ];
    Registrar::new(registry, labels.map(|(name, value)| (name, value.to_owned())))
}

/// Whose drafts a server of this configuration verifies.
pub(super) fn sources(config: &ServeConfig) -> Vec<DraftSource> {
    let Some(spec) = &config.spec else { return Vec::new() };
    let model = spec.algorithm.draft_model().map(|_| DraftSource::Model);
    let ngram = (model.is_none() || spec.ngram_first.is_some()).then_some(DraftSource::Ngram);
    model.into_iter().chain(ngram).collect()
}

impl LoadSeries {
    fn new(to: &Registrar) -> prometheus::Result<Self> {
        Ok(Self {
            running: names::NUM_RUNNING_REQS.register(to)?,
            queued: names::NUM_QUEUE_REQS.register(to)?,
            gen_throughput: names::GEN_THROUGHPUT.register(to)?,
            decode_tokens: names::DECODE_SUM_SEQ_LENS.register(to)?,
            token_usage: names::TOKEN_USAGE.register(to)?,
            full_token_usage: names::FULL_TOKEN_USAGE.register(to)?,
            used_tokens: names::NUM_USED_TOKENS.register(to)?,
            kv_used: names::KV_USED_TOKENS.register(to)?,
            kv_evictable: names::KV_EVICTABLE_TOKENS.register(to)?,
            kv_available: names::KV_AVAILABLE_TOKENS.register(to)?,
        })
    }

    fn set(&self, load: &Load) {
        let usage = share(load.usage.used, load.usage.total);
        self.running.set(load.running as f64);
        self.queued.set(load.waiting as f64);
        self.decode_tokens.set(load.decode_tokens as f64);
        self.token_usage.set(usage);
        self.full_token_usage.set(usage);
        self.used_tokens.set(load.usage.used as f64);
        self.kv_used.set(load.usage.used as f64);
        self.kv_evictable.set(load.usage.cached as f64);
        self.kv_available.set(load.usage.free as f64);
    }
}

impl SpecSeries {
    fn new(to: &Registrar, sources: Vec<DraftSource>) -> prometheus::Result<Self> {
        let proposed_by = names::SPEC_PROPOSED_BY_SOURCE.register(to)?;
        let accepted_by = names::SPEC_ACCEPTED_BY_SOURCE.register(to)?;
        for source in &sources {
            proposed_by.with_label_values(&[source.as_str()]);
            accepted_by.with_label_values(&[source.as_str()]);
        }
        Ok(Self {
            sources,
            proposed_by,
            accepted_by,
            depth_switches: names::SPEC_DEPTH_SWITCHES.register(to)?,
            steps_at_depth: names::SPEC_STEPS_AT_DEPTH.register(to)?,
            accept_length: names::SPEC_ACCEPT_LENGTH.register(to)?,
            accept_rate: names::SPEC_ACCEPT_RATE.register(to)?,
            num_steps: names::SPEC_NUM_STEPS.register(to)?,
            num_draft_tokens: names::SPEC_NUM_DRAFT_TOKENS.register(to)?,
            verify_steps: names::SPEC_VERIFY_STEPS.register(to)?,
            proposed: names::SPEC_PROPOSED_DRAFTS.register(to)?,
            accepted: names::SPEC_ACCEPTED_DRAFTS.register(to)?,
            delivered: names::SPEC_DELIVERED_DRAFTS.register(to)?,
            proposed_at: names::SPEC_PROPOSED_AT_POSITION.register(to)?,
            accepted_at: names::SPEC_ACCEPTED_AT_POSITION.register(to)?,
            proposed_at_len: Cell::new(0),
            accepted_at_len: Cell::new(0),
        })
    }

    fn by_source(&self, info: &Info, counters: &IntCounterVec) -> LiveCounts {
        let value = |source: &DraftSource| {
            let source = source.as_str();
            (source.to_owned(), counters.with_label_values(&[source]).get())
        };
        LiveCounts {
            name: info.name.to_owned(),
            label: "source".to_owned(),
            values: self.sources.iter().map(value).collect(),
        }
    }

    fn step(&self, report: &StepReport) {
        let decode = &report.decode;
        self.verify_steps.inc_by(decode.spec.verify_ct);
        self.proposed.inc_by(decode.spec.proposed_drafts);
        self.accepted.inc_by(decode.spec.accepted_drafts);
        self.delivered.inc_by(decode.spec.delivered_drafts);
        for source in DraftSource::ALL {
            let drafts = decode.by_source.of(source);
            if drafts.proposed > 0 {
                self.proposed_by.with_label_values(&[source.as_str()]).inc_by(drafts.proposed);
                self.accepted_by.with_label_values(&[source.as_str()]).inc_by(drafts.accepted);
            }
        }
        by_position(&self.proposed_at, &decode.proposed_at, &self.proposed_at_len);
        by_position(&self.accepted_at, &decode.accepted_at, &self.accepted_at_len);
        if let Some(depth) = report.depth {
            self.steps_at_depth.with_label_values(&[depth.to_string()]).inc();
        }
        for switch in &report.switches {
            let labels = [switch.from.to_string(), switch.to.to_string(), switch.reason.as_str().to_owned()];
            self.depth_switches.with_label_values(&labels).inc();
        }
    }
}

fn plain(info: &Info, counter: &IntCounter) -> LiveCounts {
    let values = vec![(String::new(), counter.get())];
    LiveCounts { name: info.name.to_owned(), label: String::new(), values }
}

fn positions(info: &Info, counters: &IntCounterVec, len: usize) -> LiveCounts {
    let value = |position: usize| {
        let position = position.to_string();
        let count = counters.with_label_values(&[position.as_str()]).get();
        (position, count)
    };
    LiveCounts {
        name: info.name.to_owned(),
        label: "position".to_owned(),
        values: (0..len).map(value).collect(),
    }
}

/// A position that was not proposed is not observed.
fn by_position(counters: &IntCounterVec, counts: &[u64], observed: &Cell<usize>) {
    for (position, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        observed.set(observed.get().max(position + 1));
        counters.with_label_values(&[position.to_string().as_str()]).inc_by(count);
    }
}
