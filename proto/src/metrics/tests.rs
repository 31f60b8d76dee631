//! Tests of the metric names, the snapshots and their join.

use std::collections::HashSet;
use std::path::Path;

use prometheus::{Encoder, Registry, TextEncoder};

use super::*;
use crate::ids::{Incarnation, Role};
use crate::topology::Member;

fn registrar(registry: &Registry) -> Registrar {
    Registrar::new(registry, [("model_name", "tiny".to_owned())])
}

/// A registry as a scheduler has it.
fn scheduler(running: f64, verify_steps: u64, queue_times: &[f64]) -> Registry {
    let registry = Registry::new();
    let to = registrar(&registry);
    names::NUM_RUNNING_REQS.register(&to).unwrap().set(running);
    names::SPEC_VERIFY_STEPS.register(&to).unwrap().inc_by(verify_steps);
    let queue_time = names::QUEUE_TIME.register(&to).unwrap();
    queue_times.iter().for_each(|seconds| queue_time.observe(*seconds));
    registry
}

fn write(dir: &Path, member: impl Into<Member>, incarnation: u64, registry: &Registry) {
    SnapshotWriter::new(dir, member, Incarnation(incarnation)).write(registry).unwrap();
}

/// The value of the sample whose line starts with this.
fn value(page: &str, sample: &str) -> f64 {
    let line = page.lines().find(|line| line.strip_prefix(sample).is_some_and(|rest| rest.starts_with(' ')));
    let line = line.unwrap_or_else(|| panic!("no {sample} in\n{page}"));
    line.rsplit_once(' ').unwrap().1.parse().unwrap()
}

#[test]
fn names_are_unique_and_say_what_they_are() {
    let mut seen = HashSet::new();
    for info in names::ALL {
        assert!(seen.insert(info.name), "{} appears twice", info.name);
        assert!(info.name.starts_with("sglang:") && !info.name.contains("_total_total"), "{}", info.name);
        assert!(info.help.ends_with('.') && !info.help.contains('\n'), "{}: {}", info.name, info.help);
        if info.name.starts_with("sglang:spec_")
            && info.name.contains("draft")
            && info.name.ends_with("_total")
        {
            assert!(info.help.contains("onus"), "{} does not say whether the bonus is in it", info.name);
        }
    }
}

