//! Owns the question whose draft is better for a row, the trie's or the model's, from what was accepted of either.
//! Knows no tokens.
//!
//! A long match is worth more than a short one, and how much depends on the text; so matches are judged by length, in
//! classes that double. A class drafts as long as its drafts were accepted as far as the model's; one that was passed
//! over is tried again after a while, since texts change.

/// Weight of the newest draft in a mean.
const NEWEST: f64 = 0.125;
/// Times that a class is passed over before it is tried again.
const PATIENCE: u32 = 32;
/// Drafts of which nothing is known are taken to be accepted this far.
const UNKNOWN: f64 = 1.0;
/// Matches of 1, 2, 4, 8 tokens and so on.
const CLASSES: usize = 8;

/// Who drafted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Guess {
    /// After so many tokens that were seen before.
    Trie {
        match_len: usize,
    },
    Model,
}

/// Accepted drafts per draft.
#[derive(Debug, Clone, Copy, Default)]
struct Mean(Option<f64>);

#[derive(Debug, Default)]
pub(super) struct Judge {
    classes: [Class; CLASSES],
    model: Mean,
}

#[derive(Debug, Clone, Copy, Default)]
struct Class {
    mean: Mean,
    passed_over: u32,
}

impl Judge {
    /// Whether the trie is to draft after a match of so many tokens. Counts that it was asked.
    pub(super) fn prefers_trie(&mut self, match_len: usize) -> bool {
        let model = self.model.value();
        let class = &mut self.classes[class_of(match_len)];
        let is_tried = class.mean.0.is_none() || class.mean.value() >= model || class.passed_over >= PATIENCE;
        class.passed_over = if is_tried { 0 } else { class.passed_over + 1 };
        is_tried
    }

    pub(super) fn learn(&mut self, guess: Guess, accepted: usize) {
        let mean = match guess {
            Guess::Trie { match_len } => &mut self.classes[class_of(match_len)].mean,
            Guess::Model => &mut self.model,
        };
        mean.add(accepted as f64);
    }
}

impl Mean {
    fn value(self) -> f64 {
        self.0.unwrap_or(UNKNOWN)
    }

    fn add(&mut self, accepted: f64) {
        self.0 = Some(self.0.map_or(accepted, |mean| mean + NEWEST * (accepted - mean)));
    }
}

fn class_of(match_len: usize) -> usize {
    (match_len.max(1).ilog2() as usize).min(CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Guess = Guess::Trie { match_len: 4 };

    fn judge(model: usize, short: usize) -> Judge {
        let mut judge = Judge::default();
        for _ in 0..20 {
            judge.learn(Guess::Model, model);
            judge.learn(SHORT, short);
        }
        judge
    }

    #[test]
    fn what_is_not_known_is_tried() {
        let mut judge = Judge::default();
        assert!(judge.prefers_trie(1) && judge.prefers_trie(100));
        judge.learn(Guess::Model, 3);
        assert!(judge.prefers_trie(4));
        judge.learn(SHORT, 0);
        assert!(!judge.prefers_trie(4), "it is known now");
        assert!(judge.prefers_trie(8), "of longer matches nothing is");
    }

    #[test]
    fn a_match_drafts_as_long_as_it_is_as_good_as_the_model() {
        assert!(judge(2, 2).prefers_trie(5));
        assert!(judge(1, 3).prefers_trie(5));
        let mut judge = judge(3, 1);
        let tried = (0..132).filter(|_| judge.prefers_trie(5)).count();
        assert_eq!(tried, 4, "once in {PATIENCE} rows, and the one after");
    }

    /// A text that repeats itself after one that did not wins the trie back.
    #[test]
    fn a_class_that_became_good_is_found_again() {
        let mut judge = judge(2, 0);
        let mut asked = 0;
        for row in 0..2000 {
            asked = row;
            if judge.prefers_trie(4) {
                judge.learn(SHORT, 7);
                if judge.prefers_trie(4) {
                    break;
                }
            }
        }
        assert!(asked < 200, "{asked} rows");
    }
}
