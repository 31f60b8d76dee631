//! Owns least squares: the linear map that comes nearest to rows of outputs, and what makes rows of inputs alike in
//! every direction.

use anyhow::{Context, Result};
use tch::{Kind, Tensor};

/// What keeps a fit finite where inputs depend on one another, relative to each one's own square.
const RIDGE: f64 = 1e-3;
/// Directions in which inputs hardly vary are not stretched without end; relative to the median input's square.
const DAMPING: f64 = 1e-2;

/// The matrix `[outputs, inputs]` whose product with the rows of `x` comes nearest to the rows of `y`.
pub(super) fn fit(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let mut square = gram(x, x);
    // Per input: some are a hundred times as large as others.
    square += (square.diagonal(0, 0, 1) * RIDGE).diag(0);
    let solution = Tensor::f_linalg_solve(&square, &gram(x, y), true).context("least squares")?;
    Ok(solution.tr().to_kind(Kind::Float).contiguous())
}

/// As [`fit`], with a bias.
pub(super) fn fit_with_bias(x: &Tensor, y: &Tensor) -> Result<(Tensor, Tensor)> {
    let inputs = x.size()[1];
    let one = Tensor::ones([x.size()[0], 1], (x.kind(), x.device()));
    let both = fit(&Tensor::cat(&[x, &one], 1), y)?;
    Ok((both.narrow(1, 0, inputs).contiguous(), both.select(1, inputs).contiguous()))
}

/// `W` such that the rows of `x · Wᵀ` have unit squares in every direction and none in common: the inverse of the
/// Cholesky factor of the rows' second moment.
pub(super) fn whitener(x: &Tensor) -> Result<Tensor> {
    let mut square = gram(x, x) / x.size()[0].max(1) as f64;
    let median = square.diagonal(0, 0, 1).median().double_value(&[]);
    square += Tensor::eye(x.size()[1], (Kind::Double, x.device())) * (median * DAMPING + f64::MIN_POSITIVE);
    let factor = square.f_linalg_cholesky(false).context("whitening")?;
    let eye = Tensor::eye(x.size()[1], (Kind::Double, x.device()));
    Ok(Tensor::linalg_solve_triangular(&factor, &eye, false, true, false).to_kind(Kind::Float))
}

/// The orthonormal rows, `[rank, outputs]`, that keep the most of the rows of `y`.
pub(super) fn principal_rows(y: &Tensor, rank: i64) -> Result<Tensor> {
    let (_, vectors) = gram(y, y).f_linalg_eigh("L").context("principal directions")?;
    let outputs = y.size()[1];
    Ok(vectors.narrow(1, outputs - rank, rank).tr().to_kind(Kind::Float).contiguous())
}

fn gram(a: &Tensor, b: &Tensor) -> Tensor {
    a.tr().matmul(b).to_kind(Kind::Double)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    fn random(size: &[i64]) -> Tensor {
        Tensor::randn(size, (Kind::Float, Device::Cpu))
    }

    #[test]
    fn a_linear_map_is_found_again() {
        tch::manual_seed(1);
        let (x, map, bias) = (random(&[500, 6]), random(&[3, 6]), random(&[3]));
        let (found, found_bias) = fit_with_bias(&x, &(x.matmul(&map.tr()) + &bias)).unwrap();
        assert!(found.allclose(&map, 0.0, 2e-2, false) && found_bias.allclose(&bias, 0.0, 2e-2, false));
    }

    #[test]
    fn whitened_rows_have_unit_moments() {
        tch::manual_seed(2);
        let x = random(&[2000, 5]).matmul(&(random(&[5, 5]) + 3.0)) + 7.0;
        let white = x.matmul(&whitener(&x).unwrap().tr());
        let moments = white.tr().matmul(&white) / 2000.0;
        // The damped directions are below 1, none is above.
        let (values, _) = moments.linalg_eigh("L");
        let values = Vec::<f64>::try_from(values).unwrap();
        assert!(values.iter().all(|&value| value < 1.01) && values[4] > 0.99, "{values:?}");
        assert!(whitener(&Tensor::zeros([4, 2], (Kind::Float, Device::Cpu))).is_ok());
    }

    #[test]
    fn principal_rows_keep_what_lies_in_them() {
        tch::manual_seed(3);
        let y = random(&[100, 2]).matmul(&random(&[2, 6]));
        let rows = principal_rows(&y, 2).unwrap();
        assert!(y.matmul(&rows.tr()).matmul(&rows).allclose(&y, 1e-3, 1e-3, false));
    }
}
