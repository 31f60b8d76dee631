//! Owns the courses of events that a server can take, told to the supervisor one by one.

use proto::Heartbeat;

use super::*;

struct Story {
    supervisor: Supervisor,
    now: Instant,
    /// The present life of each role.
    lives: BTreeMap<Member, u64>,
}

impl Story {
    fn new() -> Self {
        Self::with(Limits { watchdog: Duration::from_secs(60), ..Limits::default() })
    }

    fn with(limits: Limits) -> Self {
        Self::of(Topology::default(), limits)
    }

    fn of(topology: Topology, limits: Limits) -> Self {
        let now = Instant::now();
        let lives = topology.children().into_iter().map(|member| (member, 1)).collect();
        Self { supervisor: Supervisor::new(topology, Patience::default(), limits, now), now, lives }
    }

    fn serving() -> Self {
        let mut story = Self::new();
        story.all_ready();
        story
    }

    fn all_ready(&mut self) {
        for role in Role::CHILDREN {
            self.ready(role);
        }
    }

    fn tell(&mut self, event: Event) -> Vec<String> {
        let actions = self.supervisor.on(event, self.now);
        let quiet = |action: &&Action| matches!(action, Action::Notice(_) | Action::Bury(_));
        actions.iter().filter(|action| !quiet(action)).map(|action| format!("{action:?}")).collect()
    }

    fn status(&mut self, member: impl Into<Member>, status: Status) -> Vec<String> {
        let member = member.into();
        let life = Incarnation(self.lives[&member]);
        self.tell(Event::Status(member, life, status))
    }

    fn ready(&mut self, member: impl Into<Member>) -> Vec<String> {
        self.status(member, Status::Ready { detail: String::new() })
    }

    fn beat(&mut self, member: impl Into<Member>, in_flight: u64, progress: u64) -> Vec<String> {
        self.status(member, Status::Heartbeat(Heartbeat { in_flight, queued: 0, progress }))
    }

    /// Time passes; all who live report.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now = (self.now + Duration::from_millis(500)).min(end);
            for role in Role::CHILDREN {
                self.beat(role, 0, 0);
            }
        }
    }

    /// Time passes; all who live report, except one.
    fn pass_without(&mut self, silent: Role, time: Duration) -> Vec<String> {
        let (mut actions, end) = (Vec::new(), self.now + time);
        while self.now < end && actions.is_empty() {
            self.now = (self.now + Duration::from_millis(500)).min(end);
            for role in Role::CHILDREN.into_iter().filter(|role| *role != silent) {
                self.beat(role, 0, 0);
            }
            actions = self.tell(Event::Timeout);
        }
        actions
    }

    fn exit(&mut self, member: impl Into<Member>, code: i32) -> Vec<String> {
        self.tell(Event::Exited(member.into(), ExitStatus::from_raw(code << 8)))
    }

    /// SIGKILL by somebody; the next life says hello if there is one.
    fn killed(&mut self, member: impl Into<Member>) -> Vec<String> {
        let member = member.into();
        let actions = self.tell(Event::Exited(member, ExitStatus::from_raw(9)));
        if actions.contains(&format!("Start({member:?})")) {
            *self.lives.get_mut(&member).unwrap() += 1;
        }
        actions
    }

    fn outcome(&self) -> Option<(u8, Option<String>)> {
        self.supervisor.outcome().map(|outcome| (outcome.code, outcome.reason))
    }

    fn health(&self, member: impl Into<Member>) -> proto::ProcessHealth {
        let health = self.supervisor.health(self.now);
        let member = member.into();
        health.processes.into_iter().find(|process| process.process == member).unwrap()
    }
}

#[test]
fn the_address_is_announced_once_all_are_ready() {
    let mut story = Story::new();
    assert_eq!(story.ready(Role::Scheduler).len(), 1);
    assert_eq!(story.ready(Role::Detokenizer).len(), 1);
    assert_eq!(story.ready(Role::Tokenizer).last().map(String::as_str), Some("Serving"));
    assert!(story.ready(Role::Tokenizer).is_empty());
}

