//! Batch normalisation, fused with the residual addition and the ReLU after it.
//!
//! An activation is a matrix of rows (pixels of all pictures) by channels. Sums over rows are taken
//! in float64, in chunks whose size depends on the channels alone and in order: the same on any
//! number of threads, accurate when a channel's mean is large against its spread, and to float32's
//! last bit (but for about one value in 10^8) the same however a batch is cut over ranks.

use super::{
    elementwise::relu_of,
    simd::{LANES, wide},
};
use rayon::prelude::*;

/// PyTorch's default: added to the variance before its root is taken.
pub(super) const EPSILON: f64 = 1e-5;
/// PyTorch's default: the share of a new batch in the running statistics.
pub(super) const MOMENTUM: f32 = 0.1;

/// Values of a chunk, about: two or three operands of it fit a core's second-level cache.
const CHUNK: usize = 1 << 14;

/// Statistics that one forward pass leaves for backward, one value a channel.
#[derive(Debug, Clone, Default)]
pub(super) struct Statistics {
    pub(super) mean: Vec<f32>,
    /// 1 / sqrt(variance + epsilon), biased variance.
    pub(super) inv_std: Vec<f32>,
    /// Mean and variance before rounding, for the running statistics.
    in_f64: Vec<(f64, f64)>,
}

impl Statistics {
    /// From sums over `count` rows: first all channels' sums, then all channels' sums of squares.
    pub(super) fn from_sums(sums: &[f64], count: f64) -> Self {
        let (sum, square) = sums.split_at(sums.len() / 2);
        let in_f64: Vec<(f64, f64)> = std::iter::zip(sum, square)
            .map(|(s, q)| {
                let mean = s / count;
                let variance = q / count - mean * mean;
                // Rounding may leave it below zero. Not by `max`, which would make a NaN zero.
                (mean, if variance < 0.0 { 0.0 } else { variance })
            })
            .collect();
        Self {
            mean: in_f64.iter().map(|e| e.0 as f32).collect(),
            inv_std: in_f64.iter().map(|e| (1.0 / (e.1 + EPSILON).sqrt()) as f32).collect(),
            in_f64,
        }
    }

    /// The running statistics, for inference.
    pub(super) fn from_running(mean: &[f32], var: &[f32]) -> Self {
        let inv_std = var.iter().map(|&v| (1.0 / (f64::from(v) + EPSILON).sqrt()) as f32).collect();
        Self { mean: mean.to_vec(), inv_std, in_f64: Vec::new() }
    }

    /// Moves the running statistics towards these, with the unbiased variance, as PyTorch does.
    pub(super) fn update_running(&self, count: f64, mean: &mut [f32], var: &mut [f32]) {
        let unbias = count / (count - 1.0).max(1.0);
        for (&(m, v), (mean, var)) in self.in_f64.iter().zip(std::iter::zip(mean, var)) {
            *mean = (1.0 - MOMENTUM) * *mean + MOMENTUM * m as f32;
            *var = (1.0 - MOMENTUM) * *var + MOMENTUM * (v * unbias) as f32;
        }
    }
}

/// How a kernel walks a matrix of `channels` columns: blocks of `width` lanes, `stride` values apart.
///
/// Few channels are read several rows at a time, so that every loop is [`LANES`] wide; a number of
/// channels that fits neither way is walked one lane at a time.
#[derive(Debug, Clone, Copy)]
struct Tiling {
    channels: usize,
    stride: usize,
    wide: bool,
}

impl Tiling {
    fn new(channels: usize) -> Self {
        if LANES.is_multiple_of(channels) {
            Self { channels, stride: LANES, wide: true }
        } else {
            Self { channels, stride: channels, wide: channels.is_multiple_of(LANES) }
        }
    }

    /// Values of a chunk: whole rows, and whole strides but for the last chunk.
    fn chunk(self) -> usize {
        (CHUNK / self.stride).max(16) * self.stride
    }

    /// A value a channel -> a value a lane of the stride.
    fn spread(self, per_channel: &[f32]) -> Vec<f32> {
        per_channel.iter().copied().cycle().take(self.stride).collect()
    }
}

