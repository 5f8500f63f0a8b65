//! Reads the header of a JPEG file (ITU-T T.81, annex B), and chooses the decoder.
//!
//! A hardware decoder supports most files of cameras and the web: baseline, 8 bits, three channels in one scan,
//! stored as YCbCr with a usual subsampling, up to a maximum size. Other files are decoded on CPU cores: most of them
//! by `zune-jpeg`, and files that `zune-jpeg` decodes incorrectly by the slower `jpeg-decoder`. Tests compare all
//! decoders with libjpeg.

use jpeg_decoder::ColorTransform;
use std::fmt;

#[cfg(test)]
mod cases;
#[cfg(test)]
mod matrix;
mod scan;

/// Maximum side of pictures that the GPU decodes.
pub const MAX_SIDE: u32 = 8192;

/// Why CPU cores decode a picture although the GPU decodes others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CpuDecodeReason {
    /// PNG, WebP and so on.
    OtherFormat,
    Progressive,
    /// Arithmetic coding, 12 bits, lossless or hierarchical.
    RareCoding,
    Grey,
    /// Four channels.
    Cmyk,
    /// Three channels, which are R, G and B.
    StoredAsRgb,
    /// Three channels whose colour space libjpeg and `zune-jpeg` interpret differently.
    AmbiguousColours,
    /// Not 4:4:4, 4:2:2, 4:2:0 or 4:4:0.
    RareSubsampling,
    SeveralScans,
    /// A side is longer than [`MAX_SIDE`] pixels.
    Large,
    /// The files of the batch exceed the limit for files kept in memory.
    LongBatch,
    /// The file is damaged. The host's decoder reports how.
    Damaged,
    /// nvJPEG does not support the file.
    Refused,
    /// The GPU could not decode the picture's batch.
    Failed,
}

/// Describes pictures, as in `3 progressive, 12 damaged`.
impl fmt::Display for CpuDecodeReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CpuDecodeReason::OtherFormat => "not JPEG",
            CpuDecodeReason::Progressive => "progressive",
            CpuDecodeReason::RareCoding => "with a rare coding",
            CpuDecodeReason::Grey => "grey",
            CpuDecodeReason::Cmyk => "CMYK",
            CpuDecodeReason::StoredAsRgb => "stored as RGB",
            CpuDecodeReason::AmbiguousColours => "with ambiguous colour markers",
            CpuDecodeReason::RareSubsampling => "with a rare subsampling",
            CpuDecodeReason::SeveralScans => "in several scans",
            CpuDecodeReason::Large => "larger than 8192 pixels",
            CpuDecodeReason::LongBatch => "beyond the first 512 MiB of a batch's files",
            CpuDecodeReason::Damaged => "damaged",
            CpuDecodeReason::Refused => "refused by nvJPEG",
            CpuDecodeReason::Failed => "in batches that the GPU could not decode",
        })
    }
}

/// A picture as stored in its file, before it is turned upright.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    pub width: u32,
    pub height: u32,
    /// The EXIF orientation, 1 to 8.
    pub orientation: u8,
    pub subsampling: Subsampling,
}

/// Chroma subsampling: the number of columns and rows of the picture (1 or 2 each) for one chroma sample. (2, 2) is
/// called 4:2:0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subsampling {
    pub columns: u32,
    pub rows: u32,
}

impl Stored {
    /// Width and height of the upright picture.
    pub(crate) fn upright(self) -> (u32, u32) {
        if self.orientation > 4 { (self.height, self.width) } else { (self.width, self.height) }
    }

    /// Width and height of a chroma plane.
    pub fn chroma(self) -> (u32, u32) {
        (self.width.div_ceil(self.subsampling.columns), self.height.div_ceil(self.subsampling.rows))
    }
}

/// Whether the data of a file's only scan is damaged. Decoders, in particular on GPUs, fill missing parts with grey and
/// report nothing. Damage of progressive files and of files with several scans is not detected.
pub(super) fn has_damaged_scan(bytes: &[u8]) -> bool {
    Frame::read(bytes).is_ok_and(|frame| {
        frame.is_sequential()
            && frame.is_interleaved()
            // The decoders report a missing table.
            && scan::blocks(&frame).is_some_and(|blocks| !scan::is_whole(bytes, &frame, &blocks))
    })
}

