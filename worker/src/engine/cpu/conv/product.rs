//! The forward pass, and the gradient of the input, which is the same sum with the weights transposed.
//!
//! The pixels of a register tile are the same position of several pictures. So a tile knows exactly which
//! weights meet the picture there: padding costs nothing, any stride is a list of taps like any other, and
//! pictures of one pixel are as good as large ones.

use super::{
    ConvShape, LANES,
    memory::{Bench, Benches, Buffer, Shared},
    tile::{Pack, Product, Tap, Tiles},
};
use rayon::prelude::*;

/// Packed pictures that stay in the second-level cache beside the weights, in floats.
const PACKED: usize = 64 * 1024;
/// All of the source, when it is small enough that tasks had better share the weights out.
const PACKED_WHOLE: usize = 160 * 1024;
/// Tasks at least, if there are rows enough, so that threads finish together.
const TASKS: usize = 10;
/// Tasks that the blocks of output channels are shared out to at most.
const WEIGHT_TASKS: usize = 16;

/// `dst[n, p, :] = sum over taps t: src[n, meets(p, t), :] * w[t]`.
pub(super) struct Pass {
    batch: usize,
    src: [usize; 3],
    dst: [usize; 3],
    kernel: usize,
    rows: Axis,
    columns: Axis,
}

/// Which source rows (or columns) meet which kernel rows for every destination row.
struct Axis(Vec<Vec<(usize, usize)>>);

impl Axis {
    fn new(dst: usize, kernel: usize, meets: impl Fn(usize, usize) -> Option<usize>) -> Self {
        let row = |d| (0..kernel).filter_map(|k| meets(d, k).map(|s| (k, s))).collect();
        Axis((0..dst).map(row).collect())
    }

    /// First source index and the one past the last that destinations `from..to` meet.
    fn range(&self, from: usize, to: usize) -> (usize, usize) {
        let met = || self.0[from..to].iter().flatten().map(|(_, s)| *s);
        (met().min().unwrap_or(0), met().max().map_or(0, |s| s + 1))
    }
}

impl Pass {
    pub(super) fn forward(s: &ConvShape) -> Self {
        let axis = |src: usize, dst: usize| {
            Axis::new(dst, s.kernel, |d, k| {
                (d * s.stride + k).checked_sub(s.padding).filter(|position| *position < src)
            })
        };
        Pass {
            batch: s.batch,
            src: [s.in_h, s.in_w, s.in_c],
            dst: [s.out_h(), s.out_w(), s.out_c],
            kernel: s.kernel,
            rows: axis(s.in_h, s.out_h()),
            columns: axis(s.in_w, s.out_w()),
        }
    }

    pub(super) fn backward(s: &ConvShape) -> Self {
        let axis = |src: usize, dst: usize| {
            Axis::new(dst, s.kernel, |d, k| {
                let position = (d + s.padding).checked_sub(k)?;
                (position % s.stride == 0 && position / s.stride < src).then_some(position / s.stride)
            })
        };
        Pass {
            batch: s.batch,
            src: [s.out_h(), s.out_w(), s.out_c],
            dst: [s.in_h, s.in_w, s.in_c],
            kernel: s.kernel,
            rows: axis(s.out_h(), s.in_h),
            columns: axis(s.out_w(), s.in_w),
        }
    }

