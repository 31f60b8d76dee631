//! Owns what leaves the scheduler: replies that wait for a link with room, one queue per tokenizer process; rows, and
//! finished requests until their end is acknowledged, by lane. Nothing here waits: what cannot be sent now stays and
//! grows until the next turn, and holds up no other process's.

use std::collections::VecDeque;

use proto::link::{Backlog, LinkHandle, SendError};
use proto::{BatchTokenIDOutput, FinishReason, Front, Lane, RequestId, ToDetokenizer, ToTokenizer, Topology};

use crate::request::Request;
use crate::stream;

/// Above this much unacknowledged by a detokenizer, new requests of its lane are refused.
const BACKLOG_LIMIT: Backlog = Backlog { messages: 2048, bytes: 16 << 20 };

/// The neighbours a scheduler sends to.
pub trait Peers {
    /// Returns the message's number on its link.
    fn to_detokenizer(&mut self, lane: Lane, message: &ToDetokenizer) -> Result<u64, SendError>;

    fn to_tokenizer(&mut self, front: Front, message: &ToTokenizer) -> Result<u64, SendError>;

    /// What the lane's detokenizer has not acknowledged.
    fn detokenizer_backlog(&self, lane: Lane) -> Backlog;
}

/// The neighbours over real links, in the order of their numbers.
pub struct LinkPeers {
    pub lanes: Vec<LinkHandle<ToDetokenizer>>,
    pub fronts: Vec<LinkHandle<ToTokenizer>>,
}

impl Peers for LinkPeers {
    fn to_detokenizer(&mut self, lane: Lane, message: &ToDetokenizer) -> Result<u64, SendError> {
        self.lanes[usize::from(lane.0)].send(message)
    }

    fn to_tokenizer(&mut self, front: Front, message: &ToTokenizer) -> Result<u64, SendError> {
        self.fronts[usize::from(front.0)].send(message)
    }

    fn detokenizer_backlog(&self, lane: Lane) -> Backlog {
        self.lanes[usize::from(lane.0)].backlog()
    }
}

/// See the module.
pub struct Outbox<P> {
    peers: P,
    topology: Topology,
    /// By tokenizer process.
    replies: Vec<VecDeque<ToTokenizer>>,
    lanes: Vec<LaneBox>,
}

/// What one lane's detokenizer has not got, or not acknowledged.
#[derive(Default)]
struct LaneBox {
    /// Ended; the row that says so is not sent.
    finishing: Vec<Request>,
    /// Ended and sent, with the number of the message that said so. Kept for a detokenizer that restarts.
    ending: VecDeque<(u64, Request)>,
    stalled: bool,
}

impl<P: Peers> Outbox<P> {
    pub fn new(peers: P, topology: Topology) -> Self {
        Self {
            peers,
            topology,
            replies: topology.fronts().map(|_| VecDeque::new()).collect(),
            lanes: topology.lanes().map(|_| LaneBox::default()).collect(),
        }
    }

    pub fn peers(&self) -> &P {
        &self.peers
    }

    #[cfg(test)]
    pub fn peers_mut(&mut self) -> &mut P {
        &mut self.peers
    }

    /// The lane that a request's answer takes: one of its tokenizer process's, by its name, so that several share the
    /// work without anybody keeping count.
    pub fn lane_for(&self, front: Front, rid: &RequestId) -> Lane {
        let lanes: Vec<_> = self.topology.lanes_of_front(front).collect();
        let mix = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
        let hash = rid.0.bytes().fold(0x811c_9dc5, mix);
        lanes[hash as usize % lanes.len()]
    }

    /// Whose answers take this lane.
    pub fn front_of(&self, lane: Lane) -> Front {
        self.topology.front_of(lane)
    }

    /// No detokenizer keeps up: nothing new should be taken on.
    pub fn is_congested(&self) -> bool {
        self.topology.lanes().all(|lane| self.is_lane_congested(lane))
    }

    /// The lane's detokenizer does not keep up.
    pub fn is_lane_congested(&self, lane: Lane) -> bool {
        let backlog = self.peers.detokenizer_backlog(lane);
        self.lanes[usize::from(lane.0)].stalled
            || backlog.messages > BACKLOG_LIMIT.messages
            || backlog.bytes > BACKLOG_LIMIT.bytes
    }

    /// Something waits for a link with room.
    pub fn has_unsent(&self) -> bool {
        self.has_ends() || self.replies.iter().any(|replies| !replies.is_empty())
    }

    /// Finished requests that are not acknowledged, sent or not.
    pub fn unacknowledged(&self) -> usize {
        self.lanes.iter().map(|lane| lane.finishing.len() + lane.ending.len()).sum()
    }

    /// Requests whose end is not acknowledged.
    pub fn ended(&self) -> impl Iterator<Item = &Request> {
        self.lanes
            .iter()
            .flat_map(|lane| lane.finishing.iter().chain(lane.ending.iter().map(|(_, request)| request)))
    }

