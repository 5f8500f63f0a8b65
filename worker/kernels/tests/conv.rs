//! Tests the CPU engine's convolutions against the definition, summed in float64, and compares results on
//! different numbers of threads.

use lockstep_kernels::{
    conv::{
        ConvShape, Format, Instructions, Scratch, backward_input, backward_weight, forward,
        forward_with_sums, weight_from_oihw, weight_to_oihw,
    },
    synthetic,
};

/// `[batch, height, width, in_c, out_c, kernel, stride, padding]`.
fn shape(v: [usize; 8]) -> ConvShape {
    let [batch, in_h, in_w, in_c, out_c, kernel, stride, padding] = v;
    ConvShape { batch, in_h, in_w, in_c, out_c, kernel, stride, padding, row_padding: padding, groups: 1 }
}

/// [`shape`] with `groups`.
fn grouped(groups: usize, v: [usize; 8]) -> ConvShape {
    ConvShape { groups, ..shape(v) }
}

fn values(len: usize, seed: u64) -> Vec<f32> {
    synthetic::values(&format!("conv.{seed}"), len)
}

struct Passes {
    y: Vec<f32>,
    dx: Vec<f32>,
    /// Gradient of the weights in the order of checkpoints.
    dw: Vec<f32>,
    sums: Vec<f64>,
}

/// Runs the three passes. Outputs are NaN at first, so that values that are not written are detected.
fn passes(s: &ConvShape, x: &[f32], oihw: &[f32], dy: &[f32], scratch: &mut Scratch) -> Passes {
    let mut w = vec![f32::NAN; s.weight_len()];
    weight_from_oihw(s, oihw, &mut w);
    let mut y = vec![f32::NAN; s.output_len()];
    let sums = forward_with_sums(s, x, &w, &mut y, scratch);
    let mut dx = vec![f32::NAN; s.input_len()];
    backward_input(s, dy, &w, &mut dx, scratch);
    let mut dw_ours = vec![f32::NAN; s.weight_len()];
    backward_weight(s, x, dy, &mut dw_ours, scratch);
    let mut dw = vec![f32::NAN; s.weight_len()];
    weight_to_oihw(s, &dw_ours, &mut dw);
    Passes { y, dx, dw, sums }
}

/// Outputs, gradient of the inputs and gradient of the weights by the definition, in float64.
fn reference(s: &ConvShape, x: &[f32], w: &[f32], dy: &[f32]) -> [Vec<f64>; 3] {
    let (out_h, out_w, kernel) = (s.out_h(), s.out_w(), s.kernel);
    let (inputs, outputs) = (s.group_in_c(), s.group_out_c());
    let mut y = vec![0.0; s.output_len()];
    let mut dx = vec![0.0; s.input_len()];
    let mut dw = vec![0.0; s.weight_len()];
    for tap in 0..kernel * kernel {
        // The weights of this kernel offset as [in][out], so that the innermost loop has stride 1.
        let oihw = |index: usize| (index % s.out_c * inputs + index / s.out_c) * kernel * kernel + tap;
        let tap_w: Vec<f64> = (0..inputs * s.out_c).map(|index| w[oihw(index)].into()).collect();
        let mut tap_dw = vec![0.0; tap_w.len()];
        for position in 0..s.batch * out_h * out_w {
            let (n, oy, ox) = (position / out_w / out_h, position / out_w % out_h, position % out_w);
            let iy = (oy * s.stride + tap / kernel) as isize - s.row_padding as isize;
            let ix = (ox * s.stride + tap % kernel) as isize - s.padding as isize;
            if iy < 0 || ix < 0 || iy >= s.in_h as isize || ix >= s.in_w as isize {
                continue;
            }
            let x0 = ((n * s.in_h + iy as usize) * s.in_w + ix as usize) * s.in_c;
            let y0 = position * s.out_c;
            for i in 0..s.in_c {
                let value = f64::from(x[x0 + i]);
                let w0 = i % inputs * s.out_c;
                let mut sum = 0.0;
                for o in i / inputs * outputs..(i / inputs + 1) * outputs {
                    let g = f64::from(dy[y0 + o]);
                    y[y0 + o] += value * tap_w[w0 + o];
                    tap_dw[w0 + o] += value * g;
                    sum += g * tap_w[w0 + o];
                }
                dx[x0 + i] += sum;
            }
        }
        for (index, gradient) in tap_dw.into_iter().enumerate() {
            dw[oihw(index)] = gradient;
        }
    }
    [y, dx, dw]
}

