//! Concurrent groups of pictures share only the hardware decoders.

use super::*;
use std::thread;

/// Files of a group, with different pictures and sizes.
fn group(number: u32) -> Vec<Vec<u8>> {
    let side = |i: u32, seed: u32| 90 + (i * 37 + number * 61 + seed) % 250;
    (0..40).map(|i| jpeg(&picture(number * 40 + i, side(i, 0), side(i, 113)).into())).collect()
}

/// The decoder's pixels of each file, resized to `size` without cropping.
fn decode(decoder: &dyn DeviceDecoder, files: &[Vec<u8>], size: (u32, u32)) -> Vec<Vec<u8>> {
    let tables: Vec<_> = files
        .iter()
        .map(|file| {
            let stored = for_hardware(file).unwrap();
            (stored, ScaleTable::new(stored.height, size.1), ScaleTable::new(stored.width, size.0))
        })
        .collect();
    let mut given: Vec<Encoded<'_>> = files
        .iter()
        .zip(&tables)
        .map(|(bytes, (stored, rows, columns))| Encoded {
            bytes,
            stored: *stored,
            left: 0,
            top: 0,
            rows,
            columns,
            flip: false,
        })
        .collect();
    let mut pictures = Vec::new();
    decoder
        .decode(size, &mut |_| std::mem::take(&mut given), &mut |decoded| {
            pictures = decoded
                .iter()
                .map(|decoded| decoded.expect("an ordinary file is decoded").to_vec())
                .collect();
        })
        .unwrap();
    pictures
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_concurrent_groups_decode_as_separate_groups() {
    let decoder = super::super::open(0, DType::F16).unwrap();
    let groups: Vec<Vec<Vec<u8>>> = (0..6).map(group).collect();
    let separate: Vec<_> = groups.iter().map(|files| decode(decoder.as_ref(), files, (96, 80))).collect();
    thread::scope(|scope| {
        for first in 0..6 {
            let (decoder, groups, separate) = (&decoder, &groups, &separate);
            scope.spawn(move || {
                for round in 0..30 {
                    let number = (first + round * 5) % 6;
                    let found = decode(decoder.as_ref(), &groups[number], (96, 80));
                    assert!(found == separate[number], "group {number} in round {round}");
                }
            });
        }
    });
}
