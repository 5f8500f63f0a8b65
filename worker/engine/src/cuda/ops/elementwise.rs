//! Operations that are not fused; `elementwise.cu`. `length` is a number of values, a multiple of 8.

use super::{Arg, Kernel, NORM_COUNTER, Operand, Ops, Shape, kernel, plain};

/// Maximum number of channels of [`Ops::row_sums`].
pub(in crate::cuda) const MAX_ROW_SUM_CHANNELS: usize = 512;

/// A max pooling with square windows of at most 15 x 15 pixels.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct PlainPool {
    pub(in crate::cuda) pictures: u32,
    /// Height and width of the input.
    pub(in crate::cuda) input: [u32; 2],
    /// Height and width of the output.
    pub(in crate::cuda) output: [u32; 2],
    pub(in crate::cuda) kernel: u32,
    pub(in crate::cuda) stride: u32,
    /// Number of padding columns on either side.
    pub(in crate::cuda) padding: u32,
    /// Number of padding rows on either side.
    pub(in crate::cuda) row_padding: u32,
    /// A multiple of 8.
    pub(in crate::cuda) channels: u32,
}

impl PlainPool {
    fn args(self) -> [Arg; 10] {
        let ([height, width], [out_height, out_width]) = (self.input, self.output);
        let Self { pictures, kernel, stride, padding, row_padding, channels, .. } = self;
        [pictures, height, width, out_height, out_width, kernel, stride, padding, row_padding, channels]
            .map(Arg::U32)
    }

    /// Number of groups of 8 channels of an input or output with this height and width.
    fn groups(self, [height, width]: [u32; 2]) -> u64 {
        u64::from(self.pictures) * u64::from(height) * u64::from(width) * u64::from(self.channels / 8)
    }
}

impl Ops {
    /// The kernel `name`, which computes `to` from the operands `from`, each of `length` values.
    fn elementwise<const N: usize>(
        &self,
        name: &'static str,
        from: [Operand; N],
        to: Operand,
        length: u64,
    ) -> Kernel {
        let mut args = from.map(Arg::In).to_vec();
        args.extend([Arg::Out(to), Arg::U64(length)]);
        kernel(name, self.per_item(length / 8, 8), args)
    }

    /// y = max(x, 0).
    pub(in crate::cuda) fn relu(&self, [x, y]: [Operand; 2], length: u64) -> Kernel {
        self.elementwise("relu_forward", [x], y, length)
    }

    /// dx = dy where y = relu(x) is above 0, otherwise 0.
    pub(in crate::cuda) fn relu_backward(&self, [y, dy, dx]: [Operand; 3], length: u64) -> Kernel {
        self.elementwise("relu_backward", [y, dy], dx, length)
    }

    /// y = gelu(x).
    pub(in crate::cuda) fn gelu(&self, [x, y]: [Operand; 2], length: u64) -> Kernel {
        self.elementwise("gelu_forward", [x], y, length)
    }

    /// dx from dy and the input x of [`Ops::gelu`].
    pub(in crate::cuda) fn gelu_backward(&self, [x, dy, dx]: [Operand; 3], length: u64) -> Kernel {
        self.elementwise("gelu_backward", [x, dy], dx, length)
    }

    /// sum = a + b. `sum` may be the memory of `a`.
    pub(in crate::cuda) fn add(&self, [a, b, sum]: [Operand; 3], length: u64) -> Kernel {
        self.elementwise("add", [a, b], sum, length)
    }

    /// Rounds: to (T) = from (float32).
    pub(in crate::cuda) fn convert_to_low_precision(
        &self,
        from: Operand,
        to: Operand,
        length: u64,
    ) -> Kernel {
        self.elementwise("to_low_precision", [from], to, length)
    }

    /// Zeros the gradient of a parameter that is not trained; T, `length` values.
    pub(in crate::cuda) fn zero_gradient(&self, gradient: Operand, length: u64) -> Kernel {
        kernel("zero_gradient", self.per_item(length / 8, 8), [Arg::Out(gradient), Arg::U64(length)])
    }

