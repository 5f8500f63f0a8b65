//! The forward pass, and the gradient of the input, which is the same sum with the weights transposed.
//!
//! A register tile computes the same position of several pictures, so the weights that apply inside the picture
//! are the same for the whole tile: padding costs nothing, every stride is just a list of taps, and pictures of
//! one pixel are as efficient as large ones.

use super::{
    ConvShape, LANES,
    memory::{Buffer, SharedOutput, TaskBufferPool, TaskBuffers},
    tile::{Pack, Product, SegmentOutputs, Strides, Tap, Tiles},
    winograd,
};
use rayon::prelude::*;
use std::ops::Range;

/// Maximum size, in units of 32 bits, of packed pictures that stay in the second-level cache together with the weights.
const PACKED: usize = 64 * 1024;
/// Maximum size, in units, of a whole source for which tasks divide the weights instead of the pixels.
const PACKED_WHOLE: usize = 160 * 1024;
/// Minimum number of tasks, if there are enough rows, so that threads finish together.
const TASKS: usize = 10;
/// Maximum number of tasks that divide the blocks of output channels.
const WEIGHT_TASKS: usize = 16;

/// `dst[n, p, :] = sum over taps t: src[n, q, :] * w[t]`, where q is the source position that tap t covers at position p.
pub(super) struct Pass {
    batch: usize,
    /// Height, width and channels of the source.
    src: [usize; 3],
    /// Height, width and channels of the destination.
    dst: [usize; 3],
    kernel: usize,
    /// Number of groups of channels (`groups` are groups of pictures in this file). With several groups, each has whole blocks of units of
    /// input channels and of output channels.
    cardinality: usize,
    rows: Axis,
    columns: Axis,
    /// Whether source and destination have transformed rows, see [`winograd`].
    uses_winograd: bool,
}

/// By destination row (or column): the pairs of kernel row and source row that contribute.
struct Axis(Vec<Vec<(usize, usize)>>);

impl Axis {
    fn new(dst: usize, kernel: usize, source_of: impl Fn(usize, usize) -> Option<usize>) -> Self {
        let pairs = |d| (0..kernel).filter_map(|k| source_of(d, k).map(|s| (k, s))).collect();
        Axis((0..dst).map(pairs).collect())
    }

    /// The columns of transformed rows of `width` pixels, `[segment][point]`, see [`winograd`]. Only the same column of the source contributes
    /// to a column, with the weights of its point.
    fn of_points(width: usize) -> Self {
        let columns = 0..width.div_ceil(winograd::COLUMNS) * winograd::POINTS;
        Axis(columns.map(|column| vec![(column % winograd::POINTS, column)]).collect())
    }

    /// The range of source indices that contribute to `destinations`.
    fn range(&self, destinations: &Range<usize>) -> Range<usize> {
        let sources = || self.0[destinations.clone()].iter().flatten().map(|(_, s)| *s);
        sources().min().unwrap_or(0)..sources().max().map_or(0, |s| s + 1)
    }
}

impl Pass {
    pub(super) fn forward(s: &ConvShape, tiles: &Tiles) -> Self {
        let uses_winograd = winograd::applies(s, tiles.format);
        Pass {
            batch: s.batch,
            src: [s.in_h, s.in_w, s.in_c],
            dst: [s.out_h(), s.out_w(), s.out_c],
            kernel: s.kernel,
            cardinality: s.groups,
            rows: Axis::new(s.out_h(), s.kernel, |row, k| s.input_row(row, k)),
            columns: match uses_winograd {
                true => Axis::of_points(s.out_w()),
                false => Axis::new(s.out_w(), s.kernel, |column, k| s.input_column(column, k)),
            },
            uses_winograd,
        }
    }

    pub(super) fn backward(s: &ConvShape, tiles: &Tiles) -> Self {
        let axis = |src: usize, dst: usize, padding: usize| {
            Axis::new(dst, s.kernel, |d, k| {
                let position = (d + padding).checked_sub(k)?;
                (position % s.stride == 0 && position / s.stride < src).then_some(position / s.stride)
            })
        };
        let uses_winograd = winograd::applies(s, tiles.format);
        Pass {
            batch: s.batch,
            src: [s.out_h(), s.out_w(), s.out_c],
            dst: [s.in_h, s.in_w, s.in_c],
            kernel: s.kernel,
            cardinality: s.groups,
            rows: axis(s.out_h(), s.in_h, s.row_padding),
            columns: match uses_winograd {
                true => Axis::of_points(s.in_w),
                false => axis(s.out_w(), s.in_w, s.padding),
            },
            uses_winograd,
        }
    }

