//! Links over real sockets between two link threads of one process. Every wait is for an event, with a deadline.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use proto::link::{AckMode, LinkEvent, LinkHandle, LinkSpec, LinkThread, SendError, Side, dropped_frames};
use proto::{Incarnation, Role};

const DEADLINE: Duration = Duration::from_secs(60);

/// One process's end of a link: `u64`s out and in, or whatever the test asks for.
struct End<Out, In> {
    thread: LinkThread,
    handle: LinkHandle<Out>,
    events: Receiver<LinkEvent<In>>,
}

struct Plan<'a> {
    path: &'a Path,
    side: Side,
    ack: AckMode,
    incarnation: u64,
}

impl<Out, In> End<Out, In>
where
    Out: serde::Serialize + Send + 'static,
    In: serde::de::DeserializeOwned + Send + 'static,
{
    fn open(plan: Plan<'_>) -> Self {
        // The binding side plays the scheduler, the connecting one the detokenizer.
        let (me, peer) = match plan.side {
            Side::Bind => (Role::Scheduler, Role::Detokenizer),
            Side::Connect => (Role::Detokenizer, Role::Scheduler),
        };
        Self::open_as(plan, me, peer)
    }

    fn open_as(plan: Plan<'_>, me: Role, peer: Role) -> Self {
        let thread = LinkThread::start(me, Incarnation(plan.incarnation)).unwrap();
        let (sender, events) = channel();
        let spec = LinkSpec { path: plan.path.to_owned(), side: plan.side, peer, ack: plan.ack };
        let handle = thread.open(spec, move |event| {
            let _ = sender.send(event);
        });
        Self { thread, handle, events }
    }

    fn next(&self) -> LinkEvent<In> {
        self.events.recv_timeout(DEADLINE).expect("an event before the deadline")
    }

    /// Waits for the first event that `pick` wants; others pass.
    fn wait<T>(&self, mut pick: impl FnMut(LinkEvent<In>) -> Option<T>) -> T {
        loop {
            if let Some(found) = pick(self.next()) {
                return found;
            }
        }
    }

    fn wait_up(&self) -> (Incarnation, bool) {
        self.wait(|event| match event {
            LinkEvent::Up { peer, restarted } => Some((peer, restarted)),
            _ => None,
        })
    }

    fn message(&self) -> (u64, In) {
        self.wait(|event| match event {
            LinkEvent::Message { seq, message } => Some((seq, message)),
            _ => None,
        })
    }

    fn messages(&self, count: usize) -> Vec<In> {
        (0..count).map(|_| self.message().1).collect()
    }

    fn wait_acked(&self, wanted: u64) {
        self.wait(|event| match event {
            LinkEvent::Acked { up_to } if up_to >= wanted => Some(()),
            _ => None,
        });
    }
}

struct Place {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

fn place() -> Place {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("l.sock");
    Place { _dir: dir, path }
}

fn plan(path: &Path, side: Side, incarnation: u64) -> Plan<'_> {
    Plan { path, side, ack: AckMode::Auto, incarnation }
}

