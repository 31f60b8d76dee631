//! Owns the scheduling flags: the bounds that hang together, and the defaults that come from memory.

use anyhow::{Result, ensure};
use proto::{DeviceKind, ModelConfig, ScheduleConfig, SchedulePolicy};

use super::{Machine, ModelFacts};
use crate::args::{Args, LogArgs, PolicyArg, ScheduleArgs};

/// Larger batches are slower per token on a CPU than two smaller ones in turn.
const MAX_RUNNING_CPU: u64 = 128;
const MAX_RUNNING_CUDA: u64 = 1024;
/// Tokens a request is expected to hold, for the default number of running requests.
const TYPICAL_REQUEST: u64 = 1024;

/// Also says where a derived bound came from.
pub(super) fn resolve(
    all: &Args,
    model: &ModelConfig,
    facts: &ModelFacts,
    random_seed: u64,
    machine: &Machine,
) -> Result<(ScheduleConfig, Option<String>)> {
    let (args, logs) = (&all.schedule, &all.logs);
    let mem_fraction_static = args.mem_fraction_static.unwrap_or(match model.device {
        DeviceKind::Cpu => 0.3,
        DeviceKind::Cuda => 0.85,
    });
    check(args, logs, mem_fraction_static)?;
    let chunked_prefill_size = match args.chunked_prefill_size {
        -1 => model.context_length,
        size => size.min(i64::from(u32::MAX)) as u32,
    };
    let num_threads = all.model.num_threads.unwrap_or(machine.cpus);
    ensure!(num_threads >= 1, "--num-threads must be at least 1");
    let (max_running_requests, note) = match args.max_running_requests {
        Some(wanted) => (wanted, None),
        None => {
            let (derived, note) = default_max_running(args, model, facts, mem_fraction_static, machine);
            (derived, Some(note))
        }
    };
    let config = ScheduleConfig {
        max_running_requests,
        max_total_tokens: args.max_total_tokens,
        mem_fraction_static,
        page_size: args.page_size,
        chunked_prefill_size,
        max_prefill_tokens: args.max_prefill_tokens,
        policy: match args.schedule_policy {
            PolicyArg::Fcfs => SchedulePolicy::Fcfs,
            PolicyArg::Lpm => SchedulePolicy::Lpm,
        },
        disable_radix_cache: args.disable_radix_cache,
        decode_log_interval: logs.decode_log_interval,
        random_seed,
        num_threads,
        watchdog_timeout_s: args.watchdog_timeout,
    };
    Ok((config, note))
}

fn check(args: &ScheduleArgs, logs: &LogArgs, mem_fraction: f64) -> Result<()> {
    let page = args.page_size;
    ensure!(args.max_running_requests != Some(0), "--max-running-requests must be at least 1");
    ensure!(page >= 1, "--page-size must be at least 1");
    ensure!(
        args.chunked_prefill_size == -1 || args.chunked_prefill_size >= 1,
        "--chunked-prefill-size {} must be at least 1, or -1 for whole prompts",
        args.chunked_prefill_size
    );
    ensure!(
        args.chunked_prefill_size == -1 || args.chunked_prefill_size % i64::from(page) == 0,
        "--chunked-prefill-size {} must be a multiple of --page-size {page}: a chunk ends on a page",
        args.chunked_prefill_size
    );
    ensure!(args.max_prefill_tokens >= 1, "--max-prefill-tokens must be at least 1");
    if let Some(tokens) = args.max_total_tokens {
        ensure!(
            tokens >= u64::from(page),
            "--max-total-tokens {tokens} must be at least --page-size {page}: the pool has whole pages"
        );
    }
    ensure!(
        mem_fraction > 0.0 && mem_fraction < 1.0,
        "--mem-fraction-static {mem_fraction} must be between 0 and 1"
    );
    ensure!(
        args.watchdog_timeout.is_finite() && args.watchdog_timeout > 0.0,
        "--watchdog-timeout {} must be more than 0",
        args.watchdog_timeout
    );
    ensure!(logs.decode_log_interval >= 1, "--decode-log-interval must be at least 1");
    Ok(())
}

/// As many requests as memory holds at a typical length, within what the device is good at.
fn default_max_running(
    args: &ScheduleArgs,
    model: &ModelConfig,
    facts: &ModelFacts,
    mem_fraction: f64,
    machine: &Machine,
) -> (u32, String) {
    let bytes = facts.kv_values_per_token * super::server_args::dtype_bytes(model.dtype);
    let pool = args.max_total_tokens.unwrap_or_else(|| {
        ((machine.available_memory as f64 * mem_fraction) as u64).checked_div(bytes).unwrap_or(u64::MAX)
    });
    let each = TYPICAL_REQUEST.min(u64::from(model.context_length));
    let most = match model.device {
        DeviceKind::Cpu => MAX_RUNNING_CPU,
        DeviceKind::Cuda => MAX_RUNNING_CUDA,
    };
    let derived = (pool / each).clamp(1, most) as u32;
    let note = format!(
        "at most {derived} requests run together (room for about {pool} tokens; change it with --max-running-requests)"
    );
    (derived, note)
}
