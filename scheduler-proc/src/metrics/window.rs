//! Owns the counters between two log lines, and the lines.

use std::time::{Duration, Instant};

use proto::{DeviceKind, SpecCounters};

use super::report::{Load, StepReport};

/// What was counted since the last tick.
#[derive(Debug, Clone)]
pub(super) struct Window {
    pub(super) since: Instant,
    pub(super) decode_steps: u32,
    pub(super) tokens: usize,
    pub(super) spec: SpecCounters,
}

/// A window's numbers, taken at its end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tick {
    pub(super) gen_throughput: f64,
    /// 0 without a verify step in the window.
    pub(super) accept_length: f64,
    pub(super) accept_rate: f64,
    /// The window had verify steps.
    pub(super) speculative: bool,
}

impl Window {
    pub(super) fn new(now: Instant) -> Self {
        Self { since: now, decode_steps: 0, tokens: 0, spec: SpecCounters::default() }
    }

    pub(super) fn add(&mut self, report: &StepReport) {
        if report.decode.rows > 0 {
            self.decode_steps += 1;
            self.tokens += report.decode.tokens;
            self.spec.add(&report.decode.spec);
        }
    }

    /// Ends the window and begins the next.
    pub(super) fn tick(&mut self, now: Instant) -> Tick {
        let window = std::mem::replace(self, Self::new(now));
        Tick {
            gen_throughput: rate(window.tokens, now - window.since),
            accept_length: window.spec.accept_length().unwrap_or(0.0),
            accept_rate: window.spec.accept_rate().unwrap_or(0.0),
            speculative: window.spec.verify_ct > 0,
        }
    }
}

/// Per second; 0 for a window without a duration.
pub(super) fn rate(count: usize, elapsed: Duration) -> f64 {
    let seconds = elapsed.as_secs_f64();
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

pub(super) fn share(part: usize, whole: usize) -> f64 {
    if whole > 0 { part as f64 / whole as f64 } else { 0.0 }
}

const fn graph_label(device: DeviceKind) -> &'static str {
    match device {
        DeviceKind::Cpu => "cpu graph",
        DeviceKind::Cuda => "cuda graph",
    }
}

/// SGLang's line, so that what reads its logs reads ours.
pub(super) fn decode_line(tick: &Tick, load: &Load, device: DeviceKind) -> String {
    let spec = if tick.speculative || load.draft.max_nodes() > 0 {
        format!("accept len: {:.2}, accept rate: {:.2}, ", tick.accept_length, tick.accept_rate)
    } else {
        String::new()
    };
    format!(
        "Decode batch, #running-req: {}, #token: {}, token usage: {:.2}, {spec}{}: False, \
         gen throughput (token/s): {:.2}, #queue-req: {}",
        load.running,
        load.usage.used,
        share(load.usage.used, load.usage.total),
        graph_label(device),
        tick.gen_throughput,
        load.waiting,
    )
}

pub(super) fn prefill_line(report: &StepReport, throughput: f64, device: DeviceKind) -> String {
    let (prefill, load) = (&report.prefill, &report.load);
    format!(
        "Prefill batch, #new-seq: {}, #new-token: {}, #cached-token: {}, token usage: {:.2}, \
         #running-req: {}, #queue-req: {}, #pending-token: {}, {}: False, \
         input throughput (token/s): {throughput:.2}",
        prefill.new_seqs,
        prefill.new_tokens,
        prefill.cached_tokens,
        share(load.usage.used, load.usage.total),
        load.running,
        load.waiting,
        load.pending_tokens,
        graph_label(device),
    )
}
