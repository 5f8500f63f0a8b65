//! The parameters of a run that follow from its specification, dataset and device, determined before anything is
//! allocated.

use super::{TrainError, Training, memory::RequiredMemory};
use crate::planning;
use lockstep_data::loader::{DataSource, EpochPlan, Shape};
use lockstep_engine::{
    BuildArgs, DeviceChoice, DeviceConfig, Engine, EngineConfig, LossConfig, Needs, Optimizer,
    net::{self, Network},
    plan as parallel,
};
use lockstep_host::usage::{memory_and_swap, memory_available};
use lockstep_protocol::{
    numbers::plural,
    spec::{JobSpec, Precision, ScheduleKind},
    throughput::Throughput,
};
use std::sync::Arc;

/// The parameters of a run.
pub(super) struct RunPlan {
    /// The network for the smallest training pictures. It is [resized](Network::resized) for other sizes.
    pub(super) network: Network,
    /// Sides of training pictures in ascending order, and the side of validation pictures, in pixels.
    training_sizes: Vec<usize>,
    evaluation_size: usize,
    /// The number of ranks that see different pictures of a step, and this rank's index among them.
    pub(super) replicas: u32,
    pub(super) replica: u32,
    /// This rank's batch size and number of micro-batches, its threads, and the settings of training.
    pub(super) config: EngineConfig,
    pub(super) global_batch_size: u64,
    drop_remainder: bool,
    throughput: Throughput,
    pub(super) steps_per_epoch: u64,
    pub(super) total_steps: u64,
    /// The floating-point format, if the device supports several.
    pub(super) precision: Precision,
    /// Number of threads that prepare pictures, if each step prepares new pictures.
    max_data_threads: usize,
    evaluate_every_epochs: u64,
    checkpoint_every_epochs: u64,
    checkpoint_every_steps: u64,
    /// A warning about free memory, for the log.
    memory_warning: Option<String>,
}

impl RunPlan {
    /// # Errors
    /// The job cannot be run with these pictures, or the machine has too little memory.
    pub(super) fn new(
        training: &Training<'_>,
        shape: &Shape,
        network: Network,
        precision: Precision,
    ) -> Result<Self, TrainError> {
        let Training { spec, group, .. } = training;
        let impossible = |text: String| Err(TrainError::Impossible(text));
        if group.size() != spec.parallel.ranks {
            let (started, required) = (group.size(), spec.parallel.ranks);
            return impossible(format!(
                "{started} ranks were started, but the job has parallel.ranks = {required}"
            ));
        }
        let (replica, replicas) = (spec.parallel.data_rank(group.rank()), spec.parallel.data_ranks());
        let global_batch_size = spec.global_batch_size();
        let steps_per_epoch = spec.steps_per_epoch(shape.train_samples);
        if steps_per_epoch == 0 {
            return impossible(format!(
                "{} training pictures are fewer than one step uses ({global_batch_size}: {} x batch {} \
                 x accumulate {}). Lower train.{}, or set data.drop_remainder = false",
                shape.train_samples,
                plural(replicas.into(), "rank"),
                spec.micro_batch_size(),
                spec.train.accumulate,
                spec.train.batch_key()
            ));
        }
        let config = EngineConfig {
            batch_size: spec.micro_batch_size() as usize,
            optimizer: Optimizer::from(&spec.train),
            loss: LossConfig { class_weights: shape.class_weights.clone(), ..LossConfig::from(*spec) },
            accumulate: spec.train.accumulate.max(1) as usize,
            sync_batch_norm: spec.parallel.sync_batch_norm,
            gradients_mean: spec.parallel.gradients_mean,
            threads: training.threads.max(1),
        };
        let needs = training.device.backend.needs();
        // Hybrid ranks are excluded, because their requirement depends on how the network is split.
        let mut memory_warning = None;
        if let Some(available) = memory_and_swap().filter(|_| !spec.parallel.is_hybrid()) {
            let split = (shape.train_samples, replicas);
            let needed = RequiredMemory::of(&network, &config, needs, training.local_ranks, split);
            needed.check(spec, &network, available)?;
            memory_warning = memory_available().and_then(|free| needed.warning(free));
        }
        let every_steps = spec.checkpoint.every_steps.unwrap_or(0);
        let every_epochs = spec.checkpoint.every_epochs.unwrap_or(u32::from(every_steps == 0));
        Ok(Self {
            network,
            memory_warning,
            training_sizes: shape.training_sizes.iter().map(|(_, side)| *side).collect(),
            evaluation_size: shape.image_size,
            replicas,
            replica,
            global_batch_size,
            drop_remainder: spec.data.drop_remainder,
            throughput: Throughput::new(spec, shape.train_samples),
            steps_per_epoch,
            total_steps: spec.total_steps(shape.train_samples),
            precision,
            max_data_threads: max_data_threads(needs, config.threads),
            config,
            evaluate_every_epochs: spec.evaluate.every_epochs.into(),
            checkpoint_every_epochs: every_epochs.into(),
            checkpoint_every_steps: every_steps,
        })
    }

