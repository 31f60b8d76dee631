//! Owns reading `/metrics` in Prometheus' text format.

use std::collections::BTreeMap;

/// One scrape: the value of every series, by name and labels as they were written.
#[derive(Debug, Clone, PartialEq)]
pub struct Metrics {
    series: Vec<(String, BTreeMap<String, String>, f64)>,
}

impl Metrics {
    /// Panics on a line that is not in the format: then nobody's scraper can read it either.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        Self { series: lines.map(parse_line).collect() }
    }

    /// Sum over all series of a name.
    pub fn sum(&self, name: &str) -> f64 {
        self.matching(name, &[]).sum()
    }

    /// Sum over the series of a name that carry these labels.
    pub fn sum_with(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.matching(name, labels).sum()
    }

    /// Every series that may only grow, by name and labels.
    pub fn counters(&self) -> BTreeMap<String, f64> {
        const GROWING: [&str; 4] = ["_total", "_bucket", "_count", "_sum"];
        let grows = |name: &str| GROWING.iter().any(|ending| name.ends_with(ending));
        let counters = self.series.iter().filter(|(name, ..)| grows(name));
        counters.map(|(name, labels, value)| (format!("{name}{labels:?}"), *value)).collect()
    }

    pub fn has(&self, name: &str) -> bool {
        self.matching(name, &[]).next().is_some()
    }

    /// Values of a name by one of its labels.
    pub fn by_label(&self, name: &str, label: &str) -> BTreeMap<String, f64> {
        let mut values = BTreeMap::new();
        for (series, labels, value) in &self.series {
            if let Some(key) = labels.get(label).filter(|_| series == name) {
                *values.entry(key.clone()).or_default() += value;
            }
        }
        values
    }

    fn matching(&self, name: &str, wanted: &[(&str, &str)]) -> impl Iterator<Item = f64> {
        self.series
            .iter()
            .filter(move |(series, labels, _)| {
                series == name
                    && wanted.iter().all(|(key, value)| labels.get(*key).is_some_and(|is| is == value))
            })
            .map(|(_, _, value)| *value)
    }
}

fn parse_line(line: &str) -> (String, BTreeMap<String, String>, f64) {
    let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no value in {line:?}"));
    let value = value.parse().unwrap_or_else(|_| panic!("no number in {line:?}"));
    let Some((name, rest)) = series.split_once('{') else {
        return (series.to_owned(), BTreeMap::new(), value);
    };
    let labels = rest.strip_suffix('}').unwrap_or_else(|| panic!("no closing brace in {line:?}"));
    (name.to_owned(), parse_labels(labels), value)
}

fn parse_labels(mut text: &str) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    while let Some((key, rest)) = text.split_once("=\"") {
        let mut value = String::new();
        let mut chars = rest.char_indices();
        let mut end = rest.len();
        while let Some((at, c)) = chars.next() {
            match c {
                '\\' => match chars.next() {
                    Some((_, 'n')) => value.push('\n'),
                    Some((_, escaped)) => value.push(escaped),
                    None => break,
                },
                '"' => {
                    end = at + 1;
                    break;
                }
                c => value.push(c),
            }
        }
        labels.insert(key.trim_start_matches([',', ' ']).to_owned(), value);
        text = &rest[end..];
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_labels_and_values_are_read() {
        let metrics = Metrics::parse(
            "# HELP a b\n# TYPE a counter\na 3\nx:y_total{m=\"p\\\"q,r\",k=\"1\"} 2\nx:y_total{m=\"z\",k=\"1\"} 5e0\n",
        );
        assert_eq!(metrics.sum("a"), 3.0);
        assert_eq!(metrics.sum("x:y_total"), 7.0);
        assert_eq!(metrics.sum_with("x:y_total", &[("m", "p\"q,r")]), 2.0);
        assert_eq!(metrics.by_label("x:y_total", "m").get("z"), Some(&5.0));
        assert!(!metrics.has("x:y"));
    }
}
