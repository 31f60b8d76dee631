//! Owns what the scheduler tells about itself: the log lines, the series, and when a snapshot of them is written.
//! Told plain facts once per step; a failure here never stops the scheduler.

use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus::Registry;
use proto::metrics::LiveCounts;
use proto::{ServeConfig, SpecCounters};
use serde_json::{Value, json};

use crate::adaptive::{Reason, Switch};
use crate::batch::DraftSource;
use crate::engine::EngineLimits;

mod report;
mod series;
#[cfg(test)]
mod tests;
mod window;

pub use self::report::{DecodeReport, Drafts, Load, PrefillReport, SourceCounts, StepReport};
use self::series::Series;
use self::window::{Window, decode_line, prefill_line, rate};

/// Snapshots without a finished request are written no more often.
const SNAPSHOT_INTERVAL: Duration = Duration::from_secs(1);

/// Puts the registry where `/metrics` finds it.
pub type WriteSnapshot = Box<dyn FnMut(&Registry)>;

/// See the module.
pub struct SchedulerMetrics {
    config: Arc<ServeConfig>,
    /// `None` without `--enable-metrics`: then only log lines are made.
    series: Option<Series>,
    write: Option<WriteSnapshot>,
    window: Window,
    totals: SpecCounters,
    by_source: SourceCounts,
    last_gen_throughput: f64,
    last_prefill: Instant,
    busy: bool,
    idle_since: Instant,
    /// Something changed since the last snapshot.
    dirty: bool,
    written: Option<Instant>,
}

impl SchedulerMetrics {
    /// `write` is called with the registry whenever a snapshot is due.
    pub fn new(config: &Arc<ServeConfig>, write: Option<WriteSnapshot>) -> prometheus::Result<Self> {
        let enabled = config.server.enable_metrics;
        let now = Instant::now();
        Ok(Self {
            series: enabled.then(|| Series::new(config)).transpose()?,
            write: write.filter(|_| enabled),
            config: config.clone(),
            window: Window::new(now),
            totals: SpecCounters::default(),
            by_source: SourceCounts::default(),
            last_gen_throughput: 0.0,
            last_prefill: now,
            busy: false,
            idle_since: now,
            dirty: true,
            written: None,
        })
    }

    /// Shows what never changes. Called once.
    pub fn constants(&mut self, limits: &EngineLimits, config: &ServeConfig, capacity: usize) {
        if let Some(series) = &self.series
            && let Err(error) = series.constants(limits, config, capacity)
        {
            tracing::warn!(%error, "constants are missing from the metrics");
        }
    }

    pub fn weights_loaded(&mut self, elapsed: Duration) {
        if let Some(series) = &self.series {
            series.weights_loaded(elapsed.as_secs_f64());
        }
    }

    /// Acceptance since the start, of all counted requests.
    pub fn totals(&self) -> &SpecCounters {
        &self.totals
    }

    /// The same by who made the drafts; nothing without speculation.
    pub fn draft_sources(&self) -> Option<Value> {
        let shown = |source: DraftSource| {
            let Drafts { proposed, accepted } = self.by_source.of(source);
            let rate = (proposed > 0).then(|| accepted as f64 / proposed as f64);
            let told = json!({"proposed_drafts": proposed, "accepted_drafts": accepted, "accept_rate": rate});
            (source.as_str().to_owned(), told)
        };
        let sources = series::sources(&self.config);
        (!sources.is_empty()).then(|| Value::Object(sources.into_iter().map(shown).collect()))
    }

    /// The counters that clients are told parts of, as they stand.
    pub fn live_counts(&self) -> Vec<LiveCounts> {
        self.series.as_ref().map_or(Vec::new(), Series::live_counts)
    }

    /// Tokens per second over the last window; 0 when idle.
    pub fn last_gen_throughput(&self) -> f64 {
        self.last_gen_throughput
    }

    /// Takes in one turn of the scheduler.
    pub fn step(&mut self, report: &StepReport) {
        let busy = report.load.running > 0 || report.decode.rows > 0 || report.prefill.new_tokens > 0;
        if !busy && !self.busy && report.load.waiting == 0 {
            return;
        }
        let now = Instant::now();
        if !self.busy {
            // The time without work belongs to no window.
            if let Some(series) = &self.series {
                series.was_idle((now - self.idle_since).as_secs_f64());
            }
            self.window = Window::new(now);
            self.last_prefill = now;
        }
        self.totals.add(&report.decode.spec);
        self.by_source.add(&report.decode.by_source);
        self.window.add(report);
        self.dirty = true;
        if let Some(series) = &self.series {
            series.step(report);
            series.load(&report.load);
        }
        self.log_prefill(report, now);
        report.switches.iter().for_each(log_switch);
        if self.window.decode_steps >= self.config.schedule.decode_log_interval.max(1) {
            self.tick(report, now, true);
        }
        self.busy = report.load.running > 0;
        if !self.busy {
            self.go_idle(report, now);
        }
    }

    /// Writes a snapshot if one is due, or if an end is about to be told to a client.
    pub fn publish(&mut self, before_an_end: bool) {
        if !self.dirty {
            return;
        }
        let recent = self.written.is_some_and(|at| at.elapsed() < SNAPSHOT_INTERVAL);
        if recent && !before_an_end {
            return;
        }
        if let (Some(series), Some(write)) = (&self.series, &mut self.write) {
            write(&series.registry);
        }
        self.written = Some(Instant::now());
        self.dirty = false;
    }

    fn log_prefill(&mut self, report: &StepReport, now: Instant) {
        if report.prefill.new_tokens > 0 {
            let throughput = rate(report.prefill.new_tokens, now - self.last_prefill);
            self.last_prefill = now;
            tracing::info!("{}", prefill_line(report, throughput, self.config.model.device));
        }
    }

    fn tick(&mut self, report: &StepReport, now: Instant, log: bool) {
        let tick = self.window.tick(now);
        self.last_gen_throughput = tick.gen_throughput;
        if let Some(series) = &self.series {
            series.tick(&tick);
        }
        if log {
            tracing::info!("{}", decode_line(&tick, &report.load, self.config.model.device));
        }
    }

    /// The last request ended: what the window measured is shown once, and load gauges fall to 0 at once.
    fn go_idle(&mut self, report: &StepReport, now: Instant) {
        if self.window.decode_steps > 0 {
            self.tick(report, now, false);
        }
        self.last_gen_throughput = 0.0;
        self.idle_since = now;
        if let Some(series) = &self.series {
            series.idle();
        }
    }
}

/// A batch that grows and shrinks around a border is no news.
fn log_switch(switch: &Switch) {
    match switch.reason {
        Reason::BatchSize => tracing::debug!("{switch}"),
        _ => tracing::info!("{switch}"),
    }
}
