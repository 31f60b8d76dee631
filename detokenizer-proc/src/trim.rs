//! Owns stop strings: what may be shown while one could still be coming, and where the text ends when one came.
//!
//! One small automaton per stop string steps over every byte of the text once. Its state is the length of the
//! longest suffix of the text that is a prefix of the stop string, which is exactly what must be held back. The
//! match that ends first wins (of several that end at the same byte, the longest), so the outcome does not
//! depend on how the text was cut into pieces.

/// Trims one answer's text at its stop strings.
#[derive(Debug, Default)]
pub(crate) struct StopTrim {
    patterns: Vec<Pattern>,
    /// The stop string itself stays in the text (`no_stop_trim`), so nothing needs holding back.
    keep_match: bool,
    held: String,
    stopped: bool,
    #[cfg(test)]
    pub(crate) work: u64,
}

impl StopTrim {
    pub(crate) fn new(stop_strs: &[String], keep_match: bool) -> Self {
        let patterns =
            stop_strs.iter().filter(|stop| !stop.is_empty()).map(|stop| Pattern::new(stop)).collect();
        Self { patterns, keep_match, ..Self::default() }
    }

    /// Takes new text and returns what may be shown now.
    pub(crate) fn push(&mut self, text: String) -> String {
        if self.stopped || text.is_empty() {
            return String::new();
        }
        if self.patterns.is_empty() {
            return text;
        }
        let known = self.held.len();
        self.held.push_str(&text);
        for at in known..self.held.len() {
            if let Some(length) = self.step(self.held.as_bytes()[at]) {
                self.stopped = true;
                self.held.truncate(if self.keep_match { at + 1 } else { at + 1 - length });
                return std::mem::take(&mut self.held);
            }
        }
        let keep = if self.keep_match { 0 } else { self.longest_partial_match() };
        let hold = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, hold)
    }

    /// The stream has ended without a further match: what was held back is text like any other.
    pub(crate) fn release(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Whether a stop string came; no text follows it.
    pub(crate) fn stopped(&self) -> bool {
        self.stopped
    }

    /// Moves every pattern on by one byte; the length of the longest that this byte completes.
    fn step(&mut self, byte: u8) -> Option<usize> {
        #[cfg(test)]
        {
            self.work += self.patterns.len() as u64;
        }
        let complete = self.patterns.iter_mut().filter_map(|pattern| pattern.step(byte));
        complete.max()
    }

    fn longest_partial_match(&self) -> usize {
        self.patterns.iter().map(|pattern| pattern.matched).max().unwrap_or(0)
    }
}

/// A Knuth–Morris–Pratt automaton.
#[derive(Debug)]
struct Pattern {
    text: Box<[u8]>,
    /// `fallback[n]`: length of the longest proper suffix of the first `n + 1` bytes that is a prefix too.
    fallback: Box<[usize]>,
    matched: usize,
}

impl Pattern {
    fn new(text: &str) -> Self {
        let text: Box<[u8]> = text.as_bytes().into();
        let mut fallback = vec![0; text.len()];
        for at in 1..text.len() {
            fallback[at] = advance(&text, &fallback, fallback[at - 1], text[at]);
        }
        Self { text, fallback: fallback.into(), matched: 0 }
    }

    /// The pattern's length when this byte completes it. A complete pattern is not stepped again.
    fn step(&mut self, byte: u8) -> Option<usize> {
        self.matched = advance(&self.text, &self.fallback, self.matched, byte);
        (self.matched == self.text.len()).then_some(self.matched)
    }
}

