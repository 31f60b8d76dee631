//! Owns what the detokenizer counts. Call sites report facts.

use prometheus::{Gauge, IntCounter, IntCounterVec, Registry};
use proto::Role;
use proto::metrics::{Registrar, names, register_process_metrics};

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
#[derive(Clone)]
pub struct DetokenizerMetrics {
    registry: Registry,
    rows: IntCounter,
    tokens: IntCounter,
    dropped: IntCounterVec,
    live_requests: Gauge,
    waiting_messages: Gauge,
}

impl DetokenizerMetrics {
    pub fn new(model_name: &str) -> prometheus::Result<Self> {
        let registry = Registry::new();
        let to = Registrar::new(&registry, [("model_name", model_name.to_owned())]);
        // Of the process, not of the model it serves.
        register_process_metrics(&Registrar::new(&registry, []), Role::Detokenizer)?;
        let dropped = names::DETOKENIZER_DROPPED_ROWS.register(&to)?;
        for reason in Dropped::ALL {
            dropped.with_label_values(&[reason.as_str()]);
        }
        Ok(Self {
            rows: names::DETOKENIZED_ROWS.register(&to)?,
            tokens: names::DETOKENIZED_TOKENS.register(&to)?,
            dropped,
            live_requests: names::DETOKENIZER_LIVE_REQUESTS.register(&to)?,
            waiting_messages: names::DETOKENIZER_WAITING_MESSAGES.register(&to)?,
            registry,
        })
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
        self.live_requests.set(live_requests as f64);
        self.waiting_messages.set(waiting_messages as f64);
    }
}
