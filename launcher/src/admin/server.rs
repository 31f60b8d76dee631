//! Owns the answering of operators. Reads are answered from the board, orders are passed on to the loop.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use proto::Member;

use super::{Question, Reply};
use crate::board::Board;
use crate::console::Console;
use crate::supervise::{Event, Order};

/// Longest question.
const MAX_QUESTION: u64 = 4096;
/// How long an operator may take for a question, and for taking the answer; the next one waits meanwhile.
const PATIENCE: Duration = Duration::from_secs(1);

/// What is needed to answer.
#[derive(Clone)]
struct Desk {
    board: Board,
    console: Console,
    events: Sender<Event>,
}

/// Answers on a socket at `path` until the process ends.
pub(crate) fn listen(path: &Path, board: Board, console: Console, events: Sender<Event>) -> Result<()> {
    let listener =
        UnixListener::bind(path).with_context(|| format!("cannot listen on {}", path.display()))?;
    let desk = Desk { board, console, events };
    thread::Builder::new().name("admin".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            // Whoever hangs up needs no answer.
            let _ = desk.serve(&stream);
        }
    })?;
    Ok(())
}

impl Desk {
    fn serve(&self, mut stream: &UnixStream) -> std::io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut line = Vec::new();
        BufReader::new(stream.take(MAX_QUESTION)).read_until(b'\n', &mut line)?;
        let reply = match serde_json::from_slice(&line) {
            Ok(question) => self.answer(question),
            Err(error) => Reply::Error(format!("not a question: {error}")),
        };
        let mut text = serde_json::to_vec(&reply)?;
        text.push(b'\n');
        stream.write_all(&text)
    }

    fn answer(&self, question: Question) -> Reply {
        match question {
            Question::Ps => Reply::Processes(self.board.read()),
            Question::Restart { role } | Question::Logs { role, .. } if !self.has(role) => {
                Reply::Error(format!("the server has no {role} among its processes"))
            }
            Question::Logs { role, lines } => Reply::Lines(self.console.last_lines(role, lines)),
            Question::Restart { role } => self.order(Order::Restart(role)),
            Question::Drain => self.order(Order::Drain),
        }
    }

    fn has(&self, name: Member) -> bool {
        self.board.read().iter().any(|report| name.means(report.process))
    }

    fn order(&self, order: Order) -> Reply {
        match self.events.send(Event::Order(order)) {
            Ok(()) => Reply::Accepted,
            Err(_) => Reply::Error("the server is ending".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Instant;

    use proto::{Role, Topology};

    use super::*;
    use crate::shutdown::Patience;
    use crate::supervise::{Limits, Supervisor};

    fn desk() -> (tempfile::TempDir, Receiver<Event>) {
        let dir = tempfile::tempdir().unwrap();
        let (events, inbox) = channel();
        let (console, _) = crate::console::start().unwrap();
        console.log(Role::Scheduler.into(), "first");
        console.log(Role::Scheduler.into(), "second");
        [(1, "third"), (0, "fourth"), (1, "fifth")]
            .into_iter()
            .for_each(|(number, line)| console.log(Member::nth(Role::Tokenizer, number), line));
        let (topology, now) = (Topology { tokenizer_worker_num: 2, ..Topology::default() }, Instant::now());
        let board = Board::default();
        let supervisor = Supervisor::new(topology, Patience::default(), Limits::default(), now);
        board.update(&supervisor, &BTreeMap::new(), now);
        listen(&dir.path().join("admin.sock"), board, console, events).unwrap();
        (dir, inbox)
    }

    fn ask(dir: &tempfile::TempDir, question: &[u8]) -> Reply {
        let mut stream = UnixStream::connect(dir.path().join("admin.sock")).unwrap();
        stream.write_all(question).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        serde_json::from_str(&reply).unwrap()
    }

    #[test]
    fn orders_reach_the_loop_and_lines_come_back() {
        let (dir, inbox) = desk();
        assert_eq!(ask(&dir, b"{\"command\":\"restart\",\"role\":\"scheduler\"}\n"), Reply::Accepted);
        assert!(
            matches!(inbox.recv(), Ok(Event::Order(Order::Restart(member))) if member == Role::Scheduler.into())
        );
        let Reply::Processes(reports) = ask(&dir, b"{\"command\":\"ps\"}\n") else { panic!("no reports") };
        let names: Vec<_> = reports.iter().map(|report| report.process.to_string()).collect();
        assert_eq!(names, ["scheduler", "detokenizer", "tokenizer-0", "tokenizer-1"]);
        let lines = ask(&dir, b"{\"command\":\"logs\",\"role\":\"scheduler\",\"lines\":1}\n");
        assert_eq!(lines, Reply::Lines(vec!["second".to_owned()]));
        let lines = ask(&dir, b"{\"command\":\"logs\",\"role\":\"tokenizer\",\"lines\":2}\n");
        assert_eq!(lines, Reply::Lines(vec!["fourth".to_owned(), "fifth".to_owned()]));
        let lines = ask(&dir, b"{\"command\":\"logs\",\"role\":\"tokenizer-1\",\"lines\":9}\n");
        assert_eq!(lines, Reply::Lines(vec!["third".to_owned(), "fifth".to_owned()]));
    }

    #[test]
    fn nonsense_is_answered_and_does_no_harm() {
        let (dir, inbox) = desk();
        for junk in
            [b"\n".as_slice(), b"\xff\x00junk\n", b"{\"command\":\"fly\"}\n", &[b'x'; MAX_QUESTION as usize]]
        {
            assert!(matches!(ask(&dir, junk), Reply::Error(_)));
        }
        for role in ["launcher", "tokenizer-2", "scheduler-0", "front"] {
            let order = format!("{{\"command\":\"restart\",\"role\":\"{role}\"}}\n");
            assert!(matches!(ask(&dir, order.as_bytes()), Reply::Error(_)), "{role}");
        }
        drop(UnixStream::connect(dir.path().join("admin.sock")).unwrap());
        assert_eq!(ask(&dir, b"{\"command\":\"drain\"}\n"), Reply::Accepted);
        assert!(matches!(inbox.try_recv(), Ok(Event::Order(Order::Drain))));
    }
}
