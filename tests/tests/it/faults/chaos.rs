//! A seeded schedule of faults while sixteen clients wait: nothing is lost, nothing changes, every number adds up.
//! `make chaos` runs the long one.

use std::fmt::Write;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tests::{Server, ServerOptions, wait_until};

use super::load::{Flow, Load, Told, counted};
use super::watch::Watch;
use crate::support::greedy;
use crate::workers::{ADAPTIVE, DFLASH, MIXED, MULTI_LAYER};

const PATIENCE: Duration = Duration::from_secs(120);
const ROLES: [&str; 3] = ["scheduler-proc", "detokenizer-proc", "tokenizer-proc"];
const KINDS: [Kind; 3] = [Kind::Kill, Kind::Pause, Kind::Stop];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// SIGKILL.
    Kill,
    /// SIGSTOP, and SIGCONT some time later.
    Pause,
    /// SIGSTOP for longer than the heartbeat's limit.
    Stop,
}

/// What happens to whom once so many tokens of the sixteen answers are there.
#[derive(Debug, Clone, Copy)]
struct Fault {
    role: usize,
    /// Which one, where the role has several.
    number: usize,
    kind: Kind,
    after_tokens: usize,
}

/// A reproducible source of choices.
struct Dice {
    state: u64,
    /// Processes of each role.
    counts: [usize; 3],
}

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state % sides as u64) as usize
    }

    /// One process of a role.
    fn number(&mut self, role: usize) -> usize {
        let count = self.counts[role];
        if count > 1 { self.roll(count) } else { 0 }
    }

    /// The faults of one round of requests. A request may outlive one scheduler, so there is at most one death of
    /// it; a dead front takes its clients with it, so it has a round of its own.
    fn faults(&mut self, tokens: usize) -> Vec<Fault> {
        if self.roll(10) == 0 {
            let after_tokens = self.roll(tokens);
            return vec![Fault { role: 2, number: self.number(2), kind: Kind::Kill, after_tokens }];
        }
        let mut scheduler_lives = true;
        let mut faults: Vec<Fault> = (0..1 + self.roll(3))
            .map(|_| {
                let role = [0, 0, 1, 1, 2][self.roll(5)];
                let kind = match self.roll(20) {
                    _ if role == 2 => Kind::Pause,
                    _ if role == 0 && !scheduler_lives => Kind::Pause,
                    0 => Kind::Stop,
                    1..5 => Kind::Pause,
                    _ => Kind::Kill,
                };
                scheduler_lives &= role != 0 || kind == Kind::Pause;
                // The first tokens (prefill), anywhere, or the last ones (ends).
                let after_tokens = match self.roll(4) {
                    0 => self.roll(16),
                    1 => tokens - self.roll(tokens / 8),
                    _ => self.roll(tokens),
                };
                Fault { role, number: self.number(role), kind, after_tokens }
            })
            .collect();
        faults.sort_by_key(|fault| fault.after_tokens);
        faults
    }
}

/// What the faults did.
#[derive(Default)]
struct Tally {
    /// By role and kind.
    faults: [[usize; 3]; 3],
    /// From a kill to the first token that a new process had a part in, by role.
    recoveries: [Vec<Duration>; 3],
    requests: usize,
    lost: Vec<String>,
    /// Clients of a killed front.
    cut_off: usize,
}

impl Tally {
    fn count(&self) -> usize {
        self.faults.iter().flatten().sum()
    }

    fn table(&self) -> String {
        let mut text = String::from("role           kill  pause  stop   to first token: median     worst\n");
        for (role, name) in ROLES.iter().enumerate() {
            let [kill, pause, stop] = self.faults[role];
            let mut times = self.recoveries[role].clone();
            times.sort();
            let seconds =
                |time: Option<&Duration>| time.map_or("-".into(), |t| format!("{:.2} s", t.as_secs_f64()));
            let (median, worst) = (seconds(times.get(times.len() / 2)), seconds(times.last()));
            let role = name.trim_end_matches("-proc");
            writeln!(text, "{role:<14} {kill:>4} {pause:>6} {stop:>5} {median:>25} {worst:>9}").unwrap();
        }
        let (requests, lost) = (self.requests, self.lost.len());
        writeln!(
            text,
            "{requests} requests, {lost} lost or changed, {} cut off with their front",
            self.cut_off
        )
        .unwrap();
        text
    }
}

struct Run<'a> {
    server: &'a Server,
    load: Load,
    dice: Dice,
    tally: Tally,
    told: Told,
    base: [f64; 4],
}

impl Run<'_> {
    fn round(&mut self, tokens: usize) {
        let faults = self.dice.faults(tokens);
        let front_dies = faults.iter().any(|fault| fault.role == 2 && fault.kind == Kind::Kill);
        let (server, dice, tally) = (self.server, &mut self.dice, &mut self.tally);
        let load_len = self.load.len();
        let ended = self.load.run(server, |flow| {
            for fault in &faults {
                let due = || flow.tokens() >= fault.after_tokens || flow.ended() == load_len;
                assert!(wait_until(PATIENCE, due), "no tokens: {fault:?} of {faults:?}");
                tally.faults[fault.role][KINDS.iter().position(|kind| *kind == fault.kind).unwrap()] += 1;
                if let Some(time) = strike(server, *fault, flow, load_len, dice) {
                    tally.recoveries[fault.role].push(time);
                }
            }
        });
        self.tally.requests += ended.len();
        for outcome in ended {
            match outcome {
                Ok(meta) => self.told.add(&meta),
                Err(why) if front_dies && !why.starts_with("changed") => self.tally.cut_off += 1,
                Err(why) => self.tally.lost.push(format!("{why} ({faults:?})")),
            }
        }
        self.server.wait_ready();
        if front_dies {
            // What its clients were told last is not known here.
            assert!(wait_until(PATIENCE, || self.server.requests_held() == 0));
            self.base = counted(self.server);
            self.told = Told::default();
        }
    }
}

