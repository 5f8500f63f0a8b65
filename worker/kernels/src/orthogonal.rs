//! Orthogonalisation of matrices by Newton-Schulz iterations, for Muon (Jordan et al. 2024). The CUDA engine's kernels
//! (`muon.cu`) compute the same in bfloat16.

use crate::linear::{Matrix, multiply};

/// Number of iterations.
pub const STEPS: usize = 3;
/// Coefficients of the quintic `a x + b x^3 + c x^5` that is applied to each singular value. They maximise the slope at 0, so that small
/// singular values grow fast. In return, singular values only come near 1 instead of converging to it.
pub const QUINTIC: [f32; 3] = [3.4445, -4.7750, 2.0315];
/// A matrix is first divided by its Frobenius norm plus this value, so that singular values are at most 1.
pub const EPSILON: f64 = 1e-7;

/// The square root of the sum of the squares.
pub(crate) fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>().sqrt()
}

/// Replaces the row-major matrix `x` of `rows` rows by a matrix with the same singular vectors, whose singular values are near 1.
pub fn orthogonalise(rows: usize, x: &mut [f32]) {
    let columns = x.len() / rows.max(1);
    let norm = norm(x) + EPSILON;
    x.iter_mut().for_each(|v| *v = (f64::from(*v) / norm) as f32);
    // Number of rows of the smaller Gram matrix: x x^T if x is wide, else x^T x.
    let (side, is_wide) = (rows.min(columns), rows <= columns);
    let (mut gram, mut factor) = (vec![0.0; side * side], vec![0.0; side * side]);
    let mut product = vec![0.0; x.len()];
    let [a, b, c] = QUINTIC;
    for _ in 0..STEPS {
        let matrix = Matrix::new(x, rows, columns);
        let [left, right] =
            if is_wide { [matrix, matrix.transposed()] } else { [matrix.transposed(), matrix] };
        multiply(left, right, &mut gram);
        let square = Matrix::new(&gram, side, side);
        multiply(square, square, &mut factor);
        factor.iter_mut().zip(&gram).for_each(|(f, g)| *f = b * g + c * *f);
        let factor = Matrix::new(&factor, side, side);
        if is_wide {
            multiply(factor, matrix, &mut product);
        } else {
            multiply(matrix, factor, &mut product);
        }
        x.iter_mut().zip(&product).for_each(|(x, p)| *x = a * *x + p);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::values;

    /// Each singular value is divided by the norm, and then the quintic is applied [`STEPS`] times.
    #[test]
    fn singular_values_follow_the_quintic_and_singular_vectors_are_unchanged() {
        let polynomial = |x: f64| {
            let [a, b, c] = QUINTIC.map(f64::from);
            a * x + b * x.powi(3) + c * x.powi(5)
        };
        for (rows, columns) in [(2, 3), (3, 2)] {
            // The matrix is diagonal, so its entries are the singular values.
            let mut x = vec![0.0; 6];
            (x[0], x[columns + 1]) = (3.0, -4.0);
            orthogonalise(rows, &mut x);
            let expected = [0.6, -0.8].map(|start| (0..STEPS).fold(start, |value, _| polynomial(value)));
            for (index, value) in x.iter().enumerate() {
                let expected = [(0, expected[0]), (columns + 1, expected[1])]
                    .iter()
                    .find(|(i, _)| *i == index)
                    .map_or(0.0, |(_, v)| *v);
                assert!((f64::from(*value) - expected).abs() < 1e-5, "{rows} x {columns}: {x:?}");
            }
        }
    }

    #[test]
    fn transposes_give_transposed_results_and_zeros_stay_zeros() {
        let (rows, columns) = (5, 12);
        let mut wide = values("orthogonal", rows * columns);
        let mut tall: Vec<f32> = (0..columns * rows).map(|i| wide[i % rows * columns + i / rows]).collect();
        orthogonalise(rows, &mut wide);
        orthogonalise(columns, &mut tall);
        for i in 0..rows * columns {
            let other = tall[i % columns * rows + i / columns];
            assert!((wide[i] - other).abs() < 1e-4, "{i}: {} and {other}", wide[i]);
        }
        let mut zeros = [0.0; 6];
        orthogonalise(2, &mut zeros);
        assert_eq!(zeros, [0.0; 6]);
    }
}
