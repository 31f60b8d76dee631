//! Owns what the detokenizer counts. Call sites report facts; names and labels appear here only.

use prometheus::{IntCounter, IntCounterVec, IntGauge, Opts, Registry};

/// Why a row gave no text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dropped {
    /// Not a first row, and its request is unknown.
    Orphan,
    /// Ids before it are missing: its request was failed.
    Lost,
    /// The batch it came in could not be read.
    Ragged,
}

impl Dropped {
    const ALL: [Self; 3] = [Self::Orphan, Self::Lost, Self::Ragged];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Orphan => "orphan",
            Self::Lost => "lost",
            Self::Ragged => "ragged",
        }
    }
}

/// The detokenizer's series.
#[derive(Debug, Clone)]
pub struct DetokenizerMetrics {
    registry: Registry,
    rows: IntCounter,
    tokens: IntCounter,
    dropped: IntCounterVec,
    live_requests: IntGauge,
    waiting_messages: IntGauge,
}

impl DetokenizerMetrics {
    pub fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let metrics = Self {
            rows: IntCounter::new(
                "sglang:detokenizer_rows_total",
                "Rows turned into text (one request's new tokens of one message each)",
            )?,
            tokens: IntCounter::new(
                "sglang:detokenizer_tokens_total",
                "Output token ids turned into text, ids sent again after a restart included",
            )?,
            dropped: IntCounterVec::new(
                Opts::new(
                    "sglang:detokenizer_dropped_rows_total",
                    "Rows that gave no text: orphan (of an unknown request), lost (ids before it are missing), \
                     ragged (lists of unequal length)",
                ),
                &["reason"],
            )?,
            live_requests: IntGauge::new("sglang:detokenizer_live_requests", "Requests being decoded")?,
            waiting_messages: IntGauge::new(
                "sglang:detokenizer_waiting_messages",
                "Text messages that the tokenizer process has not acknowledged",
            )?,
            registry,
        };
        for reason in Dropped::ALL {
            metrics.dropped.with_label_values(&[reason.as_str()]);
        }
        metrics.registry.register(Box::new(metrics.rows.clone()))?;
        metrics.registry.register(Box::new(metrics.tokens.clone()))?;
        metrics.registry.register(Box::new(metrics.dropped.clone()))?;
        metrics.registry.register(Box::new(metrics.live_requests.clone()))?;
        metrics.registry.register(Box::new(metrics.waiting_messages.clone()))?;
        Ok(metrics)
    }

    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    pub fn decoded(&self, tokens: usize) {
        self.rows.inc();
        self.tokens.inc_by(tokens as u64);
    }

    pub fn dropped(&self, reason: Dropped, rows: usize) {
        self.dropped.with_label_values(&[reason.as_str()]).inc_by(rows as u64);
    }

    pub fn load(&self, live_requests: usize, waiting_messages: usize) {
        self.live_requests.set(live_requests as i64);
        self.waiting_messages.set(waiting_messages as i64);
    }
}
