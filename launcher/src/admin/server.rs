//! Owns the answering of operators. Reads are answered from the board, orders are passed on to the loop.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use proto::Role;

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
            Question::Restart { role: Role::Launcher } | Question::Logs { role: Role::Launcher, .. } => {
                Reply::Error("the launcher has no place among its own processes".to_owned())
            }
            Question::Logs { role, lines } => Reply::Lines(self.console.last_lines(role, lines)),
            Question::Restart { role } => self.order(Order::Restart(role)),
            Question::Drain => self.order(Order::Drain),
        }
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
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    fn desk() -> (tempfile::TempDir, Receiver<Event>) {
        let dir = tempfile::tempdir().unwrap();
        let (events, inbox) = channel();
        let (console, _) = crate::console::start().unwrap();
        console.log(Role::Scheduler, "first");
        console.log(Role::Scheduler, "second");
        listen(&dir.path().join("admin.sock"), Board::default(), console, events).unwrap();
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
        assert!(matches!(inbox.recv(), Ok(Event::Order(Order::Restart(Role::Scheduler)))));
        assert_eq!(ask(&dir, b"{\"command\":\"ps\"}\n"), Reply::Processes(Vec::new()));
        let lines = ask(&dir, b"{\"command\":\"logs\",\"role\":\"scheduler\",\"lines\":1}\n");
        assert_eq!(lines, Reply::Lines(vec!["second".to_owned()]));
    }

    #[test]
    fn nonsense_is_answered_and_does_no_harm() {
        let (dir, inbox) = desk();
        for junk in
            [b"\n".as_slice(), b"\xff\x00junk\n", b"{\"command\":\"fly\"}\n", &[b'x'; MAX_QUESTION as usize]]
        {
            assert!(matches!(ask(&dir, junk), Reply::Error(_)));
        }
        assert!(matches!(ask(&dir, b"{\"command\":\"restart\",\"role\":\"launcher\"}\n"), Reply::Error(_)));
        drop(UnixStream::connect(dir.path().join("admin.sock")).unwrap());
        assert_eq!(ask(&dir, b"{\"command\":\"drain\"}\n"), Reply::Accepted);
        assert!(matches!(inbox.try_recv(), Ok(Event::Order(Order::Drain))));
    }
}