/// The contents of the markers up to the first scan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Frame<'a> {
    /// The frame's marker: 0xc0 is baseline, 0xc2 progressive.
    coding: u8,
    /// Bits per sample.
    precision: u8,
    pub(super) width: u32,
    pub(super) height: u32,
    /// Three bytes per channel: the channel's id, sampling factors (horizontal in the upper four bits, vertical in the
    /// lower), and quantisation table.
    channels: &'a [u8],
    /// Whether three channels are R, G and B, and four channels are C, M, Y and K. Otherwise the first three are Y, Cb and Cr.
    is_rgb: bool,
    /// Whether `zune-jpeg` chooses the same colour space as libjpeg.
    zune_agrees: bool,
    pub(super) exif: Option<&'a [u8]>,
    /// Huffman tables, DC before AC: the number of codes of each length, then their symbols.
    tables: [Option<&'a [u8]>; 8],
    /// Number of MCUs between restart markers, or 0.
    restart_interval: usize,
    /// The channels of the first scan, two bytes each: the channel's id, and the numbers of its DC and AC tables (four bits each).
    scan: &'a [u8],
    /// The offset of the first scan's data in the file.
    data_offset: usize,
}

impl<'a> Frame<'a> {
    /// Fails if the file is not a JPEG file, or has no scan.
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self, CpuDecodeReason> {
        if !bytes.starts_with(&[0xff, 0xd8, 0xff]) {
            return Err(CpuDecodeReason::OtherFormat);
        }
        let (mut frame, mut adobe, mut is_jfif) = (Self::default(), None, false);
        let mut at = 2;
        loop {
            let rest = bytes.get(at..).unwrap_or_default();
            let (marker, length) = match *rest {
                // Fill bytes, or bytes outside segments, which decoders skip until the next marker.
                [0xff, 0xff, ..] | [0..=0xfe, ..] => {
                    at += 1;
                    continue;
                }
                [0xff, 0x00 | 0x01 | 0xd0..=0xd7, ..] => {
                    at += 2;
                    continue;
                }
                [0xff, marker, high, low, ..] => (marker, usize::from(u16::from_be_bytes([high, low]))),
                _ => return Err(CpuDecodeReason::Damaged),
            };
            let segment = rest.get(4..2 + length.max(2)).ok_or(CpuDecodeReason::Damaged)?;
            at += 2 + length.max(2);
            match marker {
                0xe0 => is_jfif |= segment.starts_with(b"JFIF\0"),
                0xe1 if segment.starts_with(b"Exif\0\0") => frame.exif = frame.exif.or(Some(segment)),
                0xee if segment.starts_with(b"Adobe") => adobe = segment.get(11).copied(),
                0xc4 => frame.add_tables(segment)?,
                // JPG (an extension) and DAC (arithmetic coding) are not frame markers, although their numbers are in the same range.
                0xc8 | 0xcc => {}
                0xc0..=0xcf => frame.read_header(marker, segment)?,
                0xdd => {
                    let interval = segment.first_chunk().ok_or(CpuDecodeReason::Damaged)?;
                    frame.restart_interval = u16::from_be_bytes(*interval).into();
                }
                0xda => {
                    let count = usize::from(*segment.first().ok_or(CpuDecodeReason::Damaged)?);
                    frame.scan = segment.get(1..1 + 2 * count).ok_or(CpuDecodeReason::Damaged)?;
                    frame.data_offset = at;
                    let is_named_rgb = frame.channels.iter().step_by(3).eq(b"RGB");
                    // Whether the decoders take three channels for RGB, and four channels for CMYK.
                    let (is_rgb_for_libjpeg, is_rgb_for_zune) = match (frame.channels.len() / 3, adobe) {
                        (4, _) => (adobe.is_none_or(|transform| transform == 0), adobe != Some(2)),
                        (_, Some(transform)) => (transform == 0 && !is_jfif, transform == 0 || is_named_rgb),
                        (_, None) => (is_named_rgb && !is_jfif, is_named_rgb),
                    };
                    frame.is_rgb = is_rgb_for_libjpeg;
                    frame.zune_agrees = is_rgb_for_libjpeg == is_rgb_for_zune;
                    return if frame.coding == 0 { Err(CpuDecodeReason::Damaged) } else { Ok(frame) };
                }
                0xd8 | 0xd9 => return Err(CpuDecodeReason::Damaged),
                _ => {}
            }
        }
    }

