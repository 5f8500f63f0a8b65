//! Max pooling fused with the batch norm and ReLU before it, and global average pooling; `pool.cu`.

use super::{Arg, Geometry, Kernel, NormBackward, NormSite, Operand, Ops, Reduce, Shape, kernel, plain};

/// A pooling of 3 x 3 windows, stride 2, padding 1. The output's sides are half of the input's, rounded up.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Pool {
    pub(in crate::cuda) pictures: u32,
    pub(in crate::cuda) height: u32,
    pub(in crate::cuda) width: u32,
    /// A multiple of 8.
    pub(in crate::cuda) channels: u32,
}

/// Maximum number of output rows of a strip. For n output rows a thread reads 2 n + 1 input rows.
const MAX_STRIP_ROWS: u32 = 7;

impl Ops {
    /// The geometry of a kernel whose threads compute strips of output rows, and the kernel's arguments for the strips. A strip has enough
    /// rows to reuse input rows, and few enough for several strips per thread.
    fn strips(&self, pool: Pool, threads: u32, per_multiprocessor: u32) -> (Geometry, [Arg; 6]) {
        let (height, width) = (pool.height.div_ceil(2), pool.width.div_ceil(2));
        let columns = u64::from(pool.pictures) * u64::from(width) * u64::from(pool.channels / 8);
        let all_threads = u64::from(self.multiprocessors * threads * per_multiprocessor);
        // Four strips per thread.
        let rows = (columns * u64::from(height) / (all_threads * 4).max(1)) as u32;
        let strip = rows.clamp(1, MAX_STRIP_ROWS.min(height.max(1)));
        let items = pool.pictures * width * height.div_ceil(strip);
        let geometry = self.grid_stride(items, pool.channels, threads, per_multiprocessor);
        let args = [pool.pictures, pool.height, pool.width, height, width, strip].map(Arg::U32);
        (geometry, args)
    }

    /// y = max_pool(relu(x * scale + bias)), with the scale and bias of `site`. argmax: window position of each
    /// maximum, one byte per value; absent in inference.
    pub(in crate::cuda) fn max_pool(
        &self,
        [x, y, argmax]: [Operand; 3],
        site: &NormSite,
        pool: Pool,
    ) -> Kernel {
        let name = if argmax.is_none() { "norm_max_pool" } else { "norm_max_pool_argmax" };
        let (geometry, strips) = self.strips(pool, 256, 2);
        let mut args = [x, site.scale, site.bias].map(Arg::In).to_vec();
        args.extend([y, argmax].map(Arg::Out));
        args.extend(strips);
        args.push(Arg::U32(pool.channels));
        kernel(name, geometry, args)
    }

    /// Backward of [`Ops::max_pool`], through the ReLU and the batch norm, to the convolution's output. `p.gradient` is the gradient of
    /// the pooling's output. With [`Reduce::StoreSums`], computes only the sums, and [`Ops::norm_backward_finish`] and then
    /// [`Ops::norm_backward_apply_max_pool`] must follow. Traffic: x, dy and argmax twice.
    pub(in crate::cuda) fn norm_backward_max_pool(
        &self,
        p: NormBackward,
        argmax: Operand,
        pool: Pool,
    ) -> Vec<Kernel> {
        let (geometry, strips) = self.strips(pool, 512, 1);
        let [dy, ..] = p.gradient.args();
        let mut args = vec![Arg::In(p.x), dy, Arg::In(argmax), Arg::In(p.control)];
        args.extend(strips);
        args.extend([Arg::U32(pool.channels), Arg::Out(self.partials()), self.counters()]);
        args.extend(p.site.backward_args(p.accumulate, p.reduce));
        args.extend(p.reduce.args());
        let sums = kernel("norm_backward_sums_max_pool", geometry, args);
        if matches!(p.reduce, Reduce::StoreSums { .. }) {
            return vec![sums];
        }
        vec![sums, self.norm_backward_apply_max_pool(p, argmax, pool)]
    }

    /// The second pass of [`Ops::norm_backward_max_pool`]: dx.
    pub(in crate::cuda) fn norm_backward_apply_max_pool(
        &self,
        p: NormBackward,
        argmax: Operand,
        pool: Pool,
    ) -> Kernel {
        let (geometry, strips) = self.strips(pool, 256, 2);
        let (site, [dy, ..]) = (p.site, p.gradient.args());
        let mut args = vec![Arg::In(p.x), dy, Arg::In(argmax)];
        args.extend([site.scale, site.bias, site.slope, site.offset].map(Arg::In));
        args.extend([Arg::Out(p.dx), Arg::In(p.control)]);
        args.extend(strips);
        args.push(Arg::U32(pool.channels));
        kernel("norm_backward_apply_max_pool", geometry, args)
    }

    /// y `[pictures, C]` = mean of x, which has `shape`, over its pixels.
    pub(in crate::cuda) fn global_average(&self, x: Operand, y: Operand, shape: Shape) -> Kernel {
        let Shape { pictures, pixels, channels } = shape;
        let groups = channels / 8;
        let lanes = groups.next_power_of_two().clamp(1, 8);
        let warps = pictures * groups.div_ceil(lanes);
        let mut args = vec![Arg::In(x), Arg::Out(y)];
        args.extend([pictures, pixels, channels, lanes].map(Arg::U32));
        // Few warps per block, so that a small batch uses every multiprocessor.
        kernel("global_average", plain([warps.div_ceil(4), 1, 1], [32, 4, 1]), args)
    }
}