    /// Runs the pass. `w` holds `[block of 16 dst channels][tap][src channel][lane]`.
    pub(super) fn run(&self, src: &[f32], w: &[f32], dst: &mut [f32], tiles: &Tiles, benches: &Benches) {
        let [src_h, src_w, src_c] = self.src;
        let [dst_h, dst_w, dst_c] = self.dst;
        assert_eq!(src.len(), self.batch * src_h * src_w * src_c);
        assert_eq!(dst.len(), self.batch * dst_h * dst_w * dst_c);
        assert_eq!(w.len(), self.kernel * self.kernel * src_c * dst_c);
        if dst.is_empty() {
            return;
        }
        let groups = self.batch.div_ceil(tiles.group);
        let blocks = dst_c.div_ceil(LANES);
        let line = src_c.next_multiple_of(LANES);
        let picture = src_h * src_w * line;
        let out = Shared::of(dst);
        let run = |bench: &mut Bench, groups, rows, blocks| {
            self.task(tiles, src, w, out, bench, groups, rows, blocks)
        };
        let all_groups = (0, groups);
        if picture * self.batch <= PACKED_WHOLE && w.len() > PACKED {
            // Few pixels, many weights: every weight is fetched by one task, for all pictures.
            let (each, tasks) = cut(blocks, WEIGHT_TASKS, 2);
            (0..tasks).into_par_iter().for_each(|task| {
                let blocks = (task * each, blocks.min((task + 1) * each));
                benches.with(|bench| run(bench, all_groups, (0, dst_h), blocks));
            });
            return;
        }
        let row = picture / src_h * self.batch.div_ceil(groups);
        let budget = if w.len() > 2 * PACKED { 2 * PACKED } else { PACKED };
        let mut rows = dst_h;
        while rows > 1 && {
            let (from, to) = self.rows.range(0, rows);
            (to - from) * row > budget || groups * dst_h.div_ceil(rows) < TASKS
        } {
            rows = rows.div_ceil(2);
        }
        let row_tasks = dst_h.div_ceil(rows);
        (0..groups * row_tasks).into_par_iter().for_each(|task| {
            let (group, first) = (task / row_tasks, task % row_tasks * rows);
            benches
                .with(|bench| run(bench, (group, group + 1), (first, dst_h.min(first + rows)), (0, blocks)));
        });
    }

