//! Owns how the processes' series become one page. Reading changes nothing: two scrapers see the same.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;

use prometheus::Registry;
use prometheus::proto::{Histogram, LabelPair, Metric, MetricFamily, MetricType};

use super::def::Mode;
use super::names::{self, UNREADABLE_SNAPSHOTS};
use super::snapshot::{Snapshot, read_all};

/// Joins all snapshots in `dir` and the caller's own registry; a process that passes its own writes no snapshots,
/// or it would be counted twice. Counters and histograms of the same labels are summed over all incarnations, so
/// they never go down; gauges are those of each member's latest incarnation, joined by their declared [`Mode`] where
/// several members have the same. A file that cannot be read is left out, and the page says how many were.
pub fn join(dir: &Path, own: Option<&Registry>) -> Vec<MetricFamily> {
    let (mut snapshots, unreadable) = read_all(dir);
    if let Some(own) = own {
        snapshots.push(Snapshot { of: None, incarnation: u64::MAX, families: own.gather() });
    }
    // Later ones win, and what a page says first does not depend on the directory's order.
    snapshots.sort_by(|a, b| (a.incarnation, &a.of).cmp(&(b.incarnation, &b.of)));
    let mut latest = BTreeMap::new();
    for snapshot in &snapshots {
        latest.insert(snapshot.of.clone(), snapshot.incarnation);
    }
    let mut page = Page::default();
    for snapshot in snapshots {
        let is_latest = latest.get(&snapshot.of) == Some(&snapshot.incarnation);
        page.add(snapshot, is_latest);
    }
    let left_out = unreadable + page.contradictions;
    page.finish(left_out)
}

type Labels = Vec<(String, String)>;

#[derive(Default)]
pub(super) struct Page {
    families: BTreeMap<String, Joined>,
    contradictions: usize,
}

struct Joined {
    help: String,
    kind: MetricType,
    mode: Mode,
    series: BTreeMap<Labels, Metric>,
}

impl Page {
    pub(super) fn add(&mut self, snapshot: Snapshot, is_latest: bool) {
        let mut contradicts = false;
        for family in snapshot.families {
            if family.type_() == MetricType::GAUGE && !is_latest {
                continue;
            }
            contradicts |= !self.add_family(family);
        }
        self.contradictions += usize::from(contradicts);
    }

    /// `false` if the family, or a series of it, does not go together with what is there.
    fn add_family(&mut self, mut family: MetricFamily) -> bool {
        let kind = family.type_();
        let joined = self.families.entry(family.name().to_owned()).or_insert_with(|| Joined {
            help: family.help().to_owned(),
            kind,
            mode: mode_of(family.name()),
            series: BTreeMap::new(),
        });
        if joined.kind != kind {
            return false;
        }
        let mut fits = true;
        for mut metric in family.take_metric() {
            coarsen(kind, &mut metric);
            match joined.series.entry(labels(&metric)) {
                Entry::Vacant(place) => {
                    place.insert(metric);
                }
                Entry::Occupied(mut place) => fits &= merge((kind, joined.mode), place.get_mut(), metric),
            }
        }
        fits
    }

    fn finish(self, left_out: usize) -> Vec<MetricFamily> {
        let mut families = self.into_families();
        families.push(left_out_family(left_out));
        families
    }

    pub(super) fn into_families(self) -> Vec<MetricFamily> {
        self.families
            .into_iter()
            .filter(|(name, joined)| !joined.series.is_empty() && name != UNREADABLE_SNAPSHOTS.info.name)
            .map(|(name, joined)| {
                let mut family = family(&name, &joined.help, joined.kind);
                family.set_metric(joined.series.into_values().collect());
                family
            })
            .collect()
    }
}

fn mode_of(name: &str) -> Mode {
    names::ALL.iter().find(|info| info.name == name).map_or(Mode::MostRecent, |info| info.mode)
}

fn family(name: &str, help: &str, kind: MetricType) -> MetricFamily {
    let mut family = MetricFamily::default();
    family.set_name(name.to_owned());
    family.set_help(help.to_owned());
    family.set_field_type(kind);
    family
}

fn left_out_family(count: usize) -> MetricFamily {
    let info = UNREADABLE_SNAPSHOTS.info;
    let mut gauge = prometheus::proto::Gauge::default();
    gauge.set_value(count as f64);
    let mut family = family(info.name, info.help, MetricType::GAUGE);
    family.set_metric(vec![Metric::from_gauge(gauge)]);
    family
}

fn labels(metric: &Metric) -> Labels {
    let pair = |label: &LabelPair| (label.name().to_owned(), label.value().to_owned());
    let mut labels: Labels = metric.get_label().iter().map(pair).collect();
    labels.sort();
    labels
}

/// What sums are made of: whole multiples of about a microsecond, of which a sum is exact, in whatever order and in
/// whatever groups it is made. Otherwise a fold could take a counter of seconds back by its last bit, and that is a
/// restart from zero to who reads it.
const GRAIN: f64 = 1.0 / (1 << 20) as f64;

fn coarsen(kind: MetricType, metric: &mut Metric) {
    let coarse = |value: f64| (value / GRAIN).floor() * GRAIN;
    match kind {
        MetricType::COUNTER => {
            let value = coarse(metric.get_counter().value());
            metric.counter.mut_or_insert_default().set_value(value);
        }
        MetricType::HISTOGRAM => {
            let sum = coarse(metric.get_histogram().get_sample_sum());
            metric.histogram.mut_or_insert_default().set_sample_sum(sum);
        }
        _ => {}
    }
}

/// Adds `later` to a series of the same labels. `false` if they do not go together; the later one then stands.
fn merge((kind, mode): (MetricType, Mode), series: &mut Metric, later: Metric) -> bool {
    match kind {
        MetricType::GAUGE => {
            let (earlier, later) = (series.get_gauge().value(), later.get_gauge().value());
            let value = match mode {
                Mode::MostRecent => later,
                Mode::LiveSum => earlier + later,
                Mode::Max => earlier.max(later),
            };
            series.gauge.mut_or_insert_default().set_value(value);
            true
        }
        MetricType::COUNTER => {
            let sum = series.get_counter().value() + later.get_counter().value();
            series.counter.mut_or_insert_default().set_value(sum);
            true
        }
        MetricType::HISTOGRAM => {
            let fits = add_histogram(series.histogram.mut_or_insert_default(), later.get_histogram());
            if !fits {
                *series = later;
            }
            fits
        }
        _ => {
            *series = later;
            true
        }
    }
}

/// Sums bucket by bucket; bounds that differ cannot be summed.
fn add_histogram(sum: &mut Histogram, other: &Histogram) -> bool {
    let same_bounds = sum.bucket.len() == other.bucket.len()
        && sum.bucket.iter().zip(&other.bucket).all(|(a, b)| a.upper_bound() == b.upper_bound());
    if same_bounds {
        for (bucket, more) in sum.bucket.iter_mut().zip(&other.bucket) {
            bucket.set_cumulative_count(bucket.cumulative_count() + more.cumulative_count());
        }
        sum.set_sample_count(sum.sample_count() + other.sample_count());
        sum.set_sample_sum(sum.sample_sum() + other.sample_sum());
    }
    same_bounds
}
