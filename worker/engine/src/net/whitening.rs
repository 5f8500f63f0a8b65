//! Filters that whiten patches of pictures: the first convolution of [`super::cifarnet`] (Jordan 2024, section 3.2).

use super::Network;
use lockstep_host::tensors::HostTensor;

/// The parameter that is computed from training pictures.
pub(super) const WHITENED: &str = "whiten.weight";
/// Height and width of a patch.
pub(super) const KERNEL: usize = 2;
/// Added to the variance along each eigenvector.
const EPSILON: f64 = 5e-4;
/// Maximum number of sweeps of Jacobi's method. It converges quadratically; a matrix of this size needs about six sweeps.
const SWEEPS: usize = 50;

/// Name of the parameter that is computed from training pictures by [`Patches::filters`], if `network` has such a parameter.
pub fn whitened_parameter(network: &Network) -> Option<&str> {
    network.fixed.iter().map(String::as_str).find(|name| *name == WHITENED)
}

/// Accumulates the second moments of the values of all patches of pictures.
#[derive(Debug)]
pub struct Patches {
    side: usize,
    channels: usize,
    count: f64,
    /// Row-major; only the upper triangle is used.
    moments: Vec<f64>,
}

impl Patches {
    /// For square pictures of `side` pixels.
    pub fn new(side: usize, channels: usize) -> Self {
        let values = channels * KERNEL * KERNEL;
        Self { side, channels, count: 0.0, moments: vec![0.0; values * values] }
    }

    /// Adds a normalised picture, `[side, side, channels]`.
    pub fn add(&mut self, picture: &[f32]) {
        let Self { side, channels, .. } = *self;
        let values = channels * KERNEL * KERNEL;
        let mut patch = vec![0.0f64; values];
        for top in 0..=side - KERNEL {
            for left in 0..=side - KERNEL {
                for (i, value) in patch.iter_mut().enumerate() {
                    let (channel, y, x) = (i / KERNEL / KERNEL, i / KERNEL % KERNEL, i % KERNEL);
                    *value = f64::from(picture[((top + y) * side + left + x) * channels + channel]);
                }
                for (row, v) in patch.iter().enumerate() {
                    let moments = &mut self.moments[row * values + row..(row + 1) * values];
                    moments.iter_mut().zip(&patch[row..]).for_each(|(moment, w)| *moment += v * w);
                }
                self.count += 1.0;
            }
        }
    }

    /// The filters, `[2 n, channels, 2, 2]` for patches of n values: each eigenvector of the second moments divided by
    /// the square root of its eigenvalue, then the negatives of all these vectors. The eigenvectors are in the order of
    /// Jacobi's method, which is deterministic.
    pub fn filters(&self) -> HostTensor {
        let values = self.channels * KERNEL * KERNEL;
        let mean = |row: usize, column: usize| {
            self.moments[row.min(column) * values + row.max(column)] / self.count.max(1.0)
        };
        let matrix = (0..values * values).map(|i| mean(i / values, i % values)).collect();
        let (eigenvalues, vectors) = eigen_decomposition(matrix, values);
        let scaled = (0..values * values).map(|i| {
            let (vector, value) = (i / values, i % values);
            vectors[value * values + vector] / (eigenvalues[vector].max(0.0) + EPSILON).sqrt()
        });
        let scaled: Vec<f32> = scaled.map(|v| v as f32).collect();
        let values_of_both = scaled.iter().copied().chain(scaled.iter().map(|v| -v)).collect();
        HostTensor { shape: vec![2 * values, self.channels, KERNEL, KERNEL], values: values_of_both }
    }
}

/// Eigenvalues of a symmetric matrix of `n` rows, and eigenvectors as columns, by Jacobi's rotations in cyclic order.
fn eigen_decomposition(mut a: Vec<f64>, n: usize) -> (Vec<f64>, Vec<f64>) {
    let mut vectors: Vec<f64> = (0..n * n).map(|i| if i / n == i % n { 1.0 } else { 0.0 }).collect();
    for _ in 0..SWEEPS {
        let squares_where = |includes: &dyn Fn(usize, usize) -> bool| -> f64 {
            (0..n * n).filter(|i| includes(i / n, i % n)).map(|i| a[i] * a[i]).sum()
        };
        let is_diagonal = |row: usize, column: usize| row == column;
        // Smaller entries outside the diagonal do not change float32 filters.
        if squares_where(&|row, column| !is_diagonal(row, column)) <= 1e-24 * squares_where(&is_diagonal) {
            break;
        }
        for p in 0..n {
            for q in p + 1..n {
                if a[p * n + q] == 0.0 {
                    continue;
                }
                // The rotation of rows and columns p and q that makes their common entry 0.
                let theta = (a[q * n + q] - a[p * n + p]) / (2.0 * a[p * n + q]);
                let tangent = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
                let cosine = 1.0 / (tangent * tangent + 1.0).sqrt();
                let sine = tangent * cosine;
                let rotate = |values: &mut [f64], first: usize, second: usize| {
                    let (x, y) = (values[first], values[second]);
                    (values[first], values[second]) = (cosine * x - sine * y, sine * x + cosine * y);
                };
                for k in 0..n {
                    rotate(&mut a, k * n + p, k * n + q);
                }
                for k in 0..n {
                    rotate(&mut a, p * n + k, q * n + k);
                    rotate(&mut vectors, k * n + p, k * n + q);
                }
            }
        }
    }
    ((0..n).map(|i| a[i * n + i]).collect(), vectors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_kernels::synthetic::values;

    #[test]
    fn filtered_patches_are_uncorrelated_and_of_unit_variance() {
        let (side, channels) = (9, 3);
        let pictures: Vec<Vec<f32>> = (0..20)
            .map(|seed| {
                // Neighbouring values are similar, as in pictures.
                let noise = values(&format!("whitening {seed}"), side * side * channels + 1);
                noise.windows(2).map(|near| near.iter().sum()).collect()
            })
            .collect();
        let mut patches = Patches::new(side, channels);
        pictures.iter().for_each(|picture| patches.add(picture));
        let filters = patches.filters();
        assert_eq!(filters.shape, [24, 3, 2, 2]);
        // The second moments of the outputs of the first twelve filters. The other twelve filters are their negatives.
        let outputs: Vec<Vec<f64>> = pictures
            .iter()
            .flat_map(|picture| (0..8 * 8).map(move |i| (picture, i / 8, i % 8)))
            .map(|(picture, top, left)| {
                let filter = |filter: &[f32]| -> f64 {
                    let value =
                        |i: usize| picture[((top + i / 2 % 2) * side + left + i % 2) * channels + i / 4];
                    filter.iter().enumerate().map(|(i, w)| f64::from(*w) * f64::from(value(i))).sum()
                };
                filters.values.chunks(12).map(filter).collect()
            })
            .collect();
        for i in 0..12 {
            for j in 0..12 {
                let moment =
                    outputs.iter().map(|output| output[i] * output[j]).sum::<f64>() / outputs.len() as f64;
                let expected = if i == j { 1.0 } else { 0.0 };
                assert!((moment - expected).abs() < 0.02, "{i}, {j}: {moment}");
            }
            assert!(outputs.iter().all(|output| output[i] == -output[i + 12]));
        }
    }
}
