//! Owns the courses of events that a server can take, told to the supervisor one by one.

use proto::Heartbeat;

use super::*;

struct Story {
    supervisor: Supervisor,
    now: Instant,
}

impl Story {
    fn new() -> Self {
        let now = Instant::now();
        Self { supervisor: Supervisor::new(Patience::default(), Duration::from_secs(60), now), now }
    }

    fn serving() -> Self {
        let mut story = Self::new();
        for role in Role::CHILDREN {
            story.tell(Event::Status(role, Status::Ready { detail: String::new() }));
        }
        story
    }

    fn tell(&mut self, event: Event) -> Vec<String> {
        let actions = self.supervisor.on(event, self.now);
        actions.iter().filter(|a| !matches!(a, Action::Notice(_))).map(|a| format!("{a:?}")).collect()
    }

    fn exit(&mut self, role: Role, code: i32) -> Vec<String> {
        self.tell(Event::Exited(role, ExitStatus::from_raw(code << 8)))
    }

    fn outcome(&self) -> Option<(u8, Option<String>)> {
        self.supervisor.outcome().map(|outcome| (outcome.code, outcome.reason))
    }
}

#[test]
fn the_address_is_announced_once_all_are_ready() {
    let mut story = Story::new();
    let ready = |role| Event::Status(role, Status::Ready { detail: "ok".into() });
    assert_eq!(story.tell(ready(Role::Scheduler)).len(), 1);
    assert_eq!(story.tell(ready(Role::Detokenizer)).len(), 1);
    assert_eq!(story.tell(ready(Role::Tokenizer)).last().map(String::as_str), Some("Serving"));
    assert!(story.tell(ready(Role::Tokenizer)).is_empty());
}

#[test]
fn a_failure_at_start_ends_all_with_that_childs_reason() {
    let mut story = Story::new();
    let failed = Status::Failed { reason: "no tensor named x".into() };
    assert_eq!(
        story.tell(Event::Status(Role::Scheduler, failed)),
        ["Tell(Scheduler, Stop)", "Tell(Detokenizer, Stop)", "Tell(Tokenizer, Stop)"]
    );
    story.exit(Role::Scheduler, 1);
    story.exit(Role::Detokenizer, 0);
    assert_eq!(story.outcome(), None);
    story.exit(Role::Tokenizer, 0);
    assert_eq!(story.outcome(), Some((EXIT_FAILED, Some("scheduler: no tensor named x".into()))));
}

#[test]
fn last_words_that_arrive_after_the_exit_still_count() {
    let mut story = Story::new();
    for role in Role::CHILDREN {
        story.exit(role, 1);
    }
    assert_eq!(story.outcome(), Some((EXIT_FAILED, Some("scheduler: ended with exit code 1".into()))));
    assert!(story.supervisor.awaits_last_words());
    story.tell(Event::Status(Role::Scheduler, Status::Failed { reason: "out of memory".into() }));
    assert!(!story.supervisor.awaits_last_words());
    assert_eq!(story.outcome(), Some((EXIT_FAILED, Some("scheduler: out of memory".into()))));
}

#[test]
fn a_killed_scheduler_ends_the_server_and_the_front_goes_last() {
    let mut story = Story::serving();
    assert_eq!(
        story.tell(Event::Exited(Role::Scheduler, ExitStatus::from_raw(9))),
        ["Tell(Detokenizer, Stop)"]
    );
    assert_eq!(story.exit(Role::Detokenizer, 0), ["Tell(Tokenizer, Stop)"]);
    assert_eq!(story.outcome(), None);
    story.exit(Role::Tokenizer, 0);
    assert_eq!(
        story.outcome(),
        Some((EXIT_FAILED, Some("scheduler: was killed by signal 9 (SIGKILL)".into())))
    );
}

#[test]
fn a_signal_drains_and_ends_with_0() {
    let mut story = Story::serving();
    assert_eq!(story.tell(Event::Signal(Signal::SIGTERM)), ["Tell(Tokenizer, Drain)"]);
    story.exit(Role::Tokenizer, 0);
    story.exit(Role::Scheduler, 0);
    story.exit(Role::Detokenizer, 0);
    assert_eq!(story.outcome(), Some((EXIT_OK, None)));
}

#[test]
fn a_second_signal_forces() {
    let mut story = Story::serving();
    story.tell(Event::Signal(Signal::SIGINT));
    assert!(story.tell(Event::Signal(Signal::SIGINT)).is_empty(), "an echo is no second signal");
    story.now += Duration::from_secs(1);
    assert_eq!(
        story.tell(Event::Signal(Signal::SIGINT)),
        ["Signal(Scheduler, SIGKILL)", "Signal(Detokenizer, SIGKILL)", "Signal(Tokenizer, SIGKILL)"]
    );
    for role in Role::CHILDREN {
        story.tell(Event::Exited(role, ExitStatus::from_raw(9)));
    }
    assert_eq!(story.outcome(), Some((130, None)));
}

#[test]
fn ctrl_c_waits_for_seconds_only() {
    let mut story = Story::serving();
    story.tell(Event::Signal(Signal::SIGINT));
    let patience = story.supervisor.deadline().unwrap() - story.now;
    assert!(patience <= Duration::from_secs(5), "{patience:?}");
    story.now = story.supervisor.deadline().unwrap();
    assert_eq!(story.tell(Event::Timeout), ["Tell(Tokenizer, Stop)"]);
}

#[test]
fn a_scheduler_that_stands_still_with_work_is_killed_and_an_idle_one_is_not() {
    let mut story = Story::serving();
    let beat = |in_flight, progress| {
        Event::Status(Role::Scheduler, Status::Heartbeat(Heartbeat { in_flight, queued: 0, progress }))
    };
    story.tell(beat(0, 5));
    assert_eq!(story.supervisor.deadline(), None);
    story.tell(beat(1, 5));
    story.now += Duration::from_secs(59);
    story.tell(beat(1, 6));
    story.now += Duration::from_secs(59);
    story.tell(beat(1, 6));
    assert!(story.tell(Event::Timeout).is_empty());
    story.now += Duration::from_secs(1);
    assert_eq!(story.tell(Event::Timeout)[0], "Signal(Scheduler, SIGKILL)");
    for role in Role::CHILDREN {
        story.exit(role, 0);
    }
    let (code, reason) = story.outcome().unwrap();
    assert_eq!(code, EXIT_FAILED);
    assert!(reason.unwrap().contains("no progress for 60 s"));
}
