//! Owns the rules of the two text formats of `/metrics`, as strict as the linter that ships with Prometheus: a page
//! that breaks one is a page that some scraper refuses, or shows wrongly.

use std::collections::{BTreeMap, BTreeSet, HashSet};

/// A text format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exposition {
    Prometheus,
    OpenMetrics,
}

/// Names that break a rule of style because dashboards made for SGLang ask for them.
pub const KEPT_FOR_DASHBOARDS: [&str; 5] = [
    "sglang:weight_memory_usage_gb",
    "sglang:kv_cache_memory_usage_gb",
    "sglang:prompt_tokens_histogram",
    "sglang:uncached_prompt_tokens_histogram",
    "sglang:generation_tokens_histogram",
];

/// One family as it stands on the page.
#[derive(Debug, Default)]
struct Family {
    name: String,
    kind: Option<String>,
    help: Option<String>,
    unit: Option<String>,
    samples: Vec<Sample>,
}

#[derive(Debug)]
struct Sample {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

/// Everything on the page that breaks a rule.
pub fn complaints(page: &str, exposition: Exposition) -> Vec<String> {
    let mut complaints = Vec::new();
    let families = families(page, exposition, &mut complaints);
    let (mut names, mut series) = (HashSet::new(), HashSet::new());
    for family in &families {
        if !names.insert(&family.name) {
            complaints.push(format!("{} is not contiguous", family.name));
        }
        for sample in &family.samples {
            let labels: BTreeSet<_> = sample.labels.iter().collect();
            if labels.len() != sample.labels.len() || !series.insert((&sample.name, labels)) {
                complaints.push(format!("{sample:?} for the second time"));
            }
        }
        complaints
            .extend(family.complaints(exposition).into_iter().map(|what| format!("{}: {what}", family.name)));
    }
    complaints
}

fn families(page: &str, exposition: Exposition, complaints: &mut Vec<String>) -> Vec<Family> {
    let mut families: Vec<Family> = Vec::new();
    let mut ended = false;
    for line in page.split_inclusive('\n') {
        let Some(line) = line.strip_suffix('\n') else {
            complaints.push(format!("{line:?} does not end"));
            continue;
        };
        if ended {
            complaints.push(format!("{line:?} after the end"));
        } else if line == "# EOF" {
            ended = true;
        } else if let Some(said) = line.strip_prefix("# ") {
            describe(&mut families, said, complaints);
        } else {
            match parse_sample(line) {
                Some(sample)
                    if families.last().is_some_and(|family| family.owns(&sample.name, exposition)) =>
                {
                    families.last_mut().expect("there is one").samples.push(sample);
                }
                Some(sample) => complaints.push(format!("{} stands outside its family", sample.name)),
                None => complaints.push(format!("{line:?} is no sample")),
            }
        }
    }
    if ended != (exposition == Exposition::OpenMetrics) {
        complaints.push("an end mark belongs to OpenMetrics, and to nothing else".to_owned());
    }
    families
}

fn describe(families: &mut Vec<Family>, said: &str, complaints: &mut Vec<String>) {
    let mut words = said.splitn(3, ' ');
    let (what, name, text) =
        (words.next(), words.next().unwrap_or_default(), words.next().unwrap_or_default());
    if families.last().is_none_or(|family| family.name != name) {
        families.push(Family { name: name.to_owned(), ..Family::default() });
    }
    let family = families.last_mut().expect("one was just made sure of");
    let place = match what {
        Some("HELP") => &mut family.help,
        Some("TYPE") => &mut family.kind,
        Some("UNIT") => &mut family.unit,
        _ => return complaints.push(format!("{said:?} says nothing")),
    };
    if place.replace(text.to_owned()).is_some() || !family.samples.is_empty() {
        complaints.push(format!("{said:?} comes twice or too late"));
    }
}

impl Family {
    fn owns(&self, sample: &str, exposition: Exposition) -> bool {
        let Some(ending) = sample.strip_prefix(&self.name) else { return false };
        match (self.kind.as_deref(), exposition) {
            (Some("histogram"), _) => ["_bucket", "_sum", "_count"].contains(&ending),
            (Some("counter"), Exposition::OpenMetrics) => ["_total", "_created"].contains(&ending),
            _ => ending.is_empty(),
        }
    }

