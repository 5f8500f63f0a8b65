//! Compares decoded JPEG files of all kinds with libjpeg's pixels.

use super::{
    super::Picture,
    Frame,
    cases::{Case, cases, files},
    has_damaged_scan,
};
use crate::test_catalog::assert_contains;
use std::path::Path;

#[test]
fn all_kinds_of_jpeg_files_match_libjpeg() {
    let (mut wrong, mut max_difference, mut usual) = (Vec::new(), 0, 0);
    for Case { name, file, pixels } in cases() {
        let difference = Picture::decode(&file).map(|picture| {
            assert_eq!((picture.width, picture.height), pixels.dimensions(), "{name}");
            picture.pixels.iter().zip(pixels.as_raw()).map(|(a, b)| a.abs_diff(*b)).max().unwrap()
        });
        usual += usize::from(Frame::read(&file).unwrap().is_decoded_by_zune());
        match difference {
            // The difference comes from rounding, and at borders from the chroma assumed beyond them.
            Ok(difference) if difference <= 4 => max_difference = max_difference.max(difference),
            _ => wrong.push((name.clone(), difference)),
        }
        assert!(!has_damaged_scan(&file), "{name}");
    }
    assert!(wrong.is_empty(), "{} files: {wrong:?}", wrong.len());
    assert!(
        max_difference > 0 && usual > 50,
        "{usual} files of the usual kind, difference {max_difference} of 255"
    );
}

#[test]
fn unsupported_kinds_of_jpeg_files_are_refused_with_advice() {
    let usual =
        cases().into_iter().find(|case| case.name == "ycc_1x1,1x1,1x1_35x23/b-one-0.jpg").unwrap().file;
    let frame = usual.windows(2).position(|marker| marker == [0xff, 0xc0]).unwrap();
    let changed = |at: usize, to: &[u8]| {
        let mut file = usual.clone();
        file[frame + at..][..to.len()].copy_from_slice(to);
        file
    };
    for (file, words) in [
        (
            files().remove(Path::new("refused/arithmetic.jpg")).unwrap(),
            "is an arithmetic-coded JPEG picture, which is not supported; `jpegtran FILE >NEW` converts it losslessly",
        ),
        (changed(1, &[0xc3]), "lossless or hierarchical; save it as 8-bit baseline JPEG or as PNG"),
        (changed(1, &[0xc1, 0, 17, 12]), "12-bit; save it as 8-bit"),
        (changed(5, &[0, 0]), "DNL (its height follows its first scan); save it"),
    ] {
        assert_contains(Picture::decode(&file).unwrap_err(), &[words]);
    }
}

/// A scan that is truncated after each of its bytes, lacks bytes in the middle, has changed bytes, or lacks a restart
/// marker.
#[test]
fn a_scan_truncated_anywhere_is_damaged() {
    let whole: Vec<Case> = cases().into_iter().filter(|case| case.name.contains("/b-one-")).collect();
    for Case { name, file, .. } in &whole {
        let data_offset = Frame::read(file).unwrap().data_offset;
        for length in data_offset..file.len() - 2 {
            assert!(has_damaged_scan(&[&file[..length], b"\xff\xd9"].concat()), "{name} until {length}");
        }
        // Data after the last block is not read.
        assert!(!has_damaged_scan(&[&file[..file.len() - 2], &[7; 9], b"\xff\xd9"].concat()), "{name}");
    }
    let restarts = whole.iter().find(|case| case.name == "ycc_2x2,1x1,1x1_64x48/b-one-4.jpg").unwrap();
    let marker = restarts.file.windows(2).position(|pair| pair == [0xff, 0xd0]).unwrap();
    let without = [&restarts.file[..marker], &restarts.file[marker + 2..]].concat();
    assert!(has_damaged_scan(&without));
    let mut another = restarts.file.clone();
    another[marker + 1] = 0xd1;
    assert!(has_damaged_scan(&another));
    // All ones are not a code.
    let mut overwritten = restarts.file.clone();
    overwritten[marker + 2..marker + 10].copy_from_slice(&[0xff, 0, 0xff, 0, 0xff, 0, 0xff, 0]);
    assert!(has_damaged_scan(&overwritten));
}
