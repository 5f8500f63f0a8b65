//! THE loop: read it top to bottom and know what training does.
//!
//! Nothing in it depends on where a run began: the order of pictures follows from seed and epoch,
//! augmentation from the picture's place, the learning rate from the step. So continuing from a
//! checkpoint gives the same weights as never having stopped.
//!
//! Past 400 lines because it is to be read in one go; what surrounds it is in `train/`.

mod measure;
mod pretrained;
mod setup;
mod start;
mod votes;

use crate::{
    checkpoint::{CheckpointError, DataPosition, Keeper, Kept, OptimizerNote, RandomState, Snapshot, State},
    comm::{CommError, Communicator, watchdog::Watchdog},
    data::{
        DataError, Look,
        loader::{Batch, DataSource, EpochPlan, replaced},
    },
    engine::{Engine, EngineError, NamedTensors, StepResult},
    gpu::DeviceChoice,
    precision::SkippedSteps,
    rendezvous::Store,
    report::{LossLines, Reporter},
    schedule::Schedule,
};
use lockstep_protocol::{
    agent::{AttemptEvent, Evaluation},
    spec::{JobSpec, Precision},
};
use measure::Pulse;
use setup::Plan;
use std::{
    collections::{BTreeMap, VecDeque},
    ops::{Deref, DerefMut},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use votes::Votes;

/// Who is told what happens.
pub trait Observer: Send + Sync {
    /// A point of a metric (a name of [`lockstep_protocol::metric::NAMES`]).
    fn metric(&self, name: &str, step: u64, value: f32);
    /// A line for people.
    fn log(&self, line: &str);
    /// Anything else.
    fn event(&self, event: &AttemptEvent);
}

impl Observer for Reporter {
    fn metric(&self, name: &str, step: u64, value: f32) {
        Reporter::metric(self, name, step, value);
    }
    fn log(&self, line: &str) {
        Reporter::log(self, line);
    }
    fn event(&self, event: &AttemptEvent) {
        Reporter::event(self, event);
    }
}

/// What a rank trains, with whom, and who watches.
pub struct Training<'a> {
    pub spec: &'a JobSpec,
    /// The dataset on this machine.
    pub dataset: &'a Path,
    /// What it is opened with: an agent has looked at its files before ranks start.
    pub look: Look,
    /// Where checkpoints go: the job's `checkpoints`.
    pub checkpoints: &'a Path,
    /// The checkpoint to go on from; read by rank 0 alone.
    pub resume: Option<&'a Path>,
    /// Where this rank computes.
    pub device: DeviceChoice,
    /// Of this rank.
    pub threads: usize,
    pub comm: Arc<dyn Communicator>,
    /// Where the ranks met; absent for a single rank.
    pub store: Option<Arc<Store>>,
    /// Told of steps by an engine whose collectives may hang.
    pub watchdog: Option<Arc<Watchdog>>,
    pub observer: &'a dyn Observer,
    /// Set from anywhere: all ranks stop after the same step, and that step is kept.
    pub stop: &'a AtomicBool,
    /// Optimizer steps done, for whoever must say where it ended.
    pub progress: &'a AtomicU64,
    /// The step of the newest checkpoint on disk as far as this rank knows (rank 0 does), 0 for none: what comes after it
    /// is lost when the run does not end in order.
    pub kept: &'a AtomicU64,
}

/// How training ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done.
    Finished { step: u64 },
    /// Told to stop, after this step; a checkpoint of it was written.
    Stopped { step: u64 },
}

/// Why training ended early.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The job asks for what cannot be.
    #[error("{0}")]
    Impossible(String),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The numbers left what float32 (or bfloat16, which has its range) holds. `what`: a sentence without its end.
    #[error(
        "{what}: training has diverged at step {step} (epoch {epoch}). Try a lower lr (it was {lr}), or \
         train.warmup_epochs"
    )]
    Diverged { what: String, step: u64, epoch: u32, lr: f32 },
    /// The job asks for float16, which cannot hold its numbers.
    #[error(
        "float16 could not hold {what} (up to step {step}). Set train.precision = \"auto\", which goes on in bfloat16 \
         then, or \"bf16\""
    )]
    Overflow { what: String, step: u64 },
    /// No thread, no memory and the like.
    #[error("{0}")]
    System(#[from] std::io::Error),
}

