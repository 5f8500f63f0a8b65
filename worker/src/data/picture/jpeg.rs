//! Which JPEG files a decoder in hardware takes, from their headers (ITU-T T.81, annex B).
//!
//! Baseline, 8 bits, three channels in one scan, stored as YCbCr in a usual subsampling, of a usual size: what cameras
//! and the web mostly have. The rest is decoded on cores.

use super::decode::Header;
use std::fmt;

/// Longer sides are decoded on cores.
pub(crate) const MOST_SIDE: u32 = 8192;

/// Why a picture is decoded on cores where others are decoded by the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CpuDecodeReason {
    /// PNG, WebP and so on.
    OtherFormat,
    Progressive,
    /// Arithmetic coding, 12 bits, lossless, hierarchical.
    RareCoding,
    Grey,
    /// Four channels.
    Cmyk,
    /// Three channels that are no YCbCr.
    StoredAsRgb,
    /// Neither 4:4:4, 4:2:2, 4:2:0 nor 4:4:0.
    RareSubsampling,
    SeveralScans,
    /// A side of more than [`MOST_SIDE`] pixels.
    Large,
    /// The batch's files are more than are held at a time.
    LongBatch,
    /// Cores say what is wrong with it.
    Damaged,
    /// nvJPEG does not take it.
    Refused,
    /// The GPU could not decode the batch that it was in.
    Failed,
    /// The GPU decodes others meanwhile.
    Concurrently,
}

impl fmt::Display for CpuDecodeReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CpuDecodeReason::OtherFormat => "not JPEG",
            CpuDecodeReason::Progressive => "progressive",
            CpuDecodeReason::RareCoding => "of a rare coding",
            CpuDecodeReason::Grey => "grey",
            CpuDecodeReason::Cmyk => "CMYK",
            CpuDecodeReason::StoredAsRgb => "stored as RGB",
            CpuDecodeReason::RareSubsampling => "of a rare subsampling",
            CpuDecodeReason::SeveralScans => "in several scans",
            CpuDecodeReason::Large => "larger than 8192 pixels",
            CpuDecodeReason::LongBatch => "past 512 MiB of files in a batch",
            CpuDecodeReason::Damaged => "damaged",
            CpuDecodeReason::Refused => "refused by nvJPEG",
            CpuDecodeReason::Failed => "in batches that the GPU could not decode",
            CpuDecodeReason::Concurrently => "while the GPU decoded others",
        })
    }
}

/// A picture as its file has it, before it is turned upright.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) width: u32,
    pub(crate) height: u32,
    /// EXIF's: 1 to 8.
    pub(crate) orientation: u8,
    pub(crate) subsampling: Subsampling,
}

/// Columns and rows of a picture, 1 or 2 of each, for which there is one sample of chroma: (2, 2) is called 4:2:0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Subsampling {
    pub(crate) columns: u32,
    pub(crate) rows: u32,
}

impl Stored {
    /// Width and height once it is upright.
    pub(crate) fn upright(self) -> (u32, u32) {
        if self.orientation > 4 { (self.height, self.width) } else { (self.width, self.height) }
    }

    /// Width and height of a plane of chroma.
    pub(crate) fn chroma(self) -> (u32, u32) {
        (self.width.div_ceil(self.subsampling.columns), self.height.div_ceil(self.subsampling.rows))
    }
}

/// What a file is for a decoder in hardware.
///
/// # Errors
/// Why cores decode it.
pub(crate) fn for_hardware(bytes: &[u8]) -> Result<Stored, CpuDecodeReason> {
    let Frame { width, height, subsampling, .. } = frame(bytes)?;
    // Also checks that the file has its end.
    let header = Header::read(bytes).map_err(|_| CpuDecodeReason::Damaged)?;
    let orientation = header.orientation.to_exif();
    let stored = Stored { width: header.width, height: header.height, orientation, subsampling };
    if (stored.width, stored.height) != (width, height) {
        return Err(CpuDecodeReason::Damaged);
    }
    if width.max(height) > MOST_SIDE {
        return Err(CpuDecodeReason::Large);
    }
    Ok(stored)
}

/// What a frame's header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Frame {
    width: u32,
    height: u32,
    subsampling: Subsampling,
    /// Its channels are called R, G and B.
    named_rgb: bool,
}

