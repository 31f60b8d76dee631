//! Owns reading server-sent events: one `data:` line and a blank line each, as this API sends them.

use std::io::{BufRead, BufReader, Read};

/// The payloads of a stream, without the closing `[DONE]`.
pub struct Events<R> {
    reader: BufReader<R>,
    /// Whether `[DONE]` was seen.
    pub done: bool,
}

impl<R: Read> Events<R> {
    pub fn new(stream: R) -> Self {
        Self { reader: BufReader::new(stream), done: false }
    }

    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = self.reader.read_line(&mut line).ok()?;
        (read > 0).then(|| line.trim_end_matches(['\n', '\r']).to_owned())
    }
}

impl<R: Read> Iterator for Events<R> {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        while !self.done {
            let line = self.line()?;
            let Some(data) = line.strip_prefix("data:").map(str::trim_start) else {
                // Comments keep a connection open; anything else is no event.
                assert!(line.is_empty() || line.starts_with(':'), "not a line of an event stream: {line:?}");
                continue;
            };
            if data == "[DONE]" {
                self.done = true;
                return None;
            }
            return Some(data.to_owned());
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_come_in_order_and_the_end_is_noticed() {
        let mut events =
            Events::new("data: {\"a\":1}\n\n: ping\n\ndata: 2\r\n\r\ndata: [DONE]\n\n".as_bytes());
        assert_eq!(events.by_ref().collect::<Vec<_>>(), ["{\"a\":1}", "2"]);
        assert!(events.done);
    }

    #[test]
    fn a_broken_stream_ends_without_done() {
        let mut events = Events::new("data: 1\n\ndata: 2".as_bytes());
        assert_eq!(events.by_ref().count(), 2);
        assert!(!events.done);
    }
}
