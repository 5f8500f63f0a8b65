//! Concurrent groups of pictures share only the hardware decoders.

use super::*;
use std::thread;

/// Files of a group, with different pictures and sizes.
fn group(number: u32) -> Vec<Vec<u8>> {
    let side = |i: u32, seed: u32| 90 + (i * 37 + number * 61 + seed) % 250;
    (0..40).map(|i| jpeg(&picture(number * 40 + i, side(i, 0), side(i, 113)).into())).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_concurrent_groups_decode_as_separate_groups() {
    let decoder = super::super::open(0, DType::F16).unwrap();
    let groups: Vec<Vec<Vec<u8>>> = (0..6).map(group).collect();
    let separate: Vec<_> = groups.iter().map(|files| decode(decoder.as_ref(), files, (96, 80))).collect();
    assert!(separate.iter().flatten().all(Option::is_some), "an ordinary file is refused");
    thread::scope(|scope| {
        for first in 0..6 {
            let (decoder, groups, separate) = (&decoder, &groups, &separate);
            scope.spawn(move || {
                for round in 0..30 {
                    let number = (first + round * 5) % 6;
                    let actual = decode(decoder.as_ref(), &groups[number], (96, 80));
                    assert!(actual == separate[number], "group {number} in round {round}");
                }
            });
        }
    });
}