#[test]
fn a_failure_at_start_ends_all_with_that_childs_reason() {
    let mut story = Story::new();
    let failed = Status::Failed { reason: "no tensor named x".into() };
    assert_eq!(
        story.status(Role::Scheduler, failed),
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
    story.tell(Event::Up(Role::Scheduler.into(), Incarnation(1)));
    for role in Role::CHILDREN {
        story.exit(role, 1);
    }
    assert_eq!(story.outcome(), Some((EXIT_FAILED, Some("scheduler: ended with exit code 1".into()))));
    assert!(story.supervisor.awaits_last_words());
    story.status(Role::Scheduler, Status::Failed { reason: "out of memory".into() });
    assert!(!story.supervisor.awaits_last_words());
    assert_eq!(story.outcome(), Some((EXIT_FAILED, Some("scheduler: out of memory".into()))));
}

#[test]
fn whoever_dies_is_started_again_at_once() {
    for role in Role::CHILDREN {
        let mut story = Story::serving();
        story.beat(role, 3, 1);
        assert_eq!(story.killed(role), [format!("Start({role:?})")]);
        let health = story.health(role);
        assert!(health.alive && !health.ready && health.restarts == 1 && health.heartbeat.in_flight == 0);
        assert_eq!(story.supervisor.story(role.into()).last_end.unwrap(), "was killed by signal 9 (SIGKILL)");
        assert_eq!(story.ready(role).len(), 1, "the address is not announced again");
        assert!(story.health(role).ready);
        assert_eq!(story.outcome(), None);
    }
}

#[test]
fn what_still_arrives_of_a_dead_life_is_not_taken_for_the_new_ones() {
    let mut story = Story::serving();
    story.killed(Role::Scheduler);
    let old = Incarnation(1);
    let ready = Status::Ready { detail: String::new() };
    assert!(story.tell(Event::Status(Role::Scheduler.into(), old, ready)).is_empty());
    assert!(!story.health(Role::Scheduler).ready);
    let failed = Status::Failed { reason: "out of memory".into() };
    assert!(story.tell(Event::Status(Role::Scheduler.into(), old, failed)).is_empty());
    assert_eq!(story.supervisor.story(Role::Scheduler.into()).last_end.unwrap(), "out of memory");
    assert_eq!(story.ready(Role::Scheduler).len(), 1);
}

#[test]
fn a_child_that_cannot_be_started_is_tried_again_ever_later() {
    let mut story = Story::with(Limits { deaths: 100, ..Limits::default() });
    story.all_ready();
    assert_eq!(story.killed(Role::Detokenizer), ["Start(Detokenizer)"]);
    let mut pauses = Vec::new();
    for _ in 0..8 {
        assert!(story.tell(Event::CannotStart(Role::Detokenizer.into(), "no memory".into())).is_empty());
        assert!(!story.health(Role::Detokenizer).alive);
        let due = story.supervisor.deadline().unwrap();
        pauses.push((due - story.now).as_millis());
        story.pass(due - story.now);
        assert_eq!(story.tell(Event::Timeout), ["Start(Detokenizer)"]);
    }
    assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
}

#[test]
fn a_crash_loop_ends_the_server_and_the_front_goes_last() {
    let mut story = Story::serving();
    for _ in 0..4 {
        assert_eq!(story.killed(Role::Scheduler), ["Start(Scheduler)"]);
        story.ready(Role::Scheduler);
        story.pass(Duration::from_secs(10));
    }
    assert_eq!(story.killed(Role::Scheduler), ["Tell(Detokenizer, Stop)"]);
    assert_eq!(story.exit(Role::Detokenizer, 0), ["Tell(Tokenizer, Stop)"]);
    assert_eq!(story.outcome(), None);
    story.exit(Role::Tokenizer, 0);
    let (code, reason) = story.outcome().unwrap();
    assert_eq!(code, EXIT_FAILED);
    assert_eq!(
        reason.unwrap(),
        "scheduler: died 5 times within 60 s, at last: was killed by signal 9 (SIGKILL)"
    );
}

#[test]
fn deaths_of_long_ago_and_of_others_make_no_loop() {
    let mut story = Story::serving();
    for _ in 0..20 {
        for role in Role::CHILDREN {
            assert_eq!(story.killed(role), [format!("Start({role:?})")]);
            story.ready(role);
        }
        story.pass(Duration::from_secs(16));
    }
}

#[test]
fn a_silent_child_is_killed_and_started_again() {
    for role in Role::CHILDREN {
        let mut story = Story::serving();
        assert!(story.pass_without(role, Duration::from_millis(9500)).is_empty());
        assert_eq!(story.pass_without(role, Duration::from_secs(1)), [format!("Signal({role:?}, SIGKILL)")]);
        assert!(story.pass_without(role, Duration::from_secs(5)).is_empty(), "it is killed once");
        assert_eq!(story.killed(role), [format!("Start({role:?})")]);
        let end = story.supervisor.story(role.into()).last_end.unwrap();
        assert!(end.starts_with("gave no sign of life for 10"), "{end}");
        assert!(story.pass_without(role, Duration::from_secs(29)).is_empty(), "a new one has more time");
        assert_eq!(story.pass_without(role, Duration::from_secs(2)), [format!("Signal({role:?}, SIGKILL)")]);
    }
}

#[test]
fn nobody_is_blamed_for_the_time_in_which_the_launcher_stood_still() {
    let mut story = Story::serving();
    story.now += Duration::from_secs(3600);
    assert!(story.tell(Event::Timeout).is_empty());
    assert!(story.pass_without(Role::Scheduler, Duration::from_secs(9)).is_empty());
}

#[test]
fn a_scheduler_that_stands_still_with_work_is_killed_and_an_idle_one_is_not() {
    let mut story = Story::serving();
    let work = |story: &mut Story, progress, seconds| {
        let end = story.now + Duration::from_secs(seconds);
        while story.now < end {
            story.now += Duration::from_millis(500);
            Role::CHILDREN.into_iter().for_each(|role| drop(story.beat(role, 1, progress)));
        }
    };
    story.pass(Duration::from_secs(120));
    assert!(story.tell(Event::Timeout).is_empty());
    work(&mut story, 5, 59);
    work(&mut story, 6, 60);
    assert!(story.tell(Event::Timeout).is_empty());
    work(&mut story, 6, 1);
    assert_eq!(story.tell(Event::Timeout), ["Signal(Scheduler, SIGKILL)"]);
    assert_eq!(story.killed(Role::Scheduler), ["Start(Scheduler)"]);
    let end = story.supervisor.story(Role::Scheduler.into()).last_end.unwrap();
    assert!(end.contains("no progress for 60 s"), "{end}");
}

#[test]
fn an_operator_replaces_a_child_which_is_no_death() {
    let mut story = Story::serving();
    for _ in 0..10 {
        assert_eq!(
            story.tell(Event::Order(Order::Restart(Role::Tokenizer.into()))),
            ["Tell(Tokenizer, Retire)"]
        );
        assert!(story.tell(Event::Order(Order::Restart(Role::Tokenizer.into()))).is_empty());
        *story.lives.get_mut(&Role::Tokenizer.into()).unwrap() += 1;
        assert_eq!(story.exit(Role::Tokenizer, 0), ["Start(Tokenizer)"]);
        story.ready(Role::Tokenizer);
    }
    assert_eq!(story.health(Role::Tokenizer).restarts, 10);
}

#[test]
fn a_child_that_does_not_leave_for_its_successor_is_killed() {
    let mut story = Story::serving();
    assert_eq!(story.tell(Event::Order(Order::Restart(Role::Scheduler.into()))), ["Tell(Scheduler, Stop)"]);
    story.pass(Duration::from_secs(29));
    assert!(story.tell(Event::Timeout).is_empty());
    story.pass(Duration::from_secs(1));
    assert_eq!(story.tell(Event::Timeout), ["Signal(Scheduler, SIGKILL)"]);
    assert_eq!(story.killed(Role::Scheduler), ["Start(Scheduler)"]);
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
fn who_dies_while_the_front_drains_is_started_again_and_goes_with_the_rest() {
    let mut story = Story::serving();
    story.tell(Event::Order(Order::Drain));
    assert_eq!(story.killed(Role::Scheduler), ["Start(Scheduler)"]);
    assert_eq!(
        story.exit(Role::Tokenizer, 0),
        ["Tell(Scheduler, Stop)", "Tell(Detokenizer, Stop)", "Signal(Scheduler, SIGKILL)"],
        "one that is still starting holds nothing"
    );
    story.killed(Role::Scheduler);
    story.exit(Role::Detokenizer, 0);
    assert_eq!(story.outcome(), Some((EXIT_OK, None)));
}

#[test]
fn an_end_does_not_wait_for_a_child_that_is_dead() {
    let mut story = Story::serving();
    story.killed(Role::Detokenizer);
    story.tell(Event::CannotStart(Role::Detokenizer.into(), "no memory".into()));
    story.tell(Event::Signal(Signal::SIGTERM));
    assert_eq!(story.exit(Role::Tokenizer, 0), ["Tell(Scheduler, Stop)"]);
    story.exit(Role::Scheduler, 0);
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
        story.killed(role);
    }
    assert_eq!(story.outcome(), Some((130, None)));
}

#[test]
fn ctrl_c_waits_for_seconds_only() {
    let mut story = Story::serving();
    story.tell(Event::Signal(Signal::SIGINT));
    let patience = story.supervisor.deadline().unwrap() - story.now;
    assert!(patience <= Duration::from_secs(5), "{patience:?}");
    story.pass(patience);
    assert_eq!(story.tell(Event::Timeout), ["Tell(Tokenizer, Stop)"]);
}

/// A server with two fronts and two detokenizers, all at work.
fn several() -> Story {
    let topology = Topology { tokenizer_worker_num: 2, detokenizer_worker_num: 2 };
    let mut story = Story::of(topology, Limits::default());
    for member in topology.children() {
        story.ready(member);
    }
    story
}

const FRONTS: [Member; 2] = [Member::nth(Role::Tokenizer, 0), Member::nth(Role::Tokenizer, 1)];

#[test]
fn several_of_a_role_die_and_return_each_on_its_own() {
    let mut story = several();
    assert_eq!(story.killed(FRONTS[1]), ["Start(Tokenizer-1)"]);
    assert_eq!(story.killed(Member::nth(Role::Detokenizer, 0)), ["Start(Detokenizer-0)"]);
    assert_eq!(story.health(FRONTS[1]).restarts, 1);
    assert!(story.health(FRONTS[0]).restarts == 0 && story.health(FRONTS[0]).ready);
    assert!(story.ready(FRONTS[1]).len() == 1 && story.health(FRONTS[1]).ready);
    assert_eq!(story.outcome(), None);
}

#[test]
fn deaths_of_two_fronts_are_no_loop_of_one() {
    let mut story = several();
    for _ in 0..4 {
        for front in FRONTS {
            assert_eq!(story.killed(front), [format!("Start({front:?})")]);
            story.ready(front);
        }
    }
    assert_eq!(story.outcome(), None);
}

#[test]
fn fronts_are_replaced_one_after_the_other() {
    let mut story = several();
    assert_eq!(
        story.tell(Event::Order(Order::Restart(Role::Tokenizer.into()))),
        ["Tell(Tokenizer-0, Retire)"]
    );
    assert!(story.tell(Event::Order(Order::Restart(FRONTS[1]))).is_empty(), "it is in the queue already");
    assert_eq!(story.killed(FRONTS[0]), ["Start(Tokenizer-0)"]);
    assert!(story.beat(FRONTS[0], 0, 0).is_empty(), "not at work yet");
    let ready = story.ready(FRONTS[0]);
    assert_eq!(ready.last().map(String::as_str), Some("Tell(Tokenizer-1, Retire)"), "{ready:?}");
    assert_eq!(story.killed(FRONTS[1]), ["Start(Tokenizer-1)"]);
    assert_eq!(story.ready(FRONTS[1]).len(), 1);
    assert!(FRONTS.iter().all(|front| story.health(*front).restarts == 1));
}

#[test]
fn an_end_drains_all_fronts_before_the_rest() {
    let mut story = several();
    assert_eq!(
        story.tell(Event::Order(Order::Drain)),
        ["Tell(Tokenizer-0, Drain)", "Tell(Tokenizer-1, Drain)"]
    );
    assert!(story.exit(FRONTS[1], 0).is_empty());
    assert_eq!(
        story.exit(FRONTS[0], 0),
        ["Tell(Scheduler, Stop)", "Tell(Detokenizer-0, Stop)", "Tell(Detokenizer-1, Stop)"]
    );
}