/// The frame, if the markers up to the first scan say that it is an ordinary one.
fn frame(bytes: &[u8]) -> Result<Frame, CpuDecodeReason> {
    if !bytes.starts_with(&[0xff, 0xd8, 0xff]) {
        return Err(CpuDecodeReason::OtherFormat);
    }
    let (mut at, mut adobe, mut jfif) = (2, None, false);
    let mut found: Option<Frame> = None;
    loop {
        let rest = bytes.get(at..).unwrap_or_default();
        let (marker, length) = match *rest {
            // Filling: the marker follows.
            [0xff, 0xff, ..] => {
                at += 1;
                continue;
            }
            [0xff, 0x01 | 0xd0..=0xd7, ..] => {
                at += 2;
                continue;
            }
            [0xff, marker, high, low, ..] => (marker, usize::from(u16::from_be_bytes([high, low]))),
            _ => return Err(CpuDecodeReason::Damaged),
        };
        let segment = rest.get(4..2 + length.max(2)).ok_or(CpuDecodeReason::Damaged)?;
        match marker {
            0xe0 => jfif |= segment.starts_with(b"JFIF\0"),
            0xee if segment.starts_with(b"Adobe") => adobe = segment.get(11).copied(),
            0xc0 => found = Some(baseline(segment)?),
            0xc2 => return Err(CpuDecodeReason::Progressive),
            // Tables and extensions of JPEG among the frames' markers.
            0xc4 | 0xc8 | 0xcc => {}
            0xc1 | 0xc3 | 0xc5..=0xc7 | 0xc9..=0xcb | 0xcd..=0xcf => return Err(CpuDecodeReason::RareCoding),
            0xda => {
                let frame = found.ok_or(CpuDecodeReason::Damaged)?;
                // As libjpeg decides: by Adobe's marker, else by the names of the channels unless it is a JFIF file.
                let rgb = adobe.map_or(frame.named_rgb && !jfif, |transform| transform == 0);
                return match segment.first() {
                    _ if rgb => Err(CpuDecodeReason::StoredAsRgb),
                    Some(3) => Ok(frame),
                    _ => Err(CpuDecodeReason::SeveralScans),
                };
            }
            0xd8 | 0xd9 => return Err(CpuDecodeReason::Damaged),
            _ => {}
        }
        at += 2 + length.max(2);
    }
}

