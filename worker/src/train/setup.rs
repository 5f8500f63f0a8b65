//! The parts of a run, checked before the first step.

use super::{
    TrainError, Training,
    memory::{self, RequiredMemory},
};
use crate::checkpoint;
use lockstep_comm::ProcessGroup;
use lockstep_data::loader::{DataSource, Mixing, Shape};
use lockstep_engine::{BuildArgs, DeviceChoice, Engine, EngineConfig, Needs, Optimizer, net, plan};
use lockstep_protocol::spec::{JobSpec, ModelSpec, Precision, ScheduleKind};
use lockstep_protocol::throughput::Throughput;
use lockstep_protocol::{dataset::too_few_classes, numbers::plural};
use std::{collections::BTreeMap, sync::Arc};

/// Broken files that are named in the log.
const NAMED: usize = 20;

/// A run in numbers.
pub(super) struct Plan {
    /// Pictures of a rank in a micro-batch.
    pub(super) batch_size: usize,
    pub(super) accumulate: usize,
    pub(super) global_batch_size: u64,
    throughput: Throughput,
    pub(super) steps_per_epoch: u64,
    pub(super) total_steps: u64,
    /// Threads that prepare pictures: known once the engine has said in which format it takes batches.
    pub(super) data_threads: usize,
    evaluate_every_epochs: u64,
    checkpoint_every_epochs: u64,
    checkpoint_every_steps: u64,
}

impl Plan {
    pub(super) fn new(spec: &JobSpec, shape: &Shape, group: &dyn ProcessGroup) -> Result<Self, TrainError> {
        let impossible = |text: String| Err(TrainError::Impossible(text));
        if group.size() != spec.parallel.ranks {
            let (is, wanted) = (group.size(), spec.parallel.ranks);
            return impossible(format!("{is} ranks were started for a job of parallel.ranks = {wanted}"));
        }
        let global_batch_size = spec.global_batch_size();
        let steps_per_epoch = spec.steps_per_epoch(shape.train_samples);
        if steps_per_epoch == 0 {
            return impossible(format!(
                "{} training pictures are fewer than one step takes ({global_batch_size}: {} ranks x batch {} \
                 x accumulate {}). Lower train.batch_size, or set data.drop_remainder = false",
                shape.train_samples,
                spec.parallel.data_ranks(),
                spec.micro_batch_size(),
                spec.train.accumulate
            ));
        }
        let every_steps = spec.checkpoint.every_steps.unwrap_or(0);
        let every_epochs = spec.checkpoint.every_epochs.unwrap_or(u32::from(every_steps == 0));
        Ok(Self {
            batch_size: spec.micro_batch_size() as usize,
            accumulate: spec.train.accumulate.max(1) as usize,
            global_batch_size,
            throughput: Throughput::new(spec, shape.train_samples),
            steps_per_epoch,
            total_steps: spec.total_steps(shape.train_samples),
            data_threads: 1,
            evaluate_every_epochs: spec.evaluate.every_epochs.into(),
            checkpoint_every_epochs: every_epochs.into(),
            checkpoint_every_steps: every_steps,
        })
    }

    /// The epoch, from 1, that step number `step` (from 1) is in.
    pub(super) fn epoch_of(&self, step: u64) -> u32 {
        (step.saturating_sub(1) / self.steps_per_epoch + 1) as u32
    }

    /// Pictures of a step, over all ranks: the last one of an epoch may have fewer than the others.
    pub(super) fn pictures_of(&self, step: u64) -> u64 {
        self.throughput.pictures_of(step)
    }

    pub(super) fn checkpoint_after_step(&self, step: u64) -> bool {
        self.checkpoint_every_steps > 0 && step.is_multiple_of(self.checkpoint_every_steps)
    }

    /// Whether `step` ends an epoch, or the run, with a checkpoint.
    pub(super) fn checkpoint_after_epoch(&self, step: u64) -> bool {
        step == self.total_steps
            || self.checkpoint_after_step(step)
            || self.epoch_is_due(step, self.checkpoint_every_epochs)
    }

    /// Whether `step` ends an epoch, or the run, with an evaluation.
    pub(super) fn evaluation_after_epoch(&self, step: u64) -> bool {
        step == self.total_steps || self.epoch_is_due(step, self.evaluate_every_epochs)
    }

    fn epoch_is_due(&self, step: u64, every_epochs: u64) -> bool {
        every_epochs > 0
            && step.is_multiple_of(self.steps_per_epoch)
            && (step / self.steps_per_epoch).is_multiple_of(every_epochs)
    }
}

