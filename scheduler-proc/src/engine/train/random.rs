//! Owns the trainer's random numbers: each a function of a seed and its place, so that no other thread and no earlier
//! draw can change them.

use tch::Tensor;

use crate::engine::rng::{GROUP, Noise, Stream};

/// Even numbers around 0 with variance 1. `stream` sets apart what is drawn from one seed.
pub(super) fn even(size: &[i64], seed: u64, stream: u64) -> Tensor {
    let count = size.iter().product::<i64>() as usize;
    let noise = Noise::new(seed, stream, Stream::Draft);
    let half_width = 3f32.sqrt();
    let value = |word: u32| (word as f32 / u32::MAX as f32 * 2.0 - 1.0) * half_width;
    let mut values = Vec::with_capacity(count + GROUP);
    for group in 0..count.div_ceil(GROUP) as u32 {
        values.extend(noise.group(group).map(value));
    }
    Tensor::from_slice(&values[..count]).view(size)
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    #[test]
    fn numbers_have_mean_0_and_variance_1_and_depend_on_seed_and_stream() {
        let values = even(&[100, 1000], 3, 4);
        let mean = values.mean(Kind::Double).double_value(&[]);
        let square = values.square().mean(Kind::Double).double_value(&[]);
        assert!(mean.abs() < 0.02 && (square - 1.0).abs() < 0.02, "{mean} {square}");
        assert!(values.equal(&even(&[100, 1000], 3, 4)));
        assert!(!values.equal(&even(&[100, 1000], 3, 5)) && !values.equal(&even(&[100, 1000], 2, 4)));
    }
}