/// Runs a kernel for the tiling's lane width.
macro_rules! tiled {
    ($tiling:expr, $kernel:ident ( $($arg:expr),* $(,)? )) => {
        if $tiling.wide {
            wide(#[inline(always)] || $kernel::<LANES>($($arg),*))
        } else {
            $kernel::<1>($($arg),*)
        }
    };
}

/// Adds the chunks' partial sums in order.
fn combine(partials: &[f64], width: usize) -> Vec<f64> {
    let mut total = vec![0.0; width];
    for partial in partials.chunks_exact(width) {
        for (t, p) in total.iter_mut().zip(partial) {
            *t += p;
        }
    }
    total
}

/// Sums and sums of squares of each channel: `2 * channels` values.
pub(super) fn sums(x: &[f32], channels: usize) -> Vec<f64> {
    let tiling = Tiling::new(channels);
    let mut partials = vec![0.0; x.len().div_ceil(tiling.chunk()) * 2 * channels];
    x.par_chunks(tiling.chunk())
        .zip(partials.par_chunks_mut(2 * channels))
        .for_each(|(x, out)| tiled!(tiling, sums_of_chunk(tiling, x, out)));
    combine(&partials, 2 * channels)
}

#[inline(always)]
fn sums_of_chunk<const W: usize>(tiling: Tiling, x: &[f32], out: &mut [f64]) {
    let (channels, stride) = (tiling.channels, tiling.stride);
    let whole = x.len() / stride * stride;
    for block in (0..stride).step_by(W) {
        let (mut sum, mut square) = ([0.0f64; W], [0.0f64; W]);
        let mut row = block;
        while row < whole {
            let x = lanes::<W>(x, row);
            for i in 0..W {
                let v = f64::from(x[i]);
                sum[i] += v;
                square[i] += v * v;
            }
            row += stride;
        }
        // Few channels: the last rows may not fill a stride.
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

/// What a batch norm needs besides its input, one value a channel each.
#[derive(Debug, Clone, Copy)]
pub(super) struct Affine<'a> {
    pub(super) statistics: &'a Statistics,
    pub(super) gamma: &'a [f32],
    pub(super) beta: &'a [f32],
}

/// [`Affine`] spread over the lanes of a stride.
struct Lanes {
    mean: Vec<f32>,
    /// gamma / sqrt(variance + epsilon)
    scale: Vec<f32>,
    beta: Vec<f32>,
}

impl Affine<'_> {
    fn lanes(&self, tiling: Tiling) -> Lanes {
        let scale: Vec<f32> =
            std::iter::zip(self.gamma, &self.statistics.inv_std).map(|(g, s)| g * s).collect();
        Lanes {
            mean: tiling.spread(&self.statistics.mean),
            scale: tiling.spread(&scale),
            beta: tiling.spread(self.beta),
        }
    }
}

/// `W` values of `from` at `at`; kernels call it with slices that are long enough.
#[inline(always)]
fn lanes<const W: usize>(from: &[f32], at: usize) -> &[f32; W] {
    const { assert!(W > 0) };
    from[at..at + W].first_chunk().unwrap_or(&[0.0; W])
}

/// y = relu(batch_norm(x) + shortcut), with the shortcut and the ReLU only as asked for.
pub(super) fn forward(x: &[f32], affine: Affine<'_>, shortcut: Option<&[f32]>, relu: bool, y: &mut [f32]) {
    let tiling = Tiling::new(affine.gamma.len());
    let lanes = affine.lanes(tiling);
    let chunk = tiling.chunk();
    y.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).enumerate().for_each(|(i, (y, x))| {
        match (shortcut.map(|s| &s[i * chunk..][..x.len()]), relu) {
            (None, false) => tiled!(tiling, forward_chunk(tiling, &lanes, x, y, |v, _| v)),
            (None, true) => tiled!(tiling, forward_chunk(tiling, &lanes, x, y, |v, _| relu_of(v))),
            (Some(s), false) => {
                y.copy_from_slice(s);
                tiled!(tiling, forward_chunk(tiling, &lanes, x, y, |v, s| v + s));
            }
            (Some(s), true) => {
                tiled!(tiling, residual_chunk(tiling, &lanes, x, s, y));
            }
        }
    });
}

