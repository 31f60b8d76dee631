//! Owns the learning rate over the course of a training.

/// Share of the steps in which the rate rises.
const WARM_UP: f64 = 0.04;
/// The last rate, as a share of the highest.
const FLOOR: f64 = 0.01;

/// The rate of step `step` of `steps`: up in a line, then down along a cosine.
pub(super) fn rate(highest: f64, step: u64, steps: u64) -> f64 {
    let warm = (steps as f64 * WARM_UP).ceil().max(1.0);
    let step = step as f64;
    if step < warm {
        return highest * (step + 1.0) / warm;
    }
    let way = ((step - warm) / (steps as f64 - warm).max(1.0)).min(1.0);
    highest * (FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + (std::f64::consts::PI * way).cos()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_rises_then_falls_to_the_floor() {
        let rates: Vec<f64> = (0..100).map(|step| rate(1.0, step, 100)).collect();
        assert_eq!(rates[..5], [0.25, 0.5, 0.75, 1.0, 1.0]);
        assert!(rates[5..].is_sorted_by(|a, b| a > b));
        assert!((rates[99] - FLOOR).abs() < 1e-2);
        assert_eq!(rate(2.0, 0, 1), 2.0);
    }
}
