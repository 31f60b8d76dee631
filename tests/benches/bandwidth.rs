//! Owns the measurement of the memory's read bandwidth.

use std::hint::black_box;
use std::time::Instant;

/// As many as the servers under test compute with.
pub(crate) const THREADS: usize = 2;
/// Per thread; far beyond any cache.
const WORDS: usize = 32 << 20;
const ROUNDS: usize = 8;

/// Bytes per second that two threads read together, the best of several rounds.
pub(crate) fn measure() -> f64 {
    let data: Vec<Vec<u64>> = (0..THREADS).map(|thread| vec![thread as u64 + 1; WORDS]).collect();
    let round = || {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in &data {
                scope.spawn(|| black_box(sum(black_box(part))));
            }
        });
        (THREADS * WORDS * size_of::<u64>()) as f64 / start.elapsed().as_secs_f64()
    };
    (0..ROUNDS).map(|_| round()).fold(0.0, f64::max)
}

fn sum(words: &[u64]) -> u64 {
    // Eight independent sums keep the loads, not the additions, the bottleneck.
    let mut sums = [0u64; 8];
    for chunk in words.chunks_exact(8) {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().fold(0, |total, sum| total.wrapping_add(*sum))
}