    /// As [`Ops::bias_gradient`], but for many rows of at most [`MAX_ROW_SUM_CHANNELS`] channels.
    pub(in crate::cuda) fn row_sums(
        &self,
        dy: Operand,
        dbias: Operand,
        shape: Shape,
        accumulate: bool,
    ) -> Kernel {
        let (rows, channels) = (shape.pictures * shape.pixels, shape.channels);
        let mut args = vec![Arg::In(dy), Arg::out(dbias, accumulate)];
        args.extend([rows, channels, accumulate.into()].map(Arg::U32));
        args.extend([Arg::Out(self.partials()), self.counter(NORM_COUNTER)]);
        let blocks = (rows * (channels / 8)).div_ceil(256 * 8).clamp(1, self.multiprocessors);
        kernel("row_sums", plain([blocks, 1, 1], [256, 1, 1]), args)
    }

    /// y = factor x.
    pub(in crate::cuda) fn scale_values(&self, [x, y]: [Operand; 2], length: u64, factor: f32) -> Kernel {
        let args = [Arg::In(x), Arg::Out(y), Arg::U64(length), Arg::F32(factor)];
        kernel("scale_values", self.per_item(length / 8, 8), args)
    }

    /// y += bias, float32 `[channels]`.
    pub(in crate::cuda) fn add_bias(&self, y: Operand, bias: Operand, shape: Shape) -> Kernel {
        let (rows, channels) = (shape.pictures * shape.pixels, shape.channels);
        let args = [Arg::InOut(y), Arg::In(bias), Arg::U32(rows), Arg::U32(channels)];
        let items = u64::from(rows) * u64::from(channels / 8);
        kernel("add_bias", self.per_item(items, 8), args)
    }

    /// dbias, float32 `[channels]`: dy summed over rows. With `accumulate`, the sum is added to dbias.
    pub(in crate::cuda) fn bias_gradient(
        &self,
        dy: Operand,
        dbias: Operand,
        shape: Shape,
        accumulate: bool,
    ) -> Kernel {
        let (rows, channels) = (shape.pictures * shape.pixels, shape.channels);
        let [dy, dbias] = [Arg::In(dy), Arg::out(dbias, accumulate)];
        let args = [dy, dbias, Arg::U32(rows), Arg::U32(channels), Arg::U32(accumulate.into())];
        let grid = [(channels / 8).div_ceil(4).max(1), 1, 1];
        kernel("bias_gradient", plain(grid, [32, 4, 1]), args)
    }

    /// Spreads `dy`, the gradient of the mean, over the pixels of `dx`, which has `shape`.
    pub(in crate::cuda) fn global_average_backward(&self, dy: Operand, dx: Operand, shape: Shape) -> Kernel {
        let Shape { pictures, pixels, channels } = shape;
        let args = [Arg::In(dy), Arg::Out(dx), Arg::U32(pictures), Arg::U32(pixels), Arg::U32(channels)];
        let items = u64::from(pictures) * u64::from(pixels) * u64::from(channels / 8);
        kernel("global_average_backward", self.per_item(items, 8), args)
    }

    /// Computes y and argmax, the position of each maximum in its window (u8; absent in inference). Traffic: x a few times,
    /// mostly from the L2 cache.
    pub(in crate::cuda) fn plain_max_pool(&self, [x, y, argmax]: [Operand; 3], pool: PlainPool) -> Kernel {
        let mut args = vec![Arg::In(x), Arg::Out(y), Arg::Out(argmax)];
        args.extend(pool.args());
        kernel("plain_max_pool", self.per_item(pool.groups(pool.output), 8), args)
    }

    /// dx from dy and the argmax of [`Ops::plain_max_pool`]. Traffic: dy and argmax a few times from the cache.
    pub(in crate::cuda) fn plain_max_pool_backward(
        &self,
        [dy, argmax, dx]: [Operand; 3],
        pool: PlainPool,
    ) -> Kernel {
        let mut args = vec![Arg::In(dy), Arg::In(argmax), Arg::Out(dx)];
        args.extend(pool.args());
        kernel("plain_max_pool_backward", self.per_item(pool.groups(pool.input), 8), args)
    }
}
