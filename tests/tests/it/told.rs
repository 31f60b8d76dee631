//! Owns the sum of what the replies of a load told their clients, to hold against `/metrics`.

use std::time::Duration;

use proto::SpecCounters;
use serde_json::Value;
use tests::{Metrics, Server, wait_until};

use crate::support::{check_identities, number, spec_counters};

/// What all requests of a load were told, summed.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) requests: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    pub(crate) spec: SpecCounters,
}

impl Told {
    pub(crate) fn add(&mut self, meta: &Value) {
        check_identities(meta);
        self.requests += 1;
        self.prompt_tokens += number(meta, "prompt_tokens");
        self.completion_tokens += number(meta, "completion_tokens");
        self.spec.add(&spec_counters(meta));
    }

    pub(crate) fn add_all(&mut self, more: &Self) {
        self.requests += more.requests;
        self.prompt_tokens += more.prompt_tokens;
        self.completion_tokens += more.completion_tokens;
        self.spec.add(&more.spec);
    }

    /// Verify steps, proposed, accepted and delivered drafts.
    pub(crate) fn acceptance(&self) -> [f64; 4] {
        let SpecCounters { verify_ct, proposed_drafts, accepted_drafts, delivered_drafts, .. } = self.spec;
        [verify_ct, proposed_drafts, accepted_drafts, delivered_drafts].map(|count| count as f64)
    }

    /// Waits until the server's counters are these sums: processes write snapshots at intervals. Then every other
    /// total must be what the clients were told, too.
    pub(crate) fn arrive_at(&self, server: &Server) -> Metrics {
        let expected = self.acceptance();
        let arrived = wait_until(Duration::from_secs(5), || acceptance(&server.metrics()) == expected);
        let metrics = server.metrics();
        assert!(arrived, "counters {:?}, replies {expected:?}", acceptance(&metrics));
        for (name, told) in [
            ("num_requests_total", self.requests),
            ("prompt_tokens_total", self.prompt_tokens),
            ("generation_tokens_total", self.completion_tokens),
            ("spec_verify_calls_total", self.spec.verify_ct),
            ("e2e_request_latency_seconds_count", self.requests),
        ] {
            assert_eq!(metrics.sum(&format!("sglang:{name}")), told as f64, "{name}");
        }
        for what in ["proposed", "accepted"] {
            let by_source = metrics.sum(&format!("sglang:spec_{what}_by_source_total"));
            assert_eq!(by_source, metrics.sum(&format!("sglang:spec_{what}_drafts_total")), "{what}");
        }
        let by_depth = |what: &str| {
            let name = format!("sglang:spec_{what}_at_position_total");
            metrics.by_label(&name, "position").into_iter().collect::<Vec<_>>()
        };
        // A draft at a depth was accepted in every step that accepted more than that.
        let deeper = |depth: usize| self.spec.acceptance_histogram.iter().skip(depth + 1).sum::<u64>() as f64;
        let depths = 0..self.spec.acceptance_histogram.len().saturating_sub(1);
        let accepted: Vec<_> = depths.map(|depth| (depth.to_string(), deeper(depth))).collect();
        let mut told = by_depth("accepted");
        told.sort_by_key(|(depth, _)| depth.parse::<usize>().ok());
        assert_eq!(told, accepted, "accepted by depth");
        let proposed: std::collections::BTreeMap<_, _> = by_depth("proposed").into_iter().collect();
        for (depth, accepted) in &told {
            assert!(proposed[depth] >= *accepted && proposed[depth] <= expected[0], "{proposed:?}");
        }
        metrics
    }
}

/// The scheduler's acceptance counters, as [`Told::acceptance`].
pub(crate) fn acceptance(metrics: &Metrics) -> [f64; 4] {
    ["verify_steps", "proposed_drafts", "accepted_drafts", "delivered_drafts"]
        .map(|what| metrics.sum(&format!("sglang:spec_{what}_total")))
}
