//! Owns one request's way from token ids to text: only text that never has to be taken back, and the same text
//! however the ids arrive. Pure: no sockets, no map, no clock.

use proto::{DecodeRow, FinishReason, Matched, TokenBytes, TokenId};

use crate::trim::StopTrim;
use crate::utf8::Utf8Tail;

/// The decoding of one answer. Keeps at most three bytes of an open character and the start of a stop string, so
/// the cost of a token does not depend on how many came before it.
#[derive(Debug)]
pub struct DecodeState {
    skip_special_tokens: bool,
    no_stop_trim: bool,
    /// The next byte is the text's first, and the tokenizer's own space there is not shown.
    strip_space: bool,
    utf8: Utf8Tail,
    trim: StopTrim,
    ids: usize,
    text_len: u64,
}

impl DecodeState {
    /// Starts an answer behind the row's prompt ids, which decide how the answer's first bytes read.
    ///
    /// `spaces_between_special_tokens` changes nothing for the tokenizers supported here, as in SGLang.
    pub fn new(tokens: &TokenBytes, row: &DecodeRow) -> Self {
        let prompt = row.decode_ids.iter().take(row.read_offset as usize);
        let shown = prompt.filter(|&&id| !(row.skip_special_tokens && tokens.is_special(id)));
        let context: Vec<u8> = shown.flat_map(|&id| tokens.bytes(id)).copied().collect();
        Self {
            skip_special_tokens: row.skip_special_tokens,
            no_stop_trim: row.no_stop_trim,
            strip_space: tokens.leading_space_stripped() && context.is_empty(),
            utf8: Utf8Tail::start_after(&context),
            trim: StopTrim::new(&row.stop_strs, row.no_stop_trim),
            ids: 0,
            text_len: 0,
        }
    }

    /// Output ids taken so far.
    pub fn ids(&self) -> usize {
        self.ids
    }

    /// Bytes of text given out so far.
    pub fn text_len(&self) -> u64 {
        self.text_len
    }

    /// Takes the next output ids; the text that they make certain.
    pub fn push(&mut self, tokens: &TokenBytes, ids: &[TokenId]) -> String {
        self.ids += ids.len();
        let text = self.join(tokens, ids);
        let shown = self.trim.push(text);
        self.give(shown)
    }

    /// Takes the last output ids; everything that is left of the text.
    pub fn finish(&mut self, tokens: &TokenBytes, ids: &[TokenId], reason: &FinishReason) -> String {
        self.ids += ids.len();
        let mut text = self.join(tokens, self.shown_at_end(ids, reason));
        self.utf8.finish(&mut text);
        let mut shown = self.trim.push(text);
        shown += &self.trim.release();
        self.give(shown)
    }

    /// A token that ended the answer is no part of its text, unless the client asked to keep it.
    fn shown_at_end<'a>(&self, ids: &'a [TokenId], reason: &FinishReason) -> &'a [TokenId] {
        match (reason, ids) {
            (FinishReason::Stop { matched: Matched::Token(stop) }, [shown @ .., last])
                if last == stop && !self.no_stop_trim =>
            {
                shown
            }
            _ => ids,
        }
    }

    fn join(&mut self, tokens: &TokenBytes, ids: &[TokenId]) -> String {
        let mut text = String::new();
        if self.trim.stopped() {
            return text;
        }
        for &id in ids {
            if self.skip_special_tokens && tokens.is_special(id) {
                continue;
            }
            let mut bytes = tokens.bytes(id);
            if bytes.is_empty() {
                continue;
            }
            if std::mem::take(&mut self.strip_space) {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
            self.utf8.push(bytes, &mut text);
        }
        text
    }

    fn give(&mut self, text: String) -> String {
        self.text_len += text.len() as u64;
        text
    }

    /// Bytes looked at so far.
    #[cfg(test)]
    pub(crate) fn work(&self) -> u64 {
        self.utf8.work + self.trim.work
    }
}

#[cfg(test)]
mod tests;