fn assert_close(name: &str, s: &ConvShape, got: &[f32], want: &[f64]) {
    let scale = want.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        assert!(
            error <= 1e-5 * scale,
            "{name}[{index}] is {got}, should be {want} (scale {scale}) for {s:?}"
        );
    }
}

fn check(shapes: &[[usize; 8]]) {
    check_all(&shapes.iter().copied().map(shape).collect::<Vec<_>>());
}

/// Compares the passes with the reference, in every number format and on every instruction set that this machine supports.
fn check_all(shapes: &[ConvShape]) {
    for (format, s) in Format::ALL.into_iter().flat_map(|format| shapes.iter().map(move |s| (format, s))) {
        let (x, w, dy) = (values(s.input_len(), 1), values(s.weight_len(), 2), values(s.output_len(), 3));
        // The passes round their inputs themselves.
        let rounded = |values: &[f32]| match format {
            Format::Float32 => values.to_vec(),
            Format::Bfloat16 => values.iter().map(|value| to_bfloat16(*value)).collect(),
        };
        let [y, dx, dw] = reference(s, &rounded(&x), &rounded(&w), &rounded(&dy));
        for mut scratch in every_scratch(format) {
            let got = passes(s, &x, &w, &dy, &mut scratch);
            assert_close("y", s, &got.y, &y);
            assert_close("dx", s, &got.dx, &dx);
            assert_close("dw", s, &got.dw, &dw);
        }
    }
}

/// Scratch memory for each instruction set that this machine supports.
fn every_scratch(format: Format) -> impl Iterator<Item = Scratch> {
    Instructions::ALL.into_iter().filter_map(move |set| Scratch::with_instructions(set, format))
}

/// The nearest bfloat16: of two that are equally near, the one whose last bit is 0.
fn to_bfloat16(value: f32) -> f32 {
    let below = f32::from_bits(value.to_bits() & 0xFFFF_0000);
    let above = f32::from_bits(below.to_bits() + 0x1_0000);
    let (to_below, to_above) = ((value - below).abs(), (above - value).abs());
    let takes_above = to_above < to_below || (to_above == to_below && below.to_bits() & 0x1_0000 != 0);
    if takes_above { above } else { below }
}

#[test]
fn resnet20_at_28_and_32_pixels() {
    for size in [28, 32] {
        let (half, quarter) = (size / 2, size / 4);
        check(&[
            [3, size, size, 1, 16, 3, 1, 1],
            [3, size, size, 3, 16, 3, 1, 1],
            [17, size, size, 16, 16, 3, 1, 1],
            [2, size, size, 16, 32, 3, 2, 1],
            [2, size, size, 16, 32, 1, 2, 0],
            [13, half, half, 32, 32, 3, 1, 1],
            [2, half, half, 32, 64, 3, 2, 1],
            [2, half, half, 32, 64, 1, 2, 0],
            [15, quarter, quarter, 64, 64, 3, 1, 1],
        ]);
    }
}

/// For ranks that share rows, the input includes the rows above and below.
#[test]
fn columns_can_have_padding_without_rows() {
    let shapes = [[2, 9, 8, 16, 16, 3, 1, 1], [3, 13, 8, 3, 64, 7, 2, 3], [2, 5, 6, 16, 24, 3, 2, 1]];
    check_all(&shapes.map(|v| ConvShape { row_padding: 0, ..shape(v) }));
    check_all(&[ConvShape { row_padding: 0, ..grouped(4, [2, 6, 5, 32, 32, 3, 1, 1]) }]);
}

#[test]
fn resnet18_with_the_small_stem() {
    check(&[
        [2, 32, 32, 3, 64, 3, 1, 1],
        [2, 32, 32, 64, 64, 3, 1, 1],
        [2, 32, 32, 64, 128, 3, 2, 1],
        [2, 32, 32, 64, 128, 1, 2, 0],
        [2, 16, 16, 128, 128, 3, 1, 1],
        [2, 16, 16, 128, 256, 3, 2, 1],
        [2, 16, 16, 128, 256, 1, 2, 0],
        [2, 8, 8, 256, 256, 3, 1, 1],
        [2, 8, 8, 256, 512, 3, 2, 1],
        [2, 8, 8, 256, 512, 1, 2, 0],
        [2, 4, 4, 512, 512, 3, 1, 1],
    ]);
}

