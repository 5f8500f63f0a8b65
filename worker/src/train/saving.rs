//! Checkpoints of a run: their content, when ranks wait for them, and the checkpoint at the end of a run.

use super::{Outcome, Run, TrainError};
use crate::checkpoint::{
    Best, CheckpointError, CheckpointEvent, CheckpointWriter, DataPosition, OptimizerNote, RandomState,
    Snapshot, State,
};
use lockstep_data::loader::Shape;
use lockstep_engine::{StateDict, Writers};
use lockstep_protocol::{agent::AttemptEvent, spec::JobSpec};
use std::{
    collections::BTreeMap,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

impl Run<'_> {
    /// Collective: every rank contributes to a checkpoint of the steps so far. Rank 0 passes it to the checkpoint
    /// thread, or each rank passes its part to its own thread. Writing continues during training.
    pub(super) fn save(&mut self) -> Result<(), TrainError> {
        self.drain()?;
        // The call reports a failure of the previous checkpoint itself.
        let is_retry = false;
        let _ = self.complete_parts(is_retry)?;
        self.check_state()?;
        // This flushes the reports of every rank. So even if a rank is killed right after, no step before a checkpoint is missing
        // from its records.
        self.throughput.report("checkpointing");
        let whole_checkpoints = Writers::default();
        let writers = self.sharded_writer.as_ref().map_or(&whole_checkpoints, |writer| &writer.writers);
        let own = self.engine.state_dict(writers)?;
        // Every rank tracks the best checkpoint, because any rank may have to write the next checkpoint.
        let keep_best = &self.training.spec.checkpoint.keep_best;
        if let Some(best) = Best::if_better(self.best.as_ref(), keep_best, &self.state(&StateDict::default()))
        {
            self.best = Some(best);
        }
        if self.sharded_writer.is_some() {
            self.begin_part(own)?;
        } else if let Some(writer) = &self.writer {
            // Other ranks wait for this rank meanwhile, and must not consider it stalled.
            let max_wait = self.stall_timeout() / 4;
            let own = own.ok_or_else(|| {
                let problem = "no checkpoint: this rank writes checkpoints, but its engine contributes no state, as if another rank were \
                               the first of the group. This is a bug in Lockstep";
                TrainError::Impossible(problem.into())
            })?;
            let saved = writer.save(self.snapshot(own), max_wait);
            if let Err(CheckpointError::NotFinite { detail, .. }) = saved {
                return Err(self.diverged(detail));
            }
            self.announce(saved?.into_iter().collect());
        }
        self.throughput.report("training");
        self.announce_checkpoints();
        Ok(())
    }

    /// The checkpoint of the steps so far. `state_dict` is the engine's state.
    pub(super) fn snapshot(&self, state_dict: StateDict) -> Snapshot {
        Snapshot {
            state: self.state(&state_dict),
            parameters: state_dict.parameters,
            optimizer: state_dict.optimizer.unwrap_or_default().slots,
            average: state_dict.average,
            batches: self.step * self.plan.config.accumulate as u64,
            metadata: self.metadata.clone(),
        }
    }

    fn state(&self, state_dict: &StateDict) -> State {
        let plan = &self.plan;
        let measured = self.evaluation.as_ref().filter(|e| e.step == self.step);
        let step_in_epoch = self.step % plan.steps_per_epoch;
        State {
            epoch: plan.epoch_of(self.step),
            step: self.step,
            data_position: DataPosition {
                epoch: (self.step / plan.steps_per_epoch) as u32,
                step_in_epoch,
                samples_in_epoch: step_in_epoch * plan.global_batch_size,
            },
            random_state: RandomState { seed: self.training.spec.train.seed },
            world_size: self.training.group.size(),
            global_batch_size: plan.global_batch_size,
            steps_per_epoch: plan.steps_per_epoch,
            val_accuracy: measured.map(|e| e.accuracy),
            val_loss: measured.map(|e| e.loss),
            validation: self.data.shape.validation.clone(),
            divisions: self.validation_divisions.clone(),
            best: None,
            stop: self.stop_progress.clone(),
            versions: BTreeMap::from([("lockstep".into(), env!("CARGO_PKG_VERSION").into())]),
            precision: self.engine.precision(),
            loss_scaling: state_dict.loss_scaling,
            skipped_steps: self.skipped.clone(),
            optimizer: OptimizerNote {
                kind: self.training.spec.train.optimizer,
                updates: state_dict.optimizer.as_ref().map_or(0, |optimizer| optimizer.updates),
            },
        }
    }

    /// Ends a run that has done all its steps or stops early.
    pub(super) fn finish(&mut self) -> Result<Outcome, TrainError> {
        self.drain()?;
        self.flush_checkpoints()?;
        self.throughput.report("finished");
        Ok(Outcome::Finished { step: self.step })
    }

    /// Ends a run after the ranks have voted to stop, with a checkpoint. All ranks are at the same step, so the
    /// checkpoint is complete.
    pub(super) fn stop(&mut self) -> Result<Outcome, TrainError> {
        self.save()?;
        self.end_after_step("asked to stop", "stopped")?;
        Ok(Outcome::Stopped { step: self.step })
    }

    /// Ends a run after the epoch at which it pauses, with a checkpoint.
    pub(super) fn pause(&mut self) -> Result<Outcome, TrainError> {
        if self.step > self.start_step && !self.plan.has_checkpoint_after_epoch(self.step) {
            self.save()?;
        }
        self.end_after_step("at a rung of its sweep", "paused")?;
        Ok(Outcome::Paused { step: self.step })
    }

    fn end_after_step(&mut self, why: &str, status: &str) -> Result<(), TrainError> {
        self.flush_checkpoints()?;
        self.training.observer.log(&format!("{why}: {status} after step {}", self.step));
        self.throughput.report(status);
        Ok(())
    }

    /// Waits until the newest checkpoint is on disk, because unwritten data is lost when this process ends. If writing fails, it is
    /// retried for up to half of the stall time-out.
    fn flush_checkpoints(&mut self) -> Result<(), TrainError> {
        let max_wait = self.stall_timeout() / 2;
        if self.sharded_writer.is_some() {
            self.throughput.report("checkpointing");
            return self.flush_parts(max_wait);
        }
        let Some(mut writer) = self.writer.take() else { return Ok(()) };
        self.throughput.report("checkpointing");
        let began = Instant::now();
        let mut failed = None;
        while let Some(events) = writer.finish() {
            for event in &events {
                failed = match event {
                    CheckpointEvent::Failed { reason, .. } => Some(reason.clone()),
                    CheckpointEvent::Written { .. } => None,
                    CheckpointEvent::Removed { .. } | CheckpointEvent::Dropped { .. } => failed,
                };
            }
            self.announce(events);
            if let Some(reason) = failed.as_ref().filter(|_| began.elapsed() > max_wait) {
                let retries = self.unwritten.map_or(0, |(_, attempts)| attempts - 1);
                return Err(last_checkpoint_error(retries, reason));
            }
        }
        Ok(())
    }

    fn stall_timeout(&self) -> Duration {
        Duration::from_secs(self.training.spec.recovery.stall_timeout_secs.into())
    }

    /// Reports the checkpoints that were written or removed since the last call.
    pub(super) fn announce_checkpoints(&mut self) {
        let events = self.writer.as_ref().map(CheckpointWriter::events);
        self.announce(events.unwrap_or_default());
    }

    /// Reports events of checkpoints: lines for the log, and the events that the server stores.
    pub(super) fn announce(&mut self, events: Vec<CheckpointEvent>) {
        let (training, observer) = (self.training, self.training.observer);
        for event in events {
            match event {
                CheckpointEvent::Written { info, took } => {
                    training.checkpointed_step.fetch_max(info.step, Ordering::Relaxed);
                    let best = if info.best { ", the best so far" } else { "" };
                    let megabytes = info.size_bytes as f64 / 1e6;
                    observer.log(&format!(
                        "checkpoint {}-{} is written ({megabytes:.1} MB{best})",
                        info.epoch, info.step
                    ));
                    if let Some((_, attempts)) = self.unwritten.take_if(|(step, _)| *step == info.step) {
                        observer.log(&format!("this checkpoint took {attempts} more attempts"));
                    }
                    observer.event(&AttemptEvent::Checkpoint(info));
                    let warning = slow_checkpoint_warning(took, training.stop_within);
                    // Logged once per run, because later checkpoints take equally long.
                    if let Some(warning) = warning.filter(|_| !self.has_warned_of_slow_writes) {
                        self.has_warned_of_slow_writes = true;
                        observer.log(&warning);
                    }
                }
                CheckpointEvent::Dropped { epoch, step } => observer.log(&format!(
                    "checkpoint {epoch}-{step} was dropped: an earlier checkpoint is still being written to {}. Training \
                     continues, and the newest complete checkpoint is kept",
                    training.checkpoints.display()
                )),
                CheckpointEvent::Failed { epoch, step, reason, is_retry } => {
                    let earlier = self.unwritten.filter(|_| is_retry).map_or(0, |(_, attempts)| attempts);
                    self.unwritten = Some((step, earlier + 1));
                    // Only the first retry gets a line. The number of attempts follows at the end.
                    match earlier {
                        0 => observer.log(&format!(
                            "checkpoint {epoch}-{step} could not be written: {reason}; training continues, and the previous \
                             checkpoint is kept"
                        )),
                        1 => observer.log(&format!(
                            "checkpoint {epoch}-{step} still cannot be written: {reason}; retrying"
                        )),
                        _ => {}
                    }
                }
                CheckpointEvent::Removed { epoch, step } => {
                    observer.event(&AttemptEvent::CheckpointRemoved { epoch, step });
                }
            }
        }
    }
}