    /// Number of columns of the packed source.
    fn packed_width(&self) -> usize {
        if self.uses_winograd { self.columns.0.len() } else { self.src[1] }
    }

    /// Number of packed weights of a kernel row, for each pair of channels.
    fn kernel_columns(&self) -> usize {
        if self.uses_winograd { winograd::POINTS } else { self.kernel }
    }

    /// Number of units of a group's source channels.
    fn units(&self, tiles: &Tiles) -> usize {
        (self.src[2] / self.cardinality).div_ceil(tiles.values_per_unit)
    }

    /// Number of packed units of a position.
    fn units_per_position(&self, tiles: &Tiles) -> usize {
        self.src[2].div_ceil(tiles.values_per_unit).next_multiple_of(LANES)
    }

    /// Number of packed units of the weights.
    fn weight_len(&self, tiles: &Tiles) -> usize {
        self.kernel * self.kernel_columns() * self.units(tiles) * self.dst[2]
    }

    /// Runs the pass. `w` is packed: `[block of 16 dst channels][tap][unit of src channels in the group][lane]`. Every channel's sum over
    /// `dst` is added to the first half of `sums`, if given, and the sum of squares to the second half.
    pub(super) fn run(
        &self,
        src: &[f32],
        w: &[f32],
        dst: &mut [f32],
        sums: Option<&mut [f64]>,
        tiles: &Tiles,
        task_buffers: &TaskBufferPool,
    ) {
        let [src_h, src_w, src_c] = self.src;
        let [dst_h, dst_w, dst_c] = self.dst;
        assert_eq!(src.len(), self.batch * src_h * src_w * src_c);
        assert_eq!(dst.len(), self.batch * dst_h * dst_w * dst_c);
        assert_eq!(w.len(), self.weight_len(tiles));
        assert!(
            self.cardinality == 1
                || [src_c / tiles.values_per_unit, dst_c]
                    .iter()
                    .all(|c| c.is_multiple_of(LANES * self.cardinality))
        );
        if dst.is_empty() {
            return;
        }
        let groups = self.batch.div_ceil(tiles.group);
        let blocks = dst_c.div_ceil(LANES);
        let picture_len = src_h * self.packed_width() * self.units_per_position(tiles);
        let job = Job { tiles, src, w, dst: SharedOutput::of(dst), computes_sums: sums.is_some() };
        let tap_len = self.units(tiles) * dst_c;
        let has_many_weights = self.kernel * self.kernel * tap_len > PACKED;
        let tasks: Vec<Task> = if picture_len * self.batch <= PACKED_WHOLE && has_many_weights {
            // Few pixels, many weights: each weight is loaded by only one task, for all pictures.
            let count = blocks.div_ceil(WEIGHT_TASKS).next_multiple_of(2);
            let task =
                |first| Task { groups: 0..groups, rows: 0..dst_h, blocks: first..blocks.min(first + count) };
            (0..blocks).step_by(count).map(task).collect()
        } else {
            let row_len = picture_len / src_h * self.batch.div_ceil(groups);
            let budget = if w.len() > 2 * PACKED { 2 * PACKED } else { PACKED };
            let fits = |rows: usize| self.rows.range(&(0..rows)).len() * row_len <= budget;
            let has_enough_tasks = |rows: usize| groups * dst_h.div_ceil(rows) >= TASKS;
            let mut rows = dst_h;
            while rows > 1 && !(fits(rows) && has_enough_tasks(rows)) {
                rows = rows.div_ceil(2);
            }
            let task = |group, first| Task {
                groups: group..group + 1,
                rows: first..dst_h.min(first + rows),
                blocks: 0..blocks,
            };
            (0..groups)
                .flat_map(|group| (0..dst_h).step_by(rows).map(move |first| task(group, first)))
                .collect()
        };
        let parts: Vec<Vec<f64>> = tasks
            .par_iter()
            .map(|task| task_buffers.with(|buffers| self.run_task(&job, task, buffers)))
            .collect();
        if let Some(sums) = sums {
            for (task, part) in tasks.iter().zip(parts) {
                let (sum, square) = part.split_at(part.len() / 2);
                for (offset, own) in [(0, sum), (dst_c, square)] {
                    for (total, own) in sums[offset + task.blocks.start * LANES..].iter_mut().zip(own) {
                        *total += own;
                    }
                }
            }
        }
    }

