//! Owns matrices on their way from a file to a kernel: plain, or in a GGUF's blocks of quantised weights.

use candle_core::quantized::GgmlDType;
use tch::{Kind, Tensor};

/// How weights lie in memory, by ggml's numbers. Blocks are codes with their scales.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[allow(non_camel_case_types, reason = "ggml's names")]
pub enum Format {
    F32 = 0,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    BF16 = 30,
}

impl Format {
    /// Of a plain tensor that kernels take.
    pub fn plain(kind: Kind) -> Option<Self> {
        match kind {
            Kind::Float => Some(Self::F32),
            Kind::BFloat16 => Some(Self::BF16),
            _ => None,
        }
    }

    /// Of a GGUF's blocks that kernels decode.
    pub fn blocks(stored: GgmlDType) -> Option<Self> {
        match stored {
            GgmlDType::Q4_0 => Some(Self::Q4_0),
            GgmlDType::Q4_1 => Some(Self::Q4_1),
            GgmlDType::Q5_0 => Some(Self::Q5_0),
            GgmlDType::Q5_1 => Some(Self::Q5_1),
            GgmlDType::Q8_0 => Some(Self::Q8_0),
            GgmlDType::Q4K => Some(Self::Q4_K),
            GgmlDType::Q5K => Some(Self::Q5_K),
            GgmlDType::Q6K => Some(Self::Q6_K),
            _ => None,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::BF16 => "bfloat16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4_K => "Q4_K",
            Self::Q5_K => "Q5_K",
            Self::Q6_K => "Q6_K",
        }
    }
}

/// `[rows, columns]` in blocks, row after row, as a file has them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocks {
    pub format: Format,
    pub rows: usize,
    pub columns: usize,
    pub bytes: Vec<u8>,
}

#[derive(Debug)]
pub enum Matrix {
    Plain(Tensor),
    Blocks(Blocks),
}

impl From<Tensor> for Matrix {
    fn from(tensor: Tensor) -> Self {
        Self::Plain(tensor)
    }
}
