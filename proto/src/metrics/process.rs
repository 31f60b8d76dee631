//! Owns the metrics that every process has of itself.

use std::sync::{Mutex, PoisonError};

use nix::sys::resource::{UsageWho, getrusage};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Counter, CounterVec, Gauge, GaugeVec, IntCounter, IntCounterVec, Result};

use super::def::{Def, Registrar};
use super::names;
use crate::ids::Role;
use crate::link::dropped_frames;

/// Registers processor time, memory and dropped frames, which are read whenever the registry is gathered.
pub fn register_process_metrics(to: &Registrar, role: Role) -> Result<()> {
    to.add_collector(ProcessMetrics::new(to, role)?)
}

struct ProcessMetrics {
    families: (CounterVec, GaugeVec, IntCounterVec),
    /// Their only series; locked so that two gatherings at once do not count a difference twice.
    series: Mutex<(Counter, Gauge, IntCounter)>,
}

impl ProcessMetrics {
    fn new(to: &Registrar, role: Role) -> Result<Self> {
        let component = &[role.as_str()];
        fn opts<M>(def: &Def<M>, to: &Registrar) -> (prometheus::Opts, &'static [&'static str]) {
            (def.opts(to), def.info.labels)
        }
        let (cpu, labels) = opts(&names::PROCESS_CPU_SECONDS, to);
        let cpu = CounterVec::new(cpu, labels)?;
        let (memory, labels) = opts(&names::PROCESS_RESIDENT_MEMORY, to);
        let memory = GaugeVec::new(memory, labels)?;
        let (dropped, labels) = opts(&names::LINK_DROPPED_FRAMES, to);
        let dropped = IntCounterVec::new(dropped, labels)?;
        let series = (
            cpu.get_metric_with_label_values(component)?,
            memory.get_metric_with_label_values(component)?,
            dropped.get_metric_with_label_values(component)?,
        );
        Ok(Self { families: (cpu, memory, dropped), series: Mutex::new(series) })
    }

    fn refresh(&self) {
        let series = self.series.lock().unwrap_or_else(PoisonError::into_inner);
        let (cpu, memory, dropped) = &*series;
        if let Some(seconds) = cpu_seconds() {
            cpu.inc_by((seconds - cpu.get()).max(0.0));
        }
        if let Some(bytes) = resident_bytes(std::process::id()) {
            memory.set(bytes as f64);
        }
        dropped.inc_by(dropped_frames().saturating_sub(dropped.get()));
    }
}

impl Collector for ProcessMetrics {
    fn desc(&self) -> Vec<&Desc> {
        let (cpu, memory, dropped) = &self.families;
        [cpu.desc(), memory.desc(), dropped.desc()].concat()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.refresh();
        let (cpu, memory, dropped) = &self.families;
        [cpu.collect(), memory.collect(), dropped.collect()].concat()
    }
}

fn cpu_seconds() -> Option<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF).ok()?;
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    Some(seconds(usage.user_time()) + seconds(usage.system_time()))
}

/// Resident memory of a process. Linux only; elsewhere nothing is known.
pub fn resident_bytes(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(kilobytes.trim().strip_suffix("kB")?.trim_end().parse::<u64>().ok()? * 1024)
}