#[test]
fn resnet50_with_the_large_stem() {
    check(&[
        [3, 32, 32, 3, 64, 7, 2, 3],
        [3, 8, 8, 64, 64, 1, 1, 0],
        [3, 8, 8, 64, 64, 3, 1, 1],
        [3, 8, 8, 64, 256, 1, 1, 0],
        [3, 8, 8, 256, 64, 1, 1, 0],
        [3, 8, 8, 256, 128, 1, 1, 0],
        [3, 8, 8, 128, 128, 3, 2, 1],
        [3, 4, 4, 128, 512, 1, 1, 0],
        [3, 8, 8, 256, 512, 1, 2, 0],
        [3, 4, 4, 512, 128, 1, 1, 0],
        [3, 4, 4, 128, 128, 3, 1, 1],
        [3, 4, 4, 512, 256, 1, 1, 0],
        [3, 4, 4, 256, 256, 3, 2, 1],
        [3, 2, 2, 256, 1024, 1, 1, 0],
        [3, 4, 4, 512, 1024, 1, 2, 0],
        [3, 2, 2, 1024, 256, 1, 1, 0],
        [3, 2, 2, 256, 256, 3, 1, 1],
        [3, 2, 2, 1024, 512, 1, 1, 0],
        [3, 2, 2, 512, 512, 3, 2, 1],
        [3, 1, 1, 512, 2048, 1, 1, 0],
        [3, 2, 2, 1024, 2048, 1, 2, 0],
        [3, 1, 1, 2048, 512, 1, 1, 0],
        [3, 1, 1, 512, 512, 3, 1, 1],
    ]);
}

#[test]
fn odd_shapes_match_the_definition() {
    check(&[
        [1, 1, 1, 1, 1, 1, 1, 0],
        [1, 5, 7, 3, 5, 3, 1, 1],
        [7, 9, 5, 17, 33, 3, 2, 1],
        [5, 11, 13, 20, 7, 5, 3, 2],
        [4, 6, 6, 31, 47, 3, 1, 0],
        [2, 28, 28, 1, 20, 7, 2, 3],
        [33, 3, 3, 48, 80, 3, 1, 1],
        [3, 7, 7, 8, 8, 2, 2, 0],
        [2, 8, 8, 5, 6, 3, 1, 2],
        [2, 9, 9, 4, 4, 1, 3, 0],
        [1, 4, 4, 40, 130, 3, 1, 1],
        [65, 2, 3, 16, 16, 3, 1, 1],
        [17, 7, 6, 33, 47, 3, 1, 1],
        [2, 1, 13, 16, 20, 3, 1, 1],
    ]);
}

#[test]
fn resnexts_of_4_to_64_channels_per_group() {
    check_all(&[
        grouped(32, [3, 8, 8, 128, 128, 3, 1, 1]),
        grouped(32, [3, 8, 8, 256, 256, 3, 2, 1]),
        grouped(32, [3, 4, 4, 512, 512, 3, 1, 1]),
        grouped(32, [2, 4, 4, 1024, 1024, 3, 2, 1]),
        grouped(32, [2, 2, 2, 2048, 2048, 3, 1, 1]),
        grouped(64, [15, 4, 4, 256, 256, 3, 1, 1]),
        grouped(64, [2, 5, 5, 512, 512, 3, 2, 1]),
    ]);
}

#[test]
fn odd_grouped_shapes_match_the_definition() {
    check_all(&[
        grouped(3, [1, 5, 7, 6, 9, 3, 1, 1]),
        grouped(5, [7, 9, 5, 20, 10, 3, 2, 1]),
        grouped(2, [4, 6, 6, 34, 62, 3, 1, 0]),
        grouped(4, [3, 7, 7, 64, 32, 3, 2, 1]),
        grouped(4, [5, 6, 4, 64, 192, 1, 1, 0]),
        grouped(2, [2, 11, 13, 48, 96, 5, 3, 2]),
        grouped(5, [17, 5, 5, 80, 80, 3, 1, 1]),
        grouped(32, [2, 7, 7, 32, 32, 3, 1, 1]),
        grouped(16, [2, 9, 9, 80, 160, 3, 2, 1]),
        grouped(2, [33, 1, 1, 64, 128, 3, 1, 1]),
        grouped(8, [1, 4, 4, 8, 8, 2, 2, 0]),
    ]);
}

