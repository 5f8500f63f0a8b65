//! The training loop. Reading it from top to bottom shows how training works.
//! Nothing depends on the step at which a run began: the order of pictures follows from the seed and the epoch,
//! augmentation from the picture's index in its split, and the learning rate from the step. So a run that continues
//! from a checkpoint gets the same weights as an uninterrupted run.

mod auto;
mod dataset;
mod decoder;
mod early_stop;
mod error;
mod evaluation;
mod fallback;
mod last_step;
mod layers;
mod measure;
mod memory;
mod plan;
mod pretrained;
mod replicas;
mod saving;
mod sharded_writer;
mod start;
mod step;
mod votes;

pub use error::TrainError;
pub use memory::check_sample;

use crate::{
    checkpoint::{Best, CheckpointWriter, StopProgress},
    planning::Planned,
    precision::SkippedSteps,
    report::{LossLines, Observer},
};
use fallback::CurrentEngine;
use layers::Layers;
use lockstep_comm::{ProcessGroup, rendezvous::Store, watchdog::Watchdog};
use lockstep_data::{ChangeDetection, loader::DataSource};
use lockstep_engine::{DeviceChoice, Engine};
use lockstep_protocol::{
    agent::{AllowedFolders, AttemptEvent, Evaluation},
    schedule::Schedule,
    spec::{JobSpec, ValidationDivision},
};
use measure::ThroughputMeter;
use plan::RunPlan;
use sharded_writer::ShardedWriter;
use std::{
    collections::{BTreeMap, VecDeque},
    panic::resume_unwind,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use step::InFlight;
use votes::{NotFinite, Votes};

/// The inputs of a rank's training: the job, the group of ranks, and the observer of its reports.
#[derive(Clone)]
pub struct Training<'a> {
    pub spec: &'a JobSpec,
    pub dataset: &'a Path,
    /// The folders in which the file named by `model.pretrained` may be. `None` if it may be in any folder.
    pub pretrained_folders: Option<&'a AllowedFolders>,
    /// How the ranks detect changes of the dataset's files. Comparing the folders' times is enough if an agent has examined the files before.
    pub changes: ChangeDetection,
    /// The folder `checkpoints` in the job's folder.
    pub checkpoints: &'a Path,
    /// The checkpoint from which to continue. Only rank 0 reads it.
    pub resume: Option<&'a Path>,
    /// The epoch (from 1) at whose end the ranks stop by themselves, with a checkpoint.
    pub pause_after: Option<u32>,
    pub device: DeviceChoice,
    /// Number of ranks that share this machine's memory.
    pub local_ranks: u32,
    pub threads: usize,
    /// The ranks of the job. They see different pictures of a step and keep the same weights, or each copy of the
    /// network is split among several of them. Rank 0 reports what concerns all ranks, and writes checkpoints.
    pub group: Arc<dyn ProcessGroup>,
    /// The rendezvous store of all ranks of the job. Absent for a single rank.
    pub store: Option<Arc<Store>>,
    /// The watchdog to which an engine reports its steps, if its collectives may hang.
    pub watchdog: Option<Arc<Watchdog>>,
    pub observer: &'a dyn Observer,
    /// Set to stop this rank. All ranks then stop after the same step, with a checkpoint of this step.
    pub stop: &'a AtomicBool,
    /// Number of optimizer steps done, for reports about the rank's end.
    pub progress: &'a AtomicU64,
    /// The step of the newest checkpoint on disk that this rank knows (normally only rank 0 does), or 0. Later steps
    /// are lost if the rank is killed or fails.
    pub checkpointed_step: &'a AtomicU64,
    /// How long ranks that are asked to end may take for their step and its checkpoint.
    pub stop_within: Duration,
}

impl Training<'_> {
    /// Whether this rank acts and reports for the whole group.
    fn is_first(&self) -> bool {
        self.group.rank() == 0
    }

    /// Logs lines that concern all ranks, on rank 0 only.
    fn log<S: AsRef<str>>(&self, lines: impl IntoIterator<Item = S>) {
        if self.is_first() {
            lines.into_iter().for_each(|line| self.observer.log(line.as_ref()));
        }
    }
}

/// How training ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done, or the run was stopped early.
    Finished { step: u64 },
    /// The ranks were asked to stop, and stopped after this step with a checkpoint of this step.
    Stopped { step: u64 },
    /// The ranks have reached the end of the epoch [`Training::pause_after`] at this step, with a checkpoint of this step.
    Paused { step: u64 },
}

/// Builds an engine with initial weights, like [`plan::build_engine`]. The third argument is the number of engines that this
/// run has built before. Tests pass functions that build engines whose float16 overflows.
type BuildEngine<'a> = dyn Fn(&Training<'_>, &RunPlan, u32) -> Result<Box<dyn Engine>, TrainError> + 'a;

