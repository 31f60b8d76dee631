//! Owns what leaves the scheduler: replies and rows that wait for a link with room, and finished requests until
//! their end is acknowledged. Nothing here waits: what cannot be sent now stays and grows until the next turn.

use std::collections::VecDeque;

use proto::link::{Backlog, LinkHandle, SendError};
use proto::{BatchTokenIDOutput, FinishReason, ToDetokenizer, ToTokenizer};

use crate::request::Request;
use crate::stream;

/// Above this much unacknowledged by the detokenizer, new requests are refused.
const BACKLOG_LIMIT: Backlog = Backlog { messages: 2048, bytes: 16 << 20 };

/// The two neighbours a scheduler sends to.
pub trait Peers {
    /// Returns the message's number on its link.
    fn to_detokenizer(&mut self, message: &ToDetokenizer) -> Result<u64, SendError>;

    fn to_tokenizer(&mut self, message: &ToTokenizer) -> Result<u64, SendError>;

    /// What the detokenizer has not acknowledged.
    fn detokenizer_backlog(&self) -> Backlog;
}

/// The neighbours over real links.
pub struct LinkPeers {
    pub detokenizer: LinkHandle<ToDetokenizer>,
    pub tokenizer: LinkHandle<ToTokenizer>,
}

impl Peers for LinkPeers {
    fn to_detokenizer(&mut self, message: &ToDetokenizer) -> Result<u64, SendError> {
        self.detokenizer.send(message)
    }

    fn to_tokenizer(&mut self, message: &ToTokenizer) -> Result<u64, SendError> {
        self.tokenizer.send(message)
    }

    fn detokenizer_backlog(&self) -> Backlog {
        self.detokenizer.backlog()
    }
}

/// See the module.
pub struct Outbox<P> {
    peers: P,
    replies: VecDeque<ToTokenizer>,
    /// Ended; the row that says so is not sent.
    finishing: Vec<Request>,
    /// Ended and sent, with the number of the message that said so. Kept for a detokenizer that restarts.
    ending: VecDeque<(u64, Request)>,
    stalled: bool,
}

impl<P: Peers> Outbox<P> {
    pub fn new(peers: P) -> Self {
        Self {
            peers,
            replies: VecDeque::new(),
            finishing: Vec::new(),
            ending: VecDeque::new(),
            stalled: false,
        }
    }

    pub fn peers(&self) -> &P {
        &self.peers
    }

    #[cfg(test)]
    pub fn peers_mut(&mut self) -> &mut P {
        &mut self.peers
    }

    /// The detokenizer does not keep up: nothing new should be taken on.
    pub fn is_congested(&self) -> bool {
        let backlog = self.peers.detokenizer_backlog();
        self.stalled || backlog.messages > BACKLOG_LIMIT.messages || backlog.bytes > BACKLOG_LIMIT.bytes
    }

    /// Something waits for a link with room.
    pub fn has_unsent(&self) -> bool {
        !self.replies.is_empty() || !self.finishing.is_empty()
    }

    /// Finished requests that are not acknowledged, sent or not.
    pub fn unacknowledged(&self) -> usize {
        self.finishing.len() + self.ending.len()
    }

    /// Requests whose end is not acknowledged.
    pub fn ended(&self) -> impl Iterator<Item = &Request> {
        self.finishing.iter().chain(self.ending.iter().map(|(_, request)| request))
    }

    pub fn reply(&mut self, message: ToTokenizer) {
        self.replies.push_back(message);
        self.send_replies();
    }

    /// Takes a request whose `finish` is set. Its last row goes out with the next [`Self::send_rows`].
    pub fn finish(&mut self, request: Request) {
        assert!(request.finish.is_some() && request.seat.is_none(), "only ended requests are handed over");
        self.finishing.push(request);
    }

    /// Ends that the next [`Self::send_rows`] will tell.
    pub fn has_ends(&self) -> bool {
        !self.finishing.is_empty()
    }

    pub fn send_replies(&mut self) {
        while let Some(message) = self.replies.front() {
            match self.peers.to_tokenizer(message) {
                Ok(_) => {}
                Err(SendError::Full(_)) => return,
                Err(error) => tracing::error!(%error, "reply to the tokenizer process is dropped"),
            }
            self.replies.pop_front();
        }
    }

    /// Sends one message with every row that is due: of the running requests, and of those that ended.
    pub fn send_rows(&mut self, running: &mut [Request], stream_interval: u32) {
        let mut due: Vec<&mut Request> = running
            .iter_mut()
            .chain(self.finishing.iter_mut())
            .filter(|request| stream::is_due(request, stream_interval))
            .collect();
        if due.is_empty() {
            return;
        }
        let sent = send_group(&mut self.peers, &mut due);
        self.stalled = sent.is_err();
        let last = sent.unwrap_or_else(|last| last);
        for request in std::mem::take(&mut self.finishing) {
            if !request.sent.finished {
                self.finishing.push(request);
            } else if let Some(seq) = last {
                self.ending.push_back((seq, request));
            }
        }
    }

    /// The detokenizer is done with everything up to this message.
    pub fn acked(&mut self, up_to: u64) {
        self.ending.retain(|(seq, _)| *seq > up_to);
        self.stalled = false;
    }

    /// A new detokenizer has nothing: ends that were not acknowledged are told again.
    pub fn detokenizer_restarted(&mut self) {
        self.finishing.extend(self.ending.drain(..).map(|(_, request)| request));
        self.finishing.iter_mut().for_each(stream::forget_sent);
        self.stalled = false;
    }

    /// Nobody waits for replies to an earlier tokenizer process.
    pub fn tokenizer_restarted(&mut self) {
        self.replies.clear();
    }
}

/// Sends the rows in one message, or in several where one would be too large. Gives the number of the last
/// message that went, as an error when the link is full before all have gone.
fn send_group(peers: &mut impl Peers, group: &mut [&mut Request]) -> Result<Option<u64>, Option<u64>> {
    let rows = group.iter().map(|request| stream::row(request));
    let message = ToDetokenizer::TokenIds(BatchTokenIDOutput::from_rows(rows));
    match peers.to_detokenizer(&message) {
        Ok(seq) => {
            group.iter_mut().for_each(|request| stream::mark_sent(request));
            Ok(Some(seq))
        }
        Err(SendError::TooLarge { .. } | SendError::Unencodable(_)) if group.len() > 1 => {
            let (left, right) = group.split_at_mut(group.len() / 2);
            let first = send_group(peers, left)?;
            match send_group(peers, right) {
                Ok(last) => Ok(last.or(first)),
                Err(last) => Err(last.or(first)),
            }
        }
        Err(error @ (SendError::TooLarge { .. } | SendError::Unencodable(_))) => {
            Ok(send_failure(peers, group, &error))
        }
        Err(SendError::Full(_) | SendError::Closed) => Err(None),
    }
}

/// A row that no message can carry ends its request: the log-probabilities that make it large are given up.
fn send_failure(peers: &mut impl Peers, group: &mut [&mut Request], error: &SendError) -> Option<u64> {
    let request = group.first_mut()?;
    if request.logprobs.take().is_none() {
        tracing::error!(rid = %request.rid, %error, "a row without log-probabilities cannot be sent");
        stream::mark_sent(request);
        return None;
    }
    let message = format!("the reply cannot be sent: {error}");
    request.finish = Some(FinishReason::failed(500, "InternalServerError", message));
    send_group(peers, &mut group[..1]).ok().flatten()
}