    pub fn reply(&mut self, front: Front, message: ToTokenizer) {
        self.replies[usize::from(front.0)].push_back(message);
        self.send_replies();
    }

    /// Takes a request whose `finish` is set. Its last row goes out with the next [`Self::send_rows`].
    pub fn finish(&mut self, request: Request) {
        assert!(request.finish.is_some() && request.seat.is_none(), "only ended requests are handed over");
        self.lanes[usize::from(request.lane.0)].finishing.push(request);
    }

    /// Ends that the next [`Self::send_rows`] will tell.
    pub fn has_ends(&self) -> bool {
        self.lanes.iter().any(|lane| !lane.finishing.is_empty())
    }

    pub fn send_replies(&mut self) {
        for (front, replies) in self.topology.fronts().zip(&mut self.replies) {
            while let Some(message) = replies.front() {
                match self.peers.to_tokenizer(front, message) {
                    Ok(_) => {}
                    Err(SendError::Full(_)) => break,
                    Err(error) => tracing::error!(%error, "reply to the tokenizer process is dropped"),
                }
                replies.pop_front();
            }
        }
    }

    /// Sends one message per lane with every row that is due: of the running requests, and of those that ended.
    pub fn send_rows(&mut self, running: &mut [Request], stream_interval: u32) {
        for (lane, waiting) in self.topology.lanes().zip(&mut self.lanes) {
            let mut due: Vec<&mut Request> = running
                .iter_mut()
                .filter(|request| request.lane == lane)
                .chain(waiting.finishing.iter_mut())
                .filter(|request| stream::is_due(request, stream_interval))
                .collect();
            if due.is_empty() {
                continue;
            }
            let sent = send_group(&mut self.peers, lane, &mut due);
            waiting.stalled = sent.is_err();
            waiting.sent(sent.unwrap_or_else(|last| last));
        }
    }

    /// The lane's detokenizer is done with everything up to this message.
    pub fn acked(&mut self, lane: Lane, up_to: u64) {
        let waiting = &mut self.lanes[usize::from(lane.0)];
        waiting.ending.retain(|(seq, _)| *seq > up_to);
        waiting.stalled = false;
    }

    /// A new detokenizer has nothing: ends that were not acknowledged are told again.
    pub fn detokenizer_restarted(&mut self, lane: Lane) {
        let waiting = &mut self.lanes[usize::from(lane.0)];
        waiting.finishing.extend(waiting.ending.drain(..).map(|(_, request)| request));
        waiting.finishing.iter_mut().for_each(stream::forget_sent);
        waiting.stalled = false;
    }

    /// Nobody waits for replies to an earlier tokenizer process.
    pub fn tokenizer_restarted(&mut self, front: Front) {
        self.replies[usize::from(front.0)].clear();
    }
}

impl LaneBox {
    /// Ends that went out are kept with the number of the last message that did.
    fn sent(&mut self, last: Option<u64>) {
        for request in std::mem::take(&mut self.finishing) {
            if !request.sent.finished {
                self.finishing.push(request);
            } else if let Some(seq) = last {
                self.ending.push_back((seq, request));
            }
        }
    }
}

/// Sends the rows in one message, or in several where one would be too large. Gives the number of the last
/// message that went, as an error when the link is full before all have gone.
fn send_group(
    peers: &mut impl Peers,
    lane: Lane,
    group: &mut [&mut Request],
) -> Result<Option<u64>, Option<u64>> {
    let rows = group.iter().map(|request| stream::row(request));
    let message = ToDetokenizer::TokenIds(BatchTokenIDOutput::from_rows(rows));
    match peers.to_detokenizer(lane, &message) {
        Ok(seq) => {
            group.iter_mut().for_each(|request| stream::mark_sent(request));
            Ok(Some(seq))
        }
        Err(SendError::TooLarge { .. } | SendError::Unencodable(_)) if group.len() > 1 => {
            let (left, right) = group.split_at_mut(group.len() / 2);
            let first = send_group(peers, lane, left)?;
            match send_group(peers, lane, right) {
                Ok(last) => Ok(last.or(first)),
                Err(last) => Err(last.or(first)),
            }
        }
        Err(error @ (SendError::TooLarge { .. } | SendError::Unencodable(_))) => {
            Ok(send_failure(peers, lane, group, &error))
        }
        Err(SendError::Full(_) | SendError::Closed) => Err(None),
    }
}

/// A row that no message can carry ends its request: the log-probabilities that make it large are given up.
fn send_failure(
    peers: &mut impl Peers,
    lane: Lane,
    group: &mut [&mut Request],
    error: &SendError,
) -> Option<u64> {
    let request = group.first_mut()?;
    if request.logprobs.take().is_none() {
        tracing::error!(rid = %request.rid, %error, "a row without log-probabilities cannot be sent");
        stream::mark_sent(request);
        return None;
    }
    let message = format!("the reply cannot be sent: {error}");
    request.finish = Some(FinishReason::failed(500, "InternalServerError", message));
    send_group(peers, lane, &mut group[..1]).ok().flatten()
}
