//! Measures a device's speed: steps of a network on synthetic pictures, and the time of each operation in one step.

use super::{
    BuildArgs, DeviceChoice, DeviceConfig, EngineConfig, EngineError, HostTensor, LayerTime, NamedTensors,
    Optimizer,
    plan::{Plan, Rates},
};
use crate::net::{self, Network, init};
use lockstep_comm::SingleRank;
use lockstep_data::loader::{DataSource, EpochPlan};
use lockstep_protocol::spec::{ModelSpec, Precision};
use serde::{Deserialize, Serialize};
use std::{iter::zip, sync::Arc, time::Instant};

/// Number of classes of the measured network, large enough for an efficient matrix product in the head.
const CLASSES: usize = 1000;
/// Numbers of classes of wide heads. Each is measured for networks with more classes than the next smaller number, or than `CLASSES`.
pub const WIDE_HEADS: [usize; 2] = [65_536, 524_288];
/// A wide head is measured if the memory is at least this many times as large as its weights, gradients and momentum.
const MEMORY_PER_HEAD: usize = 4;
/// Number of untimed steps, which load kernels and allocate memory.
const WARM_UP: usize = 3;
/// Number of timed steps, of which the fastest is used.
const TIMED: usize = 3;

/// The network and step to measure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    pub model: ModelSpec,
    /// Height and width of a picture.
    pub image_size: usize,
    /// Pictures per step.
    pub pictures: usize,
    pub precision: Precision,
    pub threads: usize,
    /// Numbers of classes of the wide heads to measure; see [`wide_heads`].
    pub heads: Vec<usize>,
}

/// The wide heads to measure for a network with `classes` classes.
pub fn wide_heads(classes: usize) -> Vec<usize> {
    let narrower = [CLASSES].into_iter().chain(WIDE_HEADS);
    zip(WIDE_HEADS, narrower).filter(|(_, narrower)| classes > *narrower).map(|(wide, _)| wide).collect()
}

/// Measures `device`. Returns its name, as its engine reports it, and its rates. A rank has `memory_bytes` of memory.
///
/// # Errors
/// The network cannot be built, the device fails, or its engine cannot time operations.
pub fn measure(
    sample: &Sample,
    device: DeviceChoice,
    memory_bytes: u64,
) -> Result<(String, Rates), EngineError> {
    let network = |classes| net::build(&sample.model, sample.image_size, 3, classes);
    let pictures = sample.pictures as f64;
    let base = network(CLASSES).map_err(EngineError::Parameters)?;
    let initial = init::initial_parameters(&base, false, 0);
    let steps = time_steps(&base, &initial, sample, device)?;
    let mut rates =
        Rates::fit(&base, pictures, &steps.times, (steps.step_secs, steps.slots), steps.value_bytes)
            .map_err(EngineError::Parameters)?;
    for width in &sample.heads {
        let wide = network(*width).map_err(EngineError::Parameters)?;
        let mut initial = initial.clone();
        let mut head_bytes = 0;
        for parameter in wide.parameters().into_iter().filter(|p| p.name.starts_with(wide.head())) {
            head_bytes += 3 * size_of::<f32>() * parameter.len();
            // The time does not depend on values.
            let values = vec![0.0; parameter.len()];
            initial.insert(parameter.name, HostTensor { shape: parameter.shape, values });
        }
        if MEMORY_PER_HEAD * head_bytes <= memory_bytes as usize {
            let steps = time_steps(&wide, &initial, sample, device)?;
            rates.add_head(&wide, pictures, &steps.times, (steps.step_secs, steps.slots));
        }
    }
    Ok((steps.device, rates))
}

/// Measured steps of a network.
struct Steps {
    device: String,
    /// Duration of the fastest step.
    step_secs: f64,
    times: Vec<LayerTime>,
    value_bytes: u64,
    /// Number of the optimizer's slots: values that it keeps for each weight.
    slots: f64,
}