/// The error of a run whose last checkpoint could not be written.
pub(super) fn last_checkpoint_error(retries: u64, reason: &str) -> TrainError {
    TrainError::System(std::io::Error::other(format!(
        "the last checkpoint could not be written in {retries} more attempts: {reason}"
    )))
}

/// A warning for the log if a checkpoint that took `took` to write may not be done in time. Ranks that are asked to end have
/// `within` for their step and its checkpoint.
fn slow_checkpoint_warning(took: Duration, within: Duration) -> Option<String> {
    // Only half of the time counts, because the step comes first, and the disk may be slower then.
    (took > within / 2).then(|| {
        format!(
            "a checkpoint takes {:.1} s to write, and ranks that are asked to end (before a time limit, for a requeue, when their \
             agent is stopped) have {} s for their step and its checkpoint: it may not be done in time, and the job then continues \
             from the previous checkpoint. Give ranks more time (Slurm's KillWait, or --killed-after of the agent), or write \
             checkpoints more often (checkpoint.every_steps)",
            took.as_secs_f64(),
            within.as_secs()
        )
    })
}

/// The metadata of `model.safetensors`: only facts that equal jobs share.
pub(super) fn model_metadata(spec: &JobSpec, shape: &Shape) -> BTreeMap<String, String> {
    let json = |value: serde_json::Result<String>| value.unwrap_or_default();
    let mut shared = serde_json::to_value(spec).unwrap_or_default();
    if let Some(object) = shared.as_object_mut() {
        object.remove("name");
        object.remove("priority");
        object.remove("private");
    }
    let mut metadata = BTreeMap::from([
        ("format".into(), "pt".into()),
        ("arch".into(), spec.model.arch.as_str().into()),
        ("classes".into(), json(serde_json::to_string(&shape.classes))),
        ("image_size".into(), shape.image_size.to_string()),
        ("channels".into(), shape.channels.to_string()),
        ("mean".into(), json(serde_json::to_string(&shape.mean))),
        ("std".into(), json(serde_json::to_string(&shape.std))),
        ("spec".into(), shared.to_string()),
    ]);
    if shape.whole_pictures {
        metadata.insert("whole_pictures".into(), "true".into());
    }
    if let Some(resize) = shape.resize {
        metadata.insert("resize".into(), resize.to_string());
    }
    metadata
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_checkpoint_gets_a_warning() {
        let within = Duration::from_secs(20);
        assert_eq!(slow_checkpoint_warning(Duration::from_secs(10), within), None);
        let message = slow_checkpoint_warning(Duration::from_millis(10_001), within).unwrap();
        assert!(
            message.starts_with("a checkpoint takes 10.0 s to write") && message.contains("have 20 s"),
            "{message}"
        );
    }
}
