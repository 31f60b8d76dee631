//! Owns the seam between bytes and text: tokens may split a character, text may not.

/// Joins bytes into text. Holds at most three bytes: the start of a character whose end may still come.
#[derive(Debug, Default)]
pub(crate) struct Utf8Tail {
    pending: Vec<u8>,
    /// How many of `pending`, from the front, belong to the prompt.
    foreign: usize,
    #[cfg(test)]
    pub(crate) work: u64,
}

impl Utf8Tail {
    /// Takes the end of the prompt: nothing of it is shown, but a character that it begins may be completed.
    pub(crate) fn start_after(prompt: &[u8]) -> Self {
        let mut tail = Self::default();
        tail.push(prompt, &mut String::new());
        tail.foreign = tail.pending.len();
        tail
    }

    /// Appends to `text` what the bytes complete; each maximal broken part becomes one U+FFFD.
    pub(crate) fn push(&mut self, bytes: &[u8], text: &mut String) {
        self.pending.extend_from_slice(bytes);
        self.release(text, false);
    }

    /// The stream has ended: an open character is a broken one.
    pub(crate) fn finish(&mut self, text: &mut String) {
        self.release(text, true);
    }

    fn release(&mut self, text: &mut String, ended: bool) {
        let mut taken = 0;
        for chunk in self.pending.utf8_chunks() {
            let (valid, broken) = (chunk.valid(), chunk.invalid());
            text.push_str(valid);
            taken += valid.len();
            if broken.is_empty() {
                break;
            }
            let is_last = taken + broken.len() == self.pending.len();
            if is_last && !ended && may_continue(broken) {
                break;
            }
            taken += broken.len();
            // A broken part that lies in the prompt was the prompt's to show.
            if taken > self.foreign {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        #[cfg(test)]
        {
            self.work += self.pending.len() as u64;
        }
        self.pending.drain(..taken);
        self.foreign = self.foreign.saturating_sub(taken);
    }
}

/// Whether the bytes are the start of a character, rather than wrong whatever follows.
fn may_continue(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(prompt: &[u8], pieces: &[&[u8]], expect: &[&str], rest: &str) {
        let mut tail = Utf8Tail::start_after(prompt);
        let texts: Vec<String> = pieces
            .iter()
            .map(|piece| {
                let mut text = String::new();
                tail.push(piece, &mut text);
                text
            })
            .collect();
        assert_eq!(texts, expect, "after {prompt:x?}: {pieces:x?}");
        let mut last = String::new();
        tail.finish(&mut last);
        assert_eq!(last, rest, "end of {pieces:x?}");
    }

    #[test]
    fn a_split_character_waits_for_its_end() {
        check(b"", &[b"a\xe4\xb8", b"\x96b"], &["a", "世b"], "");
        check(b"", &[b"\xf0", b"\x9f", b"\x98", b"\x80"], &["", "", "", "😀"], "");
    }

    #[test]
    fn broken_parts_become_one_mark_each() {
        check(b"", &[b"\x80"], &["\u{fffd}"], "");
        check(b"", &[b"\xe2\x82", b"a"], &["", "\u{fffd}a"], "");
        check(b"", &[b"\xe2\x82", b"\xe2\x82\xac"], &["", "\u{fffd}€"], "");
        check(b"", &[b"\xc0\xaf"], &["\u{fffd}\u{fffd}"], "");
        check(b"", &[b"\xf0\x9f\x98"], &[""], "\u{fffd}");
    }

    #[test]
    fn the_prompts_bytes_are_completed_but_never_marked() {
        check(b"caf\xc3", &[b"\xa9!"], &["é!"], "");
        check(b"caf\xc3", &[b"e"], &["e"], "");
        check(b"caf\xc3", &[], &[], "");
        check(b"\xf0\x9f", &[b"\x98", b"x"], &["", "\u{fffd}x"], "");
    }
}
