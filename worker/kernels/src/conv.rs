//! Two-dimensional convolution without bias: the forward pass, the gradient of the input, and the gradient of the weights. All
//! values in memory are float32. The [`Format`] of the [`Scratch`] is the format in which they are multiplied. In float32,
//! convolutions of 3 x 3 and stride 1 with 16 or more channels, and not more than 256 x 256 pairs of channels, use [`winograd`]'s
//! algorithm, which needs half of the multiplications if four divides the width.
//!
//! Activations are NHWC. Weights are one flat slice of [`ConvShape::weight_len`] values in blocks of [`LANES`] output channels:
//! `[block][ky][kx][input channel][lane]`. If [`LANES`] does not divide `out_c`, the last block has only `out_c % LANES` lanes. The
//! slice has no padding, so an optimizer may treat it as a vector. [`weight_from_oihw`] and [`weight_to_oihw`] convert from and to
//! the order of checkpoints. In a grouped convolution, the input channels of a weight are those of one group.
//!
//! The passes write every value of their result. They panic if the length of a slice does not match the shape.

#![allow(unsafe_code)] // Register tiles use raw pointers; the public functions check the slices.

mod grouped;
mod memory;
mod pieces;
mod product;
mod shape;
mod tile;
mod vector;
mod weight;
mod winograd;

pub use memory::Scratch;
pub use shape::ConvShape;
pub use tile::{Format, Instructions};

/// Number of output channels in a block of weights: the number of floats in a 512-bit register.
pub const LANES: usize = 16;

impl ConvShape {
    /// Index of the weight of `(out, ky, kx, input)` in the flat slice; `input` counts within the group.
    fn weight_index(&self, out: usize, ky: usize, kx: usize, input: usize) -> usize {
        let weights_per_output = self.kernel * self.kernel * self.group_in_c();
        let block = out / LANES;
        let lanes = LANES.min(self.out_c - block * LANES);
        block * LANES * weights_per_output
            + ((ky * self.kernel + kx) * self.group_in_c() + input) * lanes
            + out % LANES
    }
}

/// Converts weights from the order of checkpoints, `[out_c][in_c / groups][kernel][kernel]`.
pub fn weight_from_oihw(s: &ConvShape, src: &[f32], dst: &mut [f32]) {
    assert_eq!([src.len(), dst.len()], [s.weight_len(); 2], "weights of {s:?}");
    each_weight(s, |ours, oihw| dst[ours] = src[oihw]);
}

/// Converts weights to the order of checkpoints.
pub fn weight_to_oihw(s: &ConvShape, src: &[f32], dst: &mut [f32]) {
    assert_eq!([src.len(), dst.len()], [s.weight_len(); 2], "weights of {s:?}");
    each_weight(s, |ours, oihw| dst[oihw] = src[ours]);
}

/// Calls `f` with every weight's index in the flat slice and its index in the order of checkpoints.
fn each_weight(s: &ConvShape, mut f: impl FnMut(usize, usize)) {
    let mut oihw = 0;
    for out in 0..s.out_c {
        for input in 0..s.group_in_c() {
            for ky in 0..s.kernel {
                for kx in 0..s.kernel {
                    f(s.weight_index(out, ky, kx, input), oihw);
                    oihw += 1;
                }
            }
        }
    }
}

fn check(s: &ConvShape, x_len: usize, w_len: usize, y_len: usize) {
    assert!(s.stride > 0 && s.kernel > 0, "kernel and stride start at 1: {s:?}");
    assert!(
        s.in_h + 2 * s.row_padding >= s.kernel && s.in_w + 2 * s.padding >= s.kernel,
        "kernel too large: {s:?}"
    );
    assert!(
        s.groups > 0 && s.in_c.is_multiple_of(s.groups) && s.out_c.is_multiple_of(s.groups),
        "groups do not divide channels: {s:?}"
    );
    assert_eq!(
        (x_len, w_len, y_len),
        (s.input_len(), s.weight_len(), s.output_len()),
        "lengths of x, w, y for {s:?}"
    );
}

/// `y = conv(x, w)`.
pub fn forward(s: &ConvShape, x: &[f32], w: &[f32], y: &mut [f32], scratch: &mut Scratch) {
    run_forward(s, x, w, y, None, scratch);
}

fn run_forward(
    s: &ConvShape,
    x: &[f32],
    w: &[f32],
    y: &mut [f32],
    sums: Option<&mut [f64]>,
    scratch: &mut Scratch,
) {
    check(s, x.len(), w.len(), y.len());
    let tiles = scratch.tiles;
    // Tiles need whole blocks of channels, so narrow groups are merged.
    let merged = grouped::merged_shape(s, LANES * tiles.values_per_unit);
    let w = grouped::merge_weights(s, &merged, w, &mut scratch.merged);
    let pass = product::Pass::forward(&merged, tiles);
    let w = pass.pack_weights(w, tiles, &mut scratch.weights);
    pass.run(x, w, y, sums, tiles, &scratch.task_buffers);
}

/// [`forward`], and the sums for batch normalisation: for every output channel the sum over all pixels, then for
/// every channel the sum of squares, `2 * out_c` values. They are computed while outputs are in registers, which
/// saves another read of `y`.
///
/// To limit rounding, a task sums differences from a pivot (an output of the channel) in float32, and the pivot is added back in float64.
/// The sums of the tasks are added in float64, in order, so the result does not depend on the number of threads.
pub fn forward_with_sums(
    s: &ConvShape,
    x: &[f32],
    w: &[f32],
    y: &mut [f32],
    scratch: &mut Scratch,
) -> Vec<f64> {
    let mut sums = vec![0.0; 2 * s.out_c];
    run_forward(s, x, w, y, Some(&mut sums), scratch);
    sums
}

/// The gradient of the input, `dx`, from the gradient of the output, `dy`.
pub fn backward_input(s: &ConvShape, dy: &[f32], w: &[f32], dx: &mut [f32], scratch: &mut Scratch) {
    check(s, dx.len(), w.len(), dy.len());
    let merged = grouped::merged_shape(s, LANES * scratch.tiles.values_per_unit);
    let w = grouped::merge_weights(s, &merged, w, &mut scratch.merged);
    let pass = product::Pass::backward(&merged, scratch.tiles);
    let w = pass.pack_transposed_weights(w, scratch.tiles, &mut scratch.weights);
    pass.run(dy, w, dx, None, scratch.tiles, &scratch.task_buffers);
}

/// The gradient of the weights, `dw`, in the order of the weights.
pub fn backward_weight(s: &ConvShape, x: &[f32], dy: &[f32], dw: &mut [f32], scratch: &mut Scratch) {
    check(s, x.len(), dw.len(), dy.len());
    // Here a lane has one channel also with bfloat16: the two values of a unit are of two pictures, not of two channels.
    let merged = grouped::merged_shape(s, LANES);
    if merged.groups == s.groups {
        return weight::gradient(s, x, dy, dw, scratch);
    }
    let mut buffer = std::mem::take(&mut scratch.merged);
    let wide = buffer.get(merged.weight_len());
    weight::gradient(&merged, x, dy, wide, scratch);
    grouped::each_weight(s, &merged, |own, at| dw[own] = wide[at]);
    scratch.merged = buffer;
}