    /// The kernel offsets that are inside the picture at some position.
    fn used_taps(&self) -> Vec<usize> {
        let is_used = |axis: &Axis, k: usize| axis.0.iter().flatten().any(|(other, _)| *other == k);
        let (rows, columns) = (0..self.kernel)
            .map(|k| (is_used(&self.rows, k), is_used(&self.columns, k)))
            .unzip::<_, _, Vec<_>, Vec<_>>();
        let taps = 0..self.kernel * self.kernel;
        taps.filter(|tap| rows[tap / self.kernel] && columns[tap % self.kernel]).collect()
    }

    /// The packed weights for a forward pass, from `[block of 16 out][tap][in][lane]`. Weights of kernel offsets that are never inside
    /// the picture are not written.
    pub(super) fn pack_weights<'a>(&self, w: &'a [f32], tiles: &Tiles, to: &'a mut Buffer) -> &'a [f32] {
        if self.uses_winograd {
            let to = to.get(self.weight_len(tiles));
            let row_len = |columns| columns * self.src[2] * LANES;
            let (from_row, to_row) = (row_len(self.kernel), row_len(winograd::POINTS));
            let blocks = to.par_chunks_mut(self.kernel * to_row).zip(w.par_chunks(self.kernel * from_row));
            blocks.for_each(|(to, w)| {
                let [from_row, to_row] = [w.len(), to.len()].map(|len| len / self.kernel);
                let len = from_row / self.kernel;
                for (to, w) in to.chunks_exact_mut(to_row).zip(w.chunks_exact(from_row)) {
                    winograd::transform_weights([&w[..len], &w[len..2 * len], &w[2 * len..]], to, len);
                }
            });
            return to;
        }
        if tiles.values_per_unit == 1 {
            return w;
        }
        let (in_c, units) = (self.src[2] / self.cardinality, self.units(tiles));
        let (taps, used) = (self.kernel * self.kernel, self.used_taps());
        let to = to.get(self.weight_len(tiles));
        let blocks = to.par_chunks_mut(LANES * taps * units).zip(w.par_chunks(LANES * taps * in_c));
        blocks.for_each(|(to, w)| {
            let lanes = to.len() / (taps * units);
            for tap in &used {
                let w = &w[tap * in_c * lanes..][..in_c * lanes];
                tiles.pack_rows(w, lanes, &mut to[tap * units * lanes..]);
            }
        });
        to
    }

