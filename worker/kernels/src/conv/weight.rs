//! The gradient of the weights: for every kernel offset, the product of all input pixels with the output
//! gradients at this offset.
//!
//! The packed pictures of a group are interleaved: one pixel of all pictures, then the next pixel of the row. The sum runs over
//! pieces of about 256 pixels, whose input and gradient stay in the first-level cache for all kernel offsets.

use super::{
    ConvShape, LANES,
    memory::{Scratch, SharedOutput},
    pieces::{Piece, Pieces},
    tile::{Outer, Pack, Strides, Tiles, TransformFn},
    winograd,
};
use rayon::prelude::*;
use std::{ops::Range, sync::Arc};

/// Maximum number of weights for which tasks divide the pixels, with separate gradients in the second-level cache.
const MAX_OWN_WEIGHTS: usize = 80 * 1024;
/// Maximum number of packed units of a task, for the input and for the output's gradient each. They stay in the second-level
/// cache, together with the gradient of the weights.
const PACKED: usize = 48 * 1024;
/// Maximum number of separate gradients, which are added in order at the end.
const SLOTS: usize = 16;
/// Number of weights per task when the separate gradients are added.
const SUM_CHUNK: usize = 4096;
/// Approximate number of tasks that divide the weights.
const WEIGHT_TASKS: usize = 16;

/// Pieces of a group of pictures that are computed together.
#[derive(Clone)]
struct Chunk {
    pictures: Range<usize>,
    pieces: Range<usize>,
}

/// A weight gradient: its shape, and the pieces into which the sum over pixels is divided.
struct Plan<'a> {
    s: &'a ConvShape,
    tiles: &'static Tiles,
    pieces: Arc<Pieces>,
}

/// The packed pictures of a chunk, `[channel block][row][column][unit of pictures][16]`.
struct Packed {
    x: *const f32,
    dy: *const f32,
    /// Packed rows of the input.
    input_rows: Range<usize>,
    /// Packed rows of the gradient.
    output_rows: Range<usize>,
}

/// `dw = sum over pixels: x * dy`.
pub(super) fn gradient(s: &ConvShape, x: &[f32], dy: &[f32], dw: &mut [f32], scratch: &mut Scratch) {
    if s.output_len() == 0 {
        dw.fill(0.0);
        return;
    }
    let tiles = scratch.tiles;
    let pieces = Arc::clone(scratch.plans.entry(*s).or_insert_with(|| Arc::new(Pieces::new(s, tiles))));
    let plan = Plan { s, tiles, pieces };
    if !plan.pieces.uses_winograd {
        return plan.run(x, dy, dw, scratch);
    }
    let mut buffer = std::mem::take(&mut scratch.transformed);
    let transformed = buffer.get(dw.len() / s.kernel * winograd::POINTS);
    plan.run(x, dy, transformed, scratch);
    winograd::inverse_gradient(s, transformed, dw);
    scratch.transformed = buffer;
}

