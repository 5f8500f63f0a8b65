//! Groups of pictures that are decoded together, their memory layout, and their descriptions for the kernel.

use super::super::device::Ptr;
use crate::nvjpeg;
use bytemuck::{Pod, Zeroable};
use lockstep_data::device::{Encoded, Stored};
use std::ops::Range;

/// Maximum size of a group's decoded pictures in bytes: less than 2 GiB for all groups that are decoded concurrently.
pub(super) const MAX_DECODED_BYTES: usize = 512 << 20;
/// Maximum number of pictures per launch: the limit of a grid's second dimension.
const MAX_PICTURES: usize = 65_535;
/// Alignment of planes in bytes, so that two planes never share a cache line.
const ALIGN: usize = 256;
/// Alignment of a plane's rows in bytes: a sector of GPU memory, so that a warp reads as few sectors as possible.
const ROW_ALIGN: usize = 32;
/// Bytes of shared memory for the rows of a block: below the 48 KiB that a block can use without opt-in.
const SHARED_BYTES: u32 = 44 << 10;
/// Maximum number of output rows per block.
const MAX_ROWS_PER_BLOCK: u32 = 16;

/// How one output is computed from a decoded picture; `Cropping` in `crop.cu` documents the fields.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Cropping {
    pub(super) planes: Planes,
    pub(super) column: i32,
    pub(super) row: i32,
    pub(super) column_right: i32,
    pub(super) row_right: i32,
    pub(super) column_down: i32,
    pub(super) row_down: i32,
    pub(super) first_column: u32,
    pub(super) column_count: u32,
    pub(super) row_table: u32,
    pub(super) row_taps: u32,
    pub(super) row_shift: u32,
    pub(super) column_table: u32,
    pub(super) column_taps: u32,
    pub(super) column_shift: u32,
    pub(super) flip: u32,
    pub(super) output: u32,
}

/// Addresses and sizes of a decoded picture's planes; `Planes` in `planes.cu` documents the fields.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Planes {
    pub(super) luma: Ptr,
    pub(super) cb: Ptr,
    pub(super) cr: Ptr,
    pub(super) luma_pitch: u32,
    pub(super) chroma_pitch: u32,
    pub(super) chroma_width: u32,
    pub(super) chroma_height: u32,
    pub(super) half_columns: u32,
    pub(super) half_rows: u32,
}

/// Pitch in bytes of a row of `width` samples.
fn pitch(width: u32) -> usize {
    (width as usize).next_multiple_of(ROW_ALIGN)
}

fn plane_bytes(width: u32, height: u32) -> usize {
    (pitch(width) * height as usize).next_multiple_of(ALIGN)
}

/// Total size in bytes of a decoded picture's planes.
pub(super) fn planes_bytes(stored: Stored) -> usize {
    let (width, height) = stored.chroma();
    plane_bytes(stored.width, stored.height) + 2 * plane_bytes(width, height)
}

impl Planes {
    /// Consecutive planes of [`planes_bytes`] bytes in total, from address `at` on.
    pub(super) fn new(stored: Stored, at: Ptr) -> Self {
        let (chroma_width, chroma_height) = stored.chroma();
        let cb = at + plane_bytes(stored.width, stored.height) as Ptr;
        Self {
            luma: at,
            cb,
            cr: cb + plane_bytes(chroma_width, chroma_height) as Ptr,
            luma_pitch: pitch(stored.width) as u32,
            chroma_pitch: pitch(chroma_width) as u32,
            chroma_width,
            chroma_height,
            half_columns: u32::from(stored.subsampling.columns == 2),
            half_rows: u32::from(stored.subsampling.rows == 2),
        }
    }

    /// The planes as destinations for the decoder.
    pub(super) fn destinations(&self) -> [nvjpeg::Plane; 3] {
        [(self.luma, self.luma_pitch), (self.cb, self.chroma_pitch), (self.cr, self.chroma_pitch)]
            .map(|(address, pitch)| nvjpeg::Plane { address, pitch: pitch as usize })
    }
}

/// Divides pictures of these `sizes`, in bytes, into groups of consecutive pictures, of at most [`MAX_PICTURES`] pictures and `max_bytes`
/// bytes. A picture of more than `max_bytes` bytes is a group of its own.
pub(super) fn divide_into_groups(sizes: &[usize], max_bytes: usize) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    let mut bytes = 0;
    for (number, size) in sizes.iter().enumerate() {
        match groups.last_mut().filter(|group| bytes + size <= max_bytes && group.len() < MAX_PICTURES) {
            Some(group) => {
                group.end = number + 1;
                bytes += size;
            }
            None => {
                groups.push(number..number + 1);
                bytes = *size;
            }
        }
    }
    groups
}