    /// Reads the segment of a frame marker: precision, size and channels.
    fn read_header(&mut self, marker: u8, segment: &'a [u8]) -> Result<(), CpuDecodeReason> {
        let &[precision, h1, h0, w1, w0, count, ref channels @ ..] = segment else {
            return Err(CpuDecodeReason::Damaged);
        };
        self.coding = marker;
        self.precision = precision;
        self.width = u16::from_be_bytes([w1, w0]).into();
        self.height = u16::from_be_bytes([h1, h0]).into();
        self.channels = channels.get(..3 * usize::from(count)).ok_or(CpuDecodeReason::Damaged)?;
        Ok(())
    }

    fn add_tables(&mut self, mut segment: &'a [u8]) -> Result<(), CpuDecodeReason> {
        while let [class_and_id, rest @ ..] = segment {
            let counts = rest.get(..16).ok_or(CpuDecodeReason::Damaged)?;
            let length = 16 + counts.iter().map(|count| usize::from(*count)).sum::<usize>();
            let (table, rest) = rest.split_at_checked(length).ok_or(CpuDecodeReason::Damaged)?;
            let index = usize::from(class_and_id >> 4) * 4 + usize::from(class_and_id & 15);
            *self.tables.get_mut(index).ok_or(CpuDecodeReason::Damaged)? = Some(table);
            segment = rest;
        }
        Ok(())
    }

    /// The sampling factors of each channel (see [`Frame::channels`]).
    fn sampling(&self) -> impl Iterator<Item = u8> {
        self.channels.chunks_exact(3).map(|channel| channel[1])
    }

    /// Whether the first scan contains all channels.
    fn is_interleaved(&self) -> bool {
        3 * self.scan.len() == 2 * self.channels.len()
    }

    /// Checks whether a hardware decoder can decode the file.
    pub(super) fn for_hardware(&self) -> Result<Subsampling, CpuDecodeReason> {
        match (self.coding, self.precision, self.channels.len() / 3) {
            (0xc2, ..) => return Err(CpuDecodeReason::Progressive),
            (0xc0, 8, 3) => {}
            (0xc0, 8, 1) => return Err(CpuDecodeReason::Grey),
            (0xc0, 8, 4) => return Err(CpuDecodeReason::Cmyk),
            _ => return Err(CpuDecodeReason::RareCoding),
        }
        let mut sampling = self.sampling();
        let luma = match (sampling.next(), sampling.next(), sampling.next()) {
            (Some(luma @ (0x11 | 0x21 | 0x22 | 0x12)), Some(0x11), Some(0x11)) => luma,
            _ => return Err(CpuDecodeReason::RareSubsampling),
        };
        if self.width == 0 || self.height == 0 {
            // The height may follow the scan.
            return Err(CpuDecodeReason::RareCoding);
        }
        if self.is_rgb {
            return Err(CpuDecodeReason::StoredAsRgb);
        }
        if !self.zune_agrees {
            return Err(CpuDecodeReason::AmbiguousColours);
        }
        if !self.is_interleaved() {
            return Err(CpuDecodeReason::SeveralScans);
        }
        if self.width.max(self.height) > MAX_SIDE {
            return Err(CpuDecodeReason::Large);
        }
        if scan::blocks(self).is_none() {
            return Err(CpuDecodeReason::Damaged);
        }
        Ok(Subsampling { columns: u32::from(luma >> 4), rows: u32::from(luma & 15) })
    }

    /// Whether `zune-jpeg` 0.5.15 produces the same pixels as libjpeg. If channels have separate scans, or more samples
    /// than the first channel, `zune-jpeg` produces stripes or panics. It also mistakes the channels of some files for
    /// R, G and B.
    pub(super) fn is_decoded_by_zune(&self) -> bool {
        let is_supported = |luma| matches!(luma, 0x11 | 0x21 | 0x22 | 0x12);
        let mut sampling = self.sampling();
        let first = sampling.next().unwrap_or(0);
        let has_supported_sampling = match self.channels.len() / 3 {
            1 => first == 0x11,
            3 => is_supported(first) && sampling.eq([0x11; 2]),
            _ => first == 0x11 && sampling.eq([0x11; 3]),
        };
        has_supported_sampling && self.zune_agrees && (self.coding == 0xc2 || self.is_interleaved())
    }

