//! The protocol without sockets.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tokio::time::Instant;

use super::frame::{Frame, FrameError, Hello};
use super::inbox::{Arrival, Inbox};
use super::outbox::Outbox;
use super::session::{End, Peering, Session};
use super::*;

const ME: Incarnation = Incarnation(50);

type Seen = Arc<Mutex<Vec<LinkEvent<Vec<u8>>>>>;

fn peering() -> (Peering, Arc<Outbox>, Seen) {
    let outbox = Arc::new(Outbox::new());
    let seen = Seen::default();
    let sink = Arc::clone(&seen);
    let deliver = Box::new(move |event: LinkEvent<&[u8]>| {
        sink.lock().unwrap().push(match event {
            LinkEvent::Message { seq, message } => LinkEvent::Message { seq, message: message.to_vec() },
            LinkEvent::Up { peer, restarted } => LinkEvent::Up { peer, restarted },
            LinkEvent::Acked { up_to } => LinkEvent::Acked { up_to },
            LinkEvent::Down => LinkEvent::Down,
        });
        true
    });
    let inbox = Inbox::new(AckMode::Auto);
    let me = (Role::Scheduler, ME);
    (Peering::new("l".into(), me, Role::Detokenizer, Arc::clone(&outbox), inbox, deliver), outbox, seen)
}

fn hello(incarnation: u64, knows_me: bool, expect: u64) -> Bytes {
    let peer = knows_me.then_some(ME);
    Frame::Hello(Hello { role: Role::Detokenizer, incarnation: Incarnation(incarnation), peer, expect })
        .encode()
}

fn data(seq: u64) -> Bytes {
    Frame::Data { seq, payload: Bytes::from_static(b"x") }.encode()
}

fn queue(outbox: &Outbox, count: usize) {
    (0..count).for_each(|_| assert!(outbox.push(vec![0; 20]).is_ok()));
}

/// What the session has said since the last call.
fn said(session: &mut Session) -> Vec<Frame> {
    session.control.drain(..).map(|frame| Frame::decode(&frame).unwrap()).collect()
}

#[test]
fn golden_frames() {
    let hello = Hello { role: Role::Scheduler, incarnation: Incarnation(300), peer: Some(ME), expect: 7 };
    let mut bytes =
        b"H\x02\x00\x84\xa4role\xa9scheduler\xabincarnation\xcd\x01\x2c\xa4peer\x32\xa6expect\x07".to_vec();
    assert_eq!(Frame::Hello(hello.clone()).encode(), bytes);
    assert_eq!(Frame::decode(&bytes.clone().into()).unwrap(), Frame::Hello(hello));
    bytes[1] = 3;
    assert!(matches!(Frame::decode(&bytes.into()), Err(FrameError::Version { theirs: 3 })));
    let number = |kind: u8| [&[kind, 2, 1, 0, 0, 0, 0, 0, 0][..], b""].concat();
    for (frame, bytes) in [
        (Frame::Start { next: 258 }, number(b'S')),
        (Frame::Ack { up_to: 258 }, number(b'A')),
        (
            Frame::Data { seq: 258, payload: Bytes::from_static(b"pay") },
            [number(b'D'), b"pay".to_vec()].concat(),
        ),
        (Frame::Refuse { reason: "no".into() }, b"Rno".to_vec()),
    ] {
        assert_eq!(frame.encode(), bytes);
        assert_eq!(Frame::decode(&bytes.into()).unwrap(), frame);
    }
}

#[test]
fn frames_of_other_lengths_are_none() {
    for bytes in
        [&b""[..], b"S", b"S1234567", b"S123456789", b"A1234567", b"A123456789", b"D1234567", b"H\x01", b"?"]
    {
        assert!(Frame::decode(&Bytes::from_static(bytes)).is_err(), "{bytes:?}");
    }
}

#[test]
fn a_connection_goes_on_where_the_peer_stopped_receiving() {
    let (mut peering, outbox, _) = peering();
    queue(&outbox, 10);
    let mut session = Session::new();
    session.receive(&mut peering, &hello(1, false, 0)).unwrap();
    assert_eq!(said(&mut session)[1], Frame::Start { next: 1 });
    while outbox.transmit().is_some() {}
    session.receive(&mut peering, &Frame::Ack { up_to: 3 }.encode()).unwrap();
    let mut session = Session::new();
    session.receive(&mut peering, &hello(1, true, 8)).unwrap();
    assert_eq!(said(&mut session)[1], Frame::Start { next: 8 });
    assert_eq!(std::iter::from_fn(|| outbox.transmit()).count(), 3);
    assert_eq!(outbox.backlog().messages, 7, "what has arrived stays until it is processed");
}

