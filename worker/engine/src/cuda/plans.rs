//! Measures the convolutions of networks on this GPU: a lower bound of a step's time.

use super::{
    convolution::{Convolution, Direction},
    cudnn::Cudnn,
    device::Device,
    dtype::DType,
    kernels::Kernels,
    program::{StepPlan, capabilities},
    tuner::Tuner,
};
use crate::net::resnet;
use lockstep_protocol::spec::{Arch, ModelSpec, Stem};
use std::{sync::Arc, time::Instant};

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
        (Arch::ResNeXt50_32x4d, Stem::Imagenet, 224, 256),
        (Arch::ResNeXt101_64x4d, Stem::Imagenet, 224, 32),
    ] {
        let network = resnet::build(&ModelSpec { arch, stem, ..ModelSpec::default() }, side, 3, 10).unwrap();
        let network = Arc::new(network);
        for dtype in [DType::F16, DType::Bf16] {
            let began = Instant::now();
            let mut tuner = Tuner::new(&device, Cudnn::new().unwrap(), true);
            let mut all = Vec::new();
            let plan = StepPlan::new(network.clone(), batch, dtype, capabilities(false)).unwrap();
            for (convolution, first) in plan.convolutions() {
                for direction in [Direction::Forward, Direction::Weight, Direction::Input] {
                    if !(first && direction == Direction::Input) {
                        all.push(Convolution { direction, ..convolution });
                    }
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
                "{arch:?} {side} px batch {batch} {}: forward {f:.3} + weight {w:.3} + input {i:.3} = {:.3} ms, {:.0} images/s; {} plans in {prepared:.1} s, workspace {} MB",
                dtype.name(),
                f + w + i,
                1e3 * batch as f32 / (f + w + i),
                tuner.timed.len(),
                tuner.workspace_bytes(true).max(tuner.workspace_bytes(false)) >> 20
            );
            for (c, ms) in &tuner.timed {
                eprintln!("  {c}: {:.1} us", 1e3 * ms);
            }
            let began = Instant::now();
            let mut again = Tuner::new(&device, Cudnn::new().unwrap(), true);
            again.prepare(&device, &all).unwrap();
            eprintln!(
                "  again from the cache: {:.2} s, {} timed again",
                began.elapsed().as_secs_f64(),
                again.timed.len()
            );
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_calls_of_a_step_are_timed() {
    use crate::{bench, registry};
    use lockstep_host::gpu::RankGpu;
    use lockstep_protocol::spec::{Device, Precision};
    let first = RankGpu { ordinal: 0, visible: Vec::new() };
    for case in std::env::var("CASES").as_deref().unwrap_or("resnet50:224:32").split(' ') {
        let how = bench::OnDevice {
            device: registry::device_of(Some(&first), Device::Cuda),
            precision: Precision::Fp16,
            deterministic: true,
            sync_batch_norm: true,
            division: bench::Division::default(),
            store: None,
        };
        let calls = bench::profile(&case.parse().unwrap(), how).unwrap();
        let mut parts: std::collections::BTreeMap<&str, (usize, f64)> = Default::default();
        for (name, ms) in &calls {
            let part = parts.entry(name).or_default();
            *part = (part.0 + 1, part.1 + ms);
        }
        let mut parts: Vec<_> = parts.into_iter().collect();
        parts.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
        eprintln!("{case}: {:.3} ms in {} calls", calls.iter().map(|c| c.1).sum::<f64>(), calls.len());
        for (name, (count, ms)) in &parts {
            eprintln!("{ms:8.3} ms  {count:3} x  {name}");
        }
        assert!(calls.len() > 100 && parts.iter().any(|(name, _)| name.contains("convolution")));
    }
}
