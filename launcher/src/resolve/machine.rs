//! Owns what is known of the machine, measured once, so that resolving is a function of its arguments.

use proto::Dtype;

/// The facts that defaults depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    pub cpus: u32,
    /// Whether the CPU multiplies bfloat16 in hardware.
    pub computes_bfloat16: bool,
    /// Bytes a process may still take, cgroup limits included.
    pub available_memory: u64,
}

impl Machine {
    pub fn detect() -> Self {
        Self {
            cpus: std::thread::available_parallelism().map_or(1, |n| n.get() as u32),
            computes_bfloat16: Dtype::Bfloat16.is_computed_by_this_cpu(),
            available_memory: available_memory(),
        }
    }
}

fn available_memory() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let host = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
        .map_or(u64::MAX, |kib| kib * 1024);
    host.min(cgroup_headroom().unwrap_or(u64::MAX))
}

/// What the container's limit leaves; `None` without a limit ("max" does not parse).
fn cgroup_headroom() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limit = read("/sys/fs/cgroup/memory.max")?;
    Some(limit.saturating_sub(read("/sys/fs/cgroup/memory.current").unwrap_or(0)))
}