/// Sends, waiting for room when the link is full.
fn send_all<T: serde::Serialize>(handle: &LinkHandle<T>, messages: impl IntoIterator<Item = T>) {
    let deadline = Instant::now() + DEADLINE;
    for message in messages {
        loop {
            match handle.send(&message) {
                Ok(_) => break,
                Err(SendError::Full(_)) if Instant::now() < deadline => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[test]
fn twenty_thousand_messages_each_way_arrive_once_and_in_order() {
    const COUNT: u64 = 20_000;
    let place = place();
    let a: End<u64, u64> = End::open(plan(&place.path, Side::Bind, 1));
    let mut b: End<u64, u64> = End::open(plan(&place.path, Side::Connect, 2));
    let (there, back) = (a.handle.clone(), b.handle.clone());
    std::thread::scope(|scope| {
        let b = &mut b;
        scope.spawn(move || send_all(&there, 0..COUNT));
        scope.spawn(move || send_all(&back, 0..COUNT));
        scope.spawn(move || {
            for wanted in 0..COUNT {
                assert_eq!(b.message(), (wanted + 1, wanted));
            }
        });
        for wanted in 0..COUNT {
            assert_eq!(a.message(), (wanted + 1, wanted));
        }
    });
    a.thread.close(DEADLINE);
    assert_eq!(a.handle.backlog().messages, 0, "closing has waited for the last acknowledgement");
    assert_eq!(a.handle.send(&1), Err(SendError::Closed));
}

#[test]
fn messages_queued_before_the_first_connection_arrive() {
    let place = place();
    let early: End<u64, u64> = End::open(plan(&place.path, Side::Connect, 1));
    send_all(&early.handle, 0..100);
    let late: End<u64, u64> = End::open(plan(&place.path, Side::Bind, 2));
    assert_eq!(late.messages(100), (0..100).collect::<Vec<_>>());
    assert_eq!(early.wait_up(), (Incarnation(2), false));
    early.wait_acked(100);
}

#[test]
fn a_round_trip_takes_little_time() {
    const TRIPS: u32 = 500;
    let place = place();
    let a: End<u64, u64> = End::open(plan(&place.path, Side::Bind, 1));
    let b: End<u64, u64> = End::open(plan(&place.path, Side::Connect, 2));
    b.wait_up();
    let mut fastest = Duration::MAX;
    for trip in 0..u64::from(TRIPS) {
        let start = Instant::now();
        a.handle.send(&trip).unwrap();
        b.handle.send(&b.message().1).unwrap();
        assert_eq!(a.message().1, trip);
        fastest = fastest.min(start.elapsed());
    }
    // Four threads on two shared cores: the best shows that nothing polls, the rest is the machine's.
    eprintln!("fastest round trip: {fastest:?}");
    assert!(fastest < Duration::from_millis(2), "{fastest:?}");
}

#[test]
fn a_peer_that_comes_and_goes_under_load_is_a_new_one_each_time() {
    const LIVES: u64 = 12;
    let place = place();
    let stays: End<u64, u64> = End::open(plan(&place.path, Side::Bind, 1));
    let (stop, stopped) = channel::<()>();
    let sender = stays.handle.clone();
    let load = std::thread::spawn(move || {
        let mut next = 0u64;
        while stopped.recv_timeout(Duration::from_micros(20)) == Err(RecvTimeoutError::Timeout) {
            if sender.send(&next).is_ok() {
                next += 1;
            }
        }
        next
    });
    let mut last_seen = None;
    for life in 0..LIVES {
        let comes: End<u64, u64> = End::open(plan(&place.path, Side::Connect, 100 + life));
        assert_eq!(stays.wait_up(), (Incarnation(100 + life), life > 0));
        let seen = comes.messages(200);
        assert!(seen.windows(2).all(|pair| pair[1] == pair[0] + 1), "in order and without holes: {seen:?}");
        assert!(last_seen.is_none_or(|last| seen[0] > last), "{:?} after {last_seen:?}", seen[0]);
        comes.handle.send(&life).unwrap();
        assert_eq!(stays.message(), (life + 1, life), "this side's numbers go on over the peer's lives");
        last_seen = seen.last().copied();
        // Dropped without closing, as if killed.
        drop(comes);
    }
    drop(stop);
    let sent = load.join().unwrap();
    let last: End<u64, u64> = End::open(plan(&place.path, Side::Connect, 900));
    stays.wait_up();
    let marker = stays.handle.send(&u64::MAX).unwrap();
    last.wait(|event| matches!(event, LinkEvent::Message { message: u64::MAX, .. }).then_some(()));
    stays.wait_acked(marker);
    assert!(sent > 200 * LIVES);
}

#[test]
fn a_binding_side_that_restarts_is_found_again() {
    let place = place();
    let stays: End<u64, u64> = End::open(plan(&place.path, Side::Connect, 1));
    for life in 0..6 {
        let comes: End<u64, u64> = End::open(plan(&place.path, Side::Bind, 100 + life));
        assert_eq!(stays.wait_up(), (Incarnation(100 + life), life > 0));
        stays.handle.send(&life).unwrap();
        assert_eq!(comes.message().1, life);
        drop(comes);
    }
}

/// Cuts the connection under two living ends by taking the binding side's place with a second connection.
fn cut(path: &Path) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        use zeromq::{DealerSocket, Socket};
        let mut intruder = DealerSocket::new();
        intruder.connect(&format!("ipc://{}", path.display())).await.unwrap();
    });
}

#[test]
fn a_broken_connection_loses_and_repeats_nothing() {
    const COUNT: u64 = 20_000;
    let place = place();
    let a: End<u64, u64> = End::open(plan(&place.path, Side::Bind, 1));
    let mut b: End<u64, u64> = End::open(plan(&place.path, Side::Connect, 2));
    a.wait_up();
    let (there, back) = (a.handle.clone(), b.handle.clone());
    std::thread::scope(|scope| {
        scope.spawn(move || send_all(&there, 0..COUNT));
        scope.spawn(move || send_all(&back, 0..COUNT));
        let (path, b) = (&place.path, &mut b);
        scope.spawn(move || (0..10).for_each(|_| cut(path)));
        scope.spawn(move || assert_eq!(b.messages(COUNT as usize), (0..COUNT).collect::<Vec<_>>()));
        assert_eq!(a.messages(COUNT as usize), (0..COUNT).collect::<Vec<_>>());
    });
    cut(&place.path);
    assert_eq!(a.wait_up(), (Incarnation(2), false), "the same peer is back");
}

#[test]
fn long_messages() {
    let place = place();
    let a: End<String, String> = End::open(plan(&place.path, Side::Bind, 1));
    let b: End<String, String> = End::open(plan(&place.path, Side::Connect, 2));
    for megabytes in [1, 3, 20, 63] {
        let text = "x".repeat((megabytes << 20) + 7);
        a.handle.send(&text).unwrap();
        assert!(b.message().1 == text, "{megabytes} MiB");
    }
    let error = a.handle.send(&"x".repeat(65 << 20)).unwrap_err();
    assert!(matches!(error, SendError::TooLarge { .. }), "{error}");
}

#[test]
fn a_receiver_that_stops_acknowledging_fills_the_link_and_then_recovers() {
    let place = place();
    let a: End<String, String> = End::open(plan(&place.path, Side::Bind, 1));
    let b: End<String, String> =
        End::open(Plan { ack: AckMode::Manual, ..plan(&place.path, Side::Connect, 2) });
    let text = "y".repeat(1 << 20);
    let mut sent = 0;
    let full = loop {
        match a.handle.send(&text) {
            Ok(seq) => sent = seq,
            Err(error) => break error,
        }
    };
    let SendError::Full(backlog) = full else { panic!("{full}") };
    assert!(backlog.bytes <= 130 << 20 && backlog.messages as u64 == sent, "{backlog:?}");
    // The window is what arrives; nothing is acknowledged, so nothing follows.
    let (first, _) = b.message();
    assert_eq!(first, 1);
    assert_eq!(a.handle.backlog().messages as u64, sent);
    let mut seen = first;
    b.handle.ack(seen);
    while seen < sent {
        let (seq, message) = b.message();
        assert_eq!(seq, seen + 1);
        assert!(message == text);
        seen = seq;
        b.handle.ack(seen);
    }
    a.wait_acked(sent);
    assert_eq!(a.handle.backlog().messages, 0);
    a.handle.send(&text).unwrap();
    assert_eq!(b.message().0, sent + 1);
}

#[test]
fn acknowledgements_for_a_peer_that_is_gone_are_not_taken_for_its_successor() {
    let place = place();
    let reader: End<u64, u64> = End::open(Plan { ack: AckMode::Manual, ..plan(&place.path, Side::Bind, 1) });
    let first: End<u64, u64> = End::open(plan(&place.path, Side::Connect, 10));
    send_all(&first.handle, 0..5);
    reader.messages(5);
    drop(first);
    let second: End<u64, u64> = End::open(plan(&place.path, Side::Connect, 11));
    send_all(&second.handle, 0..3);
    assert_eq!((0..3).map(|_| reader.message().0).collect::<Vec<_>>(), [6, 7, 8]);
    reader.handle.ack(5);
    reader.handle.ack(6);
    let acked = second.wait(|event| match event {
        LinkEvent::Acked { up_to } => Some(up_to),
        _ => None,
    });
    assert_eq!((acked, second.handle.backlog().messages), (1, 2));
    reader.handle.ack(8);
    second.wait_acked(3);
}

#[test]
fn junk_on_the_socket_is_dropped_and_the_link_works_on() {
    let place = place();
    let a: End<u64, u64> = End::open(plan(&place.path, Side::Bind, 1));
    let b: End<u64, u64> = End::open(plan(&place.path, Side::Connect, 2));
    b.wait_up();
    for junk in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 300], &[0; 64], &[]] {
        UnixStream::connect(&place.path).unwrap().write_all(junk).unwrap();
        a.handle.send(&7).unwrap();
        assert_eq!(b.message().1, 7);
    }
}

