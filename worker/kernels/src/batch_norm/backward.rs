//! The backward pass of batch normalisation, in two passes over the activation: sums over rows, then the gradient of the
//! input, which depends on the sums over all ranks.

use super::{Affine, LANES, Lanes, Statistics, Tiling, add_partials, load, with_simd};
use rayon::prelude::*;

/// How the backward pass knows which values passed the ReLU.
#[derive(Debug, Clone, Copy)]
pub enum Mask<'a> {
    /// There is no ReLU.
    None,
    /// By the sign of the normalised input, which saves reading the output. Impossible with a shortcut.
    Input,
    /// By the sign of the output.
    Output(&'a [f32]),
}

/// First pass: for each channel the sum of g and the sum of g (x - mean), where g is the gradient of the ReLU's input.
/// Returns `2 * channels` values.
///
/// `dy` plus `second` is the gradient of the output. With `stores_g`, and always with [`Mask::Output`], `dy` becomes g.
pub fn backward_sums(
    x: &[f32],
    affine: Affine<'_>,
    dy: &mut [f32],
    second: Option<&[f32]>,
    mask: Mask<'_>,
    stores_g: bool,
) -> Vec<f64> {
    let channels = affine.gamma.len();
    let tiling = Tiling::new(channels);
    let chunk = tiling.chunk();
    let lanes = affine.spread(tiling);
    let mut partials = vec![0.0; x.len().div_ceil(chunk) * 2 * channels];
    x.par_chunks(chunk)
        .zip(dy.par_chunks_mut(chunk))
        .zip(partials.par_chunks_mut(2 * channels))
        .enumerate()
        .for_each(|(i, ((x, dy), out))| {
            let start = i * chunk;
            if let Some(second) = second {
                let second = &second[start..][..x.len()];
                with_simd(
                    #[inline(always)]
                    || {
                        for (d, s) in dy.iter_mut().zip(second) {
                            *d += s;
                        }
                    },
                );
            }
            match mask {
                Mask::None => {
                    tiled!(tiling, backward_sums_chunk(tiling, &lanes, x, dy, x, out, false, |_, _| true))
                }
                Mask::Input if stores_g => {
                    tiled!(tiling, backward_sums_chunk(tiling, &lanes, x, dy, x, out, true, |n, _| n > 0.0))
                }
                Mask::Input => {
                    tiled!(tiling, backward_sums_chunk(tiling, &lanes, x, dy, x, out, false, |n, _| n > 0.0))
                }
                Mask::Output(y) => {
                    let y = &y[start..][..x.len()];
                    tiled!(tiling, backward_sums_chunk(tiling, &lanes, x, dy, y, out, true, |_, y| y > 0.0));
                }
            }
        });
    add_partials(&partials, 2 * channels)
}

#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the operands of one loop")]
fn backward_sums_chunk<const W: usize>(
    tiling: Tiling,
    lanes: &Lanes,
    x: &[f32],
    dy: &mut [f32],
    y: &[f32],
    out: &mut [f64],
    stores_g: bool,
    passes: impl Fn(f32, f32) -> bool,
) {
    let (channels, stride) = (tiling.channels, tiling.stride);
    let whole = x.len() / stride * stride;
    for block in (0..stride).step_by(W) {
        let (mean, scale) = (load::<W>(&lanes.mean, block), load::<W>(&lanes.scale, block));
        let beta = load::<W>(&lanes.beta, block);
        let (mut sum, mut product) = ([0.0f64; W], [0.0f64; W]);
        let mut at = block;
        while at < whole {
            let (x, y) = (load::<W>(x, at), load::<W>(y, at));
            let dy = &mut dy[at..at + W];
            for i in 0..W {
                let centred = x[i] - mean[i];
                let g = if passes(centred * scale[i] + beta[i], y[i]) { dy[i] } else { 0.0 };
                if stores_g {
                    dy[i] = g;
                }
                sum[i] += f64::from(g);
                product[i] += f64::from(g) * f64::from(centred);
            }
            at += stride;
        }
        // With few channels, the last rows may not fill a stride.
        for at in (whole + block..x.len()).take(W) {
            let i = at - whole - block;
            let centred = x[at] - mean[i];
            let g = if passes(centred * scale[i] + beta[i], y[at]) { dy[at] } else { 0.0 };
            if stores_g {
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

/// The gradients of gamma and of beta, from this rank's sums.
pub fn parameter_gradients(sums: &[f64], statistics: &Statistics) -> (Vec<f64>, Vec<f64>) {
    let (sum, product) = sums.split_at(sums.len() / 2);
    let gamma = std::iter::zip(product, &statistics.inv_std).map(|(p, s)| p * f64::from(*s));
    (gamma.collect(), sum.to_vec())
}

/// The coefficients of dx = scale (g - offset - slope (x - mean)), by lane.
struct Slopes {
    lanes: Lanes,
    offset: Vec<f32>,
    slope: Vec<f32>,
}

impl Slopes {
    fn new(affine: Affine<'_>, tiling: Tiling, sums: &[f64], count: f64) -> Self {
        let (sum, product) = sums.split_at(sums.len() / 2);
        let offset: Vec<f32> = sum.iter().map(|s| (s / count) as f32).collect();
        let slope: Vec<f32> = std::iter::zip(product, &affine.statistics.inv_std)
            .map(|(p, s)| (p / count * f64::from(*s) * f64::from(*s)) as f32)
            .collect();
        Self { lanes: affine.spread(tiling), offset: tiling.spread(&offset), slope: tiling.spread(&slope) }
    }
}

/// Second pass, in place: `g` becomes the gradient of the input.
///
/// `sums` are the results of [`backward_sums`], summed over all `count` rows of the statistics. If `applies_mask`,
/// the ReLU's mask, which has not been applied to `g` yet, is applied first ([`Mask::Input`]).
pub fn backward_input_in_place(
    x: &[f32],
    affine: Affine<'_>,
    sums: &[f64],
    count: f64,
    applies_mask: bool,
    g: &mut [f32],
) {
    let tiling = Tiling::new(affine.gamma.len());
    let slopes = Slopes::new(affine, tiling, sums, count);
    let chunk = tiling.chunk();
    g.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).for_each(|(g, x)| {
        if applies_mask {
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
            let (mean, scale) = (load::<W>(&s.lanes.mean, block), load::<W>(&s.lanes.scale, block));
            let (offset, slope) = (load::<W>(&s.offset, block), load::<W>(&s.slope, block));
            let (beta, x) = (load::<W>(&s.lanes.beta, block), load::<W>(x, block));
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

/// As [`backward_input_in_place`] without a mask, but writes to a separate `dx`, because the shortcut still needs `g`.
pub fn backward_input(x: &[f32], affine: Affine<'_>, sums: &[f64], count: f64, g: &[f32], dx: &mut [f32]) {
    let tiling = Tiling::new(affine.gamma.len());
    let slopes = Slopes::new(affine, tiling, sums, count);
    let chunk = tiling.chunk();
    dx.par_chunks_mut(chunk).zip(g.par_chunks(chunk).zip(x.par_chunks(chunk))).for_each(|(dx, (g, x))| {
        dx.copy_from_slice(g);
        tiled!(tiling, in_place_chunk(tiling, &slopes, x, dx, |_| true));
    });
}