pub(super) fn open_data(training: &Training<'_>) -> Result<DataSource, TrainError> {
    let spec = training.spec;
    let mut data = DataSource::open_as(training.dataset, &spec.data, spec.train.seed, training.changes)?;
    if let Some(mistake) = too_few_classes(&data.shape.classes) {
        return Err(TrainError::Impossible(format!("dataset {} {mistake}", spec.data.dataset)));
    }
    let mixing = Mixing::from(&spec.train);
    data.set_mixing(mixing);
    // A GPU mixes the pictures that it holds in float32, the host mixes bytes. For the same bits in every run, only one may be used.
    if spec.train.deterministic && mixing.is_on() {
        data.stay();
    }
    let skipped = &data.shape.skipped;
    if training.group.rank() == 0 && !skipped.is_empty() {
        let observer = training.observer;
        let are = if skipped.len() == 1 { "is" } else { "are" };
        observer.log(&format!("{} {are} left out:", plural(skipped.len() as u64, "broken file")));
        skipped.iter().take(NAMED).for_each(|file| observer.log(&format!("  {}", one_line(file))));
    }
    if training.group.rank() == 0 {
        data.shape.notes.iter().for_each(|note| training.observer.log(note));
    }
    same_everywhere(training, &data)?;
    normalise_alike(training, &mut data)?;
    Ok(data)
}

/// Makes all ranks normalise with the mean and standard deviation of rank 0, or of the checkpoint that the run continues from. They
/// depend on which pictures could be read, and on how this version reads them.
fn normalise_alike(training: &Training<'_>, data: &mut DataSource) -> Result<(), TrainError> {
    let (asked, channels) = (&training.spec.data, data.shape.channels);
    let of_checkpoint = |key: &str| -> Option<Vec<f32>> {
        let about = checkpoint::metadata(&training.resume?.join(checkpoint::MODEL)).ok()?;
        let values: Vec<f32> = serde_json::from_str(about.get(key)?).ok()?;
        (values.len() == channels && values.iter().all(|v| v.is_finite())).then_some(values)
    };
    let first = training.group.rank() == 0;
    let [mut mean, mut std] = [("mean", &asked.mean, &data.shape.mean), ("std", &asked.std, &data.shape.std)]
        .map(|(key, asked, found)| {
            let kept = if first && asked.is_none() { of_checkpoint(key) } else { None };
            kept.unwrap_or_else(|| found.clone())
        });
    training.group.broadcast((&mut mean).into(), 0)?;
    training.group.broadcast((&mut std).into(), 0)?;
    data.set_normalisation(mean, std);
    Ok(())
}

/// Of a CPU rank's threads, one in so many prepares pictures: decoding a picture takes a small part of the time of training on it.
const TRAINING_TO_DATA: usize = 8;

/// Threads of this rank that prepare pictures. On a GPU rank they may use all of its cores. Pictures that are in memory already need
/// one thread.
pub(super) fn data_threads(needs: Needs, threads: usize, prepared_each_step: bool) -> usize {
    match needs.leaves_threads {
        _ if !prepared_each_step => 1,
        false => threads.div_ceil(TRAINING_TO_DATA).max(1),
        true => threads.max(1),
    }
}

/// Checks that all ranks have the same pictures in the same order. Otherwise they would train on some twice and on others never.
fn same_everywhere(training: &Training<'_>, data: &DataSource) -> Result<(), TrainError> {
    let group = &training.group;
    if group.size() == 1 {
        return Ok(());
    }
    let (count, digest) = (data.shape.train_samples + data.shape.validation_samples, data.digest());
    // In parts that float32 represents exactly.
    let piece = |bits: u64| (bits & 0xffff) as f32;
    let own = [piece(count >> 16), piece(count), piece(u64::from(digest >> 16)), piece(digest.into())];
    let mut all = vec![0.0f32; own.len() * group.size() as usize];
    group.all_gather((&own).into(), (&mut all).into())?;
    let other = all.chunks(own.len()).position(|rank| rank != &all[..own.len()]);
    other.map_or(Ok(()), |rank| {
        let count = |rank: usize| f64::from(all[rank * 4]) * 65536.0 + f64::from(all[rank * 4 + 1]);
        Err(TrainError::Impossible(format!(
            "rank {rank} has another dataset than rank 0 ({} pictures and {}, or other classes, names, contents or order). Copy the \
             dataset to all machines, and change none of it while a job starts",
            count(rank),
            count(0)
        )))
    })
}

/// A broken file in words, as one line of a log: the names of files may have line feeds.
fn one_line(file: &impl std::fmt::Display) -> String {
    file.to_string().replace('\n', "\\n").replace('\r', "\\r")
}

/// Logs which pictures could not be read since the last call.
pub(super) fn report_broken(training: &Training<'_>, data: &DataSource) {
    let (news, count) = data.newly_broken();
    let before = count - news.len();
    for file in news.iter().take(NAMED.saturating_sub(before)) {
        let file = one_line(file);
        training.observer.log(&format!("{file}; it is left out. Put it back before the job is paused or starts again, which it can only with what it began with"));
    }
    // The rest is only counted: a line each time that their number has doubled.
    if count > NAMED && count.ilog2() != before.max(1).ilog2() {
        training.observer.log(&format!("{count} pictures could not be read and are left out by this rank"));
    }
}