#[inline(always)]
fn forward_chunk<const W: usize>(
    tiling: Tiling,
    lanes_of: &Lanes,
    x: &[f32],
    y: &mut [f32],
    finish: impl Fn(f32, f32) -> f32,
) {
    for (x, y) in x.chunks(tiling.stride).zip(y.chunks_mut(tiling.stride)) {
        // Whole strides first; the rest of few channels lane by lane.
        let whole = x.len() / W * W;
        for block in (0..whole).step_by(W) {
            let (mean, scale) = (lanes::<W>(&lanes_of.mean, block), lanes::<W>(&lanes_of.scale, block));
            let (beta, x) = (lanes::<W>(&lanes_of.beta, block), lanes::<W>(x, block));
            let y = &mut y[block..block + W];
            for i in 0..W {
                y[i] = finish((x[i] - mean[i]) * scale[i] + beta[i], y[i]);
            }
        }
        for i in whole..x.len() {
            y[i] = finish((x[i] - lanes_of.mean[i]) * lanes_of.scale[i] + lanes_of.beta[i], y[i]);
        }
    }
}

#[inline(always)]
fn residual_chunk<const W: usize>(
    tiling: Tiling,
    lanes_of: &Lanes,
    x: &[f32],
    shortcut: &[f32],
    y: &mut [f32],
) {
    let stride = tiling.stride;
    for ((x, s), y) in x.chunks(stride).zip(shortcut.chunks(stride)).zip(y.chunks_mut(stride)) {
        let whole = x.len() / W * W;
        for block in (0..whole).step_by(W) {
            let (mean, scale) = (lanes::<W>(&lanes_of.mean, block), lanes::<W>(&lanes_of.scale, block));
            let (beta, x) = (lanes::<W>(&lanes_of.beta, block), lanes::<W>(x, block));
            let s = lanes::<W>(s, block);
            let y = &mut y[block..block + W];
            for i in 0..W {
                y[i] = relu_of((x[i] - mean[i]) * scale[i] + beta[i] + s[i]);
            }
        }
        for i in whole..x.len() {
            let v = (x[i] - lanes_of.mean[i]) * lanes_of.scale[i] + lanes_of.beta[i];
            y[i] = relu_of(v + s[i]);
        }
    }
}

/// Which outputs the ReLU let through.
#[derive(Debug, Clone, Copy)]
pub(super) enum Mask<'a> {
    /// There was no ReLU.
    None,
    /// No shortcut either: the sign of the normalised input tells, which spares reading the output.
    Input,
    /// The output itself.
    Output(&'a [f32]),
}

/// First pass of backward: for each channel the sum of g and the sum of g (x - mean), where g is
/// the gradient before the ReLU: `2 * channels` values.
///
/// `dy` plus `more` is the gradient of the output. With `keep`, `dy` becomes g.
pub(super) fn backward_sums(
    x: &[f32],
    affine: Affine<'_>,
    dy: &mut [f32],
    more: Option<&[f32]>,
    mask: Mask<'_>,
    keep: bool,
) -> Vec<f64> {
    let channels = affine.gamma.len();
    let tiling = Tiling::new(channels);
    let chunk = tiling.chunk();
    let lanes = affine.lanes(tiling);
    let mut partials = vec![0.0; x.len().div_ceil(chunk) * 2 * channels];
    x.par_chunks(chunk)
        .zip(dy.par_chunks_mut(chunk))
        .zip(partials.par_chunks_mut(2 * channels))
        .enumerate()
        .for_each(|(i, ((x, dy), out))| {
            let at = i * chunk;
            if let Some(more) = more {
                let more = &more[at..][..x.len()];
                wide(
                    #[inline(always)]
                    || {
                        for (d, m) in dy.iter_mut().zip(more) {
                            *d += m;
                        }
                    },
                );
            }
            match mask {
                Mask::None => {
                    tiled!(tiling, backward_sums_chunk(tiling, &lanes, x, dy, x, out, false, |_, _| true))
                }
                Mask::Input if keep => {
                    tiled!(tiling, backward_sums_chunk(tiling, &lanes, x, dy, x, out, true, |n, _| n > 0.0))
                }
                Mask::Input => {
                    tiled!(tiling, backward_sums_chunk(tiling, &lanes, x, dy, x, out, false, |n, _| n > 0.0))
                }
                Mask::Output(y) => {
                    let y = &y[at..][..x.len()];
                    tiled!(tiling, backward_sums_chunk(tiling, &lanes, x, dy, y, out, true, |_, y| y > 0.0));
                }
            }
        });
    combine(&partials, 2 * channels)
}