/// Only counters are called `_total`, and every counter is, exactly once.
#[test]
fn total_is_for_counters() {
    let registry = Registry::new();
    let to = registrar(&registry);
    names::NUM_REQUESTS.register(&to).unwrap().with_label_values(&["True"]).inc();
    names::PROCESS_CPU_SECONDS.register(&to).unwrap().with_label_values(&["tokenizer"]).inc();
    names::SPEC_DELIVERED_DRAFTS.register(&to).unwrap().inc();
    names::SPEC_ACCEPT_RATE.register(&to).unwrap().set(0.5);
    let page = Format::Prometheus.render(&join(Path::new("/nowhere"), Some(&registry)));
    for line in page.lines().filter(|line| line.starts_with("# TYPE ")) {
        let mut words = line.split(' ').skip(2);
        let (name, kind) = (words.next().unwrap(), words.next().unwrap());
        assert_eq!(name.ends_with("_total"), kind == "counter", "{line}");
    }
    assert_eq!(value(&page, r#"sglang:num_requests_total{is_streaming="True",model_name="tiny"}"#), 1.0);
}

#[test]
fn a_name_registered_twice_is_an_error_at_start() {
    let registry = Registry::new();
    let to = registrar(&registry);
    names::GEN_THROUGHPUT.register(&to).unwrap();
    assert!(names::GEN_THROUGHPUT.register(&to).is_err());
}

#[test]
fn counters_and_histograms_are_summed_and_gauges_are_the_latest_life_s() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), Role::Scheduler, 0x20, &scheduler(7.0, 100, &[0.002, 4.5]));
    write(dir.path(), Role::Scheduler, 0x3, &scheduler(9.0, 11, &[0.002, 5000.0]));
    let page = Format::Prometheus.render(&join(dir.path(), None));
    let labels = r#"{model_name="tiny"}"#;
    assert_eq!(value(&page, &format!("sglang:num_running_reqs{labels}")), 7.0);
    assert_eq!(value(&page, &format!("sglang:spec_verify_steps_total{labels}")), 111.0);
    assert_eq!(value(&page, &format!("sglang:queue_time_seconds_count{labels}")), 4.0);
    assert!((value(&page, &format!("sglang:queue_time_seconds_sum{labels}")) - 5004.504).abs() < 1e-5);
    let bucket = |le: &str| {
        value(&page, &format!(r#"sglang:queue_time_seconds_bucket{{model_name="tiny",le="{le}"}}"#))
    };
    assert_eq!(
        [bucket("0.001"), bucket("0.005"), bucket("5"), bucket("3000"), bucket("+Inf")],
        [0.0, 2.0, 3.0, 3.0, 4.0]
    );
}

#[test]
fn a_gauge_that_only_a_dead_life_had_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let old = Registry::new();
    names::HTTP_REQUESTS_ACTIVE
        .register(&registrar(&old))
        .unwrap()
        .with_label_values(&["/x", "GET"])
        .set(3.0);
    names::NUM_ABORTED_REQUESTS.register(&registrar(&old)).unwrap().inc();
    write(dir.path(), Role::Tokenizer, 1, &old);
    assert!(Format::Prometheus.render(&join(dir.path(), None)).contains("http_requests_active"));
    write(dir.path(), Role::Tokenizer, 2, &Registry::new());
    let page = Format::Prometheus.render(&join(dir.path(), None));
    assert!(!page.contains("http_requests_active"), "{page}");
    assert_eq!(value(&page, r#"sglang:num_aborted_requests_total{model_name="tiny"}"#), 1.0);
}

#[test]
fn bad_files_are_left_out_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), Role::Scheduler, 1, &scheduler(1.0, 5, &[1.0]));
    let whole = std::fs::read(dir.path().join("scheduler.0000000000000001.pb")).unwrap();
    // Every way in which the end can be missing, except none and all of it.
    let readable = (1..whole.len())
        .filter(|length| {
            std::fs::write(dir.path().join("scheduler.2.pb"), &whole[..*length]).unwrap();
            let page = Format::Prometheus.render(&join(dir.path(), None));
            assert!(value(&page, r#"sglang:spec_verify_steps_total{model_name="tiny"}"#) >= 5.0);
            value(&page, "sglang:metrics_unreadable_snapshots") == 0.0
        })
        .count();
    // A file may end between two families.
    assert_eq!(readable, 2);
    std::fs::write(dir.path().join("scheduler.2.pb"), b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7fjunk")
        .unwrap();
    std::fs::write(dir.path().join("scheduler.3.tmp"), b"half").unwrap();
    std::fs::write(dir.path().join("notes.txt"), b"junk").unwrap();
    let page = Format::Prometheus.render(&join(dir.path(), None));
    assert_eq!(value(&page, "sglang:metrics_unreadable_snapshots"), 1.0);
    assert_eq!(value(&page, r#"sglang:num_running_reqs{model_name="tiny"}"#), 1.0);
}

#[test]
fn a_name_with_two_types_is_shown_once() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), Role::Scheduler, 1, &scheduler(1.0, 5, &[]));
    let other = Registry::new();
    let opts = prometheus::Opts::new("sglang:spec_verify_steps_total", "as a gauge");
    other.register(Box::new(prometheus::Gauge::with_opts(opts).unwrap())).unwrap();
    write(dir.path(), Role::Tokenizer, 2, &other);
    let page = Format::Prometheus.render(&join(dir.path(), None));
    assert_eq!(page.matches("# TYPE sglang:spec_verify_steps_total ").count(), 1);
    assert_eq!(value(&page, "sglang:metrics_unreadable_snapshots"), 1.0);
}

#[test]
fn buckets_are_in_numeric_order_and_families_contiguous() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), Role::Scheduler, 1, &scheduler(1.0, 5, &[0.3, 12.0]));
    write(dir.path(), Role::Detokenizer, 1, &scheduler(1.0, 5, &[0.3, 12.0]));
    let page = Format::Prometheus.render(&join(dir.path(), Some(&scheduler(2.0, 1, &[7.0]))));
    let bounds: Vec<f64> = page
        .lines()
        .filter_map(|line| line.strip_prefix("sglang:queue_time_seconds_bucket")?.split("le=\"").nth(1))
        .map(|rest| rest.split('"').next().unwrap().parse().unwrap())
        .collect();
    assert_eq!(bounds.len(), 41);
    assert!(bounds.windows(2).all(|pair| pair[0] < pair[1]), "{bounds:?}");
    assert_eq!(bounds.last(), Some(&f64::INFINITY));
    let mut families = HashSet::new();
    for line in page.lines().filter(|line| line.starts_with("# HELP ")) {
        assert!(families.insert(line.split(' ').nth(2).unwrap()), "{line} for the second time");
    }
    assert_eq!(
        value(&page, r#"sglang:num_running_reqs{model_name="tiny"}"#),
        2.0,
        "the caller's own is the latest"
    );
}

