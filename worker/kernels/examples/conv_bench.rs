//! GFLOP/s of every convolution of a network, and their total time in a training step:
//! `cargo run --release -p lockstep-kernels --example conv_bench [NETWORK|all] [REPEATS] [THREADS] [BATCH|default] [bf16]`.
//! Networks: resnet20, resnet18 (CIFAR stem), resnet50 and resnext50_32x4d (ImageNet stem; for the latter only
//! convolutions that resnet50 does not have). Default: one thread, float32.
//!
//! Times are minima over the repeats, to reduce the effect of other work on the machine.

#![allow(clippy::print_stdout)]

use lockstep_kernels::conv::{ConvShape, Format, Scratch, backward_input, backward_weight, forward};
use std::time::Instant;

/// Layers: `(number of such layers, [size, in_c, out_c, kernel, stride])`. In a network with 32 groups, 3x3 layers with
/// equal numbers of input and output channels have groups.
type Layer = (usize, [usize; 5]);

const RESNET20: &[Layer] = &[
    (1, [32, 3, 16, 3, 1]),
    (6, [32, 16, 16, 3, 1]),
    (1, [32, 16, 32, 3, 2]),
    (1, [32, 16, 32, 1, 2]),
    (5, [16, 32, 32, 3, 1]),
    (1, [16, 32, 64, 3, 2]),
    (1, [16, 32, 64, 1, 2]),
    (5, [8, 64, 64, 3, 1]),
];

const RESNET18: &[Layer] = &[
    (1, [32, 3, 64, 3, 1]),
    (4, [32, 64, 64, 3, 1]),
    (1, [32, 64, 128, 3, 2]),
    (1, [32, 64, 128, 1, 2]),
    (3, [16, 128, 128, 3, 1]),
    (1, [16, 128, 256, 3, 2]),
    (1, [16, 128, 256, 1, 2]),
    (3, [8, 256, 256, 3, 1]),
    (1, [8, 256, 512, 3, 2]),
    (1, [8, 256, 512, 1, 2]),
    (3, [4, 512, 512, 3, 1]),
];

const RESNET50: &[Layer] = &[
    (1, [32, 3, 64, 7, 2]),
    (1, [8, 64, 64, 1, 1]),
    (3, [8, 64, 64, 3, 1]),
    (4, [8, 64, 256, 1, 1]),
    (2, [8, 256, 64, 1, 1]),
    (1, [8, 256, 128, 1, 1]),
    (1, [8, 128, 128, 3, 2]),
    (1, [8, 256, 512, 1, 2]),
    (4, [4, 128, 512, 1, 1]),
    (3, [4, 512, 128, 1, 1]),
    (3, [4, 128, 128, 3, 1]),
    (1, [4, 512, 256, 1, 1]),
    (1, [4, 256, 256, 3, 2]),
    (1, [4, 512, 1024, 1, 2]),
    (6, [2, 256, 1024, 1, 1]),
    (5, [2, 1024, 256, 1, 1]),
    (5, [2, 256, 256, 3, 1]),
    (1, [2, 1024, 512, 1, 1]),
    (1, [2, 512, 512, 3, 2]),
    (1, [2, 1024, 2048, 1, 2]),
    (3, [1, 512, 2048, 1, 1]),
    (2, [1, 2048, 512, 1, 1]),
    (2, [1, 512, 512, 3, 1]),
];

const RESNEXT50: &[Layer] = &[
    (1, [8, 64, 128, 1, 1]),
    (3, [8, 128, 128, 3, 1]),
    (3, [8, 128, 256, 1, 1]),
    (2, [8, 256, 128, 1, 1]),
    (1, [8, 256, 256, 1, 1]),
    (1, [8, 256, 256, 3, 2]),
    (3, [4, 256, 256, 3, 1]),
    (4, [4, 256, 512, 1, 1]),
    (1, [4, 512, 512, 3, 2]),
    (5, [2, 512, 512, 3, 1]),
    (6, [2, 512, 1024, 1, 1]),
    (1, [2, 1024, 1024, 3, 2]),
    (2, [1, 1024, 1024, 3, 1]),
    (3, [1, 1024, 2048, 1, 1]),
];

fn main() {
    let mut arguments = std::env::args().skip(1);
    let wanted = arguments.next();
    let repeats = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(7);
    let threads = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(1);
    let batch_wanted: Option<usize> = arguments.next().and_then(|n| n.parse().ok());
    let format = if arguments.next().is_some() { Format::Bfloat16 } else { Format::Float32 };
    match rayon::ThreadPoolBuilder::new().num_threads(threads).build() {
        Ok(pool) => pool.install(|| {
            for (name, batch, layers, groups) in [
                ("resnet20", 64, RESNET20, 1),
                ("resnet18", 64, RESNET18, 1),
                ("resnet50", 32, RESNET50, 1),
                ("resnext50_32x4d", 32, RESNEXT50, 32),
            ] {
                if wanted.as_deref().is_none_or(|wanted| wanted == name || wanted == "all") {
                    network(name, batch_wanted.unwrap_or(batch), layers, groups, repeats, format);
                }
            }
        }),
        Err(error) => println!("no thread: {error}"),
    }
}

fn network(name: &str, batch: usize, layers: &[Layer], groups: usize, repeats: usize, format: Format) {
    println!(
        "{name}, {batch} pictures of 32 x 32, {format:?}: GFLOP/s forward, input gradient, weight gradient"
    );
    let mut scratch = Scratch::new(format);
    let mut totals = [0.0; 3];
    for (count, [size, in_c, out_c, kernel, stride]) in layers.iter().copied() {
        let s = ConvShape {
            batch,
            in_h: size,
            in_w: size,
            in_c,
            out_c,
            kernel,
            stride,
            padding: (kernel - 1) / 2,
            row_padding: (kernel - 1) / 2,
            groups: if kernel == 3 && in_c == out_c { groups } else { 1 },
        };
        let values = |len: usize| (0..len).map(|i| (i % 17) as f32 / 17.0 - 0.5).collect::<Vec<_>>();
        let (x, w, dy) = (values(s.input_len()), values(s.weight_len()), values(s.output_len()));
        let (mut y, mut dx, mut dw) = (dy.clone(), x.clone(), w.clone());
        let times = [
            fastest(repeats, || forward(&s, &x, &w, &mut y, &mut scratch)),
            // The first layer's input needs no gradient.
            if in_c == 3 {
                0.0
            } else {
                fastest(repeats, || backward_input(&s, &dy, &w, &mut dx, &mut scratch))
            },
            fastest(repeats, || backward_weight(&s, &x, &dy, &mut dw, &mut scratch)),
        ];
        let speed = times.map(|secs| if secs > 0.0 { s.flops() / secs / 1e9 } else { 0.0 });
        println!(
            "{count} x {size:2} px {in_c:4} -> {out_c:4}, {kernel}x{kernel} / {stride}: {:5.0} {:5.0} {:5.0}   {:6.2} ms",
            speed[0],
            speed[1],
            speed[2],
            times.iter().sum::<f64>() * count as f64 * 1e3
        );
        for (total, time) in totals.iter_mut().zip(times) {
            *total += time * count as f64;
        }
    }
    let [forward, input, weight] = totals.map(|secs| secs * 1e3);
    println!("a step: {forward:.1} + {input:.1} + {weight:.1} = {:.1} ms\n", forward + input + weight);
}

fn fastest(repeats: usize, mut pass: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..=repeats {
        let start = Instant::now();
        pass();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}