#[test]
fn frames_that_make_no_sense_are_counted_and_dropped() {
    use zeromq::{DealerSocket, Socket, SocketSend};
    let place = place();
    let before = dropped_frames();
    let a: End<u64, u64> = End::open(plan(&place.path, Side::Bind, 1));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let mut intruder = runtime.block_on(async {
        let mut socket = DealerSocket::new();
        while socket.connect(&format!("ipc://{}", place.path.display())).await.is_err() {}
        socket
    });
    runtime.block_on(async {
        for junk in ["", "nonsense", "H", "D123", "Zzzzzzzzzzzzzzzz"] {
            intruder.send(junk.to_owned().into()).await.unwrap();
        }
    });
    let deadline = Instant::now() + DEADLINE;
    while dropped_frames() < before + 5 {
        assert!(Instant::now() < deadline, "{} of 5 counted", dropped_frames() - before);
        std::thread::yield_now();
    }
    let b: End<u64, u64> = End::open(plan(&place.path, Side::Connect, 2));
    a.handle.send(&7).unwrap();
    assert_eq!(b.message().1, 7);
    drop(intruder);
}

#[test]
fn a_message_of_the_wrong_type_is_dropped_and_does_not_stop_the_rest() {
    let place = place();
    let before = dropped_frames();
    // Says strings where numbers are expected, now and then.
    let a: End<serde_json::Value, u64> = End::open(plan(&place.path, Side::Bind, 1));
    let b: End<u64, u64> = End::open(Plan { ack: AckMode::Manual, ..plan(&place.path, Side::Connect, 2) });
    send_all(&a.handle, [1.into(), "two".into(), 3.into(), "four".into()]);
    assert_eq!(b.messages(2), [1, 3]);
    b.handle.ack(3);
    a.wait_acked(4);
    assert!(dropped_frames() >= before + 2);
}