/// What two front ends that live at the same time have: counters and load add up, and a fold of one's lives leaves the
/// other's alone.
#[test]
fn several_of_one_role_are_shown_together_and_folded_apart() {
    let dir = tempfile::tempdir().unwrap();
    let front = |active: f64, seconds: f64| {
        let registry = Registry::new();
        let to = registrar(&registry);
        names::NUM_ABORTED_REQUESTS.register(&to).unwrap().inc();
        names::HTTP_REQUESTS_ACTIVE.register(&to).unwrap().with_label_values(&["/x", "GET"]).set(active);
        names::STARTUP_TIME.register(&to).unwrap().with_label_values(&["tokenizer_e2e"]).set(seconds);
        registry
    };
    let [first, second] = [0, 1].map(|number| Member::nth(Role::Tokenizer, number));
    write(dir.path(), second, 1, &front(3.0, 9.0));
    write(dir.path(), first, 2, &front(4.0, 5.0));
    let shown = || {
        let page = Format::Prometheus.render(&join(dir.path(), None));
        [
            r#"sglang:http_requests_active{endpoint="/x",method="GET",model_name="tiny"}"#,
            r#"sglang:startup_time_seconds{model_name="tiny",phase="tokenizer_e2e"}"#,
            r#"sglang:num_aborted_requests_total{model_name="tiny"}"#,
        ]
        .map(|sample| value(&page, sample))
    };
    assert_eq!(shown(), [7.0, 9.0, 2.0]);
    assert_eq!(fold(dir.path(), second).unwrap(), 0);
    assert_eq!(shown(), [4.0, 5.0, 2.0]);
    write(dir.path(), second, 7, &front(1.0, 1.0));
    assert_eq!(shown(), [5.0, 5.0, 3.0]);
    assert_eq!(fold(dir.path(), Role::Tokenizer).unwrap(), 0, "nobody has this name");
    assert_eq!(shown(), [5.0, 5.0, 3.0]);
}

