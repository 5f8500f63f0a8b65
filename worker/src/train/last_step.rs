//! When a rank is lost, those that are left keep the last step that they have finished: the next attempt continues from there, and not
//! from the newest checkpoint. What is written is a checkpoint like any other.
//!
//! Survivors may be a step apart, as one may have had the last gradients when the connection broke and the other not. Each keeps
//! its own, and the newest is continued from. The weights of a step are the same bits on every rank.
//!
//! Nothing is kept, and the newest checkpoint counts, in five cases:
//!
//! - The ranks share memory: a killed rank leaves weights of two steps.
//! - A lost rank had a part of the state (`parallel.model`, `parallel.optimizer_sharding`).
//! - The GPU does not answer, or does not finish an update in time.
//! - Only rank 0 has the whole state (`train.ema_decay`, running statistics of each rank), and rank 0 is lost.
//! - The ranks evaluate the averaged weights, which replace the trained ones meanwhile.

use super::{Run, TrainError, saving::announce};
use crate::checkpoint::{self, CheckpointEvent, OwnDiskNote};
use lockstep_host::{lock_within, open_lock};
use std::{
    fs::{self, File},
    io,
    path::Path,
    time::{Duration, Instant},
};

/// Held by the rank that writes: those of one machine have one folder. No checkpoint has such a name.
const LOCK: &str = ".last-step";
/// Longest wait for another rank that writes. An agent ends its ranks some seconds after one of them has failed.
const PATIENCE: Duration = Duration::from_secs(4);
/// Of the ranks' own folder on a machine that has not rank 0, which removes old checkpoints elsewhere.
const KEPT: usize = 2;

impl Run<'_> {
    /// Another rank is gone: writes a checkpoint of the last finished step, if this rank has all of it and none is there.
    pub(super) fn keep_last_step(&mut self) {
        let kept = match self.has_whole_step() {
            Ok(true) => self.write_last_step(),
            Ok(false) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = kept {
            let step = self.step;
            self.training.observer.log(&format!("step {step}, the last, is not kept: {error}"));
        }
    }

    /// Whether all that a checkpoint has is here and of one step; [`Run::step`] is then that step, and all up to it are reported.
    fn has_whole_step(&mut self) -> Result<bool, TrainError> {
        let spec = self.training.spec;
        // Only rank 0 has the average, and the running statistics that count where each rank has its own.
        let is_alike =
            spec.train.ema_decay <= 0.0 && (spec.parallel.sync_batch_norm || spec.model.freeze_norm);
        // There is no engine while another one is connected.
        if !self.has_own_weights || self.engine.0.is_none() || !(is_alike || self.training.is_first()) {
            return Ok(false);
        }
        let Some(results) = self.engine.undo_unfinished_steps() else { return Ok(false) };
        for result in &results {
            self.note_not_finite(Some(result));
            self.report_step(result, 0.0);
        }
        self.step -= self.in_flight.len() as u64;
        self.in_flight.clear();
        if self.averaged < self.step {
            // It had finished when its start failed.
            self.average()?;
        }
        Ok(self.step > self.began_after && self.not_finite.is_none())
    }

    fn write_last_step(&mut self) -> Result<(), TrainError> {
        let began = Instant::now();
        if let Some(mut writer) = self.writer.take() {
            while let Some(events) = writer.finish() {
                announce(self.training, events);
                if began.elapsed() > PATIENCE {
                    break;
                }
            }
        }
        let directory = self.training.checkpoints;
        let (epoch, step) = (self.plan.epoch_of(self.step), self.step);
        fs::create_dir_all(directory)?;
        let Some(_one_at_a_time) = lock(directory, PATIENCE.saturating_sub(began.elapsed()))? else {
            return Ok(());
        };
        if directory.join(checkpoint::folder_name(epoch, step)).exists() {
            return Ok(());
        }
        let is_own_folder = is_own_folder(directory);
        if is_own_folder {
            // Of a rank that was killed while it wrote. Where rank 0 is, it removes them, and decides which checkpoints are kept.
            checkpoint::remove_leftovers(directory)?;
        }
        let snapshot = self.snapshot(self.engine.own_state()?);
        if let Some(detail) = snapshot.first_not_finite() {
            return Err(self.diverged(detail));
        }
        let size_bytes = checkpoint::write(directory, &snapshot, self.best.as_ref())?;
        self.training.observer.log(&format!("another rank is gone: step {step}, the last, is kept"));
        let info = snapshot.state.info(self.best.as_ref(), size_bytes);
        announce(self.training, vec![CheckpointEvent::Written(info)]);
        if is_own_folder {
            let mut old = checkpoint::list(directory)?;
            old.truncate(old.len().saturating_sub(KEPT));
            old.iter().try_for_each(|(epoch, step)| checkpoint::remove(directory, *epoch, *step))?;
        }
        Ok(())
    }
}

/// Whether the folder is on a disk that rank 0 does not have, so that nobody else removes old checkpoints there.
fn is_own_folder(directory: &Path) -> bool {
    directory.parent().and_then(OwnDiskNote::read).is_some_and(|here| !here.has_rank_0)
}

/// The lock, once no other rank has it; none: one had it for too long.
fn lock(directory: &Path, within: Duration) -> io::Result<Option<File>> {
    let file = open_lock(&directory.join(LOCK))?;
    Ok(lock_within(&file, within)?.then_some(file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::{agent::AttemptRef, job::JobId};

    #[test]
    fn only_where_rank_0_is_not_are_old_checkpoints_another_rank_s_to_remove() {
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