/// Trains `network` for a few steps and times them. The last step times each operation.
fn time_steps(
    network: &Network,
    initial: &NamedTensors,
    sample: &Sample,
    device: DeviceChoice,
) -> Result<Steps, EngineError> {
    let &Sample { image_size, pictures, precision, threads, .. } = sample;
    let optimizer = Optimizer { momentum: 0.9, ..Optimizer::default() };
    let mut engine = device.backend.build(BuildArgs {
        network: Arc::new(network.clone()),
        initial,
        config: EngineConfig { sync_batch_norm: false, threads, ..EngineConfig::new(pictures, optimizer) },
        comm: Arc::new(SingleRank),
        device: DeviceConfig::new(device.ordinal, precision, Plan::data(1)),
    })?;
    let steps = WARM_UP + TIMED + 1;
    let mut data = DataSource::synthetic(pictures * steps, image_size, 0);
    data.set_format(engine.take_data(&data)?);
    let mut batches = data.epoch(EpochPlan { drop_remainder: true, ..EpochPlan::of(pictures) });
    let mut fastest = f64::INFINITY;
    for step in 0..steps {
        let batch = batches.next().ok_or_else(|| EngineError::Parameters("the pictures ended".into()))?;
        let batch = batch.map_err(|error| EngineError::Parameters(error.to_string()))?;
        if step + 1 == steps {
            engine.time_layers();
        }
        let began = Instant::now();
        engine.train_step(&[batch], 0.0)?;
        if (WARM_UP..steps - 1).contains(&step) {
            fastest = fastest.min(began.elapsed().as_secs_f64());
        }
    }
    Ok(Steps {
        device: engine.device_name(),
        step_secs: fastest,
        times: engine.layer_times(),
        // CPU ranks round activations to bfloat16 when they multiply; they store and exchange float32.
        value_bytes: if device.backend.needs().host_memory || engine.precision() == Precision::Fp32 {
            4
        } else {
            2
        },
        slots: optimizer.slots().len() as f64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        plan::{Machine, Workload, cost},
        registry,
    };
    use lockstep_host::gpu::RankGpu;
    use lockstep_protocol::spec::{Arch, Device};

    fn sample(arch: Arch, image_size: usize, pictures: usize) -> Sample {
        let (model, precision) = (ModelSpec { arch, ..ModelSpec::default() }, Precision::Auto);
        Sample { model, image_size, pictures, precision, threads: 1, heads: Vec::new() }
    }

    /// ResNet-50 reaches about 10,000 images/s on an H200, and less with a batch of 64.
    #[test]
    #[ignore = "needs a GPU"]
    fn gpu_a_measured_network_has_a_plausible_time() {
        let sample = sample(Arch::ResNet50, 224, 64);
        let gpu = RankGpu { ordinal: 0, visible: vec!["0".into()] };
        let (device, rates) =
            measure(&sample, registry::device_of(Some(&gpu), Device::Cuda), 1 << 36).unwrap();
        let machine = Machine { rates, ..machine(device) };
        assert_eq!((machine.check(), machine.rates.value_bytes), (Ok(()), 2));
        let network = net::build(&sample.model, 224, 3, CLASSES).unwrap();
        let work = Workload { pictures: 64, accumulate: 1, state_per_weight: 1, sync_batch_norm: true };
        let cost = cost(&network, &Plan::data(1), &machine, &work).unwrap();
        assert!((2000.0..20_000.0).contains(&cost.images_per_second), "{machine:?}");
    }

    #[test]
    fn wide_heads_are_measured_for_jobs_with_many_classes() {
        for (classes, expected) in [
            (10, &[][..]),
            (1000, &[][..]),
            (1001, &[65_536][..]),
            (65_536, &[65_536][..]),
            (4_000_000, &[65_536, 524_288][..]),
        ] {
            assert_eq!(wide_heads(classes), expected, "{classes} classes");
        }
    }

    fn machine(device: String) -> Machine {
        Machine {
            device,
            backend: String::new(),
            ranks: 1,
            memory_bytes: 1 << 40,
            shared_memory: true,
            rates: Rates {
                value_bytes: 4,
                flops_per_second: [].into(),
                linear: Vec::new(),
                memory_bytes_per_second: 1.0,
            },
            within: None,
            between: None,
        }
    }

    /// Rates predict the step time of the network from which they were measured.
    #[test]
    fn a_measured_network_has_the_predicted_time() {
        let sample = sample(Arch::ResNet20, 16, 8);
        let began = Instant::now();
        let (device, rates) = measure(&sample, registry::device_of(None, Device::Cpu), 0).unwrap();
        let secs = began.elapsed().as_secs_f64();
        assert_eq!((device.as_str(), rates.value_bytes), ("CPU, 1 thread", 4));
        assert!(rates.flops_per_second.keys().eq(["conv1x1", "conv3x3", "linear"]), "{rates:?}");
        let machine = Machine { rates, ..machine(device) };
        assert_eq!(machine.check(), Ok(()));
        let network = net::build(&sample.model, 16, 3, CLASSES).unwrap();
        let work = Workload { pictures: 8, accumulate: 1, state_per_weight: 1, sync_batch_norm: true };
        let cost = cost(&network, &Plan::data(1), &machine, &work).unwrap();
        // Seven steps ran, none of them faster than the predicted one.
        assert!(cost.step_ms > 0.0 && 7.0 * cost.step_ms / 1e3 < secs, "{} ms of {secs} s", cost.step_ms);
        assert_eq!(cost.operators.len(), network.ops.len());
    }
}