/// Builds the engine with initial weights. `precision` replaces the job's; `generation` counts the engines before it in this process.
pub(super) fn build_engine(
    training: &Training<'_>,
    shape: &Shape,
    precision: Option<Precision>,
    generation: u32,
) -> Result<Box<dyn Engine>, TrainError> {
    let spec = training.spec;
    let DeviceChoice { backend, ordinal } = training.device;
    backend.check(spec).map_err(TrainError::Impossible)?;
    // The evaluation's image size decides the stem, whatever size training uses.
    let model = ModelSpec { stem: spec.model.stem_for(shape.image_size), ..spec.model.clone() };
    let of_size = |side: usize| {
        net::build(&model, side, shape.channels, shape.classes.len()).map_err(TrainError::Impossible)
    };
    let mut training_sizes: Vec<usize> = shape.training_sizes.iter().map(|(_, side)| *side).collect();
    if let Some(smallest) = training_sizes.first() {
        of_size(*smallest)?;
    }
    let network = of_size(training_sizes.pop().unwrap_or(shape.image_size))?;
    let mut evaluation_sizes = vec![shape.image_size];
    evaluation_sizes.retain(|side| *side != network.image_size);
    let initial = net::init::initial_parameters(&network, spec.model.zero_init_residual, spec.train.seed);
    let config = EngineConfig {
        batch_size: spec.micro_batch_size() as usize,
        optimizer: Optimizer::from(&spec.train),
        label_smoothing: spec.train.label_smoothing,
        accumulate: spec.train.accumulate.max(1) as usize,
        sync_batch_norm: spec.parallel.sync_batch_norm,
        gradients_mean: spec.parallel.gradients_mean,
        threads: training.threads.max(1),
    };
    let plan = plan::Plan::of(&spec.parallel);
    // What ranks that share a network need depends on its splits.
    if let Some(is) = memory::of_machine().filter(|_| plan.is_data()) {
        let smallest = network.resized(training_sizes.iter().copied().fold(network.image_size, usize::min));
        let of_split = (shape.train_samples, training.group.size());
        let needed = RequiredMemory::of(&smallest, &config, backend.needs(), training.local_ranks, of_split);
        needed.check(spec, &smallest, is)?;
    }
    let mut engine = backend.build(BuildArgs {
        network: Arc::new(network),
        initial: &initial,
        config,
        comm: training.group.clone(),
        plan,
        ordinal,
        precision: precision.unwrap_or(spec.train.precision),
        loss_scale: spec.train.loss_scale.clone(),
        deterministic: spec.train.deterministic,
        store: training.store.clone(),
        watchdog: training.watchdog.clone(),
        generation,
    })?;
    if !training_sizes.is_empty() || !evaluation_sizes.is_empty() {
        engine.take_sizes(&training_sizes, &evaluation_sizes)?;
    }
    Ok(engine)
}

/// What `model.safetensors` says about itself: all that equal jobs share, and nothing else.
pub(super) fn metadata(spec: &JobSpec, shape: &Shape) -> BTreeMap<String, String> {
    let json = |value: serde_json::Result<String>| value.unwrap_or_default();
    let mut shared = serde_json::to_value(spec).unwrap_or_default();
    if let Some(object) = shared.as_object_mut() {
        object.remove("name");
        object.remove("priority");
        object.remove("private");
    }
    let mut about = BTreeMap::from([
        ("format".into(), "pt".into()),
        ("arch".into(), spec.model.arch.name().into()),
        ("classes".into(), json(serde_json::to_string(&shape.classes))),
        ("image_size".into(), shape.image_size.to_string()),
        ("channels".into(), shape.channels.to_string()),
        ("mean".into(), json(serde_json::to_string(&shape.mean))),
        ("std".into(), json(serde_json::to_string(&shape.std))),
        ("spec".into(), shared.to_string()),
    ]);
    if shape.whole_pictures {
        about.insert("whole_pictures".into(), "true".into());
    }
    if let Some(resize) = shape.resize {
        about.insert("resize".into(), resize.to_string());
    }
    about
}

/// That an epoch's last step has pictures of its beginning, in words: there are fewer left than the `parts` that a step is cut into, one for
/// each micro-batch of each rank.
fn filled_up(spec: &JobSpec, samples: u64, global_batch_size: u64, parts: u64) -> Option<String> {
    let left = samples % global_batch_size.max(1);
    (!spec.data.drop_remainder && left > 0 && left < parts).then(|| {
        format!(
            "the last step of an epoch has {} for {parts} micro-batches, so {} of the epoch's first pictures are used again: the result \
             depends on the number of ranks. data.drop_remainder = true leaves this step out",
            plural(left, "picture"),
            parts - left
        )
    })
}

