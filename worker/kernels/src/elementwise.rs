//! ReLU and addition that are not fused with a batch norm, and GELU.

use rayon::prelude::*;

/// Number of values per task.
const CHUNK: usize = 1 << 14;

/// ReLU as in PyTorch: unlike `max`, it keeps a NaN, so that divergence is not hidden.
#[inline(always)]
pub fn relu_of(v: f32) -> f32 {
    if v < 0.0 { 0.0 } else { v }
}

/// y = relu(x).
pub fn relu(x: &[f32], y: &mut [f32]) {
    y.par_chunks_mut(CHUNK)
        .zip(x.par_chunks(CHUNK))
        .for_each(|(y, x)| y.iter_mut().zip(x).for_each(|(y, x)| *y = relu_of(*x)));
}

/// Turns `dy`, the gradient of `y` = relu(x), into the gradient of x.
pub fn relu_backward(y: &[f32], dy: &mut [f32]) {
    dy.par_chunks_mut(CHUNK).zip(y.par_chunks(CHUNK)).for_each(|(dy, y)| {
        for (d, y) in dy.iter_mut().zip(y) {
            *d = if *y > 0.0 { *d } else { 0.0 };
        }
    });
}

/// Number of values per task: a multiple of the number of biases.
fn chunk_of(biases: usize) -> usize {
    CHUNK.next_multiple_of(biases.max(1))
}

/// The standard normal distribution function, and its density.
fn normal_cdf_and_density(x: f32) -> (f32, f32) {
    const INVERSE_ROOT: f32 = 0.398_942_3; // 1 / sqrt(2 pi)
    let cdf = 0.5 * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2));
    (cdf, INVERSE_ROOT * libm::expf(-0.5 * x * x))
}

/// y = gelu(x + bias), where gelu(v) = v P(v) and P is the standard normal distribution function (PyTorch's `GELU()`). `bias` has a
/// value for each channel, or one for all.
pub fn gelu(x: &[f32], bias: &[f32], y: &mut [f32]) {
    let chunk = chunk_of(bias.len());
    y.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).for_each(|(y, x)| {
        for ((y, x), b) in y.iter_mut().zip(x).zip(bias.iter().cycle()) {
            let v = x + b;
            *y = v * normal_cdf_and_density(v).0;
        }
    });
}

/// Turns `dy`, the gradient of `y` = gelu(x + bias), into the gradient of x.
pub fn gelu_backward(x: &[f32], bias: &[f32], dy: &mut [f32]) {
    let chunk = chunk_of(bias.len());
    dy.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).for_each(|(dy, x)| {
        for ((d, x), b) in dy.iter_mut().zip(x).zip(bias.iter().cycle()) {
            let v = x + b;
            let (cdf, density) = normal_cdf_and_density(v);
            *d *= cdf + v * density;
        }
    });
}

/// sum = a + b.
pub fn add(a: &[f32], b: &[f32], sum: &mut [f32]) {
    sum.par_chunks_mut(CHUNK).zip(a.par_chunks(CHUNK).zip(b.par_chunks(CHUNK))).for_each(|(sum, (a, b))| {
        for (s, (a, b)) in sum.iter_mut().zip(a.iter().zip(b)) {
            *s = a + b;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `torch.nn.functional.gelu` in float64, and the slope between neighbouring values.
    #[test]
    fn gelu_matches_pytorch_and_its_gradient_is_the_slope() {
        let cases = [
            (-3.0f32, -0.004_049_694f32),
            (-0.5, -0.154_268_77),
            (0.0, 0.0),
            (1.0, 0.841_344_7),
            (4.0, 3.999_873_3),
        ];
        for (v, value) in cases {
            let (x, bias) = ([v - 0.25, v - 0.5], [0.25, 0.5]);
            let mut y = [0.0; 2];
            gelu(&x, &bias, &mut y);
            assert!(y.iter().all(|y| (y - value).abs() < 1e-6), "{v}: {y:?}");
            let (step, mut ends, mut gradient) = (1e-2, [0.0; 2], [1.0, 2.0]);
            gelu(&[v - step, v + step], &[0.0], &mut ends);
            gelu_backward(&x, &bias, &mut gradient);
            let slope = (ends[1] - ends[0]) / (2.0 * step);
            assert!(
                (gradient[0] - slope).abs() < 1e-4 && gradient[1] == 2.0 * gradient[0],
                "{v}: {gradient:?}, {slope}"
            );
        }
    }
}
