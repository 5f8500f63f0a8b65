//! Whether a picture's data has its end. Decoders fill what is missing with grey, and of files too many to keep in memory only
//! headers are read when a job starts, so it is decided by the format's own markers.
//!
//! What lies behind the end is no part of the picture: phones keep a film there (motion photographs), or further
//! pictures (CIPA DC-007, "multi-picture format").

use image::ImageFormat;

/// Whether the format's markers show where a picture ends; other formats have to be decoded.
pub(super) fn marks_its_end(format: ImageFormat) -> bool {
    matches!(format, ImageFormat::Jpeg | ImageFormat::Png | ImageFormat::WebP)
}

/// False when the picture surely is cut off.
pub(super) fn is_whole(format: ImageFormat, bytes: &[u8]) -> bool {
    match format {
        ImageFormat::Jpeg => jpeg(bytes),
        ImageFormat::Png => png(bytes),
        ImageFormat::WebP => webp(bytes),
        _ => true,
    }
}

/// From marker to marker (ITU-T T.81, annex B) until "end of image". A segment is passed over by its length, so that
/// a thumbnail's own end does not count; what is between segments, a scan's data, has no other marker in it.
fn jpeg(bytes: &[u8]) -> bool {
    // Behind "start of image".
    let mut at = 2;
    while let Some(offset) = bytes.get(at..).and_then(|rest| rest.iter().position(|b| *b == 0xff)) {
        let marker = at + offset + 1;
        at = match bytes.get(marker) {
            None => return false,
            // Filling: the marker follows.
            Some(0xff) => marker,
            Some(0xd9) => return true,
            // Another picture begins, and this one has not ended.
            Some(0xd8) => return false,
            // A scan's own 0xff, markers within a scan, and what has no length or no meaning.
            Some(0x00..=0xbf | 0xd0..=0xd7) => marker + 1,
            Some(_) => match bytes.get(marker + 1..marker + 3) {
                Some(length) => marker + 1 + usize::from(u16::from_be_bytes([length[0], length[1]])).max(2),
                None => return false,
            },
        };
    }
    false
}

/// From chunk to chunk (ISO/IEC 15948, section 5.3) until the last one, all of it there.
fn png(bytes: &[u8]) -> bool {
    let mut at = 8;
    while let Some(head) = bytes.get(at..at + 8) {
        let length = u32::from_be_bytes([head[0], head[1], head[2], head[3]]) as usize;
        // Length, kind and checksum are four bytes each.
        at = at.saturating_add(12).saturating_add(length);
        if &head[4..] == b"IEND" || at > bytes.len() {
            return at <= bytes.len();
        }
    }
    false
}

/// As long as its header says (RFC 9649, section 2.4).
fn webp(bytes: &[u8]) -> bool {
    let size = bytes.get(4..8).map(|s| u32::from_le_bytes([s[0], s[1], s[2], s[3]]));
    size.is_some_and(|size| size as usize + 8 <= bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    fn encoded(format: ImageFormat) -> Vec<u8> {
        let picture =
            image::RgbImage::from_fn(40, 30, |x, y| image::Rgb([(x * y) as u8, x as u8 * 3, 255 - y as u8]));
        let mut bytes = Cursor::new(Vec::new());
        picture.write_to(&mut bytes, format).unwrap();
        bytes.into_inner()
    }

    #[test]
    fn a_picture_ends_at_its_own_end_whatever_follows() {
        for format in [ImageFormat::Jpeg, ImageFormat::Png, ImageFormat::WebP] {
            let whole = encoded(format);
            assert!(is_whole(format, &whole), "{format:?}");
            // A film, another picture, one that is itself cut off, markers that mean nothing here.
            for behind in
                [&b"\0\0\0\x18ftypmp42\xff\xda\0\x0c"[..], &whole, &whole[..whole.len() / 2], b"\xff\xda"]
            {
                assert!(is_whole(format, &[&whole, behind].concat()), "{format:?}");
            }
            for length in 0..whole.len() {
                assert!(
                    !is_whole(format, &whole[..length]),
                    "{format:?} of {length} of {} bytes",
                    whole.len()
                );
            }
        }
    }

    #[test]
    fn the_end_of_a_thumbnail_is_not_that_of_its_picture() {
        let whole = encoded(ImageFormat::Jpeg);
        let thumbnail = encoded(ImageFormat::Jpeg);
        let length = u16::try_from(thumbnail.len() + 2).unwrap().to_be_bytes();
        let with = [&whole[..2], &[0xff, 0xe1], &length, &thumbnail, &whole[2..]].concat();
        assert!(jpeg(&with));
        assert!(!jpeg(&with[..with.len() - 2]));
        // Cut off, and another picture, which is whole, behind it.
        assert!(!jpeg(&[&whole[..whole.len() / 2], &whole[..]].concat()));
    }
}