    /// The packed weights for a backward pass, `[block of 16 in][tap][unit of out][lane]`. Weights of kernel offsets that are
    /// never inside the picture are not written.
    pub(super) fn pack_transposed_weights<'a>(
        &self,
        w: &[f32],
        tiles: &Tiles,
        to: &'a mut Buffer,
    ) -> &'a [f32] {
        let (out_c, in_c) = (self.src[2] / self.cardinality, self.dst[2] / self.cardinality);
        let taps = self.kernel * self.kernel;
        let used = if self.uses_winograd { Vec::new() } else { self.used_taps() };
        let units = self.units(tiles);
        let to = to.get(self.weight_len(tiles));
        let block_len = LANES * self.kernel * self.kernel_columns() * units;
        to.par_chunks_mut(block_len).enumerate().for_each(|(block, to)| {
            let lanes = LANES * to.len() / block_len;
            // The block's group of channels, and the block's first channel in this group.
            let (group, channel) = (block * LANES / in_c, block * LANES % in_c);
            // Transposes a tap's weights of a block of output channels, to `[out][lane]`, and returns their number.
            let transpose = |tap: usize, out_block: usize, to: &mut [f32]| {
                let out_lanes = LANES.min(out_c - out_block * LANES);
                let out_first = group * out_c + out_block * LANES;
                let first = out_first * taps * in_c + (tap * in_c + channel) * out_lanes;
                let w = &w[first..first + lanes * out_lanes];
                let to = &mut to[..lanes * out_lanes];
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
                lanes * out_lanes
            };
            let mut kernel_row = [[0.0; LANES * LANES]; 3];
            for out_block in 0..out_c.div_ceil(LANES) {
                if self.uses_winograd {
                    for ky in 0..self.kernel {
                        let mut len = 0;
                        // The gradient of the input is a convolution with reversed kernel rows.
                        for (kx, to) in kernel_row.iter_mut().rev().enumerate() {
                            len = transpose(ky * self.kernel + kx, out_block, to);
                        }
                        let first = (ky * winograd::POINTS * units + out_block * LANES) * lanes;
                        let row = kernel_row.each_ref().map(|weights| &weights[..len]);
                        winograd::transform_weights(row, &mut to[first..], units * lanes);
                    }
                    continue;
                }
                for tap in &used {
                    let packed = &mut to[(tap * units + out_block * LANES / tiles.values_per_unit) * lanes..];
                    if tiles.values_per_unit == 1 {
                        transpose(*tap, out_block, packed);
                    } else {
                        let len = transpose(*tap, out_block, &mut kernel_row[0]);
                        tiles.pack_rows(&kernel_row[0][..len], lanes, packed);
                    }
                }
            }
        });
        to
    }

    /// Computes a piece of the output. Returns the channels' sums, then their sums of squares, if requested.
    fn run_task(&self, job: &Job<'_>, task: &Task, buffers: &mut TaskBuffers) -> Vec<f64> {
        let packed_width = self.packed_width();
        let [dst_h, dst_w, dst_c] = self.dst;
        let Task { groups, rows, blocks } = task;
        let tiles = job.tiles;
        let src_rows = self.rows.range(rows);
        let units_per_position = self.units_per_position(tiles);
        let picture_len = src_rows.len() * packed_width * units_per_position;
        // The sizes of groups differ by at most one picture.
        let group_count = self.batch.div_ceil(tiles.group);
        let largest_group = self.batch.div_ceil(group_count);
        let group_start = |group: usize| group * self.batch / group_count;
        let pictures = group_start(groups.start)..group_start(groups.end);

        let packed = buffers.x.get(picture_len * pictures.len());
        for group in groups.clone() {
            let own = group_start(group)..group_start(group + 1);
            let packed = &mut packed[(own.start - pictures.start) * picture_len..][..own.len() * picture_len];
            if self.uses_winograd {
                // `[row][segment][point][block of 16 channels][picture][16]`
                let block = LANES * own.len();
                let point = units_per_position * own.len();
                let segment = winograd::POINTS * point;
                let strides = Strides { row: packed_width * point, segment, point, block };
                let transform = tiles.transform_input;
                winograd::pack(transform, job.src, self.src, &own, &src_rows, packed, strides);
            } else {
                pack_pixels_first(tiles, job.src, self.src, &own, &src_rows, packed);
            }
        }

        buffers.taps.clear();
        buffers.starts.clear();
        for row in rows.clone() {
            for column in &self.columns.0 {
                buffers.starts.push(buffers.taps.len());
                for (ky, y) in &self.rows.0[row] {
                    buffers.taps.extend(column.iter().map(|(kx, x)| Tap {
                        position: ((y - src_rows.start) * packed_width + x) as u32,
                        offset: (ky * self.kernel_columns() + kx) as u32,
                    }));
                }
            }
        }
        buffers.starts.push(buffers.taps.len());

        let sums = if job.computes_sums { buffers.sums.get(blocks.len() * 3 * LANES) } else { &mut [] };
        let units = self.units(tiles);
        let w_block = LANES * self.kernel * self.kernel_columns() * units;
        let products = buffers.products.get(winograd::POINTS * largest_group * 4 * LANES).as_mut_ptr();
        let blocks_per_group = (dst_c / self.cardinality).div_ceil(LANES);
        let full_end = (dst_c / LANES).min(blocks.end);
        let mut block = blocks.start;
        while block < blocks.end {
            // Blocks of a tile read the same channels.
            let group_of_channels = block / blocks_per_group;
            let full_blocks = full_end.min((group_of_channels + 1) * blocks_per_group).saturating_sub(block);
            let tile_blocks = tiles.product_blocks(largest_group, full_blocks);
            for group in groups.clone() {
                let own = group_start(group)..group_start(group + 1);
                let tile = match full_blocks {
                    0 => tiles.product_part(own.len()),
                    _ => tiles.product(own.len(), tile_blocks),
                };
                let sums = match sums.get_mut((block - blocks.start) * 3 * LANES..) {
                    Some(sums) if job.computes_sums => sums.as_mut_ptr(),
                    _ => std::ptr::null_mut(),
                };
                let columns = self.columns.0.len();
                for (index, taps) in buffers.starts.windows(2).enumerate() {
                    let (row, column) = (rows.start + index / columns, index % columns);
                    let (segment, point) = (column / winograd::POINTS, column % winograd::POINTS);
                    let first_column = if self.uses_winograd { segment * winograd::COLUMNS } else { column };
                    let segment_columns = winograd::COLUMNS.min(dst_w - first_column);
                    let first = ((own.start * dst_h + row) * dst_w + first_column) * dst_c + block * LANES;
                    let starts_sums = group == groups.start;
                    // SAFETY: the packed group has every position of the taps; `w` and `sums` have the blocks
                    // of the tile; `products` has the products of a segment; the outputs are inside `dst`, and no other task writes them.
                    unsafe {
                        let product = Product {
                            x: packed
                                .as_ptr()
                                .add((own.start - pictures.start) * picture_len)
                                .add(group_of_channels * units * own.len()),
                            taps: &buffers.taps[taps[0]..taps[1]],
                            pictures: own.len(),
                            units,
                            units_per_position,
                            w: job.w.as_ptr().add(block * w_block),
                            w_block,
                            y: job.dst.pointer().add(first),
                            y_picture: dst_h * dst_w * dst_c,
                            prefetch: job.dst.pointer().add(first),
                            prefetch_picture: dst_h * dst_w * dst_c,
                            lanes: LANES.min(dst_c - block * LANES),
                            sums,
                            starts_sums: starts_sums && index == 0,
                        };
                        if !self.uses_winograd {
                            tile(&product);
                            continue;
                        }
                        let y_picture = tile_blocks * LANES;
                        tile(&Product {
                            y: products.add(point * own.len() * y_picture),
                            y_picture,
                            prefetch: product.prefetch.add(point.min(segment_columns - 1) * dst_c),
                            sums: std::ptr::null_mut(),
                            ..product
                        });
                        if point + 1 == winograd::POINTS {
                            (tiles.segment_outputs)(&SegmentOutputs {
                                products,
                                pictures: own.len(),
                                blocks: tile_blocks,
                                lanes: product.lanes,
                                columns: segment_columns,
                                y: product.y,
                                y_picture: product.y_picture,
                                y_column: dst_c,
                                sums,
                                starts_sums: starts_sums && index + 1 == winograd::POINTS,
                            });
                        }
                    }
                }
            }
            block += tile_blocks;
        }

        let count = (pictures.len() * rows.len() * dst_w) as f64;
        let channels = blocks.len() * LANES - (blocks.end * LANES).saturating_sub(dst_c);
        let mut totals = vec![0.0; if job.computes_sums { 2 * channels } else { 0 }];
        for (block, sums) in sums.chunks_exact(3 * LANES).enumerate() {
            for lane in 0..LANES.min(channels - block * LANES) {
                let [pivot, sum, square] = [0, 1, 2].map(|kind| f64::from(sums[kind * LANES + lane]));
                let channel = block * LANES + lane;
                totals[channel] = sum + count * pivot;
                totals[channels + channel] = square + 2.0 * pivot * sum + count * pivot * pivot;
            }
        }
        totals
    }
}