    /// Number of threads that prepare pictures. One thread suffices if pictures are already in memory.
    pub(super) fn data_threads(&self, data: &DataSource) -> usize {
        if data.is_prepared_each_step() { self.max_data_threads } else { 1 }
    }

    /// This rank's batches of `data` after step number `step`, up to the end of the epoch.
    pub(super) fn rest_of_epoch(&self, data: &DataSource, step: u64) -> EpochPlan {
        EpochPlan {
            epoch: (step / self.steps_per_epoch) as u32,
            first_step: step % self.steps_per_epoch,
            rank: self.replica,
            world_size: self.replicas,
            batch_size: self.config.batch_size,
            accumulate: self.config.accumulate,
            drop_remainder: self.drop_remainder,
            threads: self.data_threads(data),
        }
    }

    /// Log lines about a run before its first step.
    pub(super) fn describe(&self, spec: &JobSpec, shape: &Shape, engine: &dyn Engine) -> Vec<String> {
        let mut lines = vec![format!(
            "{} of {} parameters, {}, {}x{} pixels; {} training and {}",
            spec.model.arch.as_str(),
            self.network.parameter_count(),
            plural(shape.classes.len() as u64, "class"),
            shape.image_size,
            shape.image_size,
            shape.train_samples,
            plural(shape.validation_samples, "validation picture"),
        )];
        lines.extend(self.memory_warning.clone());
        if shape.training_sizes.iter().any(|(_, side)| *side != shape.image_size) {
            let sizes: Vec<_> = shape
                .training_sizes
                .iter()
                .map(|(epoch, side)| format!("{side}x{side} from epoch {}", epoch + 1))
                .collect();
            lines.push(format!(
                "pictures are {}; validation uses {1}x{1}",
                sizes.join(", "),
                shape.image_size
            ));
        }
        // `train.steps` may end the run before a configured epoch.
        let epochs = self.total_steps.div_ceil(self.steps_per_epoch);
        for (epoch, side) in shape.training_sizes.iter().filter(|(epoch, _)| u64::from(*epoch) >= epochs) {
            lines.push(format!(
                "{side}x{side} would begin in epoch {}: the run ends in epoch {epochs}",
                epoch + 1
            ));
        }
        if spec.train.schedule == ScheduleKind::Step {
            for milestone in spec.train.milestones.iter().filter(|epoch| u64::from(**epoch) >= epochs) {
                lines.push(format!(
                    "the learning rate would fall after epoch {milestone}: the run ends in epoch {epochs}"
                ));
            }
        }
        let parts = u64::from(self.replicas) * self.config.accumulate as u64;
        if let Some(words) = reuse_note(spec, shape.train_samples, self.global_batch_size, parts) {
            lines.push(words);
        }
        let (ema_steps, warmup) = (spec.train.ema_steps, f64::from(spec.train.warmup_epochs));
        if spec.train.ema_decay > 0.0 && self.total_steps < ema_steps {
            lines.push(format!(
                "there will be no moving average of the weights: it is updated every train.ema_steps = {ema_steps} steps, and the \
                 run has {}",
                self.total_steps
            ));
        }
        if warmup > 0.0 && warmup * self.steps_per_epoch as f64 >= self.total_steps as f64 {
            lines.push(format!(
                "the learning rate warms up for {warmup} epochs: the run of {} steps ends before the warmup",
                self.total_steps
            ));
        }
        lines.push(format!(
            "{} ({}) x batch {} x accumulate {} = {} per step; {}, {} per epoch",
            spec.parallel.sets_in_words(),
            engine.device_name(),
            self.config.batch_size,
            self.config.accumulate,
            plural(self.global_batch_size, "picture"),
            plural(self.total_steps, "step"),
            self.steps_per_epoch
        ));
        lines.extend(Some(engine.exchange()).filter(|exchange| !exchange.is_empty()));
        lines.extend(spec.parallel.pipeline_in_words(spec.train.accumulate));
        lines
    }

    /// The epoch (from 1) of step number `step` (from 1).
    pub(super) fn epoch_of(&self, step: u64) -> u32 {
        (step.saturating_sub(1) / self.steps_per_epoch + 1) as u32
    }

    /// Number of pictures of a step over all ranks. The last step of an epoch may have fewer.
    pub(super) fn pictures_of(&self, step: u64) -> u64 {
        self.throughput.pictures_of(step)
    }

    /// Whether there is a checkpoint after `step` because of `checkpoint.every_steps`.
    pub(super) fn has_checkpoint_after_step(&self, step: u64) -> bool {
        self.checkpoint_every_steps > 0 && step.is_multiple_of(self.checkpoint_every_steps)
    }

    /// Whether there is a checkpoint after `step` because it ends an epoch or the run.
    pub(super) fn has_checkpoint_after_epoch(&self, step: u64) -> bool {
        step == self.total_steps
            || self.has_checkpoint_after_step(step)
            || self.is_epoch_due(step, self.checkpoint_every_epochs)
    }

