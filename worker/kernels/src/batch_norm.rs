//! Batch normalisation, fused with the residual addition and the ReLU after it.
//!
//! An activation is a matrix of rows (pixels of all pictures) by channels. Sums over rows are taken
//! in float64, in order, in chunks whose size depends only on the channels. So sums are the same on any
//! number of threads, accurate if a channel's mean is large compared with its spread, and equal in
//! float32 (except for about one value in 10^8) for any division of a batch over ranks.

use crate::{
    elementwise::relu_of,
    simd::{LANES, with_simd},
};
use rayon::prelude::*;

/// Added to the variance before the square root: PyTorch's default.
pub const EPSILON: f64 = 1e-5;
/// Weight of a new batch in the running statistics: PyTorch's default.
pub const MOMENTUM: f32 = 0.1;

/// Approximate number of values of a chunk: two or three operands fit in a core's second-level cache.
const CHUNK: usize = 1 << 14;

/// Statistics of one forward pass, kept for backward; one value per channel.
#[derive(Debug, Clone, Default)]
pub struct Statistics {
    pub mean: Vec<f32>,
    /// 1 / sqrt(variance + epsilon), with the biased variance.
    pub inv_std: Vec<f32>,
    /// Mean and variance before rounding, for the running statistics.
    in_f64: Vec<(f64, f64)>,
}

impl Statistics {
    /// From `sums` over `count` rows: first all channels' sums, then all channels' sums of squares.
    pub fn from_sums(sums: &[f64], count: f64) -> Self {
        let (sum, square) = sums.split_at(sums.len() / 2);
        let in_f64: Vec<(f64, f64)> = std::iter::zip(sum, square)
            .map(|(s, q)| {
                let mean = s / count;
                let variance = q / count - mean * mean;
                // Rounding may make the variance negative. Unlike `max`, this keeps a NaN.
                (mean, if variance < 0.0 { 0.0 } else { variance })
            })
            .collect();
        Self {
            mean: in_f64.iter().map(|(mean, _)| *mean as f32).collect(),
            inv_std: in_f64.iter().map(|(_, variance)| (1.0 / (variance + EPSILON).sqrt()) as f32).collect(),
            in_f64,
        }
    }

    /// From running statistics, for inference.
    pub fn from_running(mean: &[f32], var: &[f32]) -> Self {
        let inv_std = var.iter().map(|&v| (1.0 / (f64::from(v) + EPSILON).sqrt()) as f32).collect();
        Self { mean: mean.to_vec(), inv_std, in_f64: Vec::new() }
    }

    /// Updates the running statistics with these statistics, using the unbiased variance, as PyTorch does. `momentum`
    /// is the weight of these statistics: [`MOMENTUM`] in most networks.
    pub fn update_running(&self, count: f64, momentum: f32, mean: &mut [f32], var: &mut [f32]) {
        let unbias = count / (count - 1.0).max(1.0);
        for (&(m, v), (mean, var)) in self.in_f64.iter().zip(std::iter::zip(mean, var)) {
            *mean = (1.0 - momentum) * *mean + momentum * m as f32;
            *var = (1.0 - momentum) * *var + momentum * (v * unbias) as f32;
        }
    }
}

/// How a kernel iterates over a matrix of `channels` columns. It divides the first `stride` values into blocks of [`LANES`]
/// lanes, and advances each block by `stride` values.
///
/// With few channels, several rows are read at a time, so that every loop is [`LANES`] values long. If the number
/// of channels is neither a multiple nor a divisor of [`LANES`], a block is one lane.
#[derive(Debug, Clone, Copy)]
struct Tiling {
    channels: usize,
    stride: usize,
    /// Whether blocks have [`LANES`] lanes instead of one.
    is_vectorized: bool,
}

impl Tiling {
    fn new(channels: usize) -> Self {
        if LANES.is_multiple_of(channels) {
            Self { channels, stride: LANES, is_vectorized: true }
        } else {
            Self { channels, stride: channels, is_vectorized: channels.is_multiple_of(LANES) }
        }
    }

    /// Number of values of a chunk: whole rows and, except for the last chunk, whole strides.
    fn chunk(self) -> usize {
        (CHUNK / self.stride).max(16) * self.stride
    }

    /// Repeats the channels' values until each lane of the stride has a value.
    fn spread(self, per_channel: &[f32]) -> Vec<f32> {
        per_channel.iter().copied().cycle().take(self.stride).collect()
    }
}

