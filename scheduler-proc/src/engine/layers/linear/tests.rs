//! Products are exact, of any number of rows, on every instruction set, and from every format.

use candle_core::quantized::{GgmlDType, QTensor};

use super::*;
use crate::engine::matrix::{Blocks, Format};

fn random(kind: Kind, size: &[i64]) -> Tensor {
    Tensor::randn(size, (Kind::Float, Device::Cpu)).to_kind(kind)
}

/// Shapes of real models, and some that fill no panel and no tile.
const SHAPES: [(i64, i64); 8] =
    [(960, 576), (576, 576), (3072, 576), (576, 1536), (2048, 2048), (128, 64), (112, 48), (7, 5)];

#[test]
fn products_are_those_of_exact_arithmetic() {
    if let Ok(wanted) = std::env::var("DRAFTHORSE_KERNELS") {
        assert_eq!(shim::kernels_name(), wanted);
    }
    for kind in [Kind::Float, Kind::BFloat16] {
        for (out, input) in SHAPES {
            let (x, weight) = (random(kind, &[37, input]), random(kind, &[out, input]));
            let bias = random(kind, &[out]);
            let double = |tensor: &Tensor| tensor.to_kind(Kind::Double);
            let expected = double(&x).linear(&double(&weight), Some(&double(&bias)));
            let linear = Linear::new(&weight, Some(bias)).unwrap();
            let wide = linear.forward_wide(&x).unwrap();
            assert_eq!(wide.kind(), Kind::Float);
            assert!(double(&wide).allclose(&expected, 1e-4, 1e-3, false), "{kind:?} {out}x{input}");
            let rounded = linear.forward(&x).unwrap();
            assert!(rounded.equal(&wide.to_kind(kind)), "{kind:?} {out}x{input}: rounded once, at the end");
        }
    }
}

#[test]
fn rows_do_not_depend_on_their_number() {
    for kind in [Kind::Float, Kind::BFloat16] {
        for (out, input) in SHAPES {
            // Products that cancel, half against half, leave rounding alone: any other order of sums shows.
            let half = (input + 1) / 2;
            let (x, weight) = (random(kind, &[300, half]), random(kind, &[out, half]));
            let x = Tensor::cat(&[&x, &-&x], 1).narrow(1, 0, input).contiguous();
            let weight = Tensor::cat(&[&weight, &weight], 1).narrow(1, 0, input).contiguous();
            let linear = Linear::new(&weight, None).unwrap();
            let all = linear.forward(&x).unwrap();
            for rows in [1, 2, 3, 4, 7, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100, 256] {
                let part = linear.forward(&x.narrow(0, 300 - rows, rows)).unwrap();
                assert!(part.equal(&all.narrow(0, 300 - rows, rows)), "{kind:?} {out}x{input}, {rows} rows");
            }
        }
    }
}

/// The other tests once more on every instruction set this processor has, each in a process of its own: the
/// choice is made once.
#[test]
fn every_instruction_set_multiplies_the_same_way() {
    let has = |level: &str| match level {
        "kernels_v4" => std::is_x86_feature_detected!("avx512bw"),
        "kernels_v3" => std::is_x86_feature_detected!("avx2"),
        _ => true,
    };
    for kernels in ["kernels_baseline", "kernels_v3", "kernels_v4"].into_iter().filter(|level| has(level)) {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["linear::tests::", "--skip", "every_instruction_set", "--test-threads", "1"])
            .env("DRAFTHORSE_KERNELS", kernels)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("6 passed"), "{kernels}: {text}");
    }
}

#[test]
fn fused_projections_are_those_of_their_parts() {
    let parts: Vec<(Tensor, Option<Tensor>)> =
        [8, 4, 12].map(|out| (random(Kind::Float, &[out, 16]), Some(random(Kind::Float, &[out])))).into();
    let x = random(Kind::Float, &[5, 16]);
    let expected: Vec<Tensor> = parts.iter().map(|(weight, bias)| x.linear(weight, bias.as_ref())).collect();
    let parts: Vec<_> = parts.into_iter().map(|(weight, bias)| (Matrix::from(weight), bias)).collect();
    let actual = Linear::fused(&parts).unwrap().forward(&x).unwrap();
    assert!(actual.allclose(&Tensor::cat(&expected, 1), 1e-5, 1e-5, false));
}