/// Trains one rank from the beginning (or from a checkpoint) to the end.
///
/// # Errors
/// The first error that ends the run. [`TrainError::is_secondary`] tells whether the end of another rank caused it.
pub fn train(training: &Training<'_>) -> Result<Outcome, TrainError> {
    train_with(training, &plan::build_engine)
}

fn train_with<'a>(
    training: &'a Training<'a>,
    build_engine: &'a BuildEngine<'a>,
) -> Result<Outcome, TrainError> {
    let Training { spec, observer, .. } = training;
    let mut throughput = ThroughputMeter::new(*observer, training.group.rank(), training.device.to_string());
    throughput.report("starting");
    let mut data = dataset::open(training)?;
    let network = plan::build_network(spec, &data.shape)?;
    let largest_side = data.shape.training_sizes.last().map_or(network.image_size, |(_, side)| *side);
    let auto::Choice { spec, planned } = auto::choose(training, &network.resized(largest_side))?;
    let training = &Training { spec: &spec, ..training.clone() };
    training.log(planned.iter().map(Planned::in_words));
    let precision = start::choose_precision(training)?;
    let plan = RunPlan::new(training, &data.shape, network, precision)?;
    let generation = 0;
    // Rank 0 reads the checkpoint while its engine is built.
    let (engine, loaded) = std::thread::scope(|scope| {
        let folder = training.resume.filter(|_| training.is_first());
        let loading = folder.map(|folder| scope.spawn(|| start::load_newest_valid(training, folder)));
        let engine = build_engine(training, &plan, generation);
        let loaded = loading.map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        (engine, loaded.transpose())
    });
    let mut engine = engine?;
    data.set_format(engine.take_data(&data)?);
    let decoder_line = decoder::choose_decoder(training, engine.precision(), &mut data)?;
    training.log(decoder_line);
    throughput.set_device(engine.device_name());
    let beginning = start::initialize(training, &plan, &data, engine.as_mut(), loaded?)?;
    training.log(&beginning.notes);
    training.log(plan.describe(&spec, &data.shape, engine.as_ref()));
    training.progress.store(beginning.step, Ordering::Relaxed);
    training.checkpointed_step.store(beginning.step, Ordering::Relaxed);
    if let Some(watchdog) = &training.watchdog {
        watchdog.set_base_step(beginning.step);
    }
    if training.is_first() {
        crate::checkpoint::remove_leftovers(training.checkpoints)?;
    }

    let sharded_writer = ShardedWriter::of(training, &plan, beginning.best.as_ref())?;
    let writer = if training.is_first() && sharded_writer.is_none() {
        Some(CheckpointWriter::start(training.checkpoints, &spec.checkpoint, beginning.best.clone())?)
    } else {
        None
    };
    let mut run = Run {
        training,
        layers: Layers::prepare(
            training,
            &plan.network.resized(data.shape.image_size),
            planned.as_ref(),
            beginning.step,
        ),
        schedule: Schedule::new(&spec.train, plan.steps_per_epoch, plan.total_steps),
        metadata: saving::model_metadata(&spec, &data.shape),
        loss_lines: LossLines::new(spec.log.every_steps),
        votes: Votes::of_steps(training.group.size(), beginning.step),
        is_evaluation_missing: beginning.is_evaluation_missing,
        start_step: beginning.step,
        step: beginning.step,
        last_average_step: beginning.step,
        best: beginning.best,
        stop_progress: beginning.stop_progress,
        validation_divisions: beginning.validation_divisions,
        has_last_weights: true,
        in_flight: VecDeque::new(),
        not_finite: None,
        skipped: beginning.skipped,
        evaluation: None,
        logged_decoder_reasons: 0,
        plan,
        data,
        engine: CurrentEngine(Some(engine)),
        build_engine,
        writer,
        sharded_writer,
        has_warned_of_slow_writes: false,
        unwritten: None,
        throughput,
    };

    let outcome = run.run_epochs();
    if outcome.is_ok() {
        run.data.close_decoder();
        // A rank must not end while another rank still reads its buffers.
        let _ = training.group.barrier();
    }
    if outcome.as_ref().is_err_and(TrainError::has_lost_ranks) {
        run.keep_last_step();
    }
    // The process is about to end. Freeing the device's memory takes long, and work on the device may wait for ranks that have
    // exited, so the engine is leaked. Dropping the writer waits for a checkpoint that is being written.
    let Run { engine: CurrentEngine(engine), writer, .. } = run;
    if let Some(engine) = engine {
        engine.leak();
    }
    drop(writer);
    outcome
}

