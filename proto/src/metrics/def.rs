//! Owns the step from a metric's definition to a live metric.

use std::collections::HashMap;
use std::marker::PhantomData;

use prometheus::core::Collector;
use prometheus::{
    Counter, CounterVec, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec,
    Opts, Registry, Result,
};

/// A metric that can be registered, as a `M`.
pub struct Def<M> {
    pub info: Info,
    buckets: &'static [f64],
    made: PhantomData<fn() -> M>,
}

/// What can be said of a metric without making it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Info {
    pub name: &'static str,
    pub help: &'static str,
    /// Beyond the base labels of the process.
    pub labels: &'static [&'static str],
    /// What several living processes' values of a gauge are together.
    pub mode: Mode,
}

/// How the values that several living processes have for the same gauge become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// That of the process that was started last: they should be the same, or there is one.
    MostRecent,
    LiveSum,
    Max,
}

/// Where metrics are registered, and the labels that all of them carry.
#[derive(Clone)]
pub struct Registrar {
    registry: Registry,
    base: HashMap<String, String>,
}

impl Registrar {
    pub fn new(registry: &Registry, base: impl IntoIterator<Item = (&'static str, String)>) -> Self {
        let base = base.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Self { registry: registry.clone(), base }
    }

    /// Fails if the name is taken.
    pub(super) fn add<C: Collector + Clone + 'static>(&self, metric: Result<C>) -> Result<C> {
        let metric = metric?;
        self.registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    pub(super) fn add_collector(&self, collector: impl Collector + 'static) -> Result<()> {
        self.registry.register(Box::new(collector))
    }
}

impl<M> Def<M> {
    pub(super) const fn new(info: Info, buckets: &'static [f64]) -> Self {
        Self { info, buckets, made: PhantomData }
    }

    pub(super) fn opts(&self, to: &Registrar) -> Opts {
        Opts::new(self.info.name, self.info.help).const_labels(to.base.clone())
    }

    fn histogram_opts(&self, to: &Registrar) -> HistogramOpts {
        HistogramOpts::from(self.opts(to)).buckets(self.buckets.to_vec())
    }

    /// Bounds that the user has set instead of SGLang's.
    fn histogram_opts_with(&self, to: &Registrar, buckets: Vec<f64>) -> HistogramOpts {
        HistogramOpts::from(self.opts(to)).buckets(buckets)
    }
}

/// Metrics without and with labels of their own.
macro_rules! registers {
    ($($plain:ident, $labelled:ident);+ $(;)?) => {$(
        impl Def<$plain> {
            /// Fails if the name is taken in this registry.
            pub fn register(&self, to: &Registrar) -> Result<$plain> {
                to.add($plain::with_opts(self.opts(to)))
            }
        }

        impl Def<$labelled> {
            /// Fails if the name is taken in this registry.
            pub fn register(&self, to: &Registrar) -> Result<$labelled> {
                to.add($labelled::new(self.opts(to), self.info.labels))
            }
        }
    )+};
}

registers!(Gauge, GaugeVec; IntCounter, IntCounterVec; Counter, CounterVec);

impl Def<Histogram> {
    /// Fails if the name is taken in this registry.
    pub fn register(&self, to: &Registrar) -> Result<Histogram> {
        to.add(Histogram::with_opts(self.histogram_opts(to)))
    }

    pub fn register_with(&self, to: &Registrar, buckets: Vec<f64>) -> Result<Histogram> {
        to.add(Histogram::with_opts(self.histogram_opts_with(to, buckets)))
    }
}

impl Def<HistogramVec> {
    /// Fails if the name is taken in this registry.
    pub fn register(&self, to: &Registrar) -> Result<HistogramVec> {
        to.add(HistogramVec::new(self.histogram_opts(to), self.info.labels))
    }

    pub fn register_with(&self, to: &Registrar, buckets: Vec<f64>) -> Result<HistogramVec> {
        to.add(HistogramVec::new(self.histogram_opts_with(to, buckets), self.info.labels))
    }
}