    fn complaints(&self, exposition: Exposition) -> Vec<String> {
        let mut complaints = Vec::new();
        let mut check = |holds: bool, what: &str| {
            if !holds {
                complaints.push(what.to_owned());
            }
        };
        let kind = self.kind.as_deref().unwrap_or_default();
        let is_counter = kind == "counter";
        check(["counter", "gauge", "histogram"].contains(&kind), "has no TYPE");
        check(self.help.as_ref().is_some_and(|help| !help.is_empty()), "has no HELP");
        check(!self.samples.is_empty(), "has no samples");
        let total = exposition == Exposition::Prometheus && is_counter;
        check(self.name.ends_with("_total") == total, "only counters end in _total, and all do");
        check(is_name(&self.name), "is no name");
        let base = self.name.strip_suffix("_total").unwrap_or(&self.name);
        check(!["_sum", "_count", "_bucket"].iter().any(|e| base.ends_with(e)), "is named like a part");
        check(self.unit.as_ref().is_none_or(|unit| base.ends_with(&format!("_{unit}"))), "has another unit");
        if !KEPT_FOR_DASHBOARDS.contains(&self.name.as_str()) {
            const SHORT: [&str; 12] = ["s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "m", "h"];
            const LONG: [&str; 6] =
                ["milliseconds", "microseconds", "minutes", "hours", "kilobytes", "megabytes"];
            let words: Vec<_> = base.rsplit(':').next().unwrap_or(base).split('_').collect();
            check(!words.iter().any(|word| SHORT.contains(word)), "abbreviates a unit");
            check(!words.iter().any(|word| LONG.contains(word)), "is not in a base unit");
            check(!words.iter().any(|w| ["counter", "gauge", "histogram"].contains(w)), "names its type");
        }
        let labels = |sample: &Sample| -> BTreeSet<String> {
            sample.labels.iter().map(|(name, _)| name.clone()).filter(|name| name != "le").collect()
        };
        let sets: BTreeSet<_> = self.samples.iter().map(labels).collect();
        check(sets.len() <= 1, "has series with different labels");
        for sample in &self.samples {
            check(
                sample.labels.iter().all(|(name, _)| is_name(name) && !name.contains(':')),
                "has a bad label",
            );
            let whole = sample.value.is_finite() && sample.value >= 0.0;
            check(kind == "gauge" || whole, "a count is no number of things");
        }
        if kind == "histogram" {
            complaints.extend(self.histograms());
        }
        complaints
    }

    /// Per set of labels: buckets in numeric order up to +Inf, each at least the one before, then sum and count.
    fn histograms(&self) -> Vec<String> {
        let mut sets: BTreeMap<Vec<(String, String)>, Vec<&Sample>> = BTreeMap::new();
        for sample in &self.samples {
            let others = sample.labels.iter().filter(|(name, _)| name != "le").cloned().collect();
            sets.entry(others).or_default().push(sample);
        }
        let mut complaints = Vec::new();
        for (labels, samples) in sets {
            let ending = |sample: &Sample| sample.name[self.name.len()..].to_owned();
            let buckets: Vec<_> = samples.iter().filter(|sample| ending(sample) == "_bucket").collect();
            let bound = |sample: &Sample| {
                let le = sample.labels.iter().find(|(name, _)| name == "le");
                le.and_then(|(_, value)| value.parse::<f64>().ok()).unwrap_or(f64::NAN)
            };
            let rises = buckets
                .windows(2)
                .all(|pair| bound(pair[0]) < bound(pair[1]) && pair[0].value <= pair[1].value);
            let order: Vec<_> = samples.iter().skip(buckets.len()).map(|sample| ending(sample)).collect();
            let last = buckets.last().map(|sample| (bound(sample), sample.value));
            let count = samples.last().map(|sample| (f64::INFINITY, sample.value));
            if !rises || order != ["_sum", "_count"] || last != count {
                complaints.push(format!("the histogram with {labels:?} is torn or out of order"));
            }
        }
        complaints
    }
}

fn is_name(name: &str) -> bool {
    let may = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    name.chars().all(may) && name.starts_with(|c: char| !c.is_ascii_digit())
}

fn parse_sample(line: &str) -> Option<Sample> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = Vec::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (label, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            labels.push((label.to_owned(), value));
            rest = after.strip_prefix(',').unwrap_or(after);
        }
        rest = &rest[1..];
    }
    let value = rest.strip_prefix(' ')?.parse().ok()?;
    Some(Sample { name: name.to_owned(), labels, value })
}