impl Cropping {
    /// Describes a picture that is decoded to `planes` and becomes the output with index `output`. Appends its resampling tables to
    /// `tables`.
    pub(super) fn new(picture: &Encoded<'_>, planes: Planes, output: u32, tables: &mut Vec<i32>) -> Self {
        // Sides are at most `MAX_SIDE`, so the casts are exact.
        let (last_column, last_row) = (picture.stored.width as i32 - 1, picture.stored.height as i32 - 1);
        // EXIF orientations: stored position of the upright picture's first pixel, and the stored steps from a pixel to its
        // right and lower neighbours.
        let (origin, right, down) = match picture.stored.orientation {
            2 => ((last_column, 0), (-1, 0), (0, 1)),
            3 => ((last_column, last_row), (-1, 0), (0, -1)),
            4 => ((0, last_row), (1, 0), (0, -1)),
            5 => ((0, 0), (0, 1), (1, 0)),
            6 => ((0, last_row), (0, -1), (1, 0)),
            7 => ((last_column, last_row), (0, -1), (-1, 0)),
            8 => ((last_column, 0), (0, 1), (-1, 0)),
            _ => ((0, 0), (1, 0), (0, 1)),
        };
        let (left, top) = (picture.left as i32, picture.top as i32);
        let mut append_table = |entries: &[i32]| {
            let at = tables.len() as u32;
            tables.extend_from_slice(entries);
            at
        };
        let inputs = picture.columns.inputs();
        Self {
            planes,
            column: origin.0 + left * right.0 + top * down.0,
            row: origin.1 + left * right.1 + top * down.1,
            column_right: right.0,
            row_right: right.1,
            column_down: down.0,
            row_down: down.1,
            first_column: inputs.start,
            column_count: inputs.end - inputs.start,
            row_table: append_table(&picture.rows.entries),
            row_taps: picture.rows.taps,
            row_shift: picture.rows.shift,
            column_table: append_table(&picture.columns.entries),
            column_taps: picture.columns.taps,
            column_shift: picture.columns.shift,
            flip: picture.flip.into(),
            output,
        }
    }
}

/// The number of output rows of a block, and the bytes of shared memory that these rows need for the widest picture.
pub(super) fn rows_per_block(croppings: &[Cropping], height: u32) -> (u32, u32) {
    let columns = croppings.iter().map(|c| c.column_count).max().unwrap_or(1);
    let rows = (SHARED_BYTES / (columns * 3)).clamp(1, MAX_ROWS_PER_BLOCK).min(height.max(1));
    (rows, rows * columns * 3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_data::device::{MAX_SIDE, Subsampling};

    #[test]
    fn groups_are_as_long_as_possible_and_have_at_least_one_picture() {
        assert!(divide_into_groups(&[], 10).is_empty());
        assert_eq!(divide_into_groups(&[4, 6, 1, 9, 1, 30, 2], 10), [0..2, 2..4, 4..5, 5..6, 6..7]);
        assert_eq!(divide_into_groups(&[4, 7], 10), [0..1, 1..2]);
        assert_eq!(
            divide_into_groups(&[1; MAX_PICTURES + 1], 1 << 20),
            [0..MAX_PICTURES, MAX_PICTURES..MAX_PICTURES + 1]
        );
    }

    #[test]
    fn the_widest_accepted_picture_fits_into_a_block() {
        for column_count in [1, 224, 939, MAX_SIDE] {
            let (rows, shared) = rows_per_block(&[Cropping { column_count, ..Cropping::default() }], 224);
            assert!((1..=MAX_ROWS_PER_BLOCK).contains(&rows), "{column_count}");
            assert!(shared <= SHARED_BYTES && shared == rows * column_count * 3, "{column_count}");
        }
        assert_eq!(rows_per_block(&[Cropping { column_count: 10, ..Cropping::default() }], 3).0, 3);
    }

    const FULL: Stored =
        Stored { width: 0, height: 0, orientation: 1, subsampling: Subsampling { columns: 1, rows: 1 } };

    #[test]
    fn the_largest_picture_fits_and_small_ones_need_little_memory() {
        assert!(planes_bytes(Stored { width: MAX_SIDE, height: MAX_SIDE, ..FULL }) <= MAX_DECODED_BYTES);
        // The maximum number of the smallest pictures.
        let smallest = planes_bytes(Stored { width: 1, height: 1, ..FULL });
        assert!(smallest == 3 * ALIGN && MAX_PICTURES * smallest <= MAX_DECODED_BYTES);
        let half = Subsampling { columns: 2, rows: 2 };
        assert_eq!(
            planes_bytes(Stored { width: 480, height: 370, subsampling: half, ..FULL }),
            177_664 + 2 * 47_360
        );
    }

    #[test]
    fn planes_do_not_overlap_and_end_where_the_next_picture_begins() {
        for (columns, rows) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
            for (width, height) in [(1, 1), (2, 3), (33, 17), (8191, 5)] {
                let stored = Stored { width, height, subsampling: Subsampling { columns, rows }, ..FULL };
                let planes = Planes::new(stored, 1 << 40);
                let [luma, cb, cr] = planes.destinations();
                let end =
                    |plane: nvjpeg::Plane, rows: u32| plane.address + plane.pitch as u64 * u64::from(rows);
                assert_eq!(luma.address, 1 << 40);
                assert!(end(luma, height) <= cb.address, "{stored:?}");
                assert!(end(cb, planes.chroma_height) <= cr.address, "{stored:?}");
                assert!(
                    end(cr, planes.chroma_height) <= luma.address + planes_bytes(stored) as u64,
                    "{stored:?}"
                );
                assert!(luma.pitch >= width as usize && cb.pitch >= planes.chroma_width as usize);
            }
        }
    }

    #[test]
    fn the_layout_of_a_cropping_matches_the_kernel() {
        assert_eq!(size_of::<Planes>(), 48);
        assert_eq!(std::mem::offset_of!(Planes, half_rows), 44);
        assert_eq!(size_of::<Cropping>(), 112);
        assert_eq!(std::mem::offset_of!(Cropping, column), 48);
        assert_eq!(std::mem::offset_of!(Cropping, first_column), 72);
        assert_eq!(std::mem::offset_of!(Cropping, output), 108);
    }
}