/// The state that follows `matched` on `byte`.
fn advance(text: &[u8], fallback: &[usize], mut matched: usize, byte: u8) -> usize {
    while matched > 0 && text[matched] != byte {
        matched = fallback[matched - 1];
    }
    matched + usize::from(text[matched] == byte)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    /// Pushes the pieces; the texts shown after each, and what the end releases.
    fn run(stops: &[&str], keep_match: bool, pieces: &[&str]) -> (Vec<String>, String) {
        let mut trim = StopTrim::new(&strings(stops), keep_match);
        let shown = pieces.iter().map(|&piece| trim.push(piece.to_owned())).collect();
        (shown, trim.release())
    }

    #[track_caller]
    fn check(stops: &[&str], pieces: &[&str], shown: &[&str], rest: &str) {
        assert_eq!(run(stops, false, pieces), (strings(shown), rest.to_owned()), "{stops:?} in {pieces:?}");
    }

    #[test]
    fn no_part_of_a_stop_string_is_shown() {
        check(&["DEFGHIJ"], &["ABCD", "EFG", "HIJK", "L"], &["ABC", "", "", ""], "");
    }

    #[test]
    fn only_a_true_partial_match_is_held() {
        check(&["\n\nUser"], &["one\n", "two", "\n\n", "Us", "a"], &["one", "\ntwo", "", "", "\n\nUsa"], "");
        check(&["stop"], &["a long line of ordinary text"], &["a long line of ordinary text"], "");
    }

    #[test]
    fn the_end_releases_what_was_held() {
        check(&["</end>"], &["text </en"], &["text "], "</en");
    }

    #[test]
    fn the_first_match_of_a_block_cuts_wherever_it_is() {
        check(&["STOP"], &["a STOP b c d e f g STOP h"], &["a "], "");
        check(&["long stop", "b"], &["a b long stop"], &["a "], "");
    }

    #[test]
    fn of_matches_that_end_together_the_longest_cuts() {
        check(&["b", "ab"], &["xab"], &["x"], "");
        check(&["ab", "b"], &["xa", "b"], &["x", ""], "");
    }

    #[test]
    fn repetitive_stop_strings_fall_back_correctly() {
        check(&["aab"], &["aaa", "ab!"], &["a", "a"], "");
        check(&["abab!"], &["ababab", "!x"], &["ab", ""], "");
    }

    #[test]
    fn characters_are_never_split() {
        check(&["é€"], &["aé", "x"], &["a", "éx"], "");
        check(&["\u{e9}"], &["\u{e8}"], &["\u{e8}"], "");
    }

    #[test]
    fn keeping_the_match_holds_nothing_and_ends_with_it() {
        assert_eq!(
            run(&["DEF"], true, &["abD", "E", "Fg", "h"]),
            (strings(&["abD", "E", "F", ""]), "".into())
        );
    }

    #[test]
    fn empty_stop_strings_are_none() {
        check(&[""], &["abc"], &["abc"], "");
    }

    /// The rule, told without an automaton.
    fn expected(text: &str, stops: &[String]) -> String {
        for end in 0..=text.len() {
            if !text.is_char_boundary(end) {
                continue;
            }
            let longest =
                stops.iter().filter(|stop| text[..end].ends_with(stop.as_str())).map(String::len).max();
            if let Some(length) = longest {
                return text[..end - length].to_owned();
            }
        }
        text.to_owned()
    }

    fn longest_held(text: &str, stops: &[String]) -> usize {
        let is_prefix = |at: &usize| {
            text.is_char_boundary(*at) && stops.iter().any(|stop| stop.starts_with(&text[*at..]))
        };
        (0..text.len()).find(is_prefix).map_or(0, |at| text.len() - at)
    }

    proptest! {
        #[test]
        fn any_cutting_gives_the_same_text(
            pieces in prop::collection::vec("[ab€]{0,4}", 0..12),
            stops in prop::collection::vec("[ab€]{1,4}", 1..4),
        ) {
            let mut trim = StopTrim::new(&stops, false);
            let (mut shown, mut seen) = (String::new(), String::new());
            for piece in &pieces {
                shown += &trim.push(piece.clone());
                seen += piece;
                if !trim.stopped() {
                    prop_assert_eq!(seen.len() - shown.len(), longest_held(&seen, &stops));
                }
            }
            shown += &trim.release();
            prop_assert_eq!(shown, expected(&seen, &stops));
        }
    }
}