pub(super) fn describe(training: &Training<'_>, shape: &Shape, plan: &Plan, engine: &dyn Engine) {
    let Training { spec, observer, .. } = training;
    let weights: usize = engine.parameters().map_or(0, |all| {
        let trained = all.iter().filter(|(name, _)| !name.contains("running_"));
        trained.map(|(_, tensor)| tensor.values.len()).sum()
    });
    observer.log(&format!(
        "{} of {weights} parameters, {}, {}x{} pixels; {} training and {}",
        spec.model.arch.name(),
        plural(shape.classes.len() as u64, "class"),
        shape.image_size,
        shape.image_size,
        shape.train_samples,
        plural(shape.validation_samples, "validation picture"),
    ));
    if shape.training_sizes.iter().any(|(_, side)| *side != shape.image_size) {
        let sizes: Vec<_> = shape
            .training_sizes
            .iter()
            .map(|(epoch, side)| format!("{side}x{side} from epoch {}", epoch + 1))
            .collect();
        observer.log(&format!("pictures are {}; measured at {1}x{1}", sizes.join(", "), shape.image_size));
    }
    // With `train.steps` the number of epochs was not known before.
    let epochs = plan.total_steps.div_ceil(plan.steps_per_epoch);
    for (epoch, side) in shape.training_sizes.iter().filter(|(epoch, _)| u64::from(*epoch) >= epochs) {
        observer.log(&format!(
            "{side}x{side} would begin in epoch {}: the run ends in epoch {epochs}",
            epoch + 1
        ));
    }
    if spec.train.schedule == ScheduleKind::Step {
        for milestone in spec.train.milestones.iter().filter(|epoch| u64::from(**epoch) >= epochs) {
            observer.log(&format!(
                "the learning rate would fall after epoch {milestone}: the run ends in epoch {epochs}"
            ));
        }
    }
    let parts = u64::from(spec.parallel.data_ranks()) * plan.accumulate as u64;
    if let Some(words) = filled_up(spec, shape.train_samples, plan.global_batch_size, parts) {
        observer.log(&words);
    }
    let (ema_steps, warmup) = (spec.train.ema_steps, f64::from(spec.train.warmup_epochs));
    if spec.train.ema_decay > 0.0 && plan.total_steps < ema_steps {
        observer.log(&format!(
            "there will be no moving average of the weights: one is made every train.ema_steps = {ema_steps} steps, and the \
             run has {}",
            plan.total_steps
        ));
    }
    if warmup > 0.0 && warmup * plan.steps_per_epoch as f64 >= plan.total_steps as f64 {
        observer.log(&format!(
            "the learning rate warms up for {warmup} epochs: the run of {} steps ends before it is reached",
            plan.total_steps
        ));
    }
    observer.log(&format!(
        "{} ({}) x batch {} x accumulate {} = {} a step; {}, {} an epoch",
        plural(spec.parallel.data_ranks().into(), "rank"),
        engine.device_name(),
        plan.batch_size,
        plan.accumulate,
        plural(plan.global_batch_size, "picture"),
        plural(plan.total_steps, "step"),
        plan.steps_per_epoch
    ));
    let exchange = engine.exchange();
    if !exchange.is_empty() {
        observer.log(&exchange);
    }
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
        let words = filled_up(&spec, 17, 16, 2).unwrap();
        assert!(
            words.contains("has 1 picture for 2 micro-batches, so 1 of the epoch's first pictures"),
            "{words}"
        );
        for (samples, parts) in [(17, 1), (16, 2), (18, 2), (31, 8)] {
            assert_eq!(filled_up(&spec, samples, 16, parts), None, "{samples} {parts}");
        }
        spec.data.drop_remainder = true;
        assert_eq!(filled_up(&spec, 17, 16, 2), None);
    }

    #[test]
    fn pictures_that_are_prepared_each_step_get_threads_by_what_else_the_cores_have_to_do() {
        let given = RankGpu { ordinal: 0, visible: vec!["GPU-a".into()] };
        let on = |given| registry::device_of(given, Device::Auto);
        let (cpu, gpu) = (on(None), on(Some(&given)));
        for (device, threads, expected) in
            [(cpu, 0, 1), (cpu, 1, 1), (cpu, 8, 1), (cpu, 9, 2), (cpu, 64, 8), (gpu, 0, 1), (gpu, 16, 16)]
        {
            let needs = device.backend.needs();
            assert_eq!(data_threads(needs, threads, true), expected, "{device:?}, {threads} threads");
            assert_eq!(data_threads(needs, threads, false), 1);
        }
    }
}
