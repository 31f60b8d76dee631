//! Windows, lines and series from plain facts.

use std::cell::RefCell;
use std::rc::Rc;

use proto::DeviceKind;

use super::window::{Tick, decode_line, prefill_line};
use super::*;
use crate::accounting::Origin;
use crate::batch::VerifyCount;
use crate::cache::Usage;
use crate::engine::DraftStatus;
use crate::testing;

fn load(running: usize) -> Load {
    Load {
        running,
        waiting: 2,
        usage: Usage { used: 50, cached: 20, free: 130, total: 200 },
        draft: DraftStatus { num_steps: 3, num_draft_tokens: 4 },
        ..Load::default()
    }
}

/// One step in which every given row proposed 3 and accepted so many.
fn verify_step(accepted: &[usize], running: usize) -> StepReport {
    let mut report = StepReport { load: load(running), ..StepReport::default() };
    for &accepted in accepted {
        let verify = VerifyCount { proposed_at: vec![1, 1, 1], accepted, ..VerifyCount::default() };
        report.row(true, Origin::Verify(&verify), 1, accepted + 1);
        report.delivered(true, accepted);
    }
    report
}

fn metrics(interval: u32, enabled: bool) -> (SchedulerMetrics, Rc<RefCell<usize>>) {
    let mut config = testing::config();
    config.schedule.decode_log_interval = interval;
    config.server.enable_metrics = enabled;
    let written = Rc::new(RefCell::new(0));
    let count = written.clone();
    let write: WriteSnapshot = Box::new(move |_| *count.borrow_mut() += 1);
    (SchedulerMetrics::new(&Arc::new(config), Some(write)).expect("names are distinct"), written)
}

/// The value of the only series of a name, or of the one whose label has this value.
fn value(metrics: &SchedulerMetrics, name: &str, label: Option<&str>) -> Option<f64> {
    let families = metrics.series.as_ref().expect("enabled").registry.gather();
    let family = families.iter().find(|family| family.name() == format!("sglang:{name}"))?;
    let series = family.get_metric().iter().find(|series| {
        label.is_none_or(|wanted| series.get_label().iter().any(|pair| pair.value() == wanted))
    })?;
    Some(series.get_gauge().value() + series.get_counter().value())
}

impl SchedulerMetrics {
    /// Every series of a counter: the values of its own labels, by name, and the count.
    pub(crate) fn counted(&self, name: &str) -> Vec<(Vec<String>, f64)> {
        let families = self.series.as_ref().expect("enabled").registry.gather();
        let Some(family) = families.iter().find(|family| family.name() == format!("sglang:{name}")) else {
            return Vec::new();
        };
        let own = |name: &str| ["from", "to", "reason", "steps"].contains(&name);
        let series = |series: &prometheus::proto::Metric| {
            let labels = series.get_label().iter().filter(|pair| own(pair.name()));
            (labels.map(|pair| pair.value().to_owned()).collect(), series.get_counter().value())
        };
        family.get_metric().iter().map(series).collect()
    }
}

#[test]
fn a_tick_shows_the_window_and_begins_a_new_one() {
    let (mut metrics, _) = metrics(2, true);
    metrics.step(&verify_step(&[3, 1], 2));
    assert_eq!(value(&metrics, "spec_accept_length", None), Some(0.0), "no tick yet");
    metrics.step(&verify_step(&[0, 0], 2));
    assert_eq!(value(&metrics, "spec_accept_length", None), Some(2.0), "(4 + 4) / 4");
    assert_eq!(value(&metrics, "spec_accept_rate", None), Some(4.0 / 12.0));
    metrics.step(&verify_step(&[3, 3], 2));
    metrics.step(&verify_step(&[3, 3], 2));
    assert_eq!(value(&metrics, "spec_accept_rate", None), Some(1.0), "the first window is forgotten");
    assert_eq!(value(&metrics, "spec_accepted_drafts_total", None), Some(16.0));
    assert_eq!(value(&metrics, "realtime_tokens_total", Some("decode")), Some(8.0 + 16.0));
    assert_eq!(metrics.totals().accept_length(), Some(3.0));
}

#[test]
fn positions_that_were_not_proposed_are_not_observed() {
    let (mut metrics, _) = metrics(40, true);
    metrics.step(&verify_step(&[2, 1], 2));
    let accepted = |position| value(&metrics, "spec_accepted_at_position_total", Some(position));
    assert_eq!((accepted("0"), accepted("1"), accepted("2")), (Some(2.0), Some(1.0), None));
    assert_eq!(value(&metrics, "spec_proposed_at_position_total", Some("2")), Some(2.0));
    assert_eq!(value(&metrics, "spec_proposed_at_position_total", Some("3")), None);
}