#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the operands of one loop")]
fn backward_sums_chunk<const W: usize>(
    tiling: Tiling,
    lanes_of: &Lanes,
    x: &[f32],
    dy: &mut [f32],
    y: &[f32],
    out: &mut [f64],
    keep: bool,
    passes: impl Fn(f32, f32) -> bool,
) {
    let (channels, stride) = (tiling.channels, tiling.stride);
    let whole = x.len() / stride * stride;
    for block in (0..stride).step_by(W) {
        let (mean, scale) = (lanes::<W>(&lanes_of.mean, block), lanes::<W>(&lanes_of.scale, block));
        let beta = lanes::<W>(&lanes_of.beta, block);
        let (mut sum, mut product) = ([0.0f64; W], [0.0f64; W]);
        let mut row = block;
        while row < whole {
            let (x, y) = (lanes::<W>(x, row), lanes::<W>(y, row));
            let dy = &mut dy[row..row + W];
            for i in 0..W {
                let centred = x[i] - mean[i];
                let g = if passes(centred * scale[i] + beta[i], y[i]) { dy[i] } else { 0.0 };
                if keep {
                    dy[i] = g;
                }
                sum[i] += f64::from(g);
                product[i] += f64::from(g) * f64::from(centred);
            }
            row += stride;
        }
        for at in (whole + block..x.len()).take(W) {
            let i = at - whole - block;
            let centred = x[at] - mean[i];
            let g = if passes(centred * scale[i] + beta[i], y[at]) { dy[at] } else { 0.0 };
            if keep {
                dy[at] = g;
            }
            sum[i] += f64::from(g);
            product[i] += f64::from(g) * f64::from(centred);
        }
        for i in 0..W {
            let channel = (block + i) % channels;
            out[channel] += sum[i];
            out[channels + channel] += product[i];
        }
    }
}

/// The gradients of gamma and beta from this rank's sums.
pub(super) fn parameter_gradients(sums: &[f64], statistics: &Statistics) -> (Vec<f64>, Vec<f64>) {
    let (sum, product) = sums.split_at(sums.len() / 2);
    let gamma = std::iter::zip(product, &statistics.inv_std).map(|(p, s)| p * f64::from(*s));
    (gamma.collect(), sum.to_vec())
}

/// Per lane: dx = scale (g - offset - slope (x - mean)).
struct Slopes {
    lanes: Lanes,
    offset: Vec<f32>,
    slope: Vec<f32>,
}

fn slopes(affine: Affine<'_>, tiling: Tiling, sums: &[f64], count: f64) -> Slopes {
    let (sum, product) = sums.split_at(sums.len() / 2);
    let offset: Vec<f32> = sum.iter().map(|s| (s / count) as f32).collect();
    let slope: Vec<f32> = std::iter::zip(product, &affine.statistics.inv_std)
        .map(|(p, s)| (p / count * f64::from(*s) * f64::from(*s)) as f32)
        .collect();
    Slopes { lanes: affine.lanes(tiling), offset: tiling.spread(&offset), slope: tiling.spread(&slope) }
}