/// A value up to its closing quote, unescaped, and what follows it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    loop {
        match chars.next()? {
            (at, '"') => return Some((value, &text[at + 1..])),
            (_, '\\') => value.push(match chars.next()?.1 {
                'n' => '\n',
                c @ ('\\' | '"') => c,
                _ => return None,
            }),
            (_, '\n') => return None,
            (_, c) => value.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "# HELP a_total Things.\n# TYPE a_total counter\na_total{x=\"1\\\\\\\"\\n\"} 3\na_total{x=\"2\"} 4\n\
        # HELP wait_seconds Times.\n# TYPE wait_seconds histogram\nwait_seconds_bucket{le=\"2\"} 1\n\
        wait_seconds_bucket{le=\"10\"} 1\nwait_seconds_bucket{le=\"+Inf\"} 2\nwait_seconds_sum 30.5\nwait_seconds_count 2\n";

    #[test]
    fn a_good_page_is_not_complained_of() {
        assert_eq!(complaints(GOOD, Exposition::Prometheus), [""; 0]);
        let open = GOOD.replace("HELP a_total", "HELP a").replace("TYPE a_total", "TYPE a") + "# EOF\n";
        assert_eq!(complaints(&open, Exposition::OpenMetrics), [""; 0]);
    }

    #[test]
    fn every_rule_is_kept() {
        let broken = [
            ("a_total{x=\"2\"} 4", "a_total{x=\"1\\\\\\\"\\n\"} 4"),
            ("a_total{x=\"2\"} 4", "a_total{x=\"2\"} -4"),
            ("a_total{x=\"2\"} 4", "a_total{x=\"2} 4"),
            ("a_total{x=\"2\"} 4", "a_total{x=\"2\",x=\"2\"} 4"),
            ("a_total{x=\"2\"} 4", "a_total{x:y=\"2\"} 4"),
            ("a_total{x=\"2\"} 4", "a_total{y=\"2\"} 4"),
            ("a_total{x=\"2\"} 4", "b_total{x=\"2\"} 4"),
            ("a_total{x=\"2\"} 4", "# HELP a_total Again."),
            ("TYPE a_total counter", "TYPE a_total gauge"),
            ("# TYPE a_total counter\n", ""),
            ("# HELP a_total Things.\n", ""),
            ("le=\"10\"", "le=\"1.5\""),
            ("wait_seconds_bucket{le=\"10\"} 1", "wait_seconds_bucket{le=\"10\"} 3"),
            ("wait_seconds_count 2", "wait_seconds_count 3"),
            ("wait_seconds_sum 30.5\n", ""),
            ("wait_seconds_bucket{le=\"+Inf\"} 2\n", ""),
            ("wait_seconds_count 2\n", "wait_seconds_count 2"),
            ("wait_seconds_count 2\n", "wait_seconds_count 2\n# EOF\n"),
        ];
        for (good, bad) in broken {
            let page = GOOD.replacen(good, bad, 1);
            assert_ne!(page, GOOD, "{good}");
            assert_ne!(complaints(&page, Exposition::Prometheus), [""; 0], "{good} as {bad}");
        }
        for (good, bad) in [
            ("wait_seconds", "wait_ms"),
            ("wait_seconds", "wait_milliseconds"),
            ("wait_seconds", "wait_histogram"),
        ] {
            assert_ne!(complaints(&GOOD.replace(good, bad), Exposition::Prometheus), [""; 0], "{bad}");
        }
        let gauge = "# HELP g_count Things.\n# TYPE g_count gauge\ng_count 1\n";
        assert_ne!(complaints(gauge, Exposition::Prometheus), [""; 0]);
        assert_ne!(complaints("# EOF", Exposition::OpenMetrics), [""; 0]);
    }
}