impl Plan<'_> {
    fn run(&self, x: &[f32], dy: &[f32], dw: &mut [f32], scratch: &mut Scratch) {
        if dw.len() > MAX_OWN_WEIGHTS {
            self.divide_weights(x, dy, dw, scratch);
        } else {
            self.divide_pixels(x, dy, dw, scratch);
        }
    }

    /// Number of units of `pictures`, which begin at a whole unit.
    fn units(&self, pictures: usize) -> usize {
        pictures.div_ceil(self.tiles.values_per_unit)
    }

    /// Packed floats of a row of a unit: of the input, and of the gradient.
    fn row_lens(&self) -> [usize; 2] {
        let [in_columns, out_columns] = self.pieces.columns.packed;
        [in_columns * self.s.in_c.next_multiple_of(LANES), out_columns * self.s.out_c.next_multiple_of(LANES)]
    }

    /// Every task computes some weights over all pixels.
    fn divide_weights(&self, x: &[f32], dy: &[f32], dw: &mut [f32], scratch: &mut Scratch) {
        let s = self.s;
        let [x_row, dy_row] = self.row_lens();
        let [x_picture, dy_picture] = [s.in_h * x_row, s.out_h() * dy_row];
        let x_packed = scratch.x.get(self.units(s.batch) * x_picture);
        let dy_packed = scratch.dy.get(self.units(s.batch) * dy_picture);
        x_packed
            .par_chunks_mut(x_picture * self.units(self.pieces.group))
            .zip(dy_packed.par_chunks_mut(dy_picture * self.units(self.pieces.group)))
            .enumerate()
            .for_each(|(chunk, (x_packed, dy_packed))| {
                let pictures = chunk * self.pieces.group..s.batch.min((chunk + 1) * self.pieces.group);
                self.pack_x(x, &pictures, &(0..s.in_h), x_packed);
                self.pack_dy(dy, &pictures, &(0..s.out_h()), dy_packed);
            });

        let (x_packed, dy_packed) = (&*x_packed, &*dy_packed);
        let out = SharedOutput::of(dw);
        let panels = self.panels();
        let in_blocks = s.group_in_c().div_ceil(LANES);
        let splits = WEIGHT_TASKS.div_ceil(panels.len()).min(in_blocks);
        (0..panels.len() * splits).into_par_iter().for_each(|task| {
            let (panel, split) = (&panels[task / splits], task % splits);
            for in_block in split * in_blocks / splits..(split + 1) * in_blocks / splits {
                for first in (0..s.batch).step_by(self.pieces.group) {
                    let pictures = first..s.batch.min(first + self.pieces.group);
                    let packed = Packed {
                        x: x_packed[self.units(first) * x_picture..].as_ptr(),
                        dy: dy_packed[self.units(first) * dy_picture..].as_ptr(),
                        input_rows: 0..s.in_h,
                        output_rows: 0..s.out_h(),
                    };
                    let chunk = Chunk { pictures, pieces: 0..self.pieces.of(self.pieces.group).len() };
                    // SAFETY: the whole chunk is packed; no other task has this panel and input block.
                    unsafe { self.accumulate(&chunk, &packed, panel, in_block, out.pointer(), first > 0) };
                }
            }
        });
    }

    /// Every task computes all weights over some pixels; their sums are added in a fixed order.
    fn divide_pixels(&self, x: &[f32], dy: &[f32], dw: &mut [f32], scratch: &mut Scratch) {
        let s = self.s;
        let chunks = self.chunks();
        let slots = SLOTS.min(chunks.len());
        let panels = self.panels();
        let in_blocks = s.group_in_c().div_ceil(LANES);
        let task_buffers = &scratch.task_buffers;
        let sums = scratch.weights.get(slots * dw.len());
        sums.par_chunks_mut(dw.len()).enumerate().for_each(|(slot, sum)| {
            task_buffers.with(|buffers| {
                let own = slot * chunks.len() / slots..(slot + 1) * chunks.len() / slots;
                for (index, chunk) in chunks[own].iter().enumerate() {
                    let (input_rows, output_rows) = self.rows(chunk);
                    let units = self.units(chunk.pictures.len());
                    let [x_row, dy_row] = self.row_lens();
                    let x_packed = buffers.x.get(input_rows.len() * x_row * units);
                    let dy_packed = buffers.dy.get(output_rows.len() * dy_row * units);
                    self.pack_x(x, &chunk.pictures, &input_rows, x_packed);
                    self.pack_dy(dy, &chunk.pictures, &output_rows, dy_packed);
                    let (x, dy) = (x_packed.as_ptr(), dy_packed.as_ptr());
                    let packed = Packed { x, dy, input_rows, output_rows };
                    for panel in &panels {
                        for in_block in 0..in_blocks {
                            // SAFETY: the chunk's rows are packed; no other task uses `sum`.
                            unsafe {
                                self.accumulate(chunk, &packed, panel, in_block, sum.as_mut_ptr(), index > 0);
                            }
                        }
                    }
                }
            });
        });
        let sums = &*sums;
        let len = dw.len();
        dw.par_chunks_mut(SUM_CHUNK).enumerate().for_each(|(chunk, dw)| {
            let start = chunk * SUM_CHUNK;
            dw.copy_from_slice(&sums[start..start + dw.len()]);
            for slot in 1..slots {
                for (dw, sum) in dw.iter_mut().zip(&sums[slot * len + start..]) {
                    *dw += sum;
                }
            }
        });
    }

    /// Ranges of blocks of output channels. A tile computes one such panel, which lies in one group of channels. A block that
    /// is not full is a separate panel.
    fn panels(&self) -> Vec<Range<usize>> {
        let blocks_per_group = self.s.group_out_c().div_ceil(LANES);
        let (full, blocks) = (self.s.out_c / LANES, self.s.out_c.div_ceil(LANES));
        let mut panels = Vec::new();
        let mut block = 0;
        while block < blocks {
            let remaining = full.saturating_sub(block).min(blocks_per_group - block % blocks_per_group);
            let count = self.tiles.outer_blocks(self.s.group_in_c(), remaining);
            panels.push(block..block + count);
            block += count;
        }
        panels
    }

    /// Groups of pictures, divided by rows so that packed rows fit in the cache.
    fn chunks(&self) -> Vec<Chunk> {
        let s = self.s;
        let [x_row, dy_row] = self.row_lens();
        let row_units = x_row.max(dy_row) * self.units(self.pieces.group);
        let count = self.pieces.of(self.pieces.group).len();
        let fits = |pieces: usize| {
            let row_ends = self.pieces.of(self.pieces.group)[..pieces]
                .iter()
                .map(|piece| piece.input_rows.end.max(piece.output_rows.end));
            row_ends.max().unwrap_or(0) * row_units <= PACKED
        };
        let mut pieces_per_chunk = count;
        while pieces_per_chunk > 1 && !fits(pieces_per_chunk) {
            pieces_per_chunk = pieces_per_chunk.div_ceil(2);
        }
        (0..s.batch)
            .step_by(self.pieces.group)
            .flat_map(|first| {
                (0..count).step_by(pieces_per_chunk).map(move |piece| Chunk {
                    pictures: first..s.batch.min(first + self.pieces.group),
                    pieces: piece..count.min(piece + pieces_per_chunk),
                })
            })
            .collect()
    }

    fn pieces_of(&self, chunk: &Chunk) -> &[Piece] {
        &self.pieces.of(chunk.pictures.len())[chunk.pieces.clone()]
    }

    /// Input rows and output rows of a chunk.
    fn rows(&self, chunk: &Chunk) -> (Range<usize>, Range<usize>) {
        let pieces = self.pieces_of(chunk);
        let (first, last) = (&pieces[0], &pieces[pieces.len() - 1]);
        (
            first.input_rows.start..last.input_rows.end.max(first.input_rows.end),
            first.output_rows.start..last.output_rows.end,
        )
    }

    /// Adds a chunk's part of the gradient of one block of a group's input channels and one panel. Unless `add`, the
    /// chunk's first piece overwrites the gradient.
    ///
    /// # Safety
    /// `packed` must have the chunk's rows, and no other thread may use this part of `dw`.
    unsafe fn accumulate(
        &self,
        chunk: &Chunk,
        packed: &Packed,
        panel: &Range<usize>,
        in_block: usize,
        dw: *mut f32,
        add: bool,
    ) {
        let s = self.s;
        let Packed { input_rows, output_rows, .. } = packed;
        let units = self.units(chunk.pictures.len());
        let [x_row, dy_row] = self.pieces.columns.packed.map(|columns| columns * units * LANES);
        let kernel_columns = self.pieces.columns.pairs.len();
        let taps = s.kernel * kernel_columns;
        let in_c = s.group_in_c();
        // With several groups, each group has whole blocks.
        let x_block = panel.start * LANES / s.group_out_c() * in_c / LANES + in_block;
        let lanes = LANES.min(s.out_c - panel.start * LANES);
        let in_channels = LANES.min(in_c - in_block * LANES);
        for (index, piece) in self.pieces_of(chunk).iter().enumerate() {
            // The kernel rows of a column read about the same pixels.
            for tap in (0..kernel_columns).flat_map(|kx| (kx..taps).step_by(kernel_columns)) {
                let mut channel = 0;
                while channel < in_channels {
                    let (tile_channels, tile) = self.tiles.outer(in_channels - channel, panel.len());
                    let first =
                        panel.start * LANES * taps * in_c + (tap * in_c + in_block * LANES + channel) * lanes;
                    let input_row = piece.input_rows.start.saturating_sub(input_rows.start);
                    let output_row = piece.output_rows.start - output_rows.start;
                    let x = (x_block * input_rows.len() + input_row) * x_row;
                    let dy = (panel.start * output_rows.len() + output_row) * dy_row;
                    // SAFETY: the runs are inside the piece's rows, which are packed; the weights are
                    // inside `dw`.
                    unsafe {
                        tile(&Outer {
                            x: packed.x.add(x + channel),
                            dy: packed.dy.add(dy),
                            dy_block: output_rows.len() * dy_row,
                            runs: &piece.runs[tap],
                            dw: dw.add(first),
                            dw_block: LANES * taps * in_c,
                            accumulate: add || index > 0,
                            channels: tile_channels.min(in_channels - channel),
                            lanes,
                        });
                    }
                    channel += tile_channels;
                }
            }
        }
    }

    fn pack_x(&self, x: &[f32], pictures: &Range<usize>, rows: &Range<usize>, to: &mut [f32]) {
        let from = [self.s.in_h, self.s.in_w, self.s.in_c];
        self.pack_rows(self.tiles.transform_input, x, from, pictures, rows, to);
    }

    fn pack_dy(&self, dy: &[f32], pictures: &Range<usize>, rows: &Range<usize>, to: &mut [f32]) {
        let from = [self.s.out_h(), self.s.out_w(), self.s.out_c];
        self.pack_rows(self.tiles.transform_gradient, dy, from, pictures, rows, to);
    }

    fn pack_rows(
        &self,
        transform: TransformFn,
        values: &[f32],
        from: [usize; 3],
        pictures: &Range<usize>,
        rows: &Range<usize>,
        to: &mut [f32],
    ) {
        if !self.pieces.uses_winograd {
            return pack(self.tiles, values, from, pictures, rows, to);
        }
        // `[channel block][row][point][segment][picture][16]`
        let segment = LANES * pictures.len();
        let point = from[1].div_ceil(winograd::COLUMNS) * segment;
        let row = winograd::POINTS * point;
        let strides = Strides { row, segment, point, block: rows.len() * row };
        winograd::pack(transform, values, from, pictures, rows, to, strides);
    }
}

