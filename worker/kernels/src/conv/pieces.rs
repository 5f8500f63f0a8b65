//! How the weight gradient divides a convolution's output into pieces whose input and gradient fit in the first-level cache.

use super::{ConvShape, tile::Run};
use std::ops::Range;

/// Pieces for a full group of pictures, and for a last group with fewer pictures.
pub(super) type Pieces = [Vec<Piece>; 2];

/// Some output rows of a group of pictures, and the input rows that contribute to them.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) output_rows: Range<usize>,
    pub(super) input_rows: Range<usize>,
    /// Runs of pixels for each kernel offset. `Run::x` is relative to the first pixel of `input_rows`, `Run::dy` to that of
    /// `output_rows`. A pixel has one index for each unit, because the units of a group are adjacent: `(y * width + x) * units + unit`.
    pub(super) runs: Vec<Vec<Run>>,
}

/// Divides the output rows of a group of pictures into pieces of `rows_per_piece` rows, and lists the pairs of input and output pixels of
/// every kernel offset. `units` is the number of units of a pixel and channel: the pictures of the group, or half as many (rounded
/// up) with bfloat16.
pub(super) fn divide(s: &ConvShape, units: usize, rows_per_piece: usize) -> Vec<Piece> {
    let (out_h, out_w) = (s.out_h(), s.out_w());
    let piece = |first: usize| {
        let output_rows = first..out_h.min(first + rows_per_piece);
        let inputs =
            || output_rows.clone().flat_map(|row| (0..s.kernel).filter_map(move |k| s.input_row(row, k)));
        let input_rows = inputs().min().unwrap_or(0)..inputs().max().map_or(0, |last| last + 1);
        let runs = (0..s.kernel * s.kernel).map(|tap| {
            let (ky, kx) = (tap / s.kernel, tap % s.kernel);
            let mut runs: Vec<Run> = Vec::new();
            for row in output_rows.clone() {
                let Some(y) = s.input_row(row, ky) else { continue };
                for column in 0..out_w {
                    let Some(x) = s.input_column(column, kx) else { continue };
                    let x = (((y - input_rows.start) * s.in_w + x) * units) as u32;
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
