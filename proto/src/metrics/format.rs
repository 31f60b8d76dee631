//! Owns the two text forms of a page, and which of them a scraper gets. Of the crate's encoders one writes Prometheus'
//! form and none writes OpenMetrics, which is therefore written here.

use std::fmt::Write;

use prometheus::TextEncoder;
use prometheus::proto::{LabelPair, Metric, MetricFamily, MetricType};

/// A text form of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Version 0.0.4.
    Prometheus,
    /// Version 1.0.0.
    OpenMetrics,
}

const OPENMETRICS: &str = "application/openmetrics-text";
const TEXT: &str = "text/plain";

impl Format {
    /// What a scraper's `Accept` header asks for: OpenMetrics where it is named, and not liked less than the other.
    pub fn negotiate(accept: Option<&str>) -> Self {
        let mut wanted = [0.0_f32; 2];
        for range in accept.unwrap_or_default().split(',') {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
            let parameters: Vec<_> = parts.filter_map(|part| part.split_once('=')).collect();
            let parameter = |name: &str| {
                let found = parameters.iter().find(|(key, _)| key.trim().eq_ignore_ascii_case(name));
                found.map(|(_, value)| value.trim().trim_matches('"'))
            };
            let quality: f32 = parameter("q").map_or(1.0, |q| q.parse().unwrap_or(0.0));
            match kind.as_str() {
                OPENMETRICS if parameter("version").is_none_or(|version| version == "1.0.0") => {
                    wanted[0] = quality.max(wanted[0]);
                }
                TEXT => wanted[1] = quality.max(wanted[1]),
                _ => {}
            }
        }
        if wanted[0] > 0.0 && wanted[0] >= wanted[1] { Self::OpenMetrics } else { Self::Prometheus }
    }

    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// One HELP and TYPE per family, buckets in numeric order. A family that cannot be written is left out.
    pub fn render(self, families: &[MetricFamily]) -> String {
        let mut text = String::new();
        for family in families {
            match self {
                Self::Prometheus => classic(family, &mut text),
                Self::OpenMetrics => open_metrics(family, &mut text),
            }
        }
        if self == Self::OpenMetrics {
            text.push_str("# EOF\n");
        }
        text
    }
}

fn classic(family: &MetricFamily, text: &mut String) {
    let start = text.len();
    if let Err(error) = TextEncoder::new().encode_utf8(std::slice::from_ref(family), text) {
        tracing::warn!(family = family.name(), %error, "cannot be shown");
        text.truncate(start);
    }
}

/// A counter's family is named without the ending of its samples. Units are in the names; no UNIT says them again,
/// because there are readers that refuse one of a histogram.
fn open_metrics(family: &MetricFamily, text: &mut String) {
    let (kind, name) = match family.type_() {
        MetricType::COUNTER => ("counter", family.name().strip_suffix("_total").unwrap_or(family.name())),
        MetricType::HISTOGRAM => ("histogram", family.name()),
        MetricType::GAUGE => ("gauge", family.name()),
        _ => return tracing::warn!(family = family.name(), "cannot be shown"),
    };
    let mut put = |line: std::fmt::Arguments<'_>| {
        text.write_fmt(line).expect("a string takes everything");
        text.push('\n');
    };
    put(format_args!("# TYPE {name} {kind}"));
    put(format_args!("# HELP {name} {}", escaped(family.help())));
    for metric in family.get_metric() {
        let labels = metric.get_label();
        match family.type_() {
            MetricType::COUNTER => {
                put(format_args!("{name}_total{} {}", set(labels, None), metric.get_counter().value()));
            }
            MetricType::HISTOGRAM => histogram(name, metric, &mut put),
            _ => put(format_args!("{name}{} {}", set(labels, None), metric.get_gauge().value())),
        }
    }
}

fn histogram(name: &str, metric: &Metric, put: &mut impl FnMut(std::fmt::Arguments<'_>)) {
    let (labels, histogram) = (metric.get_label(), metric.get_histogram());
    let finite = histogram.get_bucket().iter().filter(|bucket| bucket.upper_bound().is_finite());
    for bucket in finite {
        // As the standard writes numbers here: always with a decimal point.
        let bound = format!("{:?}", bucket.upper_bound());
        put(format_args!("{name}_bucket{} {}", set(labels, Some(&bound)), bucket.cumulative_count()));
    }
    put(format_args!("{name}_bucket{} {}", set(labels, Some("+Inf")), histogram.get_sample_count()));
    put(format_args!("{name}_sum{} {}", set(labels, None), histogram.get_sample_sum()));
    put(format_args!("{name}_count{} {}", set(labels, None), histogram.get_sample_count()));
}

/// Labels in braces; nothing when there are none.
fn set(labels: &[LabelPair], bound: Option<&str>) -> String {
    let pairs = labels.iter().map(|pair| (pair.name(), pair.value())).chain(bound.map(|bound| ("le", bound)));
    let pairs: Vec<_> = pairs.map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
    if pairs.is_empty() { String::new() } else { format!("{{{}}}", pairs.join(",")) }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
