//! Owns the terminal: one thread writes everything, so that bars and lines never mix, and a terminal that stands
//! still holds up nobody. Logs go to stderr, what the operator waits for goes to stdout.

use std::collections::{HashMap, VecDeque};
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use proto::Member;

/// Log lines that may wait; more are dropped and counted.
const MAX_WAITING: usize = 10_000;
/// Log lines of each process that are kept for `launcher logs`.
const KEPT_LINES: usize = 1000;

enum Entry {
    Log(Member, String),
    Say(String),
    Complain(String),
    Progress { member: Member, stage: String, done: u64, total: u64 },
    ProgressEnd(Member),
}

/// Writes to the terminal; cheap to clone, never blocks.
#[derive(Clone)]
pub(crate) struct Console {
    entries: Sender<Entry>,
    waiting: Arc<AtomicUsize>,
    dropped: Arc<AtomicUsize>,
    kept: Arc<Mutex<Kept>>,
}

/// The last lines of every process, each with its place among all that were written.
#[derive(Default)]
struct Kept {
    lines: HashMap<Member, VecDeque<(u64, String)>>,
    written: u64,
}

/// Ends when every [`Console`] is dropped.
pub(crate) struct ConsoleThread {
    ended: Receiver<()>,
}

/// Starts the thread that writes.
pub(crate) fn start() -> std::io::Result<(Console, ConsoleThread)> {
    let (entries, inbox) = channel();
    let (alive, ended) = channel::<()>();
    let console = Console { entries, waiting: Arc::default(), dropped: Arc::default(), kept: Arc::default() };
    let (waiting, dropped) = (console.waiting.clone(), console.dropped.clone());
    thread::Builder::new().name("console".into()).spawn(move || {
        let _alive = alive;
        let mut screen = Screen::new();
        while let Ok(entry) = inbox.recv() {
            if matches!(entry, Entry::Log(..)) {
                waiting.fetch_sub(1, Ordering::Relaxed);
            }
            let lost = dropped.swap(0, Ordering::Relaxed);
            if lost > 0 {
                screen.line(&format!("[launcher] {lost} log lines dropped: the terminal does not keep up"));
            }
            screen.show(entry);
        }
    })?;
    Ok((console, ConsoleThread { ended }))
}

impl Console {
    /// A line that a child wrote.
    pub(crate) fn log(&self, member: Member, line: &str) {
        self.keep(member, line);
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= MAX_WAITING {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.put(Entry::Log(member, line.to_owned()));
    }

    /// The last lines that the processes of this name wrote, oldest first.
    pub(crate) fn last_lines(&self, name: Member, count: usize) -> Vec<String> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let of_name = kept.lines.iter().filter(|(member, _)| name.means(**member));
        let mut lines: Vec<_> = of_name.flat_map(|(_, lines)| lines).collect();
        lines.sort_by_key(|(number, _)| *number);
        let skipped = lines.len().saturating_sub(count);
        lines.into_iter().skip(skipped).map(|(_, line)| line.clone()).collect()
    }

    fn keep(&self, member: Member, line: &str) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.written += 1;
        let number = kept.written;
        let lines = kept.lines.entry(member).or_default();
        if lines.len() == KEPT_LINES {
            lines.pop_front();
        }
        lines.push_back((number, line.to_owned()));
    }

    /// Something the operator waits for.
    pub(crate) fn say(&self, line: impl Into<String>) {
        self.put(Entry::Say(line.into()));
    }

    /// Something the operator should know of.
    pub(crate) fn complain(&self, line: impl Into<String>) {
        self.put(Entry::Complain(line.into()));
    }

    pub(crate) fn progress(&self, member: Member, stage: &str, done: u64, total: u64) {
        self.put(Entry::Progress { member, stage: stage.to_owned(), done, total });
    }

    pub(crate) fn progress_end(&self, member: Member) {
        self.put(Entry::ProgressEnd(member));
    }

    fn put(&self, entry: Entry) {
        // Without a console thread there is nobody to tell.
        let _ = self.entries.send(entry);
    }
}

impl ConsoleThread {
    /// Waits until all is written. Call it after the last [`Console`] is dropped; a terminal that stands still is
    /// given up after `deadline`.
    pub(crate) fn finish(self, deadline: Duration) {
        // Nothing is ever sent: the channel closes when the thread ends.
        let _ = self.ended.recv_timeout(deadline);
    }
}

/// What is on the terminal now.
struct Screen {
    bars: Option<MultiProgress>,
    running: HashMap<Member, (String, ProgressBar)>,
    /// Without a terminal: the tenth last reported, per child and stage.
    tenths: HashMap<Member, (String, u64)>,
}

impl Screen {
    fn new() -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bars = terminal.then(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr()));
        Self { bars, running: HashMap::new(), tenths: HashMap::new() }
    }

    fn show(&mut self, entry: Entry) {
        match entry {
            Entry::Log(member, line) => self.line(&format!("[{member}] {line}")),
            Entry::Complain(line) => self.line(&line),
            Entry::Say(line) => self.undisturbed(|| {
                let mut out = std::io::stdout().lock();
                let _ = writeln!(out, "{line}").and_then(|()| out.flush());
            }),
            Entry::Progress { member, stage, done, total } => match self.bars.clone() {
                Some(bars) => self.draw(&bars, member, &stage, done, total),
                None => self.report_tenth(member, stage, done, total),
            },
            Entry::ProgressEnd(member) => {
                if let Some((_, bar)) = self.running.remove(&member) {
                    bar.finish_and_clear();
                }
            }
        }
    }

    fn line(&self, line: &str) {
        self.undisturbed(|| {
            let _ = writeln!(std::io::stderr().lock(), "{line}");
        });
    }

    /// Runs `write` with the bars out of the way.
    fn undisturbed(&self, write: impl FnOnce()) {
        match &self.bars {
            Some(bars) => bars.suspend(write),
            None => write(),
        }
    }

    fn draw(&mut self, bars: &MultiProgress, member: Member, stage: &str, done: u64, total: u64) {
        if self.running.get(&member).is_none_or(|(current, _)| current != stage) {
            let style = ProgressStyle::with_template("{prefix} {bar:30} {percent:>3} %  {msg}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = bars.add(ProgressBar::new(total).with_style(style));
            bar.set_prefix(format!("{member:<12}"));
            bar.set_message(stage.to_owned());
            if let Some((_, old)) = self.running.insert(member, (stage.to_owned(), bar)) {
                old.finish_and_clear();
            }
        }
        if let Some((_, bar)) = self.running.get(&member) {
            bar.set_length(total);
            bar.set_position(done);
        }
    }

    fn report_tenth(&mut self, member: Member, stage: String, done: u64, total: u64) {
        let tenth = (done.saturating_mul(10)).checked_div(total).unwrap_or(10);
        let last = self.tenths.entry(member).or_insert_with(|| (String::new(), 0));
        if last.0 == stage && last.1 >= tenth {
            return;
        }
        *last = (stage.clone(), tenth);
        self.line(&format!("{member:<12} {stage}: {} %", tenth * 10));
    }
}
