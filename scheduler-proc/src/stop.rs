//! Owns the decision where an answer ends: stop strings and patterns, stop and end tokens, and the limit, over all
//! tokens a step made. It looks at one token after the other, so that a block ends where single steps would.

use std::ops::Range;
use std::sync::Arc;

use proto::{FinishReason, Matched, SamplingParams, TokenBytes, TokenId};
use regex::bytes::{Regex, RegexBuilder};

#[cfg(test)]
mod tests;

/// How far back a stop pattern can see, in bytes of text.
pub const REGEX_WINDOW: usize = 4096;

/// Heap a compiled pattern may take.
const REGEX_SIZE_LIMIT: usize = 1 << 20;

/// What every request's stops need to know of the model.
#[derive(Debug, Clone)]
pub struct Vocabulary {
    pub size: usize,
    pub eos_token_ids: Arc<[TokenId]>,
    /// `None` with `--skip-tokenizer-init`: nothing is known about text, and stop strings are refused earlier.
    pub bytes: Option<Arc<TokenBytes>>,
}

/// Why a request's stops cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum StopError {
    #[error("stop strings and patterns need a tokenizer, and the server runs without one")]
    NoTokenizer,
    #[error("stop_regex {pattern:?}: {source}")]
    Pattern { pattern: String, source: Box<regex::Error> },
}

/// How much of a block reaches the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scan {
    /// Tokens of the block that are kept, the one that ended the answer included.
    pub kept: usize,
    pub reason: Option<FinishReason>,
}

/// One request's stops, with the text they look at.
#[derive(Debug)]
pub struct Stops {
    vocabulary: Vocabulary,
    ignore_eos: bool,
    stop_token_ids: Vec<TokenId>,
    limit: usize,
    text: Option<TextStops>,
}

impl Stops {
    /// `limit` is the number of answer tokens at most.
    pub fn new(params: &SamplingParams, limit: usize, vocabulary: &Vocabulary) -> Result<Self, StopError> {
        Ok(Self {
            vocabulary: vocabulary.clone(),
            ignore_eos: params.ignore_eos,
            stop_token_ids: params.stop_token_ids.clone(),
            limit,
            text: TextStops::new(params, vocabulary)?,
        })
    }

    /// Answer tokens at most.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Takes in answer tokens that were checked in an earlier life of the scheduler.
    pub fn resume(&mut self, output: &[TokenId]) {
        if let Some(text) = &mut self.text {
            output.iter().for_each(|&id| {
                text.push(id);
            });
        }
    }

    /// Looks at a block of new tokens behind `output_len` earlier ones. The earliest end wins; at one and the
    /// same token an unknown id goes before a stop string, that before a stop token, and that before the limit.
    pub fn scan(&mut self, block: &[TokenId], output_len: usize) -> Scan {
        if output_len >= self.limit {
            return Scan { kept: 0, reason: Some(self.length()) };
        }
        for (index, &id) in block.iter().enumerate() {
            if id as usize >= self.vocabulary.size {
                let reason = FinishReason::failed(
                    500,
                    "InternalServerError",
                    format!("the model chose token {id}, outside its vocabulary of {}", self.vocabulary.size),
                );
                return Scan { kept: index, reason: Some(reason) };
            }
            if let Some(reason) = self.end_at(id, output_len + index + 1) {
                return Scan { kept: index + 1, reason: Some(reason) };
            }
        }
        Scan { kept: block.len(), reason: None }
    }

    fn end_at(&mut self, id: TokenId, output_len: usize) -> Option<FinishReason> {
        if let Some(matched) = self.text.as_mut().and_then(|text| text.push(id)) {
            return Some(FinishReason::Stop { matched });
        }
        let is_eos = !self.ignore_eos && self.vocabulary.eos_token_ids.contains(&id);
        if is_eos || self.stop_token_ids.contains(&id) {
            return Some(FinishReason::Stop { matched: Matched::Token(id) });
        }
        (output_len >= self.limit).then(|| self.length())
    }

    fn length(&self) -> FinishReason {
        FinishReason::Length { length: self.limit as u32 }
    }
}

/// Stops that look at text, as the client will see it.
#[derive(Debug)]
struct TextStops {
    bytes: Arc<TokenBytes>,
    skip_special_tokens: bool,
    strings: Vec<String>,
    longest: usize,
    patterns: Vec<(String, Regex)>,
    /// The end of the answer's text. Only its last bytes are kept, but never fewer than a search can need.
    tail: Vec<u8>,
}

impl TextStops {
    fn new(params: &SamplingParams, vocabulary: &Vocabulary) -> Result<Option<Self>, StopError> {
        if params.stop.is_empty() && params.stop_regex.is_empty() {
            return Ok(None);
        }
        let bytes = vocabulary.bytes.clone().ok_or(StopError::NoTokenizer)?;
        let patterns = params.stop_regex.iter().map(|pattern| compile(pattern)).collect::<Result<_, _>>()?;
        Ok(Some(Self {
            bytes,
            skip_special_tokens: params.skip_special_tokens,
            longest: params.stop.iter().map(String::len).max().unwrap_or(0),
            strings: params.stop.iter().filter(|stop| !stop.is_empty()).cloned().collect(),
            patterns,
            tail: Vec::new(),
        }))
    }

    /// Adds a token's text and says what it completes.
    fn push(&mut self, id: TokenId) -> Option<Matched> {
        let hidden = self.skip_special_tokens && self.bytes.is_special(id);
        let text = if hidden { &[] } else { self.bytes.bytes(id) };
        if text.is_empty() {
            return None;
        }
        let old_end = self.tail.len();
        self.tail.extend_from_slice(text);
        let found = self.find_string(old_end).or_else(|| self.find_pattern(text.len()));
        self.forget();
        found
    }

    /// Among the strings that the new bytes complete, the one the client would see first. Matches that ended
    /// before were looked for before.
    fn find_string(&self, old_end: usize) -> Option<Matched> {
        let from = (old_end + 1).saturating_sub(self.longest);
        let window = &self.tail[from..];
        self.strings
            .iter()
            .filter_map(|string| Some((find(window, string.as_bytes())?, string)))
            .min_by_key(|(found, _)| found.start)
            .map(|(_, string)| Matched::Str(string.clone()))
    }

    fn find_pattern(&self, new_len: usize) -> Option<Matched> {
        let from = self.tail.len().saturating_sub(REGEX_WINDOW + new_len);
        self.patterns
            .iter()
            .find(|(_, regex)| regex.is_match_at(&self.tail, from))
            .map(|(pattern, _)| Matched::Regex(pattern.clone()))
    }

    /// Cuts the tail now and then. One byte more than any search reaches stays, so that `^` keeps meaning the
    /// start of the answer.
    fn forget(&mut self) {
        let needed = 1 + self.longest.max(if self.patterns.is_empty() { 0 } else { 2 * REGEX_WINDOW });
        if self.tail.len() > 2 * needed + REGEX_WINDOW {
            self.tail.drain(..self.tail.len() - needed);
        }
    }
}

fn compile(pattern: &str) -> Result<(String, Regex), StopError> {
    RegexBuilder::new(pattern)
        .size_limit(REGEX_SIZE_LIMIT)
        .build()
        .map(|regex| (pattern.to_owned(), regex))
        .map_err(|source| StopError::Pattern { pattern: pattern.to_owned(), source: Box::new(source) })
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<Range<usize>> {
    haystack.windows(needle.len()).position(|window| window == needle).map(|at| at..at + needle.len())
}
