//! Owns rotary position embedding: the angles of every position, computed once.

use tch::{Device, Kind, Tensor};

use super::norm::RmsNorm;

/// How a model stretches its wavelengths beyond the lengths it was first trained on.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    Default,
    Linear {
        factor: f64,
    },
    /// Long wavelengths are divided by the factor, short ones kept, those between interpolated.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position: f64,
    },
    /// Each frequency divided by its own factor, as GGUF files store it.
    Factors(Vec<f32>),
}

impl RopeScaling {
    fn scale(&self, index: usize, frequency: f64) -> f64 {
        match *self {
            Self::Factors(ref factors) => frequency / factors.get(index).copied().map_or(1.0, f64::from),
            Self::Default => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let wavelength = 2.0 * std::f64::consts::PI / frequency;
                let share = (original_max_position / wavelength - low_freq_factor)
                    / (high_freq_factor - low_freq_factor);
                let kept = share.clamp(0.0, 1.0);
                kept * frequency + (1.0 - kept) * frequency / factor
            }
        }
    }
}

/// Cosines and sines `[positions, head_dim / 2]`, float32.
#[derive(Debug)]
pub struct RopeTables {
    cos: Tensor,
    sin: Tensor,
}

impl RopeTables {
    pub fn new(theta: f64, scaling: &RopeScaling, head_dim: usize, positions: usize, device: Device) -> Self {
        let frequencies: Vec<f32> = inverse_frequencies(theta, scaling, head_dim)
            .into_iter()
            .map(|frequency| frequency as f32)
            .collect();
        let positions = Tensor::arange(positions as i64, (Kind::Float, Device::Cpu));
        let angles = positions.unsqueeze(1) * Tensor::from_slice(&frequencies).unsqueeze(0);
        Self { cos: angles.cos().to_device(device), sin: angles.sin().to_device(device) }
    }

    pub fn cos(&self) -> &Tensor {
        &self.cos
    }

    pub fn sin(&self) -> &Tensor {
        &self.sin
    }

    /// Rotates `[rows, heads, head_dim]` to the rows' positions.
    pub fn rotate(&self, x: &Tensor, positions: &Tensor) -> Tensor {
        let (cos, sin) = (self.cos.index_select(0, positions), self.sin.index_select(0, positions));
        let (cos, sin) = (cos.unsqueeze(1), sin.unsqueeze(1));
        let halves = x.to_kind(Kind::Float).chunk(2, -1);
        let (low, high) = (&halves[0], &halves[1]);
        Tensor::cat(&[low * &cos - high * &sin, high * &cos + low * &sin], -1).to_kind(x.kind())
    }
}

fn inverse_frequencies(theta: f64, scaling: &RopeScaling, head_dim: usize) -> Vec<f64> {
    (0..head_dim / 2).map(|i| scaling.scale(i, theta.powf(-2.0 * i as f64 / head_dim as f64))).collect()
}

/// What happens to each head of queries and keys before attention.
#[derive(Debug)]
pub struct HeadRotation {
    pub norms: Option<HeadNorms>,
    pub tables: std::rc::Rc<RopeTables>,
}

/// Norms over single heads (Qwen3).
#[derive(Debug)]
pub struct HeadNorms {
    pub q: RmsNorm,
    pub k: RmsNorm,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_keeps_short_wavelengths_and_stretches_long_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 256.0,
        };
        let plain = inverse_frequencies(500_000.0, &RopeScaling::Default, 8);
        let scaled = inverse_frequencies(500_000.0, &scaling, 8);
        let ratios: Vec<f64> = plain.iter().zip(&scaled).map(|(plain, scaled)| plain / scaled).collect();
        assert_eq!(ratios[0], 1.0);
        assert!(ratios[1] > 1.0 && ratios[1] < 8.0, "{ratios:?}");
        assert!((ratios[2] - 8.0).abs() < 1e-9 && (ratios[3] - 8.0).abs() < 1e-9, "{ratios:?}");
    }

    #[test]
    fn rotation_keeps_lengths_and_position_zero() {
        let tables = RopeTables::new(10_000.0, &RopeScaling::Default, 20, 64, Device::Cpu);
        let x = Tensor::randn([2, 3, 20], (Kind::Float, Device::Cpu));
        let y = tables.rotate(&x, &Tensor::from_slice(&[0i64, 63]));
        assert!(y.get(0).allclose(&x.get(0), 0.0, 0.0, false));
        assert!(y.norm().allclose(&x.norm(), 1e-5, 1e-5, false));
        assert!(!y.get(1).allclose(&x.get(1), 1e-2, 1e-2, false));
    }
}
