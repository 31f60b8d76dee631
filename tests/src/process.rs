//! Owns starting processes that do not outlive the tests, and looking at them from outside: who is alive, whose
//! child it is, and waiting for that to change.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::{Sender, channel};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::unistd::Pid;

type Order = (Command, Sender<std::io::Result<Child>>);

/// Starts processes and never ends: a parent-death signal is tied to the thread that started the process, and the
/// threads of single tests end early.
static SPAWNER: LazyLock<Mutex<Sender<Order>>> = LazyLock::new(|| {
    let (orders, inbox) = channel::<Order>();
    std::thread::spawn(move || {
        for (mut command, reply) in inbox {
            let _ = reply.send(command.spawn());
        }
    });
    Mutex::new(orders)
});

/// A command that is interrupted when the test process dies, however it dies.
pub(crate) fn bound_to_this_process(binary: &Path) -> Command {
    const SETPRIV: &str = "/usr/bin/setpriv";
    if !Path::new(SETPRIV).exists() {
        return Command::new(binary);
    }
    let mut command = Command::new(SETPRIV);
    command.args(["--pdeathsig", "INT"]).arg(binary);
    command
}

pub(crate) fn spawn(command: Command) -> std::io::Result<Child> {
    let (reply, answer) = channel();
    let order = SPAWNER.lock().unwrap_or_else(PoisonError::into_inner).send((command, reply));
    order.expect("the spawner never ends");
    answer.recv().expect("the spawner answers every order")
}

/// The children of a process, by the name of their binary, with a number where they were given one: `tokenizer-proc-1`.
pub(crate) fn children_of(parent: Pid) -> BTreeMap<String, Pid> {
    let pids = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_string_lossy().parse::<i32>().ok());
    let children = pids.filter_map(|pid| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name stands in parentheses and may hold anything; the state and the parent follow it. It is cut off
        // at 15 bytes, so the binary is asked for instead.
        let (_, tail) = stat.rsplit_once(')')?;
        let parent_pid: i32 = tail.split_whitespace().nth(1)?.parse().ok()?;
        let binary = std::fs::read_link(format!("/proc/{pid}/exe")).ok()?;
        // A binary that was built anew meanwhile is called deleted.
        let name = binary.file_name()?.to_string_lossy().trim_end_matches(" (deleted)").to_owned();
        (parent_pid == parent.as_raw()).then(|| (name + &number_of(pid), Pid::from_raw(pid)))
    });
    children.collect()
}

/// All processes below one, in no order.
pub(crate) fn descendants_of(parent: Pid) -> Vec<Pid> {
    let children: Vec<Pid> = children_of(parent).into_values().collect();
    children.iter().flat_map(|child| std::iter::once(*child).chain(descendants_of(*child))).collect()
}

/// Most resident memory a process has had, in MiB; 0 when it has ended.
pub fn peak_mib(pid: Pid) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).map_or(0, |kib| kib / 1024)
}

/// A dash and the number that a process was given on its command line; nothing without.
fn number_of(pid: i32) -> String {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut words = line.split(|byte| *byte == 0).skip_while(|word| *word != b"--number").skip(1);
    words.next().map_or(String::new(), |number| format!("-{}", String::from_utf8_lossy(number)))
}

/// Whether the process runs; one that ended and was not waited for does not.
pub fn is_alive(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, tail)| tail.split_whitespace().next());
    state.is_some_and(|state| state != "Z" && state != "X")
}

/// Looks again and again until `holds`, for states that nobody announces. Says whether it came to hold in time.
pub fn wait_until(timeout: Duration, mut holds: impl FnMut() -> bool) -> bool {
    const LOOK_AGAIN: Duration = Duration::from_millis(20);
    let deadline = Instant::now() + timeout;
    while !holds() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    true
}