#[test]
fn groups_do_not_affect_each_other() {
    let s = grouped(4, [3, 6, 6, 16, 32, 3, 1, 1]);
    let (mut x, w, dy) = (values(s.input_len(), 1), values(s.weight_len(), 2), values(s.output_len(), 3));
    let mut scratch = Scratch::default();
    let before = passes(&s, &x, &w, &dy, &mut scratch);
    // The second group of four.
    x.iter_mut().enumerate().filter(|(i, _)| i % 16 / 4 == 1).for_each(|(_, v)| *v += 1.0);
    let after = passes(&s, &x, &w, &dy, &mut scratch);
    let changed = |a: &[f32], b: &[f32], group: &dyn Fn(usize) -> usize| -> Vec<usize> {
        let mut groups: Vec<usize> = (0..a.len()).filter(|&i| a[i] != b[i]).map(group).collect();
        groups.sort_unstable();
        groups.dedup();
        groups
    };
    assert_eq!(changed(&before.y, &after.y, &|i| i % 32 / 8), [1]);
    assert_eq!(changed(&before.dw, &after.dw, &|i| i / (4 * 9) / 8), [1]);
    assert_eq!(before.dx, after.dx);
}

#[test]
fn sums_are_those_of_the_outputs_even_with_means_far_from_zero() {
    for mut scratch in Format::ALL.into_iter().flat_map(every_scratch) {
        for s in [
            [29, 16, 16, 16, 16, 3, 1, 1],
            [3, 16, 16, 3, 40, 3, 2, 1],
            [32, 2, 2, 256, 257, 3, 1, 1],
            [1, 5, 7, 3, 5, 3, 1, 1],
            [3, 5, 7, 16, 20, 3, 1, 1],
        ]
        .map(shape)
        .into_iter()
        .chain([grouped(32, [9, 8, 8, 128, 128, 3, 1, 1]), grouped(3, [9, 7, 7, 6, 9, 3, 2, 1])])
        {
            // Inputs around 100 and weights of the same sign: means of hundreds, standard deviations of about one.
            let x: Vec<f32> = values(s.input_len(), 11).iter().map(|v| 100.0 + v).collect();
            let w: Vec<f32> = values(s.weight_len(), 12).iter().map(|v| 0.1 + 0.05 * v).collect();
            let mut y = vec![f32::NAN; s.output_len()];
            let sums = forward_with_sums(&s, &x, &w, &mut y, &mut scratch);
            let mut plain = vec![f32::NAN; s.output_len()];
            forward(&s, &x, &w, &mut plain, &mut scratch);
            assert_eq!(y, plain);
            let count = (y.len() / s.out_c) as f64;
            for channel in 0..s.out_c {
                let of_channel = || y.iter().skip(channel).step_by(s.out_c).map(|v| f64::from(*v));
                let mean = of_channel().sum::<f64>() / count;
                let variance = of_channel().map(|v| (v - mean) * (v - mean)).sum::<f64>() / count;
                let got = sums[channel] / count;
                assert!((got - mean).abs() <= 1e-6 * mean.abs(), "mean {got}, should be {mean}, of {s:?}");
                let got = sums[s.out_c + channel] / count - got * got;
                let error = (got - variance).abs();
                assert!(error <= 1e-4 * variance, "variance {got}, should be {variance}, of {s:?}");
            }
        }
    }
}

/// bfloat16 has the same bits with `vdpbf16ps` and with instructions that every machine has. AMX sums in another order.
#[test]
fn same_bits_with_and_without_vectors_in_bfloat16() {
    let scratch = |set| Scratch::with_instructions(set, Format::Bfloat16);
    let mut plain = scratch(Instructions::Plain).expect("every machine has plain instructions");
    assert_eq!(plain.format(), Format::Bfloat16);
    if let Some(mut avx512) = scratch(Instructions::Avx512) {
        for s in [shape([17, 9, 5, 17, 33, 3, 2, 1]), grouped(4, [9, 7, 7, 64, 32, 3, 1, 1])] {
            let (x, w, dy) = (values(s.input_len(), 4), values(s.weight_len(), 5), values(s.output_len(), 6));
            let [a, b] = [&mut plain, &mut avx512].map(|scratch| passes(&s, &x, &w, &dy, scratch));
            assert!(a.y == b.y && a.dx == b.dx && a.dw == b.dw, "{s:?}");
        }
    }
}