#[test]
fn a_scraper_gets_the_form_it_asks_for() {
    use Format::{OpenMetrics, Prometheus};
    let cases = [
        (None, Prometheus),
        (Some(""), Prometheus),
        (Some("*/*"), Prometheus),
        (Some("text/html, application/xhtml+xml;q=0.9, */*;q=0.8"), Prometheus),
        (Some("application/openmetrics-text"), OpenMetrics),
        (Some("Application/OpenMetrics-Text; Version=1.0.0; charset=utf-8"), OpenMetrics),
        // As Prometheus asks.
        (
            Some(
                "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                 text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            ),
            OpenMetrics,
        ),
        (Some("application/openmetrics-text;version=0.0.1, text/plain;q=0.1"), Prometheus),
        (Some("application/openmetrics-text;q=0.2, text/plain;q=0.7"), Prometheus),
        (Some("application/openmetrics-text;q=0"), Prometheus),
        (Some("application/openmetrics-text;q=loud"), Prometheus),
    ];
    for (accept, format) in cases {
        assert_eq!(Format::negotiate(accept), format, "{accept:?}");
    }
}

#[test]
fn openmetrics_names_counters_without_their_ending_and_says_where_it_ends() {
    let registry = Registry::new();
    let to = Registrar::new(&registry, [("model_name", "a\\b\"c\nd".to_owned())]);
    names::SPEC_VERIFY_STEPS.register(&to).unwrap().inc_by(3);
    names::PROCESS_RESIDENT_MEMORY.register(&to).unwrap().with_label_values(&["x"]).set(1.5);
    let queue_time = names::QUEUE_TIME.register(&to).unwrap();
    [0.002, 4.5, 5000.0].into_iter().for_each(|seconds| queue_time.observe(seconds));
    let page = Format::OpenMetrics.render(&registry.gather());
    let labels = r#"model_name="a\\b\"c\nd""#;
    for line in [
        "# TYPE sglang:spec_verify_steps counter",
        &format!("sglang:spec_verify_steps_total{{{labels}}} 3"),
        &format!("sglang:process_resident_memory_bytes{{component=\"x\",{labels}}} 1.5"),
        &format!("sglang:queue_time_seconds_bucket{{{labels},le=\"5.0\"}} 2"),
        &format!("sglang:queue_time_seconds_bucket{{{labels},le=\"+Inf\"}} 3"),
        &format!("sglang:queue_time_seconds_sum{{{labels}}} 5004.502"),
        &format!("sglang:queue_time_seconds_count{{{labels}}} 3"),
    ] {
        assert!(page.lines().any(|shown| shown == line), "no {line} in\n{page}");
    }
    assert!(page.ends_with("\n# EOF\n") && page.matches("# EOF").count() == 1, "{page}");
    assert_eq!(Format::OpenMetrics.render(&[]), "# EOF\n");
}

/// A family of OpenMetrics is named without `_total`, and must have its name for itself.
#[test]
fn no_two_families_have_one_name_in_openmetrics() {
    let mut seen = HashSet::new();
    for info in names::ALL {
        let name = info.name.strip_suffix("_total").unwrap_or(info.name);
        assert!(seen.insert(name), "{name} is two families");
    }
}

/// Whatever is observed meanwhile, a page's buckets only rise, and the last one is the count.
#[test]
fn a_histogram_is_never_torn() {
    let registry = Registry::new();
    let queue_time = names::QUEUE_TIME.register(&registrar(&registry)).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let times = [0.002, 0.3, 12.0, 5000.0].into_iter().cycle();
            times.take_while(|_| !done.load(std::sync::atomic::Ordering::SeqCst)).for_each(|seconds| {
                queue_time.observe(seconds);
            });
        });
        for format in [Format::Prometheus, Format::OpenMetrics].into_iter().cycle().take(300) {
            let page = format.render(&registry.gather());
            let value = |line: &str| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap();
            let buckets: Vec<_> = page.lines().filter(|line| line.contains("_bucket{")).map(value).collect();
            assert!(buckets.windows(2).all(|pair| pair[0] <= pair[1]), "{page}");
            let count = page.lines().find(|line| line.contains("_count{")).map(value);
            assert_eq!(buckets.last().copied(), count, "{page}");
        }
        done.store(true, std::sync::atomic::Ordering::SeqCst);
    });
}

#[test]
fn two_scrapes_show_the_same() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), Role::Scheduler, 1, &scheduler(1.0, 5, &[0.3]));
    assert_eq!(
        Format::Prometheus.render(&join(dir.path(), None)),
        Format::Prometheus.render(&join(dir.path(), None))
    );
    assert_eq!(
        value(
            &Format::Prometheus.render(&join(Path::new("/nowhere"), None)),
            "sglang:metrics_unreadable_snapshots"
        ),
        0.0
    );
}

#[test]
fn process_metrics_grow_with_the_process() {
    let registry = Registry::new();
    register_process_metrics(&registrar(&registry), Role::Detokenizer).unwrap();
    let page = || {
        let mut text = Vec::new();
        TextEncoder::new().encode(&registry.gather(), &mut text).unwrap();
        String::from_utf8(text).unwrap()
    };
    let labels = r#"{component="detokenizer",model_name="tiny"}"#;
    let first = page();
    assert!(value(&first, &format!("sglang:process_cpu_seconds_total{labels}")) > 0.0);
    assert!(value(&first, &format!("sglang:process_resident_memory_bytes{labels}")) > 1e5);
    assert!(first.contains(&format!("sglang:link_dropped_frames_total{labels}")));
    let later = page();
    let cpu = |page: &str| value(page, &format!("sglang:process_cpu_seconds_total{labels}"));
    assert!(cpu(&later) >= cpu(&first));
}

