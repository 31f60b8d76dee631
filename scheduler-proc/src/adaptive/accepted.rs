//! Owns what was accepted at one depth: mean, spread, how often all was, and whether it still is so.

/// Steps that count: older ones fade.
const HORIZON: f64 = 256.0;
/// Rows that say enough.
const FEWEST_ROWS: f64 = 8.0;
/// How often a draft behind accepted ones is taken to be right, where nothing is known of it.
const FURTHER: f64 = 0.8;
/// Weight of the newest step in the mean that is to tell a change.
const RECENT: f64 = 0.2;
/// Steps and rows from which on a change can be told, and by how many standard deviations.
const STEADY_STEPS: u32 = 12;
const STEADY_ROWS: f64 = 32.0;
const CHANGE: f64 = 4.0;

/// Drafts accepted per row and step.
#[derive(Debug, Clone, Default)]
pub(super) struct Accepted {
    steps: u32,
    rows: f64,
    mean: f64,
    /// Sum of squared distances from the mean.
    spread: f64,
    /// Rows in which so many drafts were accepted at least, from one on.
    at_least: Vec<f64>,
    /// Mean of the last few steps.
    recent: f64,
}

/// A mean and its standard error.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Estimate {
    pub mean: f64,
    pub error: f64,
}

impl Accepted {
    /// One step's rows, of which there is one at least; whether they say that things have changed.
    pub(super) fn add(&mut self, rows: &[usize]) -> bool {
        let keep = 1.0 - 1.0 / HORIZON;
        self.steps = self.steps.saturating_add(1);
        self.rows *= keep;
        self.spread *= keep;
        self.at_least.iter_mut().for_each(|rows| *rows *= keep);
        for &accepted in rows {
            if self.at_least.len() < accepted {
                self.at_least.resize(accepted, 0.0);
            }
            self.at_least[..accepted].iter_mut().for_each(|rows| *rows += 1.0);
            let accepted = accepted as f64;
            self.rows += 1.0;
            let distance = accepted - self.mean;
            self.mean += distance / self.rows;
            self.spread += distance * (accepted - self.mean);
        }
        let step = rows.iter().sum::<usize>() as f64 / rows.len() as f64;
        self.recent = if self.steps == 1 { step } else { (1.0 - RECENT) * self.recent + RECENT * step };
        let deviation = (self.variance() * RECENT / (2.0 - RECENT) / rows.len() as f64).sqrt();
        let steady = self.steps >= STEADY_STEPS && self.rows >= STEADY_ROWS;
        steady && (self.recent - self.mean).abs() > CHANGE * deviation
    }

    /// `None` while too little is known.
    pub(super) fn estimate(&self) -> Option<Estimate> {
        (self.rows >= FEWEST_ROWS)
            .then(|| Estimate { mean: self.mean, error: (self.variance() / self.rows).sqrt() })
    }

    /// What depth `there` could well accept, seen from depth `here`: a shallower draft as much as the first drafts of
    /// this one; a deeper one more only in rows that accepted everything.
    pub(super) fn at_best(&self, here: u32, there: u32) -> Option<f64> {
        let Estimate { mean, .. } = self.estimate()?;
        let share =
            |at_least: u32| self.at_least.get(at_least as usize - 1).map_or(0.0, |rows| rows / self.rows);
        Some(match there > here {
            true => {
                mean + share(here) * (1..=there - here).map(|level| FURTHER.powi(level as i32)).sum::<f64>()
            }
            false => (1..=there).map(share).sum(),
        })
    }

    /// Few rows that happen to agree prove little: one that does not is taken to be among them.
    fn variance(&self) -> f64 {
        (self.spread + 0.25) / self.rows.max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_and_error_are_those_of_the_rows() {
        let mut accepted = Accepted::default();
        assert_eq!(accepted.estimate(), None);
        for _ in 0..10 {
            assert!(!accepted.add(&[0, 3]));
        }
        let Estimate { mean, error } = accepted.estimate().unwrap();
        assert!((mean - 1.5).abs() < 0.05, "{mean}");
        assert!((error - 1.5 / 20f64.sqrt()).abs() < 0.02, "{error}");
    }

    #[test]
    fn a_change_is_seen_and_noise_is_not() {
        let mut accepted = Accepted::default();
        for step in 0..200 {
            assert!(!accepted.add(&[step % 3, (step + 1) % 3, step % 2]), "step {step}");
        }
        let seen = (0..10).find(|_| accepted.add(&[3, 3, 3])).unwrap();
        assert!((1..6).contains(&seen), "after {seen} steps");
    }

    #[test]
    fn a_few_rows_show_no_change() {
        let mut accepted = Accepted::default();
        for step in 0..STEADY_STEPS as usize - 1 {
            assert!(!accepted.add(&[if step < 5 { 0 } else { 7 }; 8]));
        }
    }

    #[test]
    fn other_depths_are_bounded_by_what_this_one_showed() {
        let mut accepted = Accepted::default();
        assert_eq!(accepted.at_best(3, 1), None);
        (0..8).for_each(|_| _ = accepted.add(&[0, 1, 3, 3]));
        let check = |there: u32, expect: f64| {
            let best = accepted.at_best(3, there).unwrap();
            assert!((best - expect).abs() < 0.02, "{there}: {best}");
        };
        check(1, 0.75);
        check(2, 1.25);
        check(5, 1.75 + 0.5 * (0.8 + 0.64));
        check(0, 0.0);
    }
}