#[test]
fn same_bits_on_any_number_of_threads() {
    for s in [
        [64, 16, 16, 16, 16, 3, 1, 1],
        [29, 16, 16, 16, 32, 3, 2, 1],
        [32, 4, 4, 128, 128, 3, 1, 1],
        [32, 1, 1, 512, 512, 3, 1, 1],
        [32, 4, 4, 256, 512, 1, 1, 0],
        [9, 32, 32, 3, 64, 7, 2, 3],
        [7, 9, 5, 17, 33, 3, 2, 1],
    ]
    .map(shape)
    .into_iter()
    .chain([
        grouped(32, [16, 8, 8, 128, 128, 3, 1, 1]),
        grouped(32, [9, 4, 4, 1024, 1024, 3, 2, 1]),
        grouped(5, [7, 9, 5, 20, 10, 3, 2, 1]),
    ]) {
        let (x, w, dy) = (values(s.input_len(), 4), values(s.weight_len(), 5), values(s.output_len(), 6));
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            pool.install(|| passes(&s, &x, &w, &dy, &mut Scratch::default()))
        };
        let one = run(1);
        for threads in [2, 3] {
            let many = run(threads);
            let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
            assert_eq!(one.sums, many.sums, "sums differ on {threads} threads for {s:?}");
            assert!(same(&one.y, &many.y), "y differs on {threads} threads for {s:?}");
            assert!(same(&one.dx, &many.dx), "dx differs on {threads} threads for {s:?}");
            assert!(same(&one.dw, &many.dw), "dw differs on {threads} threads for {s:?}");
        }
    }
}

/// Ranks have different numbers of pictures, or share the rows of a picture.
#[test]
fn a_picture_has_the_same_bits_in_any_batch_and_in_slices_of_its_rows() {
    for v in [[17, 9, 7, 20, 33, 3, 1, 1], [3, 8, 8, 16, 32, 3, 1, 1], [3, 9, 8, 16, 16, 3, 2, 1]] {
        let all = shape(v);
        let (x, w, dy) =
            (values(all.input_len(), 1), values(all.weight_len(), 2), values(all.output_len(), 3));
        let run = |s: &ConvShape, x: &[f32], dy: &[f32]| passes(s, x, &w, dy, &mut Scratch::default());
        let whole = run(&all, &x, &dy);
        let one = ConvShape { batch: 1, ..all };
        for picture in 0..all.batch {
            let x = &x[picture * one.input_len()..][..one.input_len()];
            let dy = &dy[picture * one.output_len()..][..one.output_len()];
            let own = run(&one, x, dy);
            assert_eq!(own.y, whole.y[picture * one.output_len()..][..one.output_len()], "y of {all:?}");
            assert_eq!(own.dx, whole.dx[picture * one.input_len()..][..one.input_len()], "dx of {all:?}");
        }
        // The rows around output row 2 of the first picture.
        let slice = ConvShape { in_h: 3, row_padding: 0, ..one };
        let first = (2 * all.stride - 1) * all.in_w * all.in_c;
        let own = run(&slice, &x[first..][..slice.input_len()], &dy[..slice.output_len()]);
        assert_eq!(own.y, whole.y[2 * slice.output_len()..][..slice.output_len()], "a row of {all:?}");
    }
}

#[test]
fn weights_survive_the_round_trip() {
    let plain = [[1, 8, 8, 3, 64, 7, 2, 3], [1, 8, 8, 17, 33, 3, 1, 1], [1, 8, 8, 5, 6, 1, 1, 0]].map(shape);
    let in_groups = [grouped(32, [1, 8, 8, 128, 256, 3, 1, 1]), grouped(3, [1, 8, 8, 6, 33, 3, 1, 1])];
    for s in plain.into_iter().chain(in_groups) {
        let oihw = values(s.weight_len(), 7);
        let mut ours = vec![f32::NAN; s.weight_len()];
        weight_from_oihw(&s, &oihw, &mut ours);
        let mut back = vec![f32::NAN; s.weight_len()];
        weight_to_oihw(&s, &ours, &mut back);
        assert_eq!(back, oihw);
    }
}

#[test]
fn outputs_of_nan_and_infinity_are_not_finite() {
    let s = shape([13, 5, 5, 16, 32, 3, 1, 1]);
    let (mut x, w, dy) = (values(s.input_len(), 8), values(s.weight_len(), 9), values(s.output_len(), 10));
    x[0] = f32::NAN;
    x[5 * 5 * 16] = f32::INFINITY;
    for mut scratch in Format::ALL.into_iter().flat_map(every_scratch) {
        let got = passes(&s, &x, &w, &dy, &mut scratch);
        assert!(got.y[..32].iter().all(|v| v.is_nan()));
        // Infinite, or NaN if the products are those of transformed inputs.
        assert!(got.y[5 * 5 * 32..][..32].iter().all(|v| !v.is_finite()));
        assert!(got.y[2 * 5 * 5 * 32..].iter().all(|v| v.is_finite()));
    }
}
