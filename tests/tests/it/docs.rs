//! docs/metrics.md says what the code does: every metric and every acceptance key, no more and no less.

use std::collections::{BTreeMap, BTreeSet};

use proto::metrics::names;

use crate::workers::{EAGLE, ask};

fn page() -> String {
    std::fs::read_to_string(tests::repository().join("docs/metrics.md")).unwrap()
}

/// The cells of all table rows whose first cell is a name in backticks.
fn rows(text: &str) -> impl Iterator<Item = (&str, Vec<&str>)> {
    text.lines().filter_map(|line| {
        let cells: Vec<_> = line.strip_prefix("| `")?.split('|').map(str::trim).collect();
        let (name, "") = cells[0].split_once('`')? else { panic!("more than a name in {line:?}") };
        Some((name, cells[1..].to_vec()))
    })
}

/// What stands in backticks in a text.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn the_page_lists_every_metric_with_its_labels_and_nothing_else() {
    let page = page();
    let mut listed = BTreeMap::new();
    for (series, cells) in rows(&page).filter(|(name, _)| name.starts_with("sglang:")) {
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let labels: Vec<_> =
            labels.trim_end_matches('}').split(',').filter(|label| !label.is_empty()).collect();
        let whose = cells[cells.len() - 2];
        assert!(listed.insert(name, (labels, whose)).is_none(), "{name} stands twice");
    }
    let counted: BTreeMap<_, _> = names::ALL
        .iter()
        .map(|info| {
            let whose = if info.help.starts_with("Drafthorse") { "ours" } else { "SGLang" };
            (info.name, (info.labels.to_vec(), whose))
        })
        .collect();
    assert_eq!(listed, counted);
    // Prose names nothing that is not there.
    let series = quoted(&page).filter(|quoted| quoted.starts_with("sglang:"));
    for name in series.map(|series| series.split('{').next().unwrap()) {
        assert!(counted.contains_key(name), "{name}");
    }
}

#[test]
fn the_page_lists_every_acceptance_key_of_a_reply_and_nothing_else() {
    let page = page();
    let (_, section) = page.split_once("## In `meta_info`").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let mut listed: BTreeSet<&str> = BTreeSet::new();
    for (key, cells) in rows(section) {
        listed.insert(key);
        listed.extend(cells.iter().flat_map(|cell| quoted(cell)).filter(|key| key.starts_with("spec_")));
    }
    let reply = EAGLE.server().generate(&ask(&EAGLE.prompts()[0], 20));
    let told = reply["meta_info"].as_object().unwrap();
    let told: BTreeSet<&str> =
        told.keys().map(String::as_str).filter(|key| key.starts_with("spec_")).collect();
    assert_eq!(listed, told);
}

/// What a live server shows is in the list: histograms by their three series.
#[test]
fn a_live_page_shows_only_what_is_listed() {
    let server = EAGLE.server();
    server.generate(&ask(&EAGLE.prompts()[1], 20));
    let body = server.get("/metrics").body;
    let named = |name: &str| names::ALL.iter().any(|info| info.name == name);
    let mut seen = 0;
    for line in body.lines().filter(|line| line.starts_with("sglang:")) {
        let name = line.split(['{', ' ']).next().unwrap();
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        assert!(named(name) || base.is_some_and(named), "{name} is in no list");
        seen += 1;
    }
    assert!(seen > 50, "{body}");
}