/// Data shared by all tasks of a pass.
struct Job<'a> {
    tiles: &'a Tiles,
    src: &'a [f32],
    w: &'a [f32],
    dst: SharedOutput,
    computes_sums: bool,
}

/// A piece of the output: rows of groups of pictures, for blocks of channels.
struct Task {
    groups: Range<usize>,
    rows: Range<usize>,
    blocks: Range<usize>,
}

/// Packs rows of some pictures as `[row][column][block of 16 units][picture][16]`, zeros after the last channel.
fn pack_pixels_first(
    tiles: &Tiles,
    src: &[f32],
    [height, width, channels]: [usize; 3],
    pictures: &Range<usize>,
    rows: &Range<usize>,
    to: &mut [f32],
) {
    let pixels = rows.len() * width;
    let units_per_position = channels.div_ceil(tiles.values_per_unit).next_multiple_of(LANES);
    assert!(to.len() >= pixels * units_per_position * pictures.len());
    for (index, picture) in pictures.clone().enumerate() {
        let first = (picture * height + rows.start) * width * channels;
        let from = &src[first..first + pixels * channels];
        // SAFETY: `from` has the pixels, and `to` is large enough, as checked above.
        unsafe {
            (tiles.pack_channels)(&Pack {
                from: from.as_ptr(),
                second_picture: None,
                pixels,
                channels,
                to: to.as_mut_ptr().add(index * LANES),
                to_pixel: units_per_position * pictures.len(),
                to_block: LANES * pictures.len(),
            });
        }
    }
}
