//! Owns the decode state of every live request, and what each row means: a request's first, its next, a repeated
//! one, or one that cannot be decoded. A state is removed by its request's end and by nothing else.

use std::sync::Arc;

use proto::{FinishReason, RequestId, TextRow, TokenBytes, TokenId, TokenRow};
use rustc_hash::FxHashMap;

use crate::decode::DecodeState;

/// The live requests of one lane.
#[derive(Debug)]
pub struct States {
    /// `None` with `--skip-tokenizer-init`: rows pass through without text.
    tokens: Option<Arc<TokenBytes>>,
    live: FxHashMap<RequestId, DecodeState>,
}

/// What became of a row.
#[derive(Debug, Clone, PartialEq)]
pub enum Decoded {
    Text(TextRow),
    /// No state and not a first row: dropped. After a restart the scheduler may have queued such a row before it
    /// learned that this process is new; the row that carries all of the request's ids follows.
    Orphan(RequestId),
    /// Ids are missing between what was decoded and this row, which cannot heal: the request is failed alone.
    Lost(TextRow),
}

/// What a row carries of its request's answer.
enum Carried<'a> {
    /// All ids so far; the first `known` came in earlier rows.
    Whole { ids: &'a [TokenId], known: usize },
    /// The ids from `start` on.
    Next { ids: &'a [TokenId], start: usize },
    /// Lengths that contradict each other.
    Broken,
}

impl States {
    pub fn new(tokens: Option<Arc<TokenBytes>>) -> Self {
        Self { tokens, live: FxHashMap::default() }
    }

    /// Requests that are being decoded.
    pub fn len(&self) -> usize {
        self.live.len()
    }

    pub fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    /// A new scheduler starts every request afresh, and says nothing of those it does not have.
    pub fn clear(&mut self) {
        self.live.clear();
    }

    /// Decodes one row.
    pub fn decode(&mut self, row: TokenRow) -> Decoded {
        let Some(tokens) = &self.tokens else {
            return Decoded::Text(TextRow { text: String::new(), text_start: 0, progress: row.progress });
        };
        let rid = &row.progress.rid;
        let end = row.progress.finished_reason.as_ref();
        let (text, text_start) = match carried(&row) {
            Carried::Whole { ids, known } => {
                let mut fresh = DecodeState::new(tokens, &row.decode);
                fresh.push(tokens, &ids[..known]);
                let part = take(&mut fresh, tokens, &ids[known..], end);
                self.live.insert(rid.clone(), fresh);
                part
            }
            Carried::Next { ids, start } => match self.live.get_mut(rid) {
                None => return Decoded::Orphan(row.progress.rid),
                Some(state) if start > state.ids() => return self.fail(row),
                // Ids that were taken before have their text in an earlier row.
                Some(state) => take(state, tokens, &ids[(state.ids() - start).min(ids.len())..], end),
            },
            Carried::Broken => return self.fail(row),
        };
        if end.is_some() {
            self.live.remove(rid);
        }
        Decoded::Text(TextRow { text, text_start, progress: row.progress })
    }

    fn fail(&mut self, mut row: TokenRow) -> Decoded {
        let text_start = self.live.remove(&row.progress.rid).map_or(0, |state| state.text_len());
        let message = "tokens of this request were lost on their way to the detokenizer";
        row.progress.finished_reason = Some(FinishReason::failed(500, "InternalServerError", message));
        Decoded::Lost(TextRow { text: String::new(), text_start, progress: row.progress })
    }
}

/// The text of a request's next ids, and its place in the whole text.
fn take(
    state: &mut DecodeState,
    tokens: &TokenBytes,
    ids: &[TokenId],
    end: Option<&FinishReason>,
) -> (String, u64) {
    let text_start = state.text_len();
    let text = match end {
        None => state.push(tokens, ids),
        Some(reason) => state.finish(tokens, ids, reason),
    };
    (text, text_start)
}

fn carried(row: &TokenRow) -> Carried<'_> {
    let ids = row.decode.decode_ids.as_slice();
    let (start, end) = (row.progress.start as usize, row.progress.completion_tokens as usize);
    let own = row.progress.output_ids.len();
    if end != start + own {
        return Carried::Broken;
    }
    // A later row carries fewer ids than the answer has, so one with all of them behind its prompt ids is a first.
    match ids.get(row.decode.read_offset as usize..) {
        Some(answer) if answer.len() == end => Carried::Whole { ids: answer, known: start },
        _ if ids.len() == own => Carried::Next { ids, start },
        _ => Carried::Broken,
    }
}

#[cfg(test)]
mod tests;