impl TrainError {
    fn comm(&self) -> Option<&CommError> {
        match self {
            TrainError::Comm(error) | TrainError::Engine(EngineError::Comm(error)) => Some(error),
            _ => None,
        }
    }

    /// Whether another rank's end explains it.
    pub fn is_secondary(&self) -> bool {
        matches!(self.comm(), Some(CommError::Disconnected { .. } | CommError::Aborted { .. }))
    }

    /// Whether another attempt may fare better.
    pub fn is_retriable(&self) -> bool {
        match self {
            TrainError::System(_) => true,
            TrainError::Engine(EngineError::Cuda(error)) => error.is_retriable(),
            _ => self.comm().is_some_and(|error| !matches!(error, CommError::Mismatch { .. })),
        }
    }
}

/// Trains one rank from beginning (or checkpoint) to end.
///
/// # Errors
/// The first thing that cannot be gone past; [`TrainError::is_secondary`] when that happened elsewhere.
pub fn train(training: &Training<'_>) -> Result<Outcome, TrainError> {
    let Training { spec, comm, observer, .. } = training;
    let device = match training.device {
        DeviceChoice::Cpu => "CPU".into(),
        DeviceChoice::Cuda { ordinal } => format!("GPU {ordinal}"),
    };
    let mut pulse = Pulse::new(*observer, comm.rank(), device);
    pulse.report("starting");
    let mut data = setup::open_data(training)?;
    let data_threads = setup::data_threads(training.device, training.threads, data.is_prepared_each_step());
    let plan = Plan::new(spec, &data.shape, data_threads, comm.as_ref())?;
    let precision = start::precision(training)?;
    let mut engine = setup::build_engine(training, &data.shape, precision, 0)?;
    let form = engine.take_data(&data)?;
    data.set_form(form);
    setup::choose_decoder(training, engine.precision(), &mut data)?;
    pulse.device(engine.device_name());
    let beginning = start::begin(training, &plan, &data.shape.classes, engine.as_mut())?;
    training.progress.store(beginning.step, Ordering::Relaxed);
    training.kept.store(beginning.step, Ordering::Relaxed);
    if let Some(watchdog) = &training.watchdog {
        watchdog.goes_on_from(beginning.step);
    }
    let keeper = match comm.rank() {
        0 => {
            crate::checkpoint::remove_leftovers(training.checkpoints)?;
            Some(Keeper::start(training.checkpoints, &spec.checkpoint, beginning.best)?)
        }
        _ => None,
    };
    if comm.rank() == 0 {
        setup::describe(training, &data.shape, &plan, engine.as_ref());
    }
    let mut run = Run {
        training,
        schedule: Schedule::new(&spec.train, plan.steps_per_epoch, plan.total_steps),
        metadata: setup::metadata(spec, &data.shape),
        lines: LossLines::new(spec.log.every_steps),
        votes: Votes::of_steps(comm.world_size(), beginning.step),
        unmeasured: beginning.unmeasured,
        step: beginning.step,
        under_way: VecDeque::new(),
        not_finite: None,
        skipped: beginning.skipped,
        evaluation: None,
        decoded_on_cores: 0,
        plan,
        data,
        engine: Current(Some(engine)),
        keeper,
        pulse,
    };
    let outcome = run.epochs();
    if outcome.is_ok() {
        run.data.close_decoder();
    }
    if outcome.is_err() {
        // The process is about to end. What other ranks no longer finish is not waited for; a checkpoint that is being
        // written is, by the keeper.
        let Run { engine: Current(engine), keeper, .. } = run;
        if let Some(engine) = engine {
            engine.abandon();
        }
        drop(keeper);
    }
    outcome
}

/// The engine that trains. Empty only while another takes its place, which needs its memory.
struct Current(Option<Box<dyn Engine>>);

impl Deref for Current {
    type Target = dyn Engine;
    fn deref(&self) -> &Self::Target {
        self.0.as_deref().expect("an engine")
    }
}