/// From the segment behind the marker of a baseline frame.
fn baseline(segment: &[u8]) -> Result<Frame, CpuDecodeReason> {
    let &[precision, h1, h0, w1, w0, channels, ref components @ ..] = segment else {
        return Err(CpuDecodeReason::Damaged);
    };
    match (precision, channels) {
        (8, 3) => {}
        (8, 1) => return Err(CpuDecodeReason::Grey),
        (8, 4) => return Err(CpuDecodeReason::Cmyk),
        _ => return Err(CpuDecodeReason::RareCoding),
    }
    let &[a, luma, _, b, blue, _, c, red, _, ..] = components else {
        return Err(CpuDecodeReason::Damaged);
    };
    if !matches!((luma, blue, red), (0x11 | 0x21 | 0x22 | 0x12, 0x11, 0x11)) {
        return Err(CpuDecodeReason::RareSubsampling);
    }
    let (width, height) = (u16::from_be_bytes([w1, w0]), u16::from_be_bytes([h1, h0]));
    if width == 0 || height == 0 {
        // The height may come behind the scan.
        return Err(CpuDecodeReason::RareCoding);
    }
    Ok(Frame {
        width: width.into(),
        height: height.into(),
        subsampling: Subsampling { columns: u32::from(luma >> 4), rows: u32::from(luma & 15) },
        named_rgb: [a, b, c] == *b"RGB",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file's head: JFIF or not, further segments, the frame and the scan.
    fn head(marker: u8, frame: &[u8], before: &[&[u8]], scan: u8) -> Vec<u8> {
        let mut bytes = vec![0xff, 0xd8];
        let mut add = |marker: u8, segment: &[u8]| {
            bytes.extend([0xff, marker]);
            bytes.extend((segment.len() as u16 + 2).to_be_bytes());
            bytes.extend(segment);
        };
        before.iter().for_each(|segment| add(segment[0], &segment[1..]));
        add(marker, frame);
        add(0xc4, &[0; 17]);
        add(0xda, &[scan, 1, 0, 2, 0, 3, 0, 0, 63, 0]);
        bytes
    }

    const ORDINARY: [u8; 15] = [8, 0, 48, 0, 64, 3, 1, 0x22, 0, 2, 0x11, 1, 3, 0x11, 1];

    fn with(changes: &[(usize, u8)]) -> [u8; 15] {
        let mut frame = ORDINARY;
        changes.iter().for_each(|(at, value)| frame[*at] = *value);
        frame
    }

    #[test]
    fn ordinary_frames_are_taken_and_each_other_kind_is_named() {
        for (luma, columns, rows) in [(0x22, 2, 2), (0x11, 1, 1), (0x21, 2, 1), (0x12, 1, 2)] {
            let expected =
                Frame { width: 64, height: 48, subsampling: Subsampling { columns, rows }, named_rgb: false };
            assert_eq!(frame(&head(0xc0, &with(&[(7, luma)]), &[], 3)), Ok(expected), "{luma:x}");
        }
        let grey = &[8, 0, 48, 0, 64, 1, 1, 0x11, 0][..];
        let cmyk = &[8, 0, 48, 0, 64, 4, 1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0, 4, 0x11, 0][..];
        let rgb = with(&[(6, b'R'), (9, b'G'), (12, b'B')]);
        for (bytes, expected) in [
            (head(0xc2, &ORDINARY, &[], 3), CpuDecodeReason::Progressive),
            (head(0xc1, &ORDINARY, &[], 3), CpuDecodeReason::RareCoding),
            (head(0xc9, &ORDINARY, &[], 3), CpuDecodeReason::RareCoding),
            (head(0xc0, &with(&[(0, 12)]), &[], 3), CpuDecodeReason::RareCoding),
            (head(0xc0, &with(&[(2, 0)]), &[], 3), CpuDecodeReason::RareCoding),
            (head(0xc0, grey, &[], 1), CpuDecodeReason::Grey),
            (head(0xc0, cmyk, &[], 4), CpuDecodeReason::Cmyk),
            (head(0xc0, &with(&[(7, 0x41)]), &[], 3), CpuDecodeReason::RareSubsampling),
            (head(0xc0, &with(&[(10, 0x12)]), &[], 3), CpuDecodeReason::RareSubsampling),
            (head(0xc0, &ORDINARY, &[], 1), CpuDecodeReason::SeveralScans),
            (head(0xc0, &rgb, &[], 3), CpuDecodeReason::StoredAsRgb),
            (head(0xc0, &ORDINARY, &[b"\xeeAdobe\0\x64\0\0\0\0\0"], 3), CpuDecodeReason::StoredAsRgb),
            (b"\x89PNG\r\n\x1a\n".to_vec(), CpuDecodeReason::OtherFormat),
        ] {
            assert_eq!(frame(&bytes), Err(expected));
        }
        // Names of channels mean nothing in a JFIF file, nor where Adobe's marker says YCbCr.
        for before in [&b"\xe0JFIF\0\x01\x01\0\0\x01\0\x01\0\0"[..], b"\xeeAdobe\0\x64\0\0\0\0\x01"] {
            assert!(frame(&head(0xc0, &rgb, &[before], 3)).is_ok());
        }
    }

    #[test]
    fn chroma_has_a_sample_for_a_single_last_column_or_row() {
        for (columns, rows, expected) in [(1, 1, (5, 3)), (2, 1, (3, 3)), (1, 2, (5, 2)), (2, 2, (3, 2))] {
            let subsampling = Subsampling { columns, rows };
            let stored = Stored { width: 5, height: 3, orientation: 6, subsampling };
            assert_eq!(stored.chroma(), expected);
            assert_eq!(Stored { width: 1, height: 1, ..stored }.chroma(), (1, 1));
        }
    }

    #[test]
    fn a_head_that_is_cut_off_anywhere_is_damaged() {
        let whole = head(0xc0, &ORDINARY, &[b"\xe0JFIF\0"], 3);
        for length in 3..whole.len() {
            assert_eq!(frame(&whole[..length]), Err(CpuDecodeReason::Damaged), "{length} bytes");
        }
    }

    #[test]
    fn real_files_are_taken_upright_or_not_and_up_to_the_largest_side() {
        let encoded = |width, height| {
            let mut bytes = std::io::Cursor::new(Vec::new());
            image::RgbImage::new(width, height).write_to(&mut bytes, image::ImageFormat::Jpeg).unwrap();
            bytes.into_inner()
        };
        let file = encoded(24, 16);
        let subsampling = Subsampling { columns: 1, rows: 1 };
        assert_eq!(for_hardware(&file), Ok(Stored { width: 24, height: 16, orientation: 1, subsampling }));
        // An EXIF block that says: lies on its left side.
        let exif =
            b"\xff\xe1\0\x22Exif\0\0II\x2a\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0";
        let turned = for_hardware(&[&file[..2], exif, &file[2..]].concat()).unwrap();
        assert_eq!((turned.orientation, turned.upright()), (6, (16, 24)));
        assert_eq!(for_hardware(&file[..file.len() - 2]), Err(CpuDecodeReason::Damaged));
        assert!(for_hardware(&encoded(MOST_SIDE, 1)).is_ok());
        assert_eq!(for_hardware(&encoded(MOST_SIDE + 1, 1)), Err(CpuDecodeReason::Large));
    }
}
