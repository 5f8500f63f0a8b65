//! After a rank is lost, the remaining ranks write a checkpoint of their last finished step, so that the next attempt
//! continues from this step, not from the previous checkpoint.
//!
//! Surviving ranks may differ by one step, because some may have received the last gradients before the connection
//! broke. A step that several ranks have is written by the first of them, because the weights of a step have the same bits
//! on every rank. The next attempt continues from the newest step.
//!
//! In five cases nothing is written, and the next attempt continues from the newest checkpoint:
//!
//! - The ranks share memory, in which a killed rank leaves weights of two steps.
//! - The lost rank had a part of the state (`parallel.model`, `parallel.optimizer_sharding`).
//! - The GPU does not respond, or does not finish an update in time.
//! - Only rank 0 has the whole state (`train.ema_decay`, separate running statistics of each rank), and rank 0 is
//!   lost.
//! - The ranks evaluate the averaged weights, which temporarily replace the trained weights.

use super::{Run, TrainError};
use crate::checkpoint::{self, CheckpointEvent, OwnDiskNote};
use lockstep_host::{lock_within, open_lock};
use std::{
    fs::{self, File},
    io,
    path::Path,
    time::{Duration, Instant},
};

/// The lock file of the rank that writes, because the ranks of a machine share the folder. Not a valid name of a
/// checkpoint.
const LOCK: &str = ".last-step";
/// Time limit for waiting for this rank's writer, and for another rank that writes. An agent ends its ranks a few seconds
/// after a rank has failed.
const WRITE_TIMEOUT: Duration = Duration::from_secs(4);
/// Number of checkpoints kept in a folder on a machine without rank 0. Elsewhere rank 0 removes old checkpoints.
const MAX_CHECKPOINTS: usize = 2;

impl Run<'_> {
    /// Writes a checkpoint of the last finished step after another rank is lost, if this rank has the whole state of this step and
    /// no other rank has written it.
    pub(super) fn keep_last_step(&mut self) {
        let written = match self.has_whole_step() {
            Ok(true) => self.write_last_step(),
            Ok(false) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = written {
            let step = self.step;
            self.training.observer.log(&format!("no checkpoint of the last step, {step}: {error}"));
        }
    }

    /// Whether this rank has the complete state of a single step. Afterwards [`Run::step`] is that step, and all
    /// steps up to it are reported.
    fn has_whole_step(&mut self) -> Result<bool, TrainError> {
        let spec = self.training.spec;
        // Only rank 0 has the average. If running statistics differ between ranks, the statistics of rank 0 count.
        let is_state_on_every_rank =
            spec.train.ema_decay <= 0.0 && (spec.parallel.sync_batch_norm || spec.model.freeze_norm);
        // The engine is absent during the change to bfloat16.
        if !self.has_last_weights
            || self.engine.0.is_none()
            || !(is_state_on_every_rank || self.training.is_first())
        {
            return Ok(false);
        }
        let Some(results) = self.engine.undo_unfinished_steps() else { return Ok(false) };
        let waited_secs = 0.0;
        for result in &results {
            self.record_not_finite(Some(result));
            self.report_step(result, waited_secs);
        }
        self.step -= self.in_flight.len() as u64;
        self.in_flight.clear();
        if self.last_average_step < self.step {
            // The step was finished, but `run_step` failed before it updated the average.
            self.update_average()?;
        }
        Ok(self.step > self.start_step && self.not_finite.is_none())
    }

    fn write_last_step(&mut self) -> Result<(), TrainError> {
        let began = Instant::now();
        if let Some(mut writer) = self.writer.take() {
            while let Some(events) = writer.finish() {
                self.announce(events);
                if began.elapsed() > WRITE_TIMEOUT {
                    break;
                }
            }
        }
        let directory = self.training.checkpoints;
        let (epoch, step) = (self.plan.epoch_of(self.step), self.step);
        fs::create_dir_all(directory)?;
        let Some(_lock) = lock(directory, WRITE_TIMEOUT.saturating_sub(began.elapsed()))? else {
            return Ok(());
        };
        if directory.join(checkpoint::folder_name(epoch, step)).exists() {
            return Ok(());
        }
        let is_own_folder = is_own_folder(directory);
        if is_own_folder {
            // A rank that was killed while writing leaves files. In shared folders, rank 0 removes them and old checkpoints.
            checkpoint::remove_leftovers(directory)?;
        }
        let snapshot = self.snapshot(self.engine.own_state()?);
        if let Some(detail) = snapshot.first_invalid() {
            return Err(self.diverged(detail));
        }
        let write_began = Instant::now();
        let size_bytes = checkpoint::write(directory, &snapshot, self.best.as_ref())?;
        self.training
            .observer
            .log(&format!("another rank is lost: wrote a checkpoint of the last step, {step}"));
        let info = snapshot.state.info(self.best.as_ref(), size_bytes);
        self.announce(vec![CheckpointEvent::Written { info, took: write_began.elapsed() }]);
        if is_own_folder {
            let mut old = checkpoint::list(directory)?;
            old.truncate(old.len().saturating_sub(MAX_CHECKPOINTS));
            old.iter().try_for_each(|(epoch, step)| checkpoint::remove(directory, *epoch, *step))?;
        }
        Ok(())
    }
}

/// Whether the folder is on a disk that rank 0 does not share, so that no other rank removes old checkpoints in it.
fn is_own_folder(directory: &Path) -> bool {
    directory.parent().and_then(OwnDiskNote::read).is_some_and(|note| !note.has_rank_0)
}

/// Acquires the lock when no other rank holds it. `None` if another rank held it for too long.
fn lock(directory: &Path, max_wait: Duration) -> io::Result<Option<File>> {
    let file = open_lock(&directory.join(LOCK))?;
    Ok(lock_within(&file, max_wait)?.then_some(file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::{agent::AttemptRef, job::JobId};

    #[test]
    fn other_ranks_remove_old_checkpoints_only_without_rank_0() {
        let job = tempfile::tempdir().unwrap();
        let directory = job.path().join("checkpoints");
        assert!(!is_own_folder(&directory), "the server's disk");
        let attempt = AttemptRef { job: JobId::generate(), attempt: 1, fencing_token: 5.into() };
        for has_rank_0 in [true, false] {
            OwnDiskNote { attempt: attempt.clone(), has_rank_0 }.write(job.path()).unwrap();
            assert_eq!(is_own_folder(&directory), !has_rank_0);
        }
    }
}