/// A step may have rows of both; what is told by source adds up to what is told of all.
#[test]
fn drafts_are_told_by_who_made_them() {
    let (mut metrics, _) = metrics(40, true);
    let mut report = verify_step(&[2, 1], 3);
    let verify = VerifyCount { proposed_at: vec![1, 1], accepted: 2, source: DraftSource::Ngram };
    report.row(true, Origin::Verify(&verify), 1, 3);
    metrics.step(&report);
    let told = |what: &str, source| value(&metrics, &format!("spec_{what}_by_source_total"), Some(source));
    assert_eq!((told("proposed", "model"), told("proposed", "ngram")), (Some(6.0), Some(2.0)));
    assert_eq!((told("accepted", "model"), told("accepted", "ngram")), (Some(3.0), Some(2.0)));
    assert_eq!(value(&metrics, "spec_proposed_drafts_total", None), Some(8.0));
    assert_eq!(value(&metrics, "spec_accepted_drafts_total", None), Some(5.0));
}

#[test]
fn going_idle_zeroes_the_load_at_once() {
    let (mut metrics, _) = metrics(40, true);
    metrics.step(&verify_step(&[3], 1));
    assert_eq!(value(&metrics, "num_running_reqs", None), Some(1.0));
    let mut last = verify_step(&[3], 0);
    last.load = Load { usage: Usage { cached: 70, free: 130, total: 200, used: 0 }, ..Load::default() };
    metrics.step(&last);
    for name in ["num_running_reqs", "num_queue_reqs", "gen_throughput", "token_usage", "num_used_tokens"] {
        assert_eq!(value(&metrics, name, None), Some(0.0), "{name}");
    }
    assert_eq!(metrics.last_gen_throughput(), 0.0);
    assert_eq!(value(&metrics, "spec_accept_length", None), Some(4.0), "what was measured stays");
}

#[test]
fn a_window_without_verify_steps_divides_by_nothing() {
    let (mut metrics, _) = metrics(1, true);
    let mut report = StepReport { load: load(1), ..StepReport::default() };
    report.row(true, Origin::Plain, 1, 1);
    metrics.step(&report);
    assert_eq!(value(&metrics, "spec_accept_rate", None), Some(0.0));
    assert_eq!(value(&metrics, "spec_verify_steps_total", None), Some(0.0));
    assert_eq!(metrics.totals().accept_rate(), None);
}

#[test]
fn health_probes_are_not_counted() {
    let (mut metrics, _) = metrics(40, true);
    let mut report = StepReport { load: load(1), ..StepReport::default() };
    report.row(false, Origin::Prefill, 5, 1);
    report.row(
        false,
        Origin::Verify(&VerifyCount { proposed_at: vec![1], accepted: 1, ..VerifyCount::default() }),
        1,
        2,
    );
    metrics.step(&report);
    assert_eq!(value(&metrics, "realtime_tokens_total", Some("decode")).unwrap_or(0.0), 0.0);
    assert_eq!(metrics.totals().verify_ct, 0);
}

#[test]
fn a_snapshot_goes_before_an_end_and_otherwise_seldom() {
    let (mut metrics, written) = metrics(40, true);
    metrics.publish(false);
    assert_eq!(*written.borrow(), 1, "the first shows that the scheduler is there");
    metrics.step(&verify_step(&[1], 1));
    metrics.publish(false);
    assert_eq!(*written.borrow(), 1, "not again within a second");
    metrics.publish(true);
    assert_eq!(*written.borrow(), 2);
    metrics.publish(true);
    assert_eq!(*written.borrow(), 2, "nothing has changed since");
}

#[test]
fn without_metrics_nothing_is_written_and_the_totals_still_count() {
    let (mut metrics, written) = metrics(1, false);
    metrics.step(&verify_step(&[3], 1));
    metrics.publish(true);
    assert_eq!(*written.borrow(), 0);
    assert_eq!(metrics.totals().accepted_drafts, 3);
}

#[test]
fn lines_are_sglangs() {
    let tick = Tick { gen_throughput: 12.345, accept_length: 2.5, accept_rate: 0.5, speculative: true };
    assert_eq!(
        decode_line(&tick, &load(3), DeviceKind::Cpu),
        "Decode batch, #running-req: 3, #token: 50, token usage: 0.25, accept len: 2.50, accept rate: 0.50, \
         cpu graph: False, gen throughput (token/s): 12.35, #queue-req: 2"
    );
    let plain = Load { draft: DraftStatus::default(), ..load(3) };
    let tick = Tick { speculative: false, ..tick };
    assert_eq!(
        decode_line(&tick, &plain, DeviceKind::Cuda),
        "Decode batch, #running-req: 3, #token: 50, token usage: 0.25, cuda graph: False, \
         gen throughput (token/s): 12.35, #queue-req: 2"
    );
    let prefill = PrefillReport { new_seqs: 1, new_tokens: 7, cached_tokens: 4, ..PrefillReport::default() };
    let report = StepReport { prefill, load: load(1), ..StepReport::default() };
    assert_eq!(
        prefill_line(&report, 7.0, DeviceKind::Cpu),
        "Prefill batch, #new-seq: 1, #new-token: 7, #cached-token: 4, token usage: 0.25, #running-req: 1, \
         #queue-req: 2, #pending-token: 0, cpu graph: False, input throughput (token/s): 7.00"
    );
}
