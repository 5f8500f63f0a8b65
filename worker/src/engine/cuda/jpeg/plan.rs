//! What of a batch is decoded together, where it lies meanwhile, and how the kernel finds its way in it.

#![allow(unsafe_code)] // Plain numbers are said to be such, to be copied as bytes.

use super::super::device::Ptr;
use crate::data::device::Encoded;
use std::ops::Range;

/// Decoded pictures that lie on the GPU at a time, in bytes.
pub(super) const MOST_DECODED: usize = 1 << 30;
/// Pictures of a launch: a grid's second dimension.
const MOST_PICTURES: usize = 65_535;
/// Between pictures: nobody's rows share a cache line.
const ALIGN: usize = 256;
/// Shared memory that a block takes without asking.
const SHARED: u32 = 44 << 10;
/// Output rows of a block, at most.
const BAND: u32 = 16;

/// `Cropping` of the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Cropping {
    pub(super) pixels: Ptr,
    pub(super) along_row: i32,
    pub(super) along_column: i32,
    pub(super) first: u32,
    pub(super) span: u32,
    pub(super) rows: u32,
    pub(super) row_taps: u32,
    pub(super) row_shift: u32,
    pub(super) columns: u32,
    pub(super) column_taps: u32,
    pub(super) column_shift: u32,
    pub(super) flip: u32,
    pub(super) to: u32,
}

// SAFETY: numbers without a gap between them: eight bytes, then twelve times four.
unsafe impl bytemuck::Zeroable for Cropping {}
unsafe impl bytemuck::Pod for Cropping {}

/// Bytes of a row of a decoded picture.
pub(super) fn pitch(picture: &Encoded<'_>) -> usize {
    picture.stored.width as usize * 3
}

/// Bytes that a decoded picture takes.
pub(super) fn room(picture: &Encoded<'_>) -> usize {
    (pitch(picture) * picture.stored.height as usize).next_multiple_of(ALIGN)
}

/// Runs of pictures of these `rooms`, up to [`MOST_PICTURES`], that take `most` bytes together, or are one that takes more.
pub(super) fn groups(rooms: &[usize], most: usize) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    let mut taken = 0;
    for (number, room) in rooms.iter().enumerate() {
        match groups.last_mut().filter(|group| taken + room <= most && group.len() < MOST_PICTURES) {
            Some(group) => {
                group.end = number + 1;
                taken += room;
            }
            None => {
                groups.push(number..number + 1);
                taken = *room;
            }
        }
    }
    groups
}

impl Cropping {
    /// For a picture that was decoded to `at` and becomes output `to`. Its tables are put behind the others.
    pub(super) fn new(picture: &Encoded<'_>, at: Ptr, to: u32, tables: &mut Vec<i32>) -> Self {
        let (width, height) = (i64::from(picture.stored.width), i64::from(picture.stored.height));
        let line = 3 * width;
        let (last_column, last_line) = (3 * (width - 1), line * (height - 1));
        // Where the upright picture's first pixel is stored, and in which steps the others follow (EXIF's orientations).
        let (origin, along_row, along_column) = match picture.stored.orientation {
            2 => (last_column, -3, line),
            3 => (last_column + last_line, -3, -line),
            4 => (last_line, 3, -line),
            5 => (0, line, 3),
            6 => (last_line, -line, 3),
            7 => (last_column + last_line, -line, -3),
            8 => (last_column, line, -3),
            _ => (0, 3, line),
        };
        let offset = origin + i64::from(picture.left) * along_row + i64::from(picture.top) * along_column;
        let mut add = |entries: &[i32]| {
            let at = tables.len() as u32;
            tables.extend_from_slice(entries);
            at
        };
        let inputs = picture.columns.inputs();
        Self {
            pixels: at.wrapping_add_signed(offset),
            along_row: along_row as i32,
            along_column: along_column as i32,
            first: inputs.start,
            span: inputs.end - inputs.start,
            rows: add(&picture.rows.entries),
            row_taps: picture.rows.taps,
            row_shift: picture.rows.shift,
            columns: add(&picture.columns.entries),
            column_taps: picture.columns.taps,
            column_shift: picture.columns.shift,
            flip: picture.flip.into(),
            to,
        }
    }
}

/// Output rows that a block makes, and the shared memory that it takes for the widest of these pictures.
pub(super) fn band(croppings: &[Cropping], height: u32) -> (u32, u32) {
    let span = croppings.iter().map(|c| c.span).max().unwrap_or(1);
    let band = (SHARED / (span * 3)).clamp(1, BAND).min(height.max(1));
    (band, band * span * 3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::device::MOST_SIDE;

    #[test]
    fn groups_are_as_long_as_fits_and_one_picture_always_is() {
        assert!(groups(&[], 10).is_empty());
        assert_eq!(groups(&[4, 6, 1, 9, 1, 30, 2], 10), [0..2, 2..4, 4..5, 5..6, 6..7]);
        assert_eq!(groups(&[4, 7], 10), [0..1, 1..2]);
        assert_eq!(
            groups(&[1; MOST_PICTURES + 1], 1 << 20),
            [0..MOST_PICTURES, MOST_PICTURES..MOST_PICTURES + 1]
        );
    }

    #[test]
    fn a_block_has_room_for_the_widest_picture_that_is_taken() {
        for span in [1, 224, 939, MOST_SIDE] {
            let (band, shared) = band(&[Cropping { span, ..Cropping::default() }], 224);
            assert!((1..=BAND).contains(&band) && shared <= SHARED && shared == band * span * 3, "{span}");
        }
        // What a picture of the largest side takes is less than all that there is.
        assert!((MOST_SIDE as usize).pow(2) * 3 <= MOST_DECODED);
        assert_eq!(band(&[Cropping { span: 10, ..Cropping::default() }], 3).0, 3);
    }

    #[test]
    fn a_cropping_is_laid_out_as_the_kernel_reads_it() {
        assert_eq!(size_of::<Cropping>(), 56);
        assert_eq!(std::mem::offset_of!(Cropping, along_row), 8);
        assert_eq!(std::mem::offset_of!(Cropping, to), 52);
    }
}