impl DerefMut for Current {
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.0.as_deref_mut().expect("an engine")
    }
}

/// The first step whose numbers were not finite and could not be skipped.
#[derive(Debug, Clone, Copy)]
struct NotFinite {
    step: u64,
    lr: f32,
    /// The loss of this rank; else only the gradient.
    loss: bool,
}

/// A step that was started.
struct UnderWay {
    step: u64,
    lr: f32,
    began: Instant,
    /// Of that, the wait for its batches.
    data_secs: f64,
}

struct Run<'a> {
    training: &'a Training<'a>,
    plan: Plan,
    data: DataSource,
    engine: Current,
    schedule: Schedule,
    /// Rank 0 has one.
    keeper: Option<Keeper>,
    metadata: BTreeMap<String, String>,
    lines: LossLines,
    pulse: Pulse<'a>,
    votes: Votes,
    /// It goes on from a checkpoint of a step that was not evaluated.
    unmeasured: bool,
    /// Optimizer steps started.
    step: u64,
    /// Of these, the ones whose results are not told yet, oldest first.
    under_way: VecDeque<UnderWay>,
    not_finite: Option<NotFinite>,
    /// By float16's loss scaling.
    skipped: SkippedSteps,
    /// The newest.
    evaluation: Option<Evaluation>,
    /// Reasons for decoding on cores, where the GPU decodes, that were told.
    decoded_on_cores: usize,
}

