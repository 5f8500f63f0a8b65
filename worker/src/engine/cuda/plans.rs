//! What the convolutions of a network cost on this GPU: the least that a step could take.

use super::{
    cudnn::{Convolution, Direction},
    device::Device,
    kernels::{DType, Kernels},
    nodes::{self, Node},
    tuner::Tuner,
};
use crate::net::resnet;
use lockstep_protocol::spec::{Arch, ModelSpec, Stem};
use std::time::Instant;

#[test]
#[ignore = "needs a GPU"]
fn gpu_convolutions_have_plans() {
    let device = Device::open(0).unwrap();
    eprintln!(
        "{} sm{} {} multiprocessors, {:?} bytes",
        device.name,
        device.capability,
        device.multiprocessors,
        device.memory()
    );
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let began = Instant::now();
        match Kernels::load(&device, dtype) {
            Ok(_) => eprintln!("kernels {} loaded in {:.2} s", dtype.name(), began.elapsed().as_secs_f64()),
            Err(error) => eprintln!("kernels {}: {error}", dtype.name()),
        }
    }
    for (arch, stem, side, batch) in [
        (Arch::ResNet50, Stem::Imagenet, 224, 256),
        (Arch::ResNet50, Stem::Imagenet, 224, 32),
        (Arch::ResNet50, Stem::Imagenet, 32, 32),
        (Arch::ResNet18, Stem::Cifar, 32, 512),
    ] {
        let network = resnet::build(&ModelSpec { arch, stem, ..ModelSpec::default() }, side, 3, 10).unwrap();
        let (_, nodes) = nodes::compile(&network).unwrap();
        for (dtype, padded) in [(DType::F16, 4), (DType::F16, 8), (DType::Bf16, 4), (DType::Bf16, 8)] {
            let began = Instant::now();
            let mut tuner = Tuner::new(&device).unwrap();
            let mut all = Vec::new();
            for node in &nodes {
                let (input, output, kernel, stride, padding, first) = match *node {
                    Node::Conv { input, output, kernel, stride, padding, first, .. } => {
                        (input, output, kernel, stride, padding, first)
                    }
                    Node::Linear { input, output, .. } => (input, output, 1, 1, 0, false),
                    _ => continue,
                };
                let (from, to) = (network.tensors[input], network.tensors[output]);
                for direction in [Direction::Forward, Direction::Weight, Direction::Input] {
                    if first && direction == Direction::Input {
                        continue;
                    }
                    all.push(Convolution {
                        direction,
                        dtype,
                        batch,
                        in_h: from.height,
                        in_w: from.width,
                        in_c: if first { padded } else { from.channels },
                        out_h: to.height,
                        out_w: to.width,
                        out_c: to.channels.next_multiple_of(8),
                        kernel,
                        stride,
                        padding,
                    });
                }
            }
            if let Err(error) = tuner.prepare(&device, &all) {
                eprintln!("{arch:?} {side} {batch} {}: {error}", dtype.name());
                continue;
            }
            let prepared = began.elapsed().as_secs_f64();
            let of = |direction: Direction| -> f32 {
                all.iter()
                    .filter(|c| c.direction == direction)
                    .map(|c| tuner.timed.iter().find(|(t, _)| t == c).map_or(f32::NAN, |(_, ms)| *ms))
                    .sum()
            };
            let (f, w, i) = (of(Direction::Forward), of(Direction::Weight), of(Direction::Input));
            eprintln!(
                "{arch:?} {side} px batch {batch} {} input padded to {padded}: forward {f:.3} + weight {w:.3} + input {i:.3} = {:.3} ms, {:.0} images/s; {} plans in {prepared:.1} s, workspace {} MB",
                dtype.name(),
                f + w + i,
                1e3 * batch as f32 / (f + w + i),
                tuner.timed.len(),
                tuner.workspace_bytes() >> 20
            );
            let began = Instant::now();
            let mut again = Tuner::new(&device).unwrap();
            again.prepare(&device, &all).unwrap();
            eprintln!(
                "  again from the cache: {:.2} s, {} timed anew",
                began.elapsed().as_secs_f64(),
                again.timed.len()
            );
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_speed() {
    use crate::{comm::Alone, engine::bench, gpu::GpuConfig};
    use lockstep_protocol::spec::{LossScale, Precision};
    let cases = std::env::var("CASES")
        .unwrap_or_else(|_| "resnet50:224:256 resnet50:224:32 resnet50:32:32 resnet18c:32:512".into());
    let precisions = std::env::var("PRECISIONS").unwrap_or_else(|_| "fp16 bf16".into());
    for case in cases.split(' ') {
        for name in precisions.split(' ') {
            let precision = match name {
                "fp16" => Precision::Fp16,
                "bf16" => Precision::Bf16,
                _ => Precision::Fp32,
            };
            let gpu = GpuConfig {
                ordinal: 0,
                precision,
                loss_scale: LossScale::Named("dynamic".into()),
                store: None,
                watchdog: None,
            };
            if std::env::var_os("PROFILE").is_some() {
                match bench::profile_gpu(&case.parse().unwrap(), gpu.clone()) {
                    Ok(parts) => {
                        let mut by_name: std::collections::BTreeMap<String, (usize, f64)> =
                            Default::default();
                        for (name, ms) in &parts {
                            let entry = by_name.entry(name.clone()).or_default();
                            entry.0 += 1;
                            entry.1 += ms;
                        }
                        let mut sorted: Vec<_> = by_name.into_iter().collect();
                        sorted.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
                        let total: f64 = parts.iter().map(|p| p.1).sum();
                        eprintln!("PROFILE {case} {name}: {total:.3} ms in {} calls", parts.len());
                        for (name, (count, ms)) in sorted {
                            eprintln!(
                                "PART {ms:8.3} ms {count:3} x {:8.1} us  {name}",
                                1e3 * ms / count as f64
                            );
                        }
                        for (name, ms) in &parts {
                            eprintln!("CALL {:8.1} us {name}", 1e3 * ms);
                        }
                    }
                    Err(error) => eprintln!("PROFILE {case} {name}: {error}"),
                }
            }
            match bench::run_gpu_rank(&case.parse().unwrap(), true, std::sync::Arc::new(Alone), gpu) {
                Ok(m) => eprintln!(
                    "SPEED {case} {name}: {:.0} images/s, step {:.3} ms (fastest {:.3}), first step after {:.1} s, {:.0} MB",
                    m.images_per_second, m.step_ms, m.fastest_step_ms, m.first_step_secs, m.gpu_memory_mb
                ),
                Err(error) => eprintln!("SPEED {case} {name}: {error}"),
            }
        }
    }
}
