//! Winograd's convolution along rows, F(4, 3): four outputs of a row are computed from six products instead of twelve (Lavin and Gray,
//! "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308).
//!
//! A row is divided into segments of four output columns. A segment depends on six input columns `d`, on three weights `g` of a kernel
//! row, and its outputs are `Aᵀ [(G g) ∘ (Bᵀ d)]`, summed over kernel rows and input channels before `Aᵀ` is applied. The matrices are those
//! of the paper, for the points 0, 1, -1, 2, -2 and infinity; an index of the six products is a point. The gradient of the weights
//! is `Gᵀ [(A dy) ∘ (Bᵀ d)]`.
//!
//! Rows are not combined, so ranks that share rows compute the same products as one rank. Rounding errors are relative to the largest input
//! of a segment: an output that is exactly 0 by the definition may be 1e-7 of this input. A NaN, an infinite value or a value above about
//! 1e37 can affect all four outputs of a segment.

use super::{
    ConvShape, LANES,
    tile::{Format, Segments, Strides, TransformFn},
};
use crate::simd::with_simd;
use rayon::prelude::*;
use std::ops::Range;

/// Number of output columns of a segment.
pub(super) const COLUMNS: usize = 4;
/// Number of products of a segment.
pub(super) const POINTS: usize = 6;

/// Maximum number of pairs of channels. With more, the transforms of the weights take as long as they save.
const MAX_PAIRS: usize = 256 * 256;

/// Whether the passes of `s` use this algorithm. This must not depend on the number of pictures or rows, which depend on the rank.
pub(super) fn applies(s: &ConvShape, format: Format) -> bool {
    format == Format::Float32
        && (s.kernel, s.stride, s.padding, s.groups) == (3, 1, 1, 1)
        // Five columns need almost as many products by the definition.
        && s.in_w >= COLUMNS && s.in_w != 5
        && s.in_c.min(s.out_c) >= LANES
        && s.in_c * s.out_c <= MAX_PAIRS
}

/// Packs rows of some pictures, transformed by `transform`, as `strides` says.
pub(super) fn pack(
    transform: TransformFn,
    from: &[f32],
    [height, width, channels]: [usize; 3],
    pictures: &Range<usize>,
    rows: &Range<usize>,
    to: &mut [f32],
    strides: Strides,
) {
    let picture = height * width * channels;
    let segments = rows.len() * width.div_ceil(COLUMNS) * pictures.len();
    assert!(from.len() >= pictures.end * picture && rows.end <= height);
    assert!(to.len() >= segments * POINTS * channels.next_multiple_of(LANES));
    for row in rows.clone() {
        // SAFETY: `from` has the rows, and `to` has a vector for each point, block of channels and picture of every segment.
        unsafe {
            transform(&Segments {
                row: from[pictures.start * picture + row * width * channels..].as_ptr(),
                width,
                channels,
                pictures: pictures.len(),
                picture,
                to: to[(row - rows.start) * strides.row..].as_mut_ptr(),
                strides,
            });
        }
    }
}

/// `G g` for each value of three slices, the weights of a kernel row. The slice of a point begins `to_point` values after the previous one.
pub(super) fn transform_weights(g: [&[f32]; 3], to: &mut [f32], to_point: usize) {
    with_simd(
        #[inline(always)]
        || {
            let len = g[0].len();
            let [g0, g1, g2] = g.map(|g| &g[..len]);
            let (first, to) = to.split_at_mut(to_point);
            let (second, to) = to.split_at_mut(to_point);
            let (third, to) = to.split_at_mut(to_point);
            let (fourth, to) = to.split_at_mut(to_point);
            let (fifth, sixth) = to.split_at_mut(to_point);
            let [first, second, third, fourth, fifth, sixth] =
                [first, second, third, fourth, fifth, sixth].map(|to| &mut to[..len]);
            for i in 0..len {
                let (even, odd) = (g0[i] + g2[i], g1[i]);
                first[i] = g0[i] * (1.0 / 4.0);
                second[i] = (even + odd) * (-1.0 / 6.0);
                third[i] = (even - odd) * (-1.0 / 6.0);
                let even = g0[i] * (1.0 / 24.0) + g2[i] * (1.0 / 6.0);
                let odd = odd * (1.0 / 12.0);
                fourth[i] = even + odd;
                fifth[i] = even - odd;
                sixth[i] = g2[i];
            }
        },
    );
}

/// `Gᵀ m` for each weight: `dw` from its transformed gradient, `[block][kernel row][point][input channel][lane]`.
pub(super) fn inverse_gradient(s: &ConvShape, transformed: &[f32], dw: &mut [f32]) {
    let block_len = |columns| s.kernel * columns * s.in_c * LANES;
    let blocks = dw.par_chunks_mut(block_len(s.kernel)).zip(transformed.par_chunks(block_len(POINTS)));
    blocks.for_each(|(dw, transformed)| {
        with_simd(
            #[inline(always)]
            || {
                let len = dw.len() / (s.kernel * s.kernel);
                for (row, dw) in dw.chunks_exact_mut(3 * len).enumerate() {
                    let m: [_; POINTS] =
                        std::array::from_fn(|point| &transformed[(POINTS * row + point) * len..][..len]);
                    let (first, dw) = dw.split_at_mut(len);
                    let (second, third) = dw.split_at_mut(len);
                    for i in 0..len {
                        let (sum, difference) = (m[1][i] + m[2][i], m[2][i] - m[1][i]);
                        let (sum_2, difference_2) = (m[3][i] + m[4][i], m[3][i] - m[4][i]);
                        first[i] = m[0][i] * (1.0 / 4.0) - sum * (1.0 / 6.0) + sum_2 * (1.0 / 24.0);
                        second[i] = difference * (1.0 / 6.0) + difference_2 * (1.0 / 12.0);
                        third[i] = (sum_2 - sum) * (1.0 / 6.0) + m[5][i];
                    }
                }
            },
        );
    });
}