struct Run<'a> {
    training: &'a Training<'a>,
    layers: Layers,
    plan: RunPlan,
    data: DataSource,
    engine: CurrentEngine,
    build_engine: &'a BuildEngine<'a>,
    schedule: Schedule,
    /// Writes whole checkpoints. Only on rank 0.
    writer: Option<CheckpointWriter>,
    /// Writes sharded checkpoints.
    sharded_writer: Option<ShardedWriter>,
    /// Whether the log already warns that a checkpoint may take longer than ranks have at their end.
    has_warned_of_slow_writes: bool,
    /// The step of the last checkpoint that could not be written, and the number of failed attempts.
    unwritten: Option<(u64, u64)>,
    metadata: BTreeMap<String, String>,
    loss_lines: LossLines,
    throughput: ThroughputMeter<'a>,
    votes: Votes,
    /// Whether the run continues from a checkpoint of a step that was not evaluated.
    is_evaluation_missing: bool,
    /// The step after which the run began.
    start_step: u64,
    /// Number of optimizer steps started.
    step: u64,
    /// The last step that the average of the weights includes.
    last_average_step: u64,
    /// The best of the saved checkpoints.
    best: Option<Best>,
    /// See [`State::stop`](crate::checkpoint::State::stop).
    stop_progress: Option<StopProgress>,
    /// How this run, and the runs from which it continues, divided pictures into training and validation.
    validation_divisions: Vec<ValidationDivision>,
    /// Whether the engine has the weights of the last step. False while the average of the weights is evaluated.
    has_last_weights: bool,
    /// Steps that were started and whose results have not been reported yet, oldest first.
    in_flight: VecDeque<InFlight>,
    not_finite: Option<NotFinite>,
    /// Steps skipped by the loss scaling of float16.
    skipped: SkippedSteps,
    /// The newest evaluation.
    evaluation: Option<Evaluation>,
    /// Number of logged reasons why CPU cores decode some pictures of a run that decodes on the GPU.
    logged_decoder_reasons: usize,
}

impl Run<'_> {
    fn run_epochs(&mut self) -> Result<Outcome, TrainError> {
        let total = self.plan.total_steps;
        if self.training.is_first() {
            self.training.observer.event(&AttemptEvent::Running {
                total_steps: total,
                steps_per_epoch: self.plan.steps_per_epoch,
                start_step: self.step,
                train_samples: self.data.shape.train_samples,
            });
        }
        // An evaluation that was due when the previous run was stopped is done now. A run without further steps is evaluated, too.
        let is_evaluation_overdue = self.is_evaluation_missing
            && self.data.shape.validation_samples > 0
            && self.plan.has_evaluation_after_epoch(self.step);
        if is_evaluation_overdue || self.step >= total {
            if !self.evaluate()? {
                return self.stop();
            }
            let ends_here = self.early_stop_reason().is_some() || self.is_at_pause();
            if is_evaluation_overdue && (ends_here || self.plan.has_checkpoint_after_epoch(self.step)) {
                self.save()?;
            }
        }
        while self.step < total {
            if let Some(why) = self.early_stop_reason() {
                return self.stop_early(why);
            }
            // Also reached after a restart from the checkpoint of this epoch.
            if self.is_at_pause() {
                return self.pause();
            }
            let epoch = self.step / self.plan.steps_per_epoch;
            let end = total.min((epoch + 1) * self.plan.steps_per_epoch);
            self.set_training_size(epoch as u32)?;
            while self.step < end {
                let mut batches = self.data.epoch(self.plan.rest_of_epoch(&self.data, self.step));
                // The loop ends early if float16 overflows too often. The rest of the epoch is then prepared again
                // for a bfloat16 engine.
                while self.step < end && !self.skipped.is_persistent() {
                    let continues = self.run_step(batches.as_mut())?;
                    if !continues {
                        return self.stop();
                    }
                    if self.step < end && self.plan.has_checkpoint_after_step(self.step) {
                        self.save()?;
                    } else {
                        self.compare_ranks_weights_if_due()?;
                    }
                }
                drop(batches);
                self.drain()?;
                self.report_decoder();
                if let Some(steps) = self.skipped.describe_if_persistent() {
                    if !self.fall_back_to_bfloat16(&format!("the gradients of {steps}"))? {
                        return self.stop();
                    }
                    self.set_training_size(epoch as u32)?;
                }
            }
            if self.plan.has_evaluation_after_epoch(self.step) && !self.evaluate()? {
                return self.stop();
            }
            if self.plan.has_checkpoint_after_epoch(self.step) || self.early_stop_reason().is_some() {
                self.save()?;
            }
        }
        self.finish()
    }

    /// Whether the epoch after which the run pauses is done.
    fn is_at_pause(&self) -> bool {
        let pause = self.training.pause_after.map(|epoch| u64::from(epoch) * self.plan.steps_per_epoch);
        pause.is_some_and(|step| self.step >= step)
    }

    /// Sets the engine's picture size to the size of epoch `epoch` (from 0).
    fn set_training_size(&mut self, epoch: u32) -> Result<(), TrainError> {
        Ok(self.engine.set_image_size(self.data.shape.training_size(epoch))?)
    }

    /// Whether this rank's engine keeps an average of the weights.
    fn is_average_kept_here(&self) -> bool {
        self.training.is_first() || self.training.spec.parallel.is_hybrid()
    }
}

#[cfg(test)]
pub(crate) mod tests;