/// Packs rows of some pictures as `[channel block][row][column][unit of pictures][16]`, zeros after the last channel and picture.
fn pack(
    tiles: &Tiles,
    from: &[f32],
    [height, width, channels]: [usize; 3],
    pictures: &Range<usize>,
    rows: &Range<usize>,
    to: &mut [f32],
) {
    let pixels = rows.len() * width;
    let units = pictures.len().div_ceil(tiles.values_per_unit);
    assert!(to.len() >= pixels * channels.next_multiple_of(LANES) * units);
    let rows_of = |picture: usize| {
        let first = (picture * height + rows.start) * width * channels;
        from[first..first + pixels * channels].as_ptr()
    };
    for (index, picture) in pictures.clone().step_by(tiles.values_per_unit).enumerate() {
        let second = (tiles.values_per_unit > 1 && picture + 1 < pictures.end).then(|| rows_of(picture + 1));
        // SAFETY: both pictures have the pixels, and `to` is large enough, as checked above.
        unsafe {
            (tiles.pack_pictures)(&Pack {
                from: rows_of(picture),
                second_picture: second,
                pixels,
                channels,
                to: to.as_mut_ptr().add(index * LANES),
                to_pixel: LANES * units,
                to_block: LANES * units * pixels,
            });
        }
    }
}
