//! Owns what was accepted at one depth: mean, spread, and how often all was.

/// Steps that count: older ones fade.
const HORIZON: f64 = 256.0;
/// Rows that say enough.
const FEWEST_ROWS: f64 = 8.0;
/// Rows from which on a change of the mean can be seen, and by how many standard deviations.
const STEADY_ROWS: f64 = 32.0;
const CHANGE: f64 = 4.0;

/// Drafts accepted per row and step.
#[derive(Debug, Clone, Default)]
pub(super) struct Accepted {
    rows: f64,
    mean: f64,
    /// Sum of squared distances from the mean.
    spread: f64,
    /// Rows in which every draft was accepted.
    full: f64,
}

/// A mean and its standard error.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Estimate {
    pub mean: f64,
    pub error: f64,
    /// Share of rows in which every draft was accepted.
    pub full: f64,
}

impl Accepted {
    /// One step's rows at a depth of `steps`.
    pub(super) fn add(&mut self, rows: &[usize], steps: u32) {
        let keep = 1.0 - 1.0 / HORIZON;
        self.rows *= keep;
        self.spread *= keep;
        self.full *= keep;
        for &accepted in rows {
            let accepted = accepted as f64;
            self.rows += 1.0;
            let distance = accepted - self.mean;
            self.mean += distance / self.rows;
            self.spread += distance * (accepted - self.mean);
            self.full += f64::from(u8::from(accepted >= f64::from(steps)));
        }
    }

    /// `None` while too little is known.
    pub(super) fn estimate(&self) -> Option<Estimate> {
        (self.rows >= FEWEST_ROWS).then(|| Estimate {
            mean: self.mean,
            error: (self.variance() / self.rows).sqrt(),
            full: self.full / self.rows,
        })
    }

    /// Whether a mean over recent steps, each of weight `alpha` and of `rows` rows, is no longer this one.
    pub(super) fn contradicts(&self, recent: f64, alpha: f64, rows: usize) -> bool {
        let deviation = (self.variance() * alpha / (2.0 - alpha) / rows as f64).sqrt();
        self.rows >= STEADY_ROWS && (recent - self.mean).abs() > CHANGE * deviation
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
        (0..10).for_each(|_| accepted.add(&[0, 3], 3));
        let Estimate { mean, error, full } = accepted.estimate().unwrap();
        assert!((mean - 1.5).abs() < 0.02 && (full - 0.5).abs() < 0.02, "{mean} {full}");
        assert!((error - 1.5 / 20f64.sqrt()).abs() < 0.02, "{error}");
    }

    #[test]
    fn a_change_is_seen_and_noise_is_not() {
        let mut accepted = Accepted::default();
        (0..40).for_each(|step| accepted.add(&[step % 3, 2 - step % 3], 3));
        assert!(!accepted.contradicts(1.3, 0.2, 2));
        assert!(accepted.contradicts(3.0, 0.2, 2));
        let mut fresh = Accepted::default();
        fresh.add(&[0; 8], 3);
        assert!(!fresh.contradicts(3.0, 0.2, 8), "eight rows prove nothing");
    }
}