    /// The colour space of the channels, for `jpeg-decoder`.
    pub(super) fn colours(&self) -> ColorTransform {
        match (self.channels.len() / 3, self.is_rgb) {
            (1, _) => ColorTransform::Grayscale,
            (4, true) => ColorTransform::CMYK,
            (4, false) => ColorTransform::YCCK,
            (_, true) => ColorTransform::RGB,
            (_, false) => ColorTransform::YCbCr,
        }
    }

    /// Whether the picture is decoded block by block, so that decoding it at a smaller scale needs less memory.
    pub(super) fn is_sequential(&self) -> bool {
        matches!(self.coding, 0xc0 | 0xc1)
    }

    /// Why no decoder supports the file, as a phrase to follow its name. `None` if a decoder supports it.
    pub(super) fn refusal(&self) -> Option<String> {
        let what = match (self.coding, self.precision, self.channels.len() / 3) {
            (0xc9..=0xcf, ..) => {
                return Some(
                    "is an arithmetic-coded JPEG picture, which is not supported; `jpegtran FILE >NEW` converts it losslessly"
                        .into(),
                );
            }
            (0xc3 | 0xc5..=0xc7, ..) => "lossless or hierarchical".into(),
            (_, bits, _) if bits != 8 => format!("{bits}-bit"),
            (_, _, channels) if ![1, 3, 4].contains(&channels) => format!("{channels}-channel"),
            _ if self.height == 0 => "DNL (its height follows its first scan)".into(),
            _ => return None,
        };
        Some(format!(
            "is a JPEG picture of an unsupported kind: {what}; save it as 8-bit baseline JPEG or as PNG"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{picture::decode::for_hardware, test_catalog::encode};

    /// The head of a file: the segments `before`, each after its marker; a frame with this marker; tables; a scan of `scan` channels.
    fn head(marker: u8, frame: &[u8], before: &[&[u8]], scan: u8) -> Vec<u8> {
        let mut bytes = vec![0xff, 0xd8];
        let mut add = |marker: u8, segment: &[u8]| {
            bytes.extend([0xff, marker]);
            bytes.extend((segment.len() as u16 + 2).to_be_bytes());
            bytes.extend(segment);
        };
        before.iter().for_each(|segment| add(segment[0], &segment[1..]));
        add(marker, frame);
        // DC and AC tables without any code.
        add(0xc4, &[0; 17]);
        add(0xc4, &[&[0x10][..], &[0; 16]].concat());
        add(0xda, &[scan, 1, 0, 2, 0, 3, 0, 0, 63, 0]);
        bytes
    }

    const ORDINARY: [u8; 15] = [8, 0, 48, 0, 64, 3, 1, 0x22, 0, 2, 0x11, 1, 3, 0x11, 1];

    fn frame_with(changes: &[(usize, u8)]) -> [u8; 15] {
        let mut frame = ORDINARY;
        changes.iter().for_each(|(at, value)| frame[*at] = *value);
        frame
    }

    #[test]
    fn supported_frames_are_accepted_and_others_have_reasons() {
        let sampling_of = |bytes: &[u8]| Frame::read(bytes).and_then(|frame| frame.for_hardware());
        for (luma, columns, rows) in [(0x22, 2, 2), (0x11, 1, 1), (0x21, 2, 1), (0x12, 1, 2)] {
            let bytes = head(0xc0, &frame_with(&[(7, luma)]), &[], 3);
            assert_eq!(sampling_of(&bytes), Ok(Subsampling { columns, rows }), "{luma:x}");
            let frame = Frame::read(&bytes).unwrap();
            assert_eq!((frame.width, frame.height, frame.restart_interval), (64, 48, 0));
        }
        let grey = &[8, 0, 48, 0, 64, 1, 1, 0x11, 0][..];
        let cmyk = &[8, 0, 48, 0, 64, 4, 1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0, 4, 0x11, 0][..];
        let rgb = frame_with(&[(6, b'R'), (9, b'G'), (12, b'B')]);
        for (bytes, expected) in [
            (head(0xc2, &ORDINARY, &[], 3), CpuDecodeReason::Progressive),
            (head(0xc1, &ORDINARY, &[], 3), CpuDecodeReason::RareCoding),
            (head(0xc9, &ORDINARY, &[], 3), CpuDecodeReason::RareCoding),
            (head(0xc0, &frame_with(&[(0, 12)]), &[], 3), CpuDecodeReason::RareCoding),
            (head(0xc0, &frame_with(&[(2, 0)]), &[], 3), CpuDecodeReason::RareCoding),
            (head(0xc0, grey, &[], 1), CpuDecodeReason::Grey),
            (head(0xc0, cmyk, &[], 4), CpuDecodeReason::Cmyk),
            (head(0xc0, &frame_with(&[(7, 0x41)]), &[], 3), CpuDecodeReason::RareSubsampling),
            (head(0xc0, &frame_with(&[(10, 0x12)]), &[], 3), CpuDecodeReason::RareSubsampling),
            (head(0xc0, &ORDINARY, &[], 1), CpuDecodeReason::SeveralScans),
            (head(0xc0, &rgb, &[], 3), CpuDecodeReason::StoredAsRgb),
            (head(0xc0, &ORDINARY, &[b"\xeeAdobe\0\x64\0\0\0\0\0"], 3), CpuDecodeReason::StoredAsRgb),
            (b"\x89PNG\r\n\x1a\n".to_vec(), CpuDecodeReason::OtherFormat),
        ] {
            assert_eq!(sampling_of(&bytes), Err(expected));
        }
        // In a JFIF file, or if Adobe's marker says YCbCr, the ids of channels have no meaning. Not every decoder
        // respects that.
        for before in [&b"\xe0JFIF\0\x01\x01\0\0\x01\0\x01\0\0"[..], b"\xeeAdobe\0\x64\0\0\0\0\x01"] {
            assert!(sampling_of(&head(0xc0, &ORDINARY, &[before], 3)).is_ok());
            let bytes = head(0xc0, &rgb, &[before], 3);
            assert_eq!(sampling_of(&bytes), Err(CpuDecodeReason::AmbiguousColours));
            assert_eq!(Frame::read(&bytes).unwrap().colours(), ColorTransform::YCbCr);
        }
    }

    #[test]
    fn chroma_sizes_are_rounded_up() {
        for (columns, rows, expected) in [(1, 1, (5, 3)), (2, 1, (3, 3)), (1, 2, (5, 2)), (2, 2, (3, 2))] {
            let subsampling = Subsampling { columns, rows };
            let stored = Stored { width: 5, height: 3, orientation: 6, subsampling };
            assert_eq!(stored.chroma(), expected);
            assert_eq!(Stored { width: 1, height: 1, ..stored }.chroma(), (1, 1));
        }
    }

    #[test]
    fn a_truncated_header_is_damaged() {
        let whole = head(0xc0, &ORDINARY, &[b"\xe0JFIF\0"], 3);
        for length in 3..whole.len() {
            assert_eq!(Frame::read(&whole[..length]), Err(CpuDecodeReason::Damaged), "{length} bytes");
        }
    }

    #[test]
    fn real_files_are_accepted_with_any_orientation_up_to_the_size_limit() {
        let encoded = |width, height| encode(&image::RgbImage::new(width, height), image::ImageFormat::Jpeg);
        let file = encoded(24, 16);
        let subsampling = Subsampling { columns: 1, rows: 1 };
        assert_eq!(for_hardware(&file), Ok(Stored { width: 24, height: 16, orientation: 1, subsampling }));
        // An EXIF block for a picture that is rotated to its left side.
        let exif =
            b"\xff\xe1\0\x22Exif\0\0II\x2a\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0";
        let turned = for_hardware(&[&file[..2], exif, &file[2..]].concat()).unwrap();
        assert_eq!((turned.orientation, turned.upright()), (6, (16, 24)));
        assert_eq!(for_hardware(&file[..file.len() - 2]), Err(CpuDecodeReason::Damaged));
        assert!(for_hardware(&encoded(MAX_SIDE, 1)).is_ok());
        assert_eq!(for_hardware(&encoded(MAX_SIDE + 1, 1)), Err(CpuDecodeReason::Large));
    }
}