/// Second pass of backward, in place: g in `g` becomes the gradient of the input.
///
/// `sums` are those of [`backward_sums`] over `count` rows of the whole batch that the statistics
/// are of. With `masked`, `g` still has to pass the ReLU ([`Mask::Input`]).
pub(super) fn backward_input_in_place(
    x: &[f32],
    affine: Affine<'_>,
    sums: &[f64],
    count: f64,
    masked: bool,
    g: &mut [f32],
) {
    let tiling = Tiling::new(affine.gamma.len());
    let slopes = slopes(affine, tiling, sums, count);
    let chunk = tiling.chunk();
    g.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).for_each(|(g, x)| {
        if masked {
            tiled!(tiling, in_place_chunk(tiling, &slopes, x, g, |n| n > 0.0));
        } else {
            tiled!(tiling, in_place_chunk(tiling, &slopes, x, g, |_| true));
        }
    });
}

#[inline(always)]
fn in_place_chunk<const W: usize>(
    tiling: Tiling,
    s: &Slopes,
    x: &[f32],
    g: &mut [f32],
    passes: impl Fn(f32) -> bool,
) {
    for (x, g) in x.chunks(tiling.stride).zip(g.chunks_mut(tiling.stride)) {
        let whole = x.len() / W * W;
        for block in (0..whole).step_by(W) {
            let (mean, scale) = (lanes::<W>(&s.lanes.mean, block), lanes::<W>(&s.lanes.scale, block));
            let (offset, slope) = (lanes::<W>(&s.offset, block), lanes::<W>(&s.slope, block));
            let (beta, x) = (lanes::<W>(&s.lanes.beta, block), lanes::<W>(x, block));
            let g = &mut g[block..block + W];
            for i in 0..W {
                let centred = x[i] - mean[i];
                let v = if passes(centred * scale[i] + beta[i]) { g[i] } else { 0.0 };
                g[i] = scale[i] * (v - offset[i] - slope[i] * centred);
            }
        }
        for i in whole..x.len() {
            let centred = x[i] - s.lanes.mean[i];
            let v = if passes(centred * s.lanes.scale[i] + s.lanes.beta[i]) { g[i] } else { 0.0 };
            g[i] = s.lanes.scale[i] * (v - s.offset[i] - s.slope[i] * centred);
        }
    }
}

/// As [`backward_input_in_place`] without a mask, for a `g` that the shortcut still needs.
pub(super) fn backward_input(
    x: &[f32],
    affine: Affine<'_>,
    sums: &[f64],
    count: f64,
    g: &[f32],
    dx: &mut [f32],
) {
    let tiling = Tiling::new(affine.gamma.len());
    let slopes = slopes(affine, tiling, sums, count);
    let chunk = tiling.chunk();
    dx.par_chunks_mut(chunk)
        .zip(g.par_chunks(chunk).zip(x.par_chunks(chunk)))
        .for_each(|(dx, (g, x))| tiled!(tiling, input_chunk(tiling, &slopes, x, g, dx)));
}

#[inline(always)]
fn input_chunk<const W: usize>(tiling: Tiling, s: &Slopes, x: &[f32], g: &[f32], dx: &mut [f32]) {
    let stride = tiling.stride;
    for ((x, g), dx) in x.chunks(stride).zip(g.chunks(stride)).zip(dx.chunks_mut(stride)) {
        let whole = x.len() / W * W;
        for block in (0..whole).step_by(W) {
            let (mean, scale) = (lanes::<W>(&s.lanes.mean, block), lanes::<W>(&s.lanes.scale, block));
            let (offset, slope) = (lanes::<W>(&s.offset, block), lanes::<W>(&s.slope, block));
            let (x, g) = (lanes::<W>(x, block), lanes::<W>(g, block));
            let dx = &mut dx[block..block + W];
            for i in 0..W {
                dx[i] = scale[i] * (g[i] - offset[i] - slope[i] * (x[i] - mean[i]));
            }
        }
        for i in whole..x.len() {
            let centred = x[i] - s.lanes.mean[i];
            dx[i] = s.lanes.scale[i] * (g[i] - s.offset[i] - s.slope[i] * centred);
        }
    }
}