/// Runs a kernel with the tiling's lane width.
macro_rules! tiled {
    ($tiling:expr, $kernel:ident ( $($arg:expr),* $(,)? )) => {
        if $tiling.is_vectorized {
            with_simd(#[inline(always)] || $kernel::<LANES>($($arg),*))
        } else {
            $kernel::<1>($($arg),*)
        }
    };
}

mod backward;

pub use backward::{Mask, backward_input, backward_input_in_place, backward_sums, parameter_gradients};

/// Adds the chunks' partial sums, in order.
fn add_partials(partials: &[f64], width: usize) -> Vec<f64> {
    let mut total = vec![0.0; width];
    for partial in partials.chunks_exact(width) {
        for (t, p) in total.iter_mut().zip(partial) {
            *t += p;
        }
    }
    total
}

/// The sums of all channels, then the sums of squares of all channels: `2 * channels` values.
pub fn sums(x: &[f32], channels: usize) -> Vec<f64> {
    let tiling = Tiling::new(channels);
    let mut partials = vec![0.0; x.len().div_ceil(tiling.chunk()) * 2 * channels];
    x.par_chunks(tiling.chunk())
        .zip(partials.par_chunks_mut(2 * channels))
        .for_each(|(x, out)| tiled!(tiling, sums_of_chunk(tiling, x, out)));
    add_partials(&partials, 2 * channels)
}

#[inline(always)]
fn sums_of_chunk<const W: usize>(tiling: Tiling, x: &[f32], out: &mut [f64]) {
    let (channels, stride) = (tiling.channels, tiling.stride);
    let whole = x.len() / stride * stride;
    for block in (0..stride).step_by(W) {
        let (mut sum, mut square) = ([0.0f64; W], [0.0f64; W]);
        let mut at = block;
        while at < whole {
            let x = load::<W>(x, at);
            for i in 0..W {
                let v = f64::from(x[i]);
                sum[i] += v;
                square[i] += v * v;
            }
            at += stride;
        }
        // With few channels, the last rows may not fill a stride.
        for (i, v) in x[whole..].iter().enumerate().skip(block).take(W) {
            let v = f64::from(*v);
            sum[i - block] += v;
            square[i - block] += v * v;
        }
        for i in 0..W {
            let channel = (block + i) % channels;
            out[channel] += sum[i];
            out[channels + channel] += square[i];
        }
    }
}

/// Parameters of a batch norm's forward pass, one value per channel.
#[derive(Debug, Clone, Copy)]
pub struct Affine<'a> {
    pub statistics: &'a Statistics,
    pub gamma: &'a [f32],
    pub beta: &'a [f32],
}

/// [`Affine`] spread over the lanes of a stride.
struct Lanes {
    mean: Vec<f32>,
    /// gamma / sqrt(variance + epsilon)
    scale: Vec<f32>,
    beta: Vec<f32>,
}

impl Affine<'_> {
    fn spread(&self, tiling: Tiling) -> Lanes {
        let scale: Vec<f32> =
            std::iter::zip(self.gamma, &self.statistics.inv_std).map(|(g, s)| g * s).collect();
        Lanes {
            mean: tiling.spread(&self.statistics.mean),
            scale: tiling.spread(&scale),
            beta: tiling.spread(self.beta),
        }
    }
}

/// The `W` values of `from` that start at index `at`. `from` must be long enough.
#[inline(always)]
fn load<const W: usize>(from: &[f32], at: usize) -> &[f32; W] {
    const { assert!(W > 0) };
    from[at..at + W].first_chunk().unwrap_or(&[0.0; W])
}

/// y = relu(batch_norm(x) + shortcut); the shortcut and the ReLU are optional.
pub fn forward(x: &[f32], affine: Affine<'_>, shortcut: Option<&[f32]>, has_relu: bool, y: &mut [f32]) {
    let tiling = Tiling::new(affine.gamma.len());
    let lanes = affine.spread(tiling);
    let chunk = tiling.chunk();
    y.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).enumerate().for_each(|(i, (y, x))| {
        match (shortcut.map(|s| &s[i * chunk..][..x.len()]), has_relu) {
            // Without a shortcut, `x` is passed in its place, and the closure ignores it.
            (None, false) => tiled!(tiling, forward_chunk(tiling, &lanes, x, x, y, |v, _| v)),
            (None, true) => tiled!(tiling, forward_chunk(tiling, &lanes, x, x, y, |v, _| relu_of(v))),
            (Some(added), false) => {
                tiled!(tiling, forward_chunk(tiling, &lanes, x, added, y, |v, s| v + s));
            }
            (Some(added), true) => {
                tiled!(tiling, forward_chunk(tiling, &lanes, x, added, y, |v, s| relu_of(v + s)));
            }
        }
    });
}

#[inline(always)]
fn forward_chunk<const W: usize>(
    tiling: Tiling,
    lanes: &Lanes,
    x: &[f32],
    shortcut: &[f32],
    y: &mut [f32],
    finish: impl Fn(f32, f32) -> f32,
) {
    let stride = tiling.stride;
    for ((x, s), y) in x.chunks(stride).zip(shortcut.chunks(stride)).zip(y.chunks_mut(stride)) {
        // Whole blocks first, then the remaining values one by one.
        let whole = x.len() / W * W;
        for block in (0..whole).step_by(W) {
            let (mean, scale) = (load::<W>(&lanes.mean, block), load::<W>(&lanes.scale, block));
            let (beta, x) = (load::<W>(&lanes.beta, block), load::<W>(x, block));
            let s = load::<W>(s, block);
            let y = &mut y[block..block + W];
            for i in 0..W {
                y[i] = finish((x[i] - mean[i]) * scale[i] + beta[i], s[i]);
            }
        }
        for i in whole..x.len() {
            y[i] = finish((x[i] - lanes.mean[i]) * lanes.scale[i] + lanes.beta[i], s[i]);
        }
    }
}
