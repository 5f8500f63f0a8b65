//! How the weight gradient divides a convolution's output into pieces whose input and gradient fit in the first-level cache.

use super::{
    ConvShape,
    tile::{Run, Tiles},
    winograd,
};
use std::ops::Range;

/// Number of units of pixels per piece: (16 input and 32 output channels) * 4 bytes * 256 = 48 KiB. Larger pieces are slower.
const PIXELS: usize = 256;
/// Number of units of pictures per group if a picture is larger than a piece.
const GROUP: usize = 4;

/// How the output of a convolution is divided.
#[derive(Debug)]
pub(super) struct Pieces {
    pub(super) uses_winograd: bool,
    /// Pictures in a group, in whole units; the last group may have fewer.
    pub(super) group: usize,
    pub(super) columns: Columns,
    /// Pieces of a full group of pictures, and of a last group with fewer pictures.
    of_group: [Vec<Piece>; 2],
}

impl Pieces {
    pub(super) fn new(s: &ConvShape, tiles: &Tiles) -> Self {
        let uses_winograd = winograd::applies(s, tiles.format);
        let columns = if uses_winograd { Columns::winograd(s) } else { Columns::plain(s) };
        let pairs_per_row = columns.pairs.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let plane = s.out_h() * s.out_w();
        let group =
            (if plane <= PIXELS { PIXELS / plane } else { GROUP } * tiles.values_per_unit).min(s.batch);
        let units = |pictures: usize| pictures.div_ceil(tiles.values_per_unit);
        let rows = (PIXELS / (pairs_per_row * units(group))).clamp(1, s.out_h());
        let of_group = [group, s.batch % group].map(|group| divide(s, &columns, units(group), rows));
        Self { uses_winograd, group, columns, of_group }
    }

    /// The pieces of a group of `pictures`.
    pub(super) fn of(&self, pictures: usize) -> &[Piece] {
        &self.of_group[usize::from(pictures != self.group)]
    }
}

/// Some output rows of a group of pictures, and the input rows that contribute to them.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) output_rows: Range<usize>,
    pub(super) input_rows: Range<usize>,
    /// Runs of pixels for each kernel offset. `Run::x` is relative to the first pixel of `input_rows`, `Run::dy` to that of
    /// `output_rows`. A pixel has one index for each unit, because the units of a group are adjacent: `(y * width + x) * units + unit`.
    pub(super) runs: Vec<Vec<Run>>,
}

/// How the columns of packed rows are paired.
#[derive(Debug)]
pub(super) struct Columns {
    /// Columns of a packed row of the input, and of the gradient.
    pub(super) packed: [usize; 2],
    /// Pairs of a column of the input and a column of the gradient, for each column of the kernel (with [`winograd`], for each point).
    pub(super) pairs: Vec<Vec<(usize, usize)>>,
}

impl Columns {
    /// The columns of a convolution by its definition.
    fn plain(s: &ConvShape) -> Self {
        let pairs = |kx| (0..s.out_w()).filter_map(move |column| Some((s.input_column(column, kx)?, column)));
        Self { packed: [s.in_w, s.out_w()], pairs: (0..s.kernel).map(|kx| pairs(kx).collect()).collect() }
    }

    /// The columns of transformed rows: `[point][segment]`.
    fn winograd(s: &ConvShape) -> Self {
        let segments = s.out_w().div_ceil(winograd::COLUMNS);
        let pairs = |point| (point * segments..(point + 1) * segments).map(|column| (column, column));
        Self {
            packed: [winograd::POINTS * segments; 2],
            pairs: (0..winograd::POINTS).map(|point| pairs(point).collect()).collect(),
        }
    }
}

/// Divides the output rows of a group of pictures into pieces of `rows_per_piece` rows, and lists the pairs of input and output pixels of
/// every kernel offset. `units` is the number of units of a pixel and channel: the pictures of the group, or half as many (rounded
/// up) with bfloat16.
fn divide(s: &ConvShape, columns: &Columns, units: usize, rows_per_piece: usize) -> Vec<Piece> {
    let out_h = s.out_h();
    let [in_w, out_w] = columns.packed;
    let piece = |first: usize| {
        let output_rows = first..out_h.min(first + rows_per_piece);
        let inputs =
            || output_rows.clone().flat_map(|row| (0..s.kernel).filter_map(move |k| s.input_row(row, k)));
        let input_rows = inputs().min().unwrap_or(0)..inputs().max().map_or(0, |last| last + 1);
        let taps = (0..s.kernel).flat_map(|ky| columns.pairs.iter().map(move |pairs| (ky, pairs)));
        let runs = taps.map(|(ky, pairs)| {
            let mut runs: Vec<Run> = Vec::new();
            for row in output_rows.clone() {
                let Some(y) = s.input_row(row, ky) else { continue };
                for (x, column) in pairs {
                    let x = (((y - input_rows.start) * in_w + x) * units) as u32;
                    let dy = (((row - output_rows.start) * out_w + column) * units) as u32;
                    match runs.last_mut() {
                        Some(run) if run.x + run.len == x && run.dy + run.len == dy => {
                            run.len += units as u32;
                        }
                        _ => runs.push(Run { x, dy, len: units as u32 }),
                    }
                }
            }
            runs
        });
        Piece { runs: runs.collect(), input_rows, output_rows }
    };
    (0..out_h).step_by(rows_per_piece).map(piece).collect()
}