    /// The weights for a backward pass, `[block of 16 in][tap][out][lane]`. Kernel offsets that never meet
    /// the picture keep what was there.
    pub(super) fn transpose<'a>(&self, w: &[f32], tiles: &Tiles, to: &'a mut Buffer) -> &'a [f32] {
        let (out_c, in_c) = (self.src[2], self.dst[2]);
        let taps = self.kernel * self.kernel;
        let used = |axis: &Axis, k: usize| axis.0.iter().flatten().any(|(met, _)| *met == k);
        let (rows, columns) = (0..self.kernel)
            .map(|k| (used(&self.rows, k), used(&self.columns, k)))
            .unzip::<_, _, Vec<_>, Vec<_>>();
        let to = to.get(w.len());
        to.par_chunks_mut(LANES * taps * out_c).enumerate().for_each(|(block, to)| {
            let lanes = to.len() / (taps * out_c);
            for tap in (0..taps).filter(|tap| rows[tap / self.kernel] && columns[tap % self.kernel]) {
                for out_block in 0..out_c.div_ceil(LANES) {
                    let out_lanes = LANES.min(out_c - out_block * LANES);
                    let first = out_block * LANES * taps * in_c + (tap * in_c + block * LANES) * out_lanes;
                    let w = &w[first..first + lanes * out_lanes];
                    let to = &mut to[(tap * out_c + out_block * LANES) * lanes..][..lanes * out_lanes];
                    match (w.try_into(), <&mut [f32; LANES * LANES]>::try_from(&mut *to)) {
                        (Ok(w), Ok(to)) => tiles.transpose(w, to),
                        _ => {
                            for (out, to) in to.chunks_exact_mut(lanes).enumerate() {
                                for (input, to) in to.iter_mut().enumerate() {
                                    *to = w[input * out_lanes + out];
                                }
                            }
                        }
                    }
                }
            }
        });
        to
    }

    /// Computes some rows of the output of some groups of pictures for some blocks of output channels.
    #[allow(clippy::too_many_arguments)]
    fn task(
        &self,
        tiles: &Tiles,
        src: &[f32],
        w: &[f32],
        dst: Shared,
        bench: &mut Bench,
        groups: (usize, usize),
        rows: (usize, usize),
        blocks: (usize, usize),
    ) {
        let [src_h, src_w, src_c] = self.src;
        let [dst_h, dst_w, dst_c] = self.dst;
        let line = src_c.next_multiple_of(LANES);
        let (first, last) = self.rows.range(rows.0, rows.1);
        let picture = (last - first) * src_w * line;
        let all = self.batch.div_ceil(tiles.group);
        let group_start = |group: usize| group * self.batch / all;
        let largest = self.batch.div_ceil(all);
        let pictures = group_start(groups.0)..group_start(groups.1);

        let packed = bench.x.get(picture * pictures.len());
        for group in groups.0..groups.1 {
            let (from, to) = (group_start(group), group_start(group + 1));
            let packed = &mut packed[(from - pictures.start) * picture..(to - pictures.start) * picture];
            let shape = [src_h, src_w, src_c];
            pack_pixels_first(tiles, src, shape, (from, to), (first, last), packed);
        }

        bench.taps.clear();
        bench.starts.clear();
        for row in rows.0..rows.1 {
            for column in &self.columns.0 {
                bench.starts.push(bench.taps.len());
                for (ky, y) in &self.rows.0[row] {
                    bench.taps.extend(column.iter().map(|(kx, x)| Tap {
                        position: ((y - first) * src_w + x) as u32,
                        tap: (ky * self.kernel + kx) as u32,
                    }));
                }
            }
        }
        bench.starts.push(bench.taps.len());

        let w_block = LANES * self.kernel * self.kernel * src_c;
        let full = (dst_c / LANES).min(blocks.1);
        let mut block = blocks.0;
        while block < blocks.1 {
            let left = full.saturating_sub(block);
            let takes = tiles.product_blocks(largest, left);
            for group in groups.0..groups.1 {
                let (from, to) = (group_start(group), group_start(group + 1));
                let tile = match left {
                    0 => tiles.product_part(to - from),
                    _ => tiles.product(to - from, takes),
                };
                let positions = (rows.0 * dst_w)..(rows.1 * dst_w);
                for (position, ends) in positions.zip(bench.starts.windows(2)) {
                    let first = (from * dst_h * dst_w + position) * dst_c + block * LANES;
                    // SAFETY: the packed group holds every position that the taps name; `w` holds the
                    // blocks that the tile takes; the outputs are inside of `dst` and this task's own.
                    unsafe {
                        tile(&Product {
                            x: packed.as_ptr().add((from - pictures.start) * picture),
                            taps: &bench.taps[ends[0]..ends[1]],
                            channels: src_c,
                            w: w.as_ptr().add(block * w_block),
                            w_block,
                            y: dst.pointer().add(first),
                            y_picture: dst_h * dst_w * dst_c,
                            lanes: dst_c - (dst_c / LANES) * LANES,
                        });
                    }
                }
            }
            block += takes;
        }
    }
}

/// `total` items for at most `tasks` tasks in multiples of `unit`: items a task, and tasks.
fn cut(total: usize, tasks: usize, unit: usize) -> (usize, usize) {
    let each = total.div_ceil(tasks).next_multiple_of(unit);
    (each, total.div_ceil(each))
}

/// Packs rows of some pictures as `[row][column][channel block][picture][16]`, zeros after the last channel.
fn pack_pixels_first(
    tiles: &Tiles,
    src: &[f32],
    [height, width, channels]: [usize; 3],
    pictures: (usize, usize),
    rows: (usize, usize),
    to: &mut [f32],
) {
    let count = pictures.1 - pictures.0;
    let line = channels.next_multiple_of(LANES);
    assert!(to.len() >= (rows.1 - rows.0) * width * line * count);
    for picture in pictures.0..pictures.1 {
        let from = &src
            [(picture * height + rows.0) * width * channels..(picture * height + rows.1) * width * channels];
        // SAFETY: `from` has the pixels; `to` has room for them, checked above.
        unsafe {
            tiles.pack(&Pack {
                from: from.as_ptr(),
                pixels: (rows.1 - rows.0) * width,
                channels,
                to: to.as_mut_ptr().add((picture - pictures.0) * LANES),
                to_pixel: line * count,
                to_block: LANES * count,
            });
        }
    }
}
