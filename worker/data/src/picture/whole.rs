//! Checks whether a picture's data is complete, according to the markers of its format. Decoders fill missing data with
//! grey, and large datasets are not decoded when they are indexed.
//!
//! Data after the picture's end is ignored. Phones append a video (motion photographs), or further pictures
//! (CIPA DC-007, "multi-picture format").

use image::ImageFormat;

/// Whether the markers of the format show where a picture ends. Pictures in other formats must be decoded.
pub(super) fn has_end_marker(format: ImageFormat) -> bool {
    matches!(format, ImageFormat::Jpeg | ImageFormat::Png | ImageFormat::WebP)
}

/// Whether the picture is complete according to its markers. True for formats without an end marker.
pub(super) fn is_whole(format: ImageFormat, bytes: &[u8]) -> bool {
    match format {
        ImageFormat::Jpeg => is_whole_jpeg(bytes),
        ImageFormat::Png => is_whole_png(bytes),
        ImageFormat::WebP => is_whole_webp(bytes),
        _ => true,
    }
}

/// Follows the markers (ITU-T T.81, annex B) to "end of image". A segment is skipped by its length, so that the end
/// of a thumbnail does not count. Between segments is the data of a scan, which contains only restart markers.
fn is_whole_jpeg(bytes: &[u8]) -> bool {
    // After "start of image".
    let mut at = 2;
    while let Some(offset) = bytes.get(at..).and_then(|rest| rest.iter().position(|b| *b == 0xff)) {
        let marker = at + offset + 1;
        at = match bytes.get(marker) {
            None => return false,
            // Fill bytes before a marker.
            Some(0xff) => marker,
            Some(0xd9) => return true,
            // Another picture begins before this one has ended.
            Some(0xd8) => return false,
            // A 0xff in the data of a scan, a restart marker, or a marker without length or meaning.
            Some(0x00..=0xbf | 0xd0..=0xd7) => marker + 1,
            Some(_) => match bytes.get(marker + 1..marker + 3) {
                Some(length) => marker + 1 + usize::from(u16::from_be_bytes([length[0], length[1]])).max(2),
                None => return false,
            },
        };
    }
    false
}

/// Follows the chunks (ISO/IEC 15948, section 5.3) to the last chunk, which must be complete.
fn is_whole_png(bytes: &[u8]) -> bool {
    let mut at = 8;
    while let Some(head) = bytes.get(at..at + 8) {
        let length = u32::from_be_bytes([head[0], head[1], head[2], head[3]]) as usize;
        // Length, type and checksum have four bytes each.
        at = at.saturating_add(12).saturating_add(length);
        if &head[4..] == b"IEND" || at > bytes.len() {
            return at <= bytes.len();
        }
    }
    false
}

/// Compares the length with the header (RFC 9649, section 2.4).
fn is_whole_webp(bytes: &[u8]) -> bool {
    let size = bytes.get(4..8).map(|s| u32::from_le_bytes([s[0], s[1], s[2], s[3]]));
    size.is_some_and(|size| size as usize + 8 <= bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(format: ImageFormat) -> Vec<u8> {
        let picture =
            image::RgbImage::from_fn(40, 30, |x, y| image::Rgb([(x * y) as u8, x as u8 * 3, 255 - y as u8]));
        crate::test_catalog::encode(&picture, format)
    }

    #[test]
    fn data_after_the_end_of_a_picture_is_ignored() {
        for format in [ImageFormat::Jpeg, ImageFormat::Png, ImageFormat::WebP] {
            let whole = encode(format);
            assert!(is_whole(format, &whole), "{format:?}");
            // A video, another picture, a truncated picture, and markers without meaning here.
            for trailing in
                [&b"\0\0\0\x18ftypmp42\xff\xda\0\x0c"[..], &whole, &whole[..whole.len() / 2], b"\xff\xda"]
            {
                assert!(is_whole(format, &[&whole, trailing].concat()), "{format:?}");
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
    fn the_end_of_a_thumbnail_is_not_the_end_of_the_picture() {
        let whole = encode(ImageFormat::Jpeg);
        let thumbnail = encode(ImageFormat::Jpeg);
        let length = u16::try_from(thumbnail.len() + 2).unwrap().to_be_bytes();
        let with_thumbnail = [&whole[..2], &[0xff, 0xe1], &length, &thumbnail, &whole[2..]].concat();
        assert!(is_whole_jpeg(&with_thumbnail));
        assert!(!is_whole_jpeg(&with_thumbnail[..with_thumbnail.len() - 2]));
        // A truncated picture, followed by another complete picture.
        assert!(!is_whole_jpeg(&[&whole[..whole.len() / 2], &whole[..]].concat()));
    }
}
