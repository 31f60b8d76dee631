//! Owns the rules of acceptance: what becomes of one position, given the target's law there and the drafts tried.
//!
//! By equality the target chooses as in plain decoding and a draft is accepted if it is that choice; the draft may
//! share the choice's noise, and the output never depends on it. The other two rules are SGLang's, and weigh a draft:
//! - *rejection*: a token `x` drawn from `q` is accepted with probability `min(1, p(x) / q(x))`, otherwise the
//!   position's law becomes the normalised `(p - q)+` and the next sibling is tried on it; a token that was sure to be
//!   tried has all of `q`. The output's law is `p`, provided that a draft knows nothing of the coin and of the last
//!   draw: it must be drawn with noise of its own.
//! - *thresholds*: one coin for all siblings; a token is accepted if the coin is below the mass of the siblings so
//!   far over `acc`, or if its own probability reaches `single`; otherwise its mass is gone. With both at 1 the law
//!   is `p`, below it leans towards the draft. A draft must not know the coin either, and its law plays no part.
//!
//! `p` and `q` are what the request's edits, temperature and filters leave of the logits. A draw after all drafts were
//! refused, and at a position without drafts, has the noise of plain decoding. Greedy requests know equality only.

use proto::{AcceptanceRule, SamplingParams, TokenId};

use super::DraftDraw;
use super::tree::{DraftTree, Parent, Sibling};
use crate::batch::ChosenToken;
use crate::engine::rng::{Noise, Stream};
use crate::engine::sample::{self, ChooseError, Chooser, Path};

/// SGLang's smallest `acc`: below it everything with some probability is accepted anyway.
const SMALLEST_ACC: f64 = 1e-9;
/// Thresholds weigh all siblings with the coin of this token.
const LEVEL: TokenId = 0;

/// A position to decide: `path` ends before it, `at` is the parent of what is tried there.
pub(super) struct Node<'a> {
    pub logits: &'a [f32],
    pub path: &'a Path<'a>,
    pub tree: &'a DraftTree,
    pub at: Parent,
}

/// The token of a position, and the draft node if it is one's.
pub(super) struct Decision {
    pub token: ChosenToken,
    pub accepted: Option<usize>,
}

/// How a draft must be drawn for a rule.
pub(super) fn draw(rule: AcceptanceRule, sampling: &SamplingParams) -> DraftDraw {
    match rule {
        _ if sample::is_greedy(sampling) => DraftDraw::Shared,
        AcceptanceRule::Equality => DraftDraw::Shared,
        AcceptanceRule::Rejection => DraftDraw::Own,
        AcceptanceRule::Thresholds { .. } => DraftDraw::Likeliest,
    }
}

pub(super) fn decide(
    rule: AcceptanceRule,
    chooser: &mut Chooser,
    node: Node<'_>,
) -> Result<Decision, ChooseError> {
    let Node { logits, path, tree, at } = node;
    let greedy = sample::is_greedy(&path.params().sampling);
    let mut siblings = tree.siblings(at).peekable();
    if greedy || rule == AcceptanceRule::Equality || siblings.peek().is_none() {
        let token = chooser.choose(logits, path)?;
        let accepted = tree.child(at, token.id);
        return Ok(Decision { token, accepted });
    }
    let mut left = chooser.law(logits, path)?;
    let coins = path.noise(Stream::Coin);
    let accepted = match rule {
        AcceptanceRule::Thresholds { single, acc } => {
            let mut weigh = Thresholds { single, acc: acc.max(SMALLEST_ACC), mass: 0.0 };
            siblings.find(|sibling| weigh.accepts(&mut left, sibling, coins))
        }
        _ => siblings.find(|sibling| by_ratio(&mut left, sibling, coins)),
    };
    let id = match accepted {
        Some(Sibling { token, .. }) => token,
        // Where rounding leaves nothing of the law, refusing was as good as impossible.
        None => match sample::draw_from(&left, path) {
            Some(token) => token,
            None => chooser.choose(logits, path)?.id,
        },
    };
    let token = chooser.report(id, logits, path)?;
    Ok(Decision { token, accepted: accepted.map(|sibling| sibling.node) })
}

fn by_ratio(left: &mut [f64], sibling: &Sibling<'_>, coins: Noise) -> bool {
    let Sibling { token, law, .. } = *sibling;
    let p = at(left, token);
    let q = law.map_or(1.0, |law| at(law, token));
    // A token that cannot have been drawn is refused, and so is one whose law is not a number.
    if q > 0.0 && coins.uniform(token) * q < p {
        return true;
    }
    match law {
        Some(law) => left.iter_mut().zip(law).for_each(|(p, q)| *p = (*p - q).max(0.0)),
        None => remove(left, token),
    }
    let total: f64 = left.iter().sum();
    if total > 0.0 {
        left.iter_mut().for_each(|p| *p /= total);
    }
    false
}

struct Thresholds {
    single: f64,
    acc: f64,
    /// Of the siblings so far.
    mass: f64,
}

impl Thresholds {
    fn accepts(&mut self, left: &mut [f64], sibling: &Sibling<'_>, coins: Noise) -> bool {
        let p = at(left, sibling.token);
        self.mass += p;
        // What the filters took is never accepted, whatever the thresholds.
        if p > 0.0 && (coins.uniform(LEVEL) < self.mass / self.acc || p >= self.single) {
            return true;
        }
        remove(left, sibling.token);
        false
    }
}

fn at(law: &[f64], token: TokenId) -> f64 {
    law.get(token as usize).copied().unwrap_or(0.0)
}

fn remove(law: &mut [f64], token: TokenId) {
    if let Some(p) = law.get_mut(token as usize) {
        *p = 0.0;
    }
}
