//! The transforms of [`winograd`](super::super::winograd), generic over the vector type. Safety is as in `kernels.rs`.

use super::{SegmentOutputs, Segments, Vector, kernels::BlockSums};

/// A column of the row, or zeros outside of the row.
#[inline(always)]
unsafe fn column<S: Vector>(t: &Segments, row: *const f32, column: isize, block: usize) -> S {
    if column < 0 || column as usize >= t.width {
        return S::zero();
    }
    let from = row.add(column as usize * t.channels + block * 16);
    let channels = t.channels - block * 16;
    if channels >= 16 { S::load(from) } else { S::load_first(from, channels) }
}

/// `Bᵀ d` of each segment of an input row (`INPUT`), or `A dy` of each segment of a row of the output's gradient.
#[inline(always)]
pub(super) unsafe fn transform<S: Vector, const INPUT: bool>(t: &Segments) {
    let [two, four, minus_four, minus_five, eight] = [2.0f32, 4.0, -4.0, -5.0, 8.0];
    let (two, four, eight) = (S::splat(&two), S::splat(&four), S::splat(&eight));
    let (minus_four, minus_five) = (S::splat(&minus_four), S::splat(&minus_five));
    let blocks = t.channels.div_ceil(16);
    for index in 0..t.width.div_ceil(4) * blocks {
        let (segment, block) = (index / blocks, index % blocks);
        for picture in 0..t.pictures {
            let row = t.row.add(picture * t.picture);
            let first = segment as isize * 4;
            let points = if INPUT {
                let d0 = column::<S>(t, row, first - 1, block);
                let d1 = column::<S>(t, row, first, block);
                let d2 = column::<S>(t, row, first + 1, block);
                let d3 = column::<S>(t, row, first + 2, block);
                let d4 = column::<S>(t, row, first + 3, block);
                let d5 = column::<S>(t, row, first + 4, block);
                let (even, odd) = (d2.mul_add(minus_four, d4), d1.mul_add(minus_four, d3));
                let (even_2, odd_2) = (d4.sub(d2), d3.sub(d1));
                [
                    d0.mul_add(four, d2.mul_add(minus_five, d4)),
                    even.add(odd),
                    even.sub(odd),
                    odd_2.mul_add(two, even_2),
                    even_2.sub(odd_2.add(odd_2)),
                    d1.mul_add(four, d3.mul_add(minus_five, d5)),
                ]
            } else {
                let y0 = column::<S>(t, row, first, block);
                let y1 = column::<S>(t, row, first + 1, block);
                let y2 = column::<S>(t, row, first + 2, block);
                let y3 = column::<S>(t, row, first + 3, block);
                let (even, odd) = (y0.add(y2), y1.add(y3));
                let (even_2, odd_2) = (y2.mul_add(four, y0), y3.mul_add(eight, y1.add(y1)));
                [y0, even.add(odd), even.sub(odd), even_2.add(odd_2), even_2.sub(odd_2), y3]
            };
            let to = t.to.add(segment * t.strides.segment + block * t.strides.block + picture * 16);
            for (point, value) in points.into_iter().enumerate() {
                value.store(to.add(point * t.strides.point));
            }
        }
    }
}

/// `Aᵀ m` for each picture and channel.
#[inline(always)]
pub(super) unsafe fn outputs<S: Vector>(t: &SegmentOutputs) {
    let [two, four, eight] = [2.0f32, 4.0, 8.0];
    let (two, four, eight) = (S::splat(&two), S::splat(&four), S::splat(&eight));
    for block in 0..t.blocks {
        let mut sums = None;
        for picture in 0..t.pictures {
            let from = t.products.add((picture * t.blocks + block) * 16);
            let to_point = t.pictures * t.blocks * 16;
            let m0 = S::load(from);
            let m1 = S::load(from.add(to_point));
            let m2 = S::load(from.add(2 * to_point));
            let m3 = S::load(from.add(3 * to_point));
            let m4 = S::load(from.add(4 * to_point));
            let m5 = S::load(from.add(5 * to_point));
            let (sum, difference) = (m1.add(m2), m1.sub(m2));
            let (sum_2, difference_2) = (m3.add(m4), m3.sub(m4));
            let outputs = [
                m0.add(sum).add(sum_2),
                difference_2.mul_add(two, difference),
                sum_2.mul_add(four, sum),
                difference_2.mul_add(eight, difference).add(m5),
            ];
            let y = t.y.add(picture * t.y_picture + block * 16);
            for (column, output) in outputs.iter().enumerate() {
                if column < t.columns {
                    let y = y.add(column * t.y_column);
                    if t.lanes == 16 {
                        output.store(y);
                    } else {
                        output.store_first(y, t.lanes);
                    }
                }
            }
            if !t.sums.is_null() {
                let sums = match &mut sums {
                    Some(sums) => sums,
                    None => sums.insert(BlockSums::begin(t.sums.add(block * 48), t.starts_sums, outputs[0])),
                };
                for (column, output) in outputs.iter().enumerate() {
                    if column < t.columns {
                        sums.add(*output);
                    }
                }
            }
        }
        if let Some(sums) = sums {
            sums.store(t.sums.add(block * 48));
        }
    }
}