#[test]
fn a_peer_of_the_wrong_role_is_refused() {
    let place = place();
    let a: End<u64, u64> = End::open(plan(&place.path, Side::Bind, 1));
    let wrong: End<u64, u64> =
        End::open_as(plan(&place.path, Side::Connect, 5), Role::Tokenizer, Role::Scheduler);
    wrong.handle.send(&1).unwrap();
    let right: End<u64, u64> = End::open(plan(&place.path, Side::Connect, 6));
    right.handle.send(&2).unwrap();
    assert_eq!(a.message().1, 2, "nothing of the wrong one was let through");
    assert_eq!((wrong.events.try_iter().count(), wrong.handle.backlog().messages), (0, 1));
}

#[test]
fn a_peer_of_another_version_is_told_so_and_refused() {
    use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend};
    let place = place();
    let a: End<u64, u64> = End::open(plan(&place.path, Side::Bind, 1));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let reply = runtime.block_on(async {
        let mut socket = DealerSocket::new();
        while socket.connect(&format!("ipc://{}", place.path.display())).await.is_err() {}
        // The version stands right behind the letter; what follows it need not be readable.
        socket.send(vec![b'H', 0xfe, 0x00, 0xc1].into()).await.unwrap();
        socket.recv().await.unwrap().into_vec().remove(0)
    });
    let reply = String::from_utf8_lossy(&reply).into_owned();
    assert!(reply.starts_with('R') && reply.contains("version 254"), "{reply}");
    assert_eq!(a.events.try_iter().count(), 0);
}

#[test]
fn closing_without_a_peer_ends_at_the_deadline() {
    let place = place();
    let alone: End<u64, u64> = End::open(plan(&place.path, Side::Connect, 1));
    alone.handle.send(&1).unwrap();
    let start = Instant::now();
    alone.thread.close(Duration::from_millis(100));
    assert!(start.elapsed() >= Duration::from_millis(100) && start.elapsed() < Duration::from_secs(20));
    assert!(!place.path.exists());
}

#[test]
fn closing_the_binding_side_takes_its_socket_away() {
    let place = place();
    let a: End<u64, u64> = End::open(plan(&place.path, Side::Bind, 1));
    let b: End<u64, u64> = End::open(plan(&place.path, Side::Connect, 2));
    b.wait_up();
    a.thread.close(DEADLINE);
    assert_eq!(std::fs::read_dir(place.path.parent().unwrap()).unwrap().count(), 0);
    b.wait(|event| matches!(event, LinkEvent::Down).then_some(()));
}