    /// Whether there is an evaluation after `step` because it ends an epoch or the run.
    pub(super) fn has_evaluation_after_epoch(&self, step: u64) -> bool {
        step == self.total_steps || self.is_epoch_due(step, self.evaluate_every_epochs)
    }

    fn is_epoch_due(&self, step: u64, every_epochs: u64) -> bool {
        every_epochs > 0
            && step.is_multiple_of(self.steps_per_epoch)
            && (step / self.steps_per_epoch).is_multiple_of(every_epochs)
    }
}

/// A note if the last step of an epoch reuses pictures from the beginning of the epoch, because fewer pictures are left
/// than the `parts` into which a step is divided (one for each micro-batch of each rank).
fn reuse_note(spec: &JobSpec, samples: u64, global_batch_size: u64, parts: u64) -> Option<String> {
    let remaining = samples % global_batch_size.max(1);
    (!spec.data.drop_remainder && remaining > 0 && remaining < parts).then(|| {
        format!(
            "the last step of an epoch has {} for {parts} micro-batches, so {} of the epoch's first pictures are used again: the result \
             depends on the number of ranks. data.drop_remainder = true leaves this step out",
            plural(remaining, "picture"),
            parts - remaining
        )
    })
}

/// Builds the network of a job for the smallest training pictures.
///
/// # Errors
/// The pictures are too small for the network.
pub(super) fn build_network(spec: &JobSpec, shape: &Shape) -> Result<Network, TrainError> {
    let sides = (shape.image_size, shape.training_size(0));
    planning::build_network(&spec.model, sides, shape.channels, shape.classes.len())
        .map_err(TrainError::Impossible)
}

/// A CPU rank has one data thread per this many threads, because decoding a picture takes a small fraction of the time
/// of training on it.
const THREADS_PER_DATA_THREAD: usize = 8;

/// Maximum number of a rank's threads that prepare pictures. A rank that computes on a GPU may use all of its threads.
fn max_data_threads(needs: Needs, threads: usize) -> usize {
    if needs.leaves_threads { threads } else { threads.div_ceil(THREADS_PER_DATA_THREAD) }
}

/// Builds the engine of a plan with initial weights. `generation` is the number of the run's earlier engines.
pub(super) fn build_engine(
    training: &Training<'_>,
    plan: &RunPlan,
    generation: u32,
) -> Result<Box<dyn Engine>, TrainError> {
    let spec = training.spec;
    let DeviceChoice { backend, ordinal } = training.device;
    backend.check(spec).map_err(TrainError::Impossible)?;
    let (largest, others) = plan.training_sizes.split_last().unwrap_or((&plan.evaluation_size, &[]));
    let network = plan.network.resized(*largest);
    let initial = net::init::InitialParameters::new(&network, spec.model.zero_init_residual, spec.train.seed);
    let mut engine = backend.build(BuildArgs {
        network: Arc::new(network),
        initial: &initial,
        config: plan.config.clone(),
        comm: training.group.clone(),
        device: DeviceConfig {
            loss_scale: spec.train.loss_scale.clone(),
            deterministic: spec.train.deterministic,
            store: training.store.clone(),
            watchdog: training.watchdog.clone(),
            generation,
            ..DeviceConfig::new(ordinal, plan.precision, parallel::Plan::of(&spec.parallel))
        },
    })?;
    let evaluation = Some(plan.evaluation_size).filter(|side| side != largest);
    if !others.is_empty() || evaluation.is_some() {
        engine.add_image_sizes(others, evaluation.as_slice())?;
    }
    Ok(engine)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_engine::registry;
    use lockstep_host::gpu::RankGpu;
    use lockstep_protocol::spec::Device;

    #[test]
    fn a_last_step_with_fewer_pictures_than_ranks_is_named() {
        let mut spec = JobSpec::default();
        spec.data.drop_remainder = false;
        let message = reuse_note(&spec, 17, 16, 2).unwrap();
        let named = "has 1 picture for 2 micro-batches, so 1 of the epoch's first pictures";
        assert!(message.contains(named), "{message}");
        for (samples, parts) in [(17, 1), (16, 2), (18, 2), (31, 8)] {
            assert_eq!(reuse_note(&spec, samples, 16, parts), None, "{samples} {parts}");
        }
        spec.data.drop_remainder = true;
        assert_eq!(reuse_note(&spec, 17, 16, 2), None);
    }

    #[test]
    fn gpu_ranks_have_more_data_threads_than_cpu_ranks() {
        let given = RankGpu { ordinal: 0, visible: vec!["GPU-a".into()] };
        let on = |given| registry::device_of(given, Device::Auto);
        let (cpu, gpu) = (on(None), on(Some(&given)));
        for (device, threads, expected) in
            [(cpu, 1, 1), (cpu, 8, 1), (cpu, 9, 2), (cpu, 64, 8), (gpu, 16, 16)]
        {
            let needs = device.backend.needs();
            assert_eq!(max_data_threads(needs, threads), expected, "{device:?}, {threads} threads");
        }
    }
}