#[test]
fn a_new_life_of_the_peer_gets_nothing_of_what_was_meant_for_the_old() {
    let (mut peering, outbox, seen) = peering();
    queue(&outbox, 5);
    Session::new().receive(&mut peering, &hello(1, false, 0)).unwrap();
    let mut session = Session::new();
    session.receive(&mut peering, &hello(2, false, 0)).unwrap();
    assert_eq!(said(&mut session)[1], Frame::Start { next: 6 });
    assert_eq!(outbox.backlog(), Backlog::default());
    let up = |peer, restarted| LinkEvent::Up { peer: Incarnation(peer), restarted };
    assert_eq!(*seen.lock().unwrap(), [up(1, false), up(2, true)]);
    // The old one is a leftover while the new one is heard.
    let mut session = Session::new();
    let end = session.receive(&mut peering, &hello(1, true, 1)).unwrap_err();
    assert!(matches!(end, End::Refused(_)), "{end}");
    assert!(matches!(said(&mut session)[0], Frame::Refuse { .. }));
}

#[test]
fn a_gap_is_answered_by_a_reset_and_a_repetition_by_nothing() {
    let (mut peering, _, seen) = peering();
    let mut session = Session::new();
    session.receive(&mut peering, &hello(1, false, 0)).unwrap();
    session.receive(&mut peering, &Frame::Start { next: 4 }.encode()).unwrap();
    session.receive(&mut peering, &data(4)).unwrap();
    session.receive(&mut peering, &data(4)).unwrap();
    assert_eq!(session.receive(&mut peering, &data(6)), Err(End::Gap { seq: 6 }));
    let message = LinkEvent::Message { seq: 1, message: b"x".to_vec() };
    assert_eq!(seen.lock().unwrap()[1..], [message]);
    // The next hello asks for what is missing.
    let mut session = Session::new();
    session.connect(&peering, true);
    let Frame::Hello(hello) = said(&mut session).remove(0) else { panic!("no hello") };
    assert_eq!((hello.peer, hello.expect), (Some(Incarnation(1)), 5));
}

#[test]
fn nothing_passes_before_its_turn() {
    for early in [data(1), Frame::Start { next: 1 }.encode(), Frame::Ack { up_to: 1 }.encode()] {
        let (mut peering, outbox, seen) = peering();
        queue(&outbox, 1);
        assert_eq!(Session::new().receive(&mut peering, &early), Err(End::OutOfTurn));
        assert_eq!((outbox.backlog().messages, seen.lock().unwrap().len()), (1, 0));
    }
}

#[test]
fn the_window_is_bounded_in_messages_and_in_bytes() {
    let outbox = Outbox::new();
    queue(&outbox, 3000);
    assert_eq!(std::iter::from_fn(|| outbox.transmit()).count(), 1024);
    assert_eq!(outbox.acknowledge(2000), Some(1024), "what was not sent cannot be acknowledged");
    let outbox = Outbox::new();
    (0..100).for_each(|_| assert!(outbox.push(vec![0; 1 << 20]).is_ok()));
    assert!((60..=64).contains(&std::iter::from_fn(|| outbox.transmit()).count()));
}

#[test]
fn what_the_application_never_saw_is_acknowledged_in_its_turn() {
    let mut inbox = Inbox::new(AckMode::Manual);
    let now = Instant::now();
    inbox.start(100);
    for (wire, local) in (100..105).zip(1..) {
        assert_eq!(inbox.arrive(wire), Arrival::Next(local));
        inbox.handled(local, local != 2 && local != 3 && local != 5, now);
    }
    assert_eq!(inbox.take_ack(), 99);
    inbox.advance_manual(1, now);
    assert_eq!(inbox.take_ack(), 102);
    inbox.advance_manual(900, now);
    assert_eq!(inbox.take_ack(), 104, "only what has been delivered");
}