impl Run<'_> {
    fn epochs(&mut self) -> Result<Outcome, TrainError> {
        let total = self.plan.total_steps;
        if self.is_first() {
            self.training.observer.event(&AttemptEvent::Running {
                total_steps: total,
                steps_per_epoch: self.plan.steps_per_epoch,
                start_step: self.step,
            });
        }
        // An evaluation that was due when the run before was told to stop comes now, as if it had not been.
        let left_over = self.unmeasured
            && self.data.shape.validation_samples > 0
            && self.plan.evaluation_after_epoch(self.step);
        if left_over || self.step >= total {
            if !self.evaluated()? {
                return self.stopped();
            }
            if left_over && self.plan.checkpoint_after_epoch(self.step) {
                self.keep()?;
            }
        }
        while self.step < total {
            let epoch = self.step / self.plan.steps_per_epoch;
            let end = total.min((epoch + 1) * self.plan.steps_per_epoch);
            self.sees(epoch as u32)?;
            while self.step < end {
                let mut batches = self.data.epoch(self.epoch_plan());
                // Until float16 will not do: the rest of the epoch begins anew then.
                while self.step < end && self.skipped.persist().is_none() {
                    let goes_on = self.step(batches.as_mut())?;
                    if !goes_on {
                        return self.stopped();
                    }
                    if self.step < end && self.plan.checkpoint_after_step(self.step) {
                        self.keep()?;
                    }
                }
                drop(batches);
                self.settle()?;
                self.tell_decoded();
                if let Some(steps) = self.skipped.persist() {
                    // Ranks that are told to stop do not meet anew; the checkpoint knows of the skipped steps, and whoever
                    // goes on from it changes the format at once.
                    if !self.agree(true)? {
                        return self.stopped();
                    }
                    self.go_on_in_bfloat16(&format!("the gradients of {steps}"))?;
                    self.sees(epoch as u32)?;
                }
            }
            if self.plan.evaluation_after_epoch(self.step) && !self.evaluated()? {
                return self.stopped();
            }
            if self.plan.checkpoint_after_epoch(self.step) {
                self.keep()?;
            }
        }
        self.finished()
    }

    /// Has the engine train on pictures of the size that an epoch (from 0) has.
    fn sees(&mut self, epoch: u32) -> Result<(), TrainError> {
        Ok(self.engine.set_image_size(self.data.shape.training_size(epoch))?)
    }

    /// What float16 could not hold, bfloat16 does: an engine of that format takes over. Steps that were not finite have
    /// changed nothing, so it goes on from the last finite weights.
    fn go_on_in_bfloat16(&mut self, what: &str) -> Result<(), TrainError> {
        let (training, step) = (self.training, self.step);
        if training.spec.train.precision != Precision::Auto {
            return Err(TrainError::Overflow { what: what.into(), step });
        }
        self.pulse.report("starting");
        if self.is_first() {
            training.observer.log(&format!(
                "float16 could not hold {what}: training goes on in bfloat16 after step {step}, from the last weights \
                 that are finite"
            ));
            training.observer.event(&AttemptEvent::PrecisionFallback { step, what: what.into() });
        }
        let (parameters, optimizer) = (self.engine.parameters()?, self.engine.optimizer_state()?);
        let average = self.engine.averaged()?;
        // Ranks use each other's memory until all have come here.
        training.comm.barrier()?;
        drop(self.engine.0.take());
        let mut engine = setup::build_engine(training, &self.data.shape, Some(Precision::Bf16), 1)?;
        let form = engine.take_data(&self.data)?;
        self.data.set_form(form);
        engine.set_parameters(&parameters)?;
        engine.set_optimizer_state(&optimizer)?;
        if let Some(average) = average {
            engine.set_averaged(&average)?;
        }
        self.pulse.device(engine.device_name());
        self.pulse.report("training");
        self.engine = Current(Some(engine));
        self.skipped.recent.clear();
        Ok(())
    }

    /// One optimizer step. False: all ranks have agreed to stop after it.
    fn step(
        &mut self,
        batches: &mut dyn Iterator<Item = Result<Batch, DataError>>,
    ) -> Result<bool, TrainError> {
        let began = Instant::now();
        let micro_batches: Vec<Batch> = batches.take(self.plan.accumulate).collect::<Result<_, _>>()?;
        if micro_batches.len() < self.plan.accumulate {
            return Err(TrainError::Impossible(format!("the data ended before step {}", self.step + 1)));
        }
        let data_secs = began.elapsed().as_secs_f64();
        setup::tell_broken(self.training, &self.data);
        let lr = self.schedule.lr(self.step);

        let result = self.engine.start_step(&micro_batches, lr)?;

        self.step += 1;
        self.average()?;
        self.under_way.push_back(UnderWay { step: self.step, lr, began, data_secs });
        let waited = Instant::now();
        self.look_at(result.as_ref());
        let verdict = self.agree(false);
        if let Some(result) = result {
            self.report_step(&result, waited.elapsed().as_secs_f64());
        }
        self.announce_checkpoints();
        verdict
    }

    /// Takes the weights into their average when that is due. Rank 0 keeps it; the others get it to evaluate it.
    fn average(&mut self) -> Result<(), TrainError> {
        let decay = self.schedule.average_decay(&self.training.spec.train, self.step);
        if let Some(decay) = decay.filter(|_| self.is_first()) {
            self.engine.average(decay)?;
        }
        Ok(())
    }

    /// Waits for the steps under way: the engine's state is then that of [`Run::step`].
    fn settle(&mut self) -> Result<(), TrainError> {
        for result in self.engine.finish_steps()? {
            self.look_at(Some(&result));
            // Always: nobody leaves before all others have seen the end of their steps.
            let verdict = self.agree(true);
            self.report_step(&result, 0.0);
            verdict?;
        }
        Ok(())
    }

    /// Remembers the oldest step under way if what came of it cannot be gone on from.
    fn look_at(&mut self, result: Option<&StepResult>) {
        if let (Some(result), Some(of), None) = (result, self.under_way.front(), self.not_finite)
            && !result.is_finite()
            && !result.is_skipped()
        {
            self.not_finite = Some(NotFinite { step: of.step, lr: of.lr, loss: !result.loss.is_finite() });
        }
    }

    /// Whether all go on: a rank that is told to stop, or whose numbers are not finite, tells the others.
    fn agree(&mut self, always: bool) -> Result<bool, TrainError> {
        let comm = &self.training.comm;
        // Always before a checkpoint and an evaluation: what is not finite is not kept, and neither is begun in vain.
        let due = always
            || self.votes.is_due(self.step)
            || self.step == self.plan.total_steps
            || self.step.is_multiple_of(self.plan.steps_per_epoch)
            || self.plan.checkpoint_after_step(self.step);
        if !due {
            return Ok(true);
        }
        let stop = self.training.stop.load(Ordering::Relaxed);
        let not_finite = [self.not_finite.is_some(), self.not_finite.is_some_and(|n| n.loss)];
        let own = [stop, not_finite[0], not_finite[1]].map(|vote| f64::from(u8::from(vote)));
        let mut votes = [own[0], own[1], own[2], self.votes.step_secs(self.step)];
        comm.all_reduce_f64(&mut votes)?;
        let [stop, not_finite, losses, step_secs] = votes;
        // Votes on steps that are waited for come at once, and tell nothing of how long a step takes.
        if !always {
            self.votes.voted(self.step, step_secs / f64::from(comm.world_size()));
        }
        if not_finite > 0.0 {
            let oldest = self.under_way.front().map_or((self.step, 0.0), |u| (u.step, u.lr));
            let (step, lr) = self.not_finite.map_or(oldest, |n| (n.step, n.lr));
            let what = match (losses as u32, comm.world_size()) {
                (0, _) => "the gradient is not finite".into(),
                (_, 1) => "the loss is not finite".into(),
                (ranks, world_size) => format!("the loss is not finite on {ranks} of {world_size} ranks"),
            };
            return Err(TrainError::Diverged { what, step, epoch: self.plan.epoch_of(step), lr });
        }
        Ok(stop == 0.0)
    }

    /// An error that ends the run on all ranks if any has weights, running statistics or optimizer state that are not finite.
    fn check_state(&self) -> Result<(), TrainError> {
        let own = self.engine.first_not_finite()?;
        let mut votes = [f64::from(u8::from(own.is_some()))];
        self.training.comm.all_reduce_f64(&mut votes)?;
        if votes == [0.0] {
            return Ok(());
        }
        let found = own.unwrap_or_else(|| "a tensor of another rank".into());
        Err(self.diverged(found))
    }

    /// With the newest step.
    fn diverged(&self, what: String) -> TrainError {
        let (step, lr) = (self.step, self.schedule.lr(self.step.saturating_sub(1)));
        TrainError::Diverged { what, step, epoch: self.plan.epoch_of(step), lr }
    }

    /// [`Run::evaluate`], in bfloat16 if float16 cannot hold it.
    fn evaluated(&mut self) -> Result<bool, TrainError> {
        if self.data.shape.validation_samples == 0 {
            return Ok(true);
        }
        self.settle()?;
        self.check_state()?;
        match self.evaluate() {
            Err(TrainError::Diverged { .. }) if self.engine.precision() == Precision::Fp16 => {
                self.go_on_in_bfloat16("the validation's loss")?;
                self.evaluate()
            }
            done => done,
        }
    }

    /// Validation of the weights and, if there is one, of their average. False: all ranks have agreed to stop before its
    /// end, and nothing was measured.
    fn evaluate(&mut self) -> Result<bool, TrainError> {
        self.pulse.report("evaluating");
        let Training { observer, spec, .. } = self.training;
        if !spec.parallel.sync_batch_norm {
            // Running statistics differ by rank; those of the checkpoint are rank 0's.
            self.engine.broadcast_parameters()?;
        }
        let Some(evaluation) = self.measure("the validation's loss")? else { return Ok(false) };
        let averaged = match self.is_averaged()? {
            true => match self.measure_average()? {
                Some(averaged) => Some(averaged),
                None => return Ok(false),
            },
            false => None,
        };
        if self.is_first() {
            let say = |whose: &str, of: &Evaluation| {
                observer.log(&format!(
                    "epoch: {} validation accuracy {whose}is {:.2} %, loss is {:.4} ({} pictures in {:.1} s)",
                    of.epoch,
                    of.accuracy * 100.0,
                    of.loss,
                    of.samples,
                    of.secs
                ));
            };
            observer.metric("val_loss", self.step, evaluation.loss as f32);
            observer.metric("val_accuracy", self.step, evaluation.accuracy as f32);
            say("", &evaluation);
            if let Some(averaged) = &averaged {
                observer.metric("val_ema_loss", self.step, averaged.loss as f32);
                observer.metric("val_ema_accuracy", self.step, averaged.accuracy as f32);
                say("of the averaged weights ", averaged);
            }
            observer.event(&AttemptEvent::Evaluation(evaluation.clone()));
        }
        self.evaluation = Some(evaluation);
        self.pulse.report("training");
        Ok(true)
    }

    /// Whether rank 0 has an average; every rank is told.
    fn is_averaged(&self) -> Result<bool, TrainError> {
        if self.training.spec.train.ema_decay <= 0.0 {
            return Ok(false);
        }
        let mut has = [f64::from(u8::from(self.engine.has_average()))];
        self.training.comm.all_reduce_f64(&mut has)?;
        Ok(has != [0.0])
    }

    /// [`Run::measure`] with the averaged weights in the place of the weights, which come back whatever was measured.
    fn measure_average(&mut self) -> Result<Option<Evaluation>, TrainError> {
        let average = if self.is_first() { self.engine.averaged()? } else { None };
        let own = average.is_some().then(|| self.engine.parameters()).transpose()?;
        self.put_everywhere(average.as_ref())?;
        let measured = self.measure("the loss of the averaged weights in validation");
        // After any other error nobody waits for this rank.
        if matches!(measured, Ok(_) | Err(TrainError::Diverged { .. })) {
            self.put_everywhere(own.as_ref())?;
        }
        measured
    }

    /// Rank 0's `parameters` into every engine. All ranks have done with what was there before.
    fn put_everywhere(&mut self, parameters: Option<&NamedTensors>) -> Result<(), TrainError> {
        if let Some(parameters) = parameters {
            self.engine.set_parameters(parameters)?;
        }
        Ok(self.engine.broadcast_parameters()?)
    }

    /// Validation over the whole split, each rank its part; sums are added up, so every picture counts once. `what`
    /// is in words what must be finite. None: all ranks have agreed to stop before its end.
    fn measure(&mut self, what: &str) -> Result<Option<Evaluation>, TrainError> {
        let began = Instant::now();
        let Training { comm, observer, .. } = self.training;
        self.engine.set_image_size(self.data.shape.image_size)?;
        let mut sums = [0.0; 3];
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let mut batches =
            self.data.validation(rank, world_size, self.plan.batch_size, self.plan.data_threads);
        let mut votes = Votes::timed(0);
        // Of the rank that has most: all of them vote equally often.
        let most = self.data.shape.validation_samples.div_ceil(world_size.into());
        for number in 1..=most.div_ceil(self.plan.batch_size as u64) {
            if let Some(batch) = batches.next() {
                let result = self.engine.eval_step(&batch?)?;
                sums[0] += result.loss_sum;
                sums[1] += result.correct as f64;
                sums[2] += result.samples as f64;
                self.pulse.still_alive("evaluating");
            }
            if votes.is_due(number) {
                let stop = self.training.stop.load(Ordering::Relaxed);
                let mut vote = [f64::from(u8::from(stop)), votes.step_secs(number)];
                comm.all_reduce_f64(&mut vote)?;
                votes.voted(number, vote[1] / f64::from(world_size));
                if vote[0] > 0.0 {
                    if rank == 0 {
                        let text = format!(
                            "the evaluation after step {} is broken off; it comes when the job goes on",
                            self.step
                        );
                        observer.log(&text);
                    }
                    return Ok(None);
                }
            }
        }
        setup::tell_broken(self.training, &self.data);
        comm.all_reduce_f64(&mut sums)?;
        let (seen, all) = (sums[2] as usize, self.data.shape.validation_samples as usize);
        if replaced::too_many(all.saturating_sub(seen), all, all) {
            return Err(DataError::Invalid(replaced::gone(all - seen, all, None)).into());
        }
        if !sums[0].is_finite() {
            return Err(self.diverged(format!("{what} is not finite")));
        }
        Ok(Some(Evaluation {
            epoch: self.plan.epoch_of(self.step),
            step: self.step,
            samples: sums[2] as u64,
            accuracy: sums[1] / sums[2],
            loss: sums[0] / sums[2],
            secs: began.elapsed().as_secs_f64(),
        }))
    }

    /// Hands this moment to the keeper, which writes it while training goes on.
    fn keep(&mut self) -> Result<(), TrainError> {
        self.settle()?;
        self.check_state()?;
        // On every rank: this writes out what it has said so far, so that no step before a checkpoint is in nobody's
        // records when its rank is killed right after.
        self.pulse.report("checkpointing");
        let Some(keeper) = &self.keeper else {
            self.pulse.report("training");
            return Ok(());
        };
        let plan = &self.plan;
        let measured = self.evaluation.as_ref().filter(|e| e.step == self.step);
        let step_in_epoch = self.step % plan.steps_per_epoch;
        let optimizer = self.engine.optimizer_state()?;
        let state = State {
            epoch: plan.epoch_of(self.step),
            step: self.step,
            data_position: DataPosition {
                epoch: (self.step / plan.steps_per_epoch) as u32,
                step_in_epoch,
                samples_in_epoch: step_in_epoch * plan.global_batch_size,
            },
            random_state: RandomState { seed: self.training.spec.train.seed },
            world_size: self.training.comm.world_size(),
            global_batch_size: plan.global_batch_size,
            steps_per_epoch: plan.steps_per_epoch,
            val_accuracy: measured.map(|e| e.accuracy),
            val_loss: measured.map(|e| e.loss),
            best: None,
            versions: BTreeMap::from([("lockstep".into(), env!("CARGO_PKG_VERSION").into())]),
            precision: Some(self.engine.precision()),
            loss_scaling: self.engine.loss_scaling()?,
            skipped_steps: self.skipped.clone(),
            optimizer: Some(OptimizerNote {
                kind: self.training.spec.train.optimizer,
                updates: optimizer.updates,
            }),
        };
        let kept = keeper.keep(Snapshot {
            state,
            parameters: self.engine.parameters()?,
            optimizer: optimizer.slots,
            average: self.engine.averaged()?,
            batches: self.step * plan.accumulate as u64,
            metadata: self.metadata.clone(),
        });
        if let Err(CheckpointError::NotFinite { detail, .. }) = kept {
            return Err(self.diverged(detail));
        }
        kept?;
        self.pulse.report("training");
        self.announce_checkpoints();
        Ok(())
    }

    fn finished(&mut self) -> Result<Outcome, TrainError> {
        self.settle()?;
        self.write_out()?;
        self.pulse.report("finished");
        Ok(Outcome::Finished { step: self.step })
    }

    /// Every rank is at the same step: what is kept here is whole.
    fn stopped(&mut self) -> Result<Outcome, TrainError> {
        self.keep()?;
        self.write_out()?;
        self.training.observer.log(&format!("told to stop: stopped after step {}", self.step));
        self.pulse.report("stopped");
        Ok(Outcome::Stopped { step: self.step })
    }

    /// Waits until the newest checkpoint is on disk. A full disk is waited for as long as a stall may last: what
    /// is not written is lost with this process.
    fn write_out(&mut self) -> Result<(), TrainError> {
        let Some(mut keeper) = self.keeper.take() else { return Ok(()) };
        self.pulse.report("checkpointing");
        let patience = Duration::from_secs(self.training.spec.recovery.stall_timeout_secs.into()) / 2;
        let began = Instant::now();
        let mut failed = None;
        while let Some(news) = keeper.finish() {
            for kept in &news {
                failed = match kept {
                    Kept::Failed { reason, .. } => Some(reason.clone()),
                    Kept::Written(_) => None,
                    Kept::Removed { .. } => failed,
                };
            }
            announce(self.training, news);
            if let Some(reason) = failed.as_ref().filter(|_| began.elapsed() > patience) {
                let waited = began.elapsed().as_secs();
                return Err(TrainError::System(std::io::Error::other(format!(
                    "the last checkpoint could not be written for {waited} s: {reason}"
                ))));
            }
        }
        Ok(())
    }

    fn announce_checkpoints(&self) {
        if let Some(keeper) = &self.keeper {
            announce(self.training, keeper.news());
        }
    }

    /// Tells about the oldest step under way; `waited_secs` were spent on other ranks after it.
    fn report_step(&mut self, result: &StepResult, waited_secs: f64) {
        let Some(UnderWay { step, lr, began, data_secs }) = self.under_way.pop_front() else { return };
        // An engine that runs behind takes time of its own; the caller's includes that of other steps.
        let secs = if result.step_secs > 0.0 { result.step_secs } else { began.elapsed().as_secs_f64() };
        let all_reduce_secs = if result.step_secs > 0.0 {
            result.all_reduce_secs
        } else {
            result.all_reduce_secs + waited_secs
        };
        self.training.progress.store(step, Ordering::Relaxed);
        let observer = self.training.observer;
        let plan = &self.plan;
        let epoch = plan.epoch_of(step);
        self.skipped.note(step, result.is_skipped());
        if result.samples > 0 {
            observer.metric("loss", step, result.loss);
            observer.metric("accuracy", step, result.correct as f32 / result.samples as f32);
            let step_in_epoch = (step - 1) % plan.steps_per_epoch + 1;
            if let Some(line) = self.lines.line(epoch, step_in_epoch, plan.steps_per_epoch, result.loss) {
                observer.log(&line);
            }
        }
        observer.metric("step_ms", step, (secs * 1e3) as f32);
        observer.metric("data_ms", step, (data_secs * 1e3) as f32);
        observer.metric("all_reduce_ms", step, (all_reduce_secs * 1e3) as f32);
        if self.is_first() {
            observer.metric("lr", step, lr);
            observer.metric("grad_norm", step, result.grad_norm);
            if let Some(scale) = result.loss_scale {
                observer.metric("loss_scale", step, scale);
                observer.metric("skipped_steps", step, self.skipped.total as f32);
            }
            observer.metric("images_per_second", step, (plan.global_batch_size as f64 / secs) as f32);
        }
        self.pulse.step(step, epoch, secs, data_secs, all_reduce_secs, result.samples);
    }

    /// Which pictures the GPU has not decoded, when there are new reasons.
    fn tell_decoded(&mut self) {
        let Some(decoded) = self.data.decoded().filter(|_| self.is_first()) else { return };
        let reasons = decoded.by_cores.len() + usize::from(decoded.given_up);
        if reasons > self.decoded_on_cores {
            self.decoded_on_cores = reasons;
            self.training.observer.log(&format!("so far, {decoded}"));
        }
    }

    fn epoch_plan(&self) -> EpochPlan {
        let plan = &self.plan;
        EpochPlan {
            epoch: (self.step / plan.steps_per_epoch) as u32,
            first_step: self.step % plan.steps_per_epoch,
            rank: self.training.comm.rank(),
            world_size: self.training.comm.world_size(),
            batch_size: plan.batch_size,
            accumulate: plan.accumulate,
            drop_remainder: self.training.spec.data.drop_remainder,
            threads: plan.data_threads,
        }
    }

    fn is_first(&self) -> bool {
        self.training.comm.rank() == 0
    }
}

fn announce(training: &Training<'_>, news: Vec<Kept>) {
    let observer = training.observer;
    for kept in news {
        match kept {
            Kept::Written(info) => {
                training.kept.fetch_max(info.step, Ordering::Relaxed);
                let best = if info.best { ", the best so far" } else { "" };
                let megabytes = info.size_bytes as f64 / 1e6;
                observer.log(&format!(
                    "checkpoint {}-{} is written ({megabytes:.1} MB{best})",
                    info.epoch, info.step
                ));
                observer.event(&AttemptEvent::Checkpoint(info));
            }
            Kept::Failed { epoch, step, reason, again: false } => observer.log(&format!(
                "checkpoint {epoch}-{step} could not be written: {reason}; training goes on, the one before it stands"
            )),
            Kept::Failed { epoch, step, reason, again: true } => observer
                .log(&format!("checkpoint {epoch}-{step} still cannot be written: {reason}; trying again")),
            Kept::Removed { epoch, step } => observer.event(&AttemptEvent::CheckpointRemoved { epoch, step }),
        }
    }
}