/// A random weight in blocks, and the plain one that these stand for.
fn blocks(stored: GgmlDType, (rows, columns): (usize, usize), size: f64) -> (Matrix, Tensor) {
    let cpu = candle_core::Device::Cpu;
    let values = candle_core::Tensor::randn(0f32, 1.0, (rows, columns), &cpu).unwrap();
    let quantised = QTensor::quantize(&(values * size).unwrap(), stored).unwrap();
    let bytes = quantised.data().unwrap().into_owned();
    let values = quantised.dequantize(&cpu).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let plain = Tensor::from_slice(&values).reshape([rows as i64, columns as i64]).to_kind(Kind::BFloat16);
    let format = Format::blocks(stored).unwrap();
    (Matrix::Blocks(Blocks { format, rows, columns, bytes }), plain)
}

const STORED: [GgmlDType; 8] = [
    GgmlDType::Q4_0,
    GgmlDType::Q4_1,
    GgmlDType::Q5_0,
    GgmlDType::Q5_1,
    GgmlDType::Q8_0,
    GgmlDType::Q4K,
    GgmlDType::Q5K,
    GgmlDType::Q6K,
];

/// Rows and columns; those of the formats whose blocks are wide are multiplied by 8.
const BLOCK_SHAPES: [(usize, usize); 5] = [(960, 576), (576, 1536), (64, 32), (49, 96), (7, 64)];

fn block_shapes(stored: GgmlDType) -> impl Iterator<Item = (usize, usize)> {
    let wide = stored.block_size() > 32;
    BLOCK_SHAPES.into_iter().map(move |(rows, columns)| match wide {
        true if columns > 96 => (rows, columns.next_multiple_of(256)),
        true => (rows, columns * 8),
        false => (rows, columns),
    })
}

#[test]
fn blocks_multiply_bit_by_bit_like_what_they_stand_for() {
    for stored in STORED {
        for shape in block_shapes(stored) {
            // Where scales are that small, half precision has no exponent left for them.
            for size in [1.0, 2e-6] {
                let (matrix, plain) = blocks(stored, shape, size);
                let bias = random(Kind::BFloat16, &[shape.0 as i64]);
                let actual = Linear::fused(&[(matrix, Some(bias.shallow_clone()))]).unwrap();
                let expected = Linear::new(&plain, Some(bias)).unwrap();
                let x = random(Kind::BFloat16, &[100, shape.1 as i64]);
                for rows in (1..=40).chain([64, 100]) {
                    let x = x.narrow(0, 100 - rows, rows);
                    let (actual, expected) =
                        (actual.forward_wide(&x).unwrap(), expected.forward_wide(&x).unwrap());
                    assert!(actual.equal(&expected), "{stored:?} {shape:?} of {size}, {rows} rows");
                }
            }
        }
    }
}

#[test]
fn rows_of_blocks_are_those_of_what_they_stand_for() {
    for stored in STORED {
        for shape in block_shapes(stored) {
            let (matrix, plain) = blocks(stored, shape, 1.0);
            let packed = Packed::new(&matrix).unwrap();
            let ids: Vec<i64> = (0..shape.0 as i64).rev().step_by(3).collect();
            let expected = plain.index_select(0, &Tensor::from_slice(&ids));
            assert!(packed.gather(&ids).unwrap().equal(&expected), "{stored:?} {shape:?}");
            assert!(packed.gather(&[shape.0 as i64]).is_err() && packed.gather(&[-1]).is_err());
        }
    }
}

#[test]
fn parts_may_lie_in_different_ways() {
    let shapes = [(40, 512), (7, 512), (64, 512), (33, 512)];
    let stored = [Some(GgmlDType::Q4K), None, Some(GgmlDType::Q6K), Some(GgmlDType::Q8_0)];
    let (mut parts, mut plain) = (Vec::new(), Vec::new());
    for (shape, stored) in shapes.into_iter().zip(stored) {
        let (matrix, values) = blocks(stored.unwrap_or(GgmlDType::Q8_0), shape, 1.0);
        let matrix = if stored.is_some() { matrix } else { Matrix::Plain(values.shallow_clone()) };
        parts.push((matrix, None));
        plain.push(values);
    }
    let (actual, expected) =
        (Linear::fused(&parts).unwrap(), Linear::new(&Tensor::cat(&plain, 0), None).unwrap());
    for rows in [1, 5, 16, 17, 33, 70] {
        let x = random(Kind::BFloat16, &[rows, 512]);
        assert!(actual.forward(&x).unwrap().equal(&expected.forward(&x).unwrap()), "{rows} rows");
    }
}
