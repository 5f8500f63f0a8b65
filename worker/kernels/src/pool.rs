//! Max pooling and global average pooling. NHWC; a task is one picture.

use crate::TensorShape;
use rayon::prelude::*;

/// A square max pooling.
#[derive(Debug, Clone, Copy)]
pub struct MaxPool {
    pub input: TensorShape,
    pub output: TensorShape,
    pub kernel: usize,
    pub stride: usize,
    /// Padding columns on either side of the input, which are never the maximum.
    pub padding: usize,
    /// Padding rows above and below the input: as `padding`, or 0 if the input already includes them.
    pub row_padding: usize,
}

impl MaxPool {
    /// Calls `visit(position in the window, offset in the input)` for the pixels of the window of output pixel (`oy`, `ox`) that
    /// are inside the picture, row by row.
    #[inline(always)]
    fn window(&self, oy: usize, ox: usize, mut visit: impl FnMut(u8, usize)) {
        for ky in 0..self.kernel {
            let Some(y) = (oy * self.stride + ky).checked_sub(self.row_padding) else { continue };
            if y >= self.input.height {
                continue;
            }
            for kx in 0..self.kernel {
                let Some(x) = (ox * self.stride + kx).checked_sub(self.padding) else { continue };
                if x < self.input.width {
                    visit((ky * self.kernel + kx) as u8, (y * self.input.width + x) * self.input.channels);
                }
            }
        }
    }

    /// Max pooling. `argmax` receives the window position of each maximum: the first of equal ones, as in PyTorch.
    pub fn forward(&self, x: &[f32], y: &mut [f32], argmax: &mut [u8]) {
        let (inputs, outputs, channels) = (self.input.len(), self.output.len(), self.input.channels);
        y.par_chunks_mut(outputs).zip(argmax.par_chunks_mut(outputs)).zip(x.par_chunks(inputs)).for_each(
            |((y, argmax), x)| {
                for (pixel, (y, argmax)) in
                    y.chunks_exact_mut(channels).zip(argmax.chunks_exact_mut(channels)).enumerate()
                {
                    let mut is_first = true;
                    self.window(pixel / self.output.width, pixel % self.output.width, |position, at| {
                        let x = &x[at..at + channels];
                        for c in 0..channels {
                            // A NaN wins, so that divergence is not hidden.
                            if is_first || x[c] > y[c] || x[c].is_nan() {
                                y[c] = x[c];
                                argmax[c] = position;
                            }
                        }
                        is_first = false;
                    });
                }
            },
        );
    }

    /// Overwrites `dx`: each output's gradient is added to the input that was the maximum.
    pub fn backward(&self, dy: &[f32], argmax: &[u8], dx: &mut [f32]) {
        let (inputs, outputs, channels) = (self.input.len(), self.output.len(), self.input.channels);
        dx.par_chunks_mut(inputs).zip(dy.par_chunks(outputs).zip(argmax.par_chunks(outputs))).for_each(
            |(dx, (dy, argmax))| {
                dx.fill(0.0);
                for (pixel, (dy, argmax)) in
                    dy.chunks_exact(channels).zip(argmax.chunks_exact(channels)).enumerate()
                {
                    self.window(pixel / self.output.width, pixel % self.output.width, |position, at| {
                        let dx = &mut dx[at..at + channels];
                        for c in 0..channels {
                            if argmax[c] == position {
                                dx[c] += dy[c];
                            }
                        }
                    });
                }
            },
        );
    }
}

/// Mean over the pixels of each picture and channel.
pub fn global_average(x: &[f32], input: TensorShape, y: &mut [f32]) {
    let scale = 1.0 / input.pixels() as f32;
    y.par_chunks_mut(input.channels).zip(x.par_chunks(input.len())).for_each(|(y, x)| {
        y.fill(0.0);
        for pixel in x.chunks_exact(input.channels) {
            for (y, x) in y.iter_mut().zip(pixel) {
                *y += x;
            }
        }
        for y in y {
            *y *= scale;
        }
    });
}

/// Overwrites `dx`: spreads a picture's gradient over all pixels.
pub fn global_average_backward(dy: &[f32], input: TensorShape, dx: &mut [f32]) {
    let scale = 1.0 / input.pixels() as f32;
    dx.par_chunks_mut(input.len()).zip(dy.par_chunks(input.channels)).for_each(|(dx, dy)| {
        for pixel in dx.chunks_exact_mut(input.channels) {
            for (dx, dy) in pixel.iter_mut().zip(dy) {
                *dx = dy * scale;
            }
        }
    });
}