#[test]
fn dead_lives_are_folded_into_one_file_and_counts_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let labels = r#"{model_name="tiny"}"#;
    let show = || Format::Prometheus.render(&join(dir.path(), None));
    for life in 1..=20 {
        write(dir.path(), Role::Scheduler, life, &scheduler(3.0, 10, &[0.5]));
        write(dir.path(), Role::Detokenizer, 7, &scheduler(4.0, 1, &[]));
        assert_eq!(
            value(&show(), &format!("sglang:spec_verify_steps_total{labels}")),
            10.0 * life as f64 + 1.0
        );
        assert_eq!(fold(dir.path(), Role::Scheduler).unwrap(), 0);
        let page = show();
        assert_eq!(
            value(&page, &format!("sglang:spec_verify_steps_total{labels}")),
            10.0 * life as f64 + 1.0
        );
        assert_eq!(value(&page, &format!("sglang:queue_time_seconds_count{labels}")), life as f64);
        assert_eq!(value(&page, &format!("sglang:num_running_reqs{labels}")), 4.0, "the dead one's is gone");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }
    assert_eq!(fold(dir.path(), Role::Scheduler).unwrap(), 0, "nothing new");
    assert_eq!(fold(dir.path(), Role::Tokenizer).unwrap(), 0, "nothing there");
    assert_eq!(value(&show(), &format!("sglang:spec_verify_steps_total{labels}")), 201.0);
}

/// Not even by a last bit, in whatever order fractions are added up.
#[test]
fn folding_changes_no_sum_of_seconds() {
    let dir = tempfile::tempdir().unwrap();
    let members = [0, 1, 2].map(|number| Member::nth(Role::Detokenizer, number));
    let mut last = String::new();
    for life in 1..=40_u64 {
        for member in members {
            let registry = Registry::new();
            let to = registrar(&registry);
            let seconds = names::PROCESS_CPU_SECONDS.register(&to).unwrap();
            let part = (life * 7 + u64::from(member.number()) * 13) as f64;
            seconds.with_label_values(&["detokenizer"]).inc_by(0.1 / part);
            names::QUEUE_TIME.register(&to).unwrap().observe(0.7 / part);
            write(dir.path(), member, life, &registry);
        }
        let before = Format::Prometheus.render(&join(dir.path(), None));
        assert_ne!(before, last);
        for member in members {
            fold(dir.path(), member).unwrap();
            last = Format::Prometheus.render(&join(dir.path(), None));
            assert_eq!(last, before);
        }
    }
}

#[test]
fn a_fold_that_was_cut_short_counts_nothing_twice() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), Role::Scheduler, 1, &scheduler(3.0, 10, &[]));
    let first = std::fs::read(dir.path().join("scheduler.0000000000000001.pb")).unwrap();
    fold(dir.path(), Role::Scheduler).unwrap();
    std::fs::write(dir.path().join("scheduler.0000000000000001.pb"), first).unwrap();
    let steps = || {
        let page = Format::Prometheus.render(&join(dir.path(), None));
        value(&page, r#"sglang:spec_verify_steps_total{model_name="tiny"}"#)
    };
    assert_eq!(steps(), 10.0);
    fold(dir.path(), Role::Scheduler).unwrap();
    assert_eq!(steps(), 10.0);
}

#[test]
fn a_bad_file_of_a_dead_life_is_given_up_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), Role::Scheduler, 1, &scheduler(3.0, 10, &[]));
    let bad = dir.path().join("scheduler.2.pb");
    std::fs::write(&bad, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7fjunk").unwrap();
    assert_eq!(unreadable(dir.path()), [bad].into());
    assert_eq!(fold(dir.path(), Role::Scheduler).unwrap(), 1);
    assert!(unreadable(dir.path()).is_empty());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

/// A scraper that polls while lives come and go never sees a counter go down.
#[test]
fn a_page_read_during_folding_shows_every_count_once() {
    let dir = tempfile::tempdir().unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for life in 1..=200 {
                write(dir.path(), Role::Scheduler, life, &scheduler(1.0, 5, &[]));
                fold(dir.path(), Role::Scheduler).unwrap();
            }
            done.store(true, std::sync::atomic::Ordering::SeqCst);
        });
        let mut last = 0.0;
        while !done.load(std::sync::atomic::Ordering::SeqCst) {
            let page = Format::Prometheus.render(&join(dir.path(), None));
            if !page.contains("spec_verify_steps_total{") {
                assert_eq!(last, 0.0);
                continue;
            }
            let now = value(&page, r#"sglang:spec_verify_steps_total{model_name="tiny"}"#);
            assert!(now >= last && now % 5.0 == 0.0, "{now} after {last}");
            last = now;
        }
    });
}