/// Does it; after a kill, the time to the first token that the new process had a part in.
fn strike(server: &Server, fault: Fault, flow: &Flow, all: usize, dice: &mut Dice) -> Option<Duration> {
    let binary = &match dice.counts[fault.role] {
        1 => ROLES[fault.role].to_owned(),
        _ => format!("{}-{}", ROLES[fault.role], fault.number),
    };
    match fault.kind {
        Kind::Kill => {
            let (dead, at) = (server.signal_child(binary, Signal::SIGKILL), Instant::now());
            let born = replaced(server, binary, dead);
            if fault.role == 2 {
                server.generate(&greedy("after", 1));
                return Some(at.elapsed());
            }
            let mut first = None;
            wait_until(PATIENCE, || {
                first = flow.token_after(born);
                first.is_some() || flow.ended() == all
            });
            Some(first? - at)
        }
        Kind::Pause => {
            let paused = server.signal_child(binary, Signal::SIGSTOP);
            std::thread::sleep(Duration::from_millis(5 + dice.roll(200) as u64));
            let _ = kill(paused, Signal::SIGCONT);
            None
        }
        Kind::Stop => {
            let stopped = server.signal_child(binary, Signal::SIGSTOP);
            replaced(server, binary, stopped);
            None
        }
    }
}

/// When a successor was there.
fn replaced(server: &Server, binary: &str, dead: Pid) -> Instant {
    let there = wait_until(PATIENCE, || server.child(binary).is_some_and(|pid| pid != dead));
    assert!(there, "{binary} was not started again");
    Instant::now()
}

/// Runs rounds until so many faults have happened.
fn chaos(options: ServerOptions, counts: [usize; 3], faults: usize, seed: u64) -> Tally {
    let (detokenizers, fronts) = (counts[1].to_string(), counts[2].to_string());
    let options =
        options.with(&["--detokenizer-worker-num", &detokenizers, "--tokenizer-worker-num", &fronts]);
    let options =
        options.with(&["--metrics-port", "0", "--restart-limit", "100000", "--heartbeat-timeout", "6"]);
    let server = Server::start(options);
    let load = Load::new(&server, &PROMPTS, 160);
    let base = counted(&server);
    let stop = AtomicBool::new(false);
    let tally = std::thread::scope(|scope| {
        let watch = Watch::start(scope, &server, &stop);
        let mut run = Run {
            server: &server,
            load,
            dice: Dice { state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, counts },
            tally: Tally::default(),
            told: Told::default(),
            base,
        };
        while run.tally.count() < faults && run.tally.lost.is_empty() {
            run.round(16 * 100);
            assert!(!server.has_ended(), "the server ended");
        }
        if run.tally.lost.is_empty() {
            run.told.check(&server, run.base);
        }
        assert_eq!(watch.stop(), [""; 0], "counters went down");
        run.tally
    });
    let files = std::fs::read_dir(server.run_dir().join("metrics")).unwrap().count();
    let most = 4 + 2 * counts.iter().sum::<usize>();
    assert!(files <= most, "{files} metric files are left");
    println!("seed {seed}, {} detokenizers, {} fronts\n{}", counts[1], counts[2], tally.table());
    assert!(tally.lost.is_empty(), "{}", tally.lost.join("\n"));
    tally
}

const PROMPTS: [&str; 3] = ["one two three one two three one two", "abcabcabcabcabc", "a tale of"];

/// One of seven parts of the faults of a long run, which `make chaos` asks for; few otherwise.
fn share(part: usize) -> usize {
    let all: usize = std::env::var("CHAOS_FAULTS").ok().and_then(|text| text.parse().ok()).unwrap_or(14);
    (all + part) / 7
}

fn seed() -> u64 {
    std::env::var("CHAOS_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

#[test]
fn chaos_with_ngram() {
    chaos(ServerOptions::tiny().with(&["--speculative-algorithm", "NGRAM"]), [1; 3], share(0), seed());
}

#[test]
fn chaos_with_eagle() {
    chaos(ServerOptions::tiny_eagle(), [1; 3], share(1), seed() + 1);
}

#[test]
fn chaos_with_several_of_each() {
    chaos(ServerOptions::tiny_eagle(), [1, 2, 2], share(2), seed() + 2);
}

#[test]
fn chaos_with_dflash() {
    chaos(DFLASH.options(), [1; 3], share(3), seed() + 3);
}

#[test]
fn chaos_with_several_layers() {
    chaos(MULTI_LAYER.options(), [1; 3], share(4), seed() + 4);
}

#[test]
fn chaos_with_adaptive_depth() {
    chaos(ADAPTIVE.options(), [1; 3], share(5), seed() + 5);
}

#[test]
fn chaos_with_n_grams_before_eagle() {
    chaos(MIXED.options(), [1; 3], share(6), seed() + 6);
}
