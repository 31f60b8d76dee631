//! Owns the frames that travel between two links. A frame is one ZeroMQ message: a byte that says what it is, then
//! fixed-width numbers in little endian, then a payload.

use bytes::{BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use crate::ids::{Incarnation, Role};
use crate::wire;

/// Room that [`stamp`] needs in front of a payload.
pub(super) const DATA_HEADER: usize = 9;

const HELLO: u8 = b'H';
const START: u8 = b'S';
const DATA: u8 = b'D';
const ACK: u8 = b'A';
const REFUSE: u8 = b'R';

/// Longest reason that is read out of a refusal.
const MAX_REASON: usize = 1024;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Frame {
    /// The first frame each way.
    Hello(Hello),
    /// The second frame each way: the number of the first data frame that can follow.
    Start {
        next: u64,
    },
    Data {
        seq: u64,
        payload: Bytes,
    },
    /// Everything up to this number is processed. Repeated as a sign of life.
    Ack {
        up_to: u64,
    },
    /// Why the sender hangs up on this peer.
    Refuse {
        reason: String,
    },
}

/// Who speaks, and what it remembers of the peer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) role: Role,
    pub(super) incarnation: Incarnation,
    /// The last incarnation heard from the peer's side, if any.
    pub(super) peer: Option<Incarnation>,
    /// The next data frame expected of that incarnation: all before it has arrived.
    pub(super) expect: u64,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum FrameError {
    #[error("a frame of {0} bytes is none of ours")]
    Unknown(usize),
    #[error("the peer speaks protocol version {theirs}, this side {}", wire::PROTOCOL_VERSION)]
    Version { theirs: u16 },
    #[error(transparent)]
    Wire(#[from] wire::WireError),
}

/// Fills in the number of a data frame whose first [`DATA_HEADER`] bytes were left free.
pub(super) fn stamp(mut frame: Vec<u8>, seq: u64) -> Bytes {
    frame[0] = DATA;
    frame[1..DATA_HEADER].copy_from_slice(&seq.to_le_bytes());
    frame.into()
}

impl Frame {
    pub(super) fn encode(&self) -> Bytes {
        match self {
            Self::Hello(hello) => {
                let [low, high] = wire::PROTOCOL_VERSION.to_le_bytes();
                wire::encode_behind(&[HELLO, low, high], hello).expect("a hello is small and plain").into()
            }
            Self::Start { next } => numbered(START, *next, &[]),
            Self::Data { seq, payload } => numbered(DATA, *seq, payload),
            Self::Ack { up_to } => numbered(ACK, *up_to, &[]),
            Self::Refuse { reason } => [&[REFUSE], reason.as_bytes()].concat().into(),
        }
    }

    pub(super) fn decode(bytes: &Bytes) -> Result<Self, FrameError> {
        let unknown = FrameError::Unknown(bytes.len());
        match (bytes.first(), bytes.len()) {
            (Some(&HELLO), 3..) => {
                // Before anything else of it is read: only the version may never change its place.
                match u16::from_le_bytes([bytes[1], bytes[2]]) {
                    wire::PROTOCOL_VERSION => Ok(Self::Hello(wire::decode(&bytes[3..])?)),
                    theirs => Err(FrameError::Version { theirs }),
                }
            }
            (Some(&START), DATA_HEADER) => Ok(Self::Start { next: number(bytes) }),
            (Some(&DATA), DATA_HEADER..) => {
                Ok(Self::Data { seq: number(bytes), payload: bytes.slice(DATA_HEADER..) })
            }
            (Some(&ACK), DATA_HEADER) => Ok(Self::Ack { up_to: number(bytes) }),
            (Some(&REFUSE), ..=MAX_REASON) => {
                Ok(Self::Refuse { reason: String::from_utf8_lossy(&bytes[1..]).into_owned() })
            }
            _ => Err(unknown),
        }
    }
}

fn numbered(kind: u8, number: u64, payload: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(DATA_HEADER + payload.len());
    frame.put_u8(kind);
    frame.put_u64_le(number);
    frame.put_slice(payload);
    frame.freeze()
}

fn number(frame: &Bytes) -> u64 {
    let mut digits = [0; 8];
    digits.copy_from_slice(&frame[1..DATA_HEADER]);
    u64::from_le_bytes(digits)
}
