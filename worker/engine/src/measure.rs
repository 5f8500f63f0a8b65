//! Measures a device's speed: steps of a network on synthetic pictures, and the time of each operation in one step.

use super::{
    BuildArgs, DeviceChoice, EngineConfig, EngineError, LossConfig, Optimizer,
    plan::{Plan, Rates},
};
use crate::net::{self, init};
use lockstep_comm::SingleRank;
use lockstep_data::loader::{DataSource, EpochPlan};
use lockstep_protocol::spec::{LossScale, ModelSpec, Precision};
use serde::{Deserialize, Serialize};
use std::{sync::Arc, time::Instant};

/// Classes of the measured network: enough that the head multiplies matrices, not vectors.
const CLASSES: usize = 1000;
/// Untimed steps, which load kernels and allocate.
const WARM_UP: usize = 3;
/// Timed steps; the fastest one counts.
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
}

/// The name of `device`, as its engine reports it, and the measured rates.
///
/// # Errors
/// The network cannot be built, the device fails, or its engine cannot time operations.
pub fn measure(sample: &Sample, device: DeviceChoice) -> Result<(String, Rates), EngineError> {
    let &Sample { image_size, pictures, precision, threads, .. } = sample;
    let network = net::build(&sample.model, image_size, 3, CLASSES).map_err(EngineError::Parameters)?;
    let optimizer = Optimizer { momentum: 0.9, ..Optimizer::default() };
    let mut engine = device.backend.build(BuildArgs {
        network: Arc::new(network.clone()),
        initial: &init::initial_parameters(&network, false, 0),
        config: EngineConfig {
            batch_size: pictures,
            optimizer,
            loss: LossConfig::default(),
            accumulate: 1,
            sync_batch_norm: false,
            gradients_mean: true,
            threads,
        },
        comm: Arc::new(SingleRank),
        plan: Plan::data(1),
        ordinal: device.ordinal,
        precision,
        loss_scale: LossScale::Named("dynamic".into()),
        deterministic: false,
        store: None,
        watchdog: None,
        generation: 0,
    })?;
    let steps = WARM_UP + TIMED + 1;
    let mut data = DataSource::synthetic(pictures * steps, image_size, 0);
    data.set_format(engine.take_data(&data)?);
    let mut batches = data.epoch(EpochPlan {
        epoch: 0,
        first_step: 0,
        rank: 0,
        world_size: 1,
        batch_size: pictures,
        accumulate: 1,
        drop_remainder: true,
        threads: 1,
    });
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
    let times = engine.layer_times();
    let value_bytes = if engine.precision() == Precision::Fp32 { 4 } else { 2 };
    let state = optimizer.slots().len() as f64;
    let rates = Rates::fit(&network, pictures as f64, &times, (fastest, state), value_bytes)
        .map_err(EngineError::Parameters)?;
    Ok((engine.device_name(), rates))
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

    /// ResNet-50 reaches about 10,000 images/s on an H200, and at least a third of this rate with a batch of 64.
    #[test]
    #[ignore = "needs a GPU"]
    fn gpu_a_measured_network_has_a_plausible_time() {
        let model = ModelSpec { arch: Arch::ResNet50, ..ModelSpec::default() };
        let sample = Sample { model, image_size: 224, pictures: 64, precision: Precision::Auto, threads: 1 };
        let gpu = RankGpu { ordinal: 0, visible: vec!["0".into()] };
        let (device, rates) = measure(&sample, registry::device_of(Some(&gpu), Device::Cuda)).unwrap();
        let machine = Machine { rates, ..machine(device) };
        assert_eq!((machine.check(), machine.rates.value_bytes), (Ok(()), 2));
        let network = net::build(&sample.model, 224, 3, CLASSES).unwrap();
        let work = Workload { pictures: 64, accumulate: 1, state: 1, sync_batch_norm: true };
        let cost = cost(&network, &Plan::data(1), &machine, &work).unwrap();
        assert!((2000.0..20_000.0).contains(&cost.images_per_second), "{machine:?}");
    }

    fn machine(device: String) -> Machine {
        Machine {
            device,
            backend: String::new(),
            ranks: 1,
            memory_bytes: 1 << 40,
            shared_memory: true,
            rates: Rates { value_bytes: 4, flops_per_second: [].into(), memory_bytes_per_second: 1.0 },
            within: None,
            between: None,
        }
    }

    /// Rates predict the step time of the network from which they were measured.
    #[test]
    fn a_measured_network_has_the_predicted_time() {
        let model = ModelSpec { arch: Arch::ResNet20, ..ModelSpec::default() };
        let sample = Sample { model, image_size: 16, pictures: 8, precision: Precision::Auto, threads: 1 };
        let began = Instant::now();
        let (device, rates) = measure(&sample, registry::device_of(None, Device::Cpu)).unwrap();
        let all = began.elapsed().as_secs_f64();
        assert_eq!((device.as_str(), rates.value_bytes), ("CPU, 1 thread", 4));
        assert!(rates.flops_per_second.keys().eq(["conv1x1", "conv3x3", "linear"]), "{rates:?}");
        let machine = Machine { rates, ..machine(device) };
        assert_eq!(machine.check(), Ok(()));
        let network = net::build(&sample.model, 16, 3, CLASSES).unwrap();
        let work = Workload { pictures: 8, accumulate: 1, state: 1, sync_batch_norm: true };
        let cost = cost(&network, &Plan::data(1), &machine, &work).unwrap();
        // More than seven steps ran, none of them faster than the predicted one.
        assert!(cost.step_ms > 0.0 && 7.0 * cost.step_ms / 1e3 < all, "{} ms of {all} s", cost.step_ms);
        assert_eq!(cost.operators.len(), network.ops.len());
    }
}
