//! Sharded checkpoints (`checkpoint.sharded`): every rank that shares the folder of checkpoints writes some tensors,
//! while training continues. Each vote of the ranks includes whether all parts are on disk. Then rank 0 adds the
//! index, the state and the manifest, and renames the checkpoint to its final name. So a checkpoint has all of its
//! parts or does not exist, whichever rank is lost meanwhile.

use super::{Run, TrainError, Training, plan::RunPlan, saving::last_checkpoint_error, start::broadcast_json};
use crate::checkpoint::{
    Best, CheckpointError, CheckpointEvent, Files, RETRY, Retention, Snapshot, State, TEMPORARY,
    complete_parts, temporary_folder, write_part,
};
use lockstep_engine::{AverageOn, StateDict, Writers, slots};
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    path::PathBuf,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// How the ranks of a run write checkpoints together.
pub(super) struct ShardedWriter {
    pub(super) writers: Writers,
    /// A name that is unique to this run, and the same on every rank.
    run_name: String,
    /// Number of checkpoints that were begun.
    begun_count: u64,
    pending: Option<Pending>,
    /// Only on rank 0.
    retention: Option<Retention>,
}

/// A checkpoint whose parts are being written.
struct Pending {
    folder: PathBuf,
    /// Only on rank 0.
    state: Option<State>,
    /// `None` on a rank that writes no part.
    thread: Option<JoinHandle<Part>>,
}

/// The part written by a rank.
#[derive(Default, Serialize, Deserialize)]
struct Part {
    files: Files,
    error: Option<String>,
    took: Duration,
}

impl ShardedWriter {
    /// Collective: finds the ranks that share the folder of checkpoints, and distributes the network's tensors to
    /// them. `None` if checkpoints are not sharded, or if only rank 0 has the folder and therefore writes whole checkpoints. `best` is
    /// the best checkpoint so far.
    ///
    /// # Errors
    /// Another rank is lost.
    pub(super) fn of(
        training: &Training<'_>,
        plan: &RunPlan,
        best: Option<&Best>,
    ) -> Result<Option<Self>, TrainError> {
        let (spec, group) = (training.spec, training.group.as_ref());
        if !spec.checkpoint.sharded || group.size() == 1 {
            return Ok(None);
        }
        let directory = training.checkpoints;
        // A full disk must not end the run. If the marker folder cannot be created, only rank 0 writes.
        let create_marker = || {
            fs::create_dir_all(directory)?;
            tempfile::Builder::new().prefix(TEMPORARY).tempdir_in(directory)
        };
        let marker = training.is_first().then(create_marker).and_then(Result::ok);
        let name = marker.as_ref().and_then(|marker| marker.path().file_name()?.to_str());
        let name = training.is_first().then(|| name.unwrap_or_default().to_owned());
        let run_name: String = broadcast_json(group, name)?;
        let has_folder = !run_name.is_empty() && directory.join(&run_name).exists();
        let have_folder = group.all_gather_bytes(&[u8::from(has_folder)])?;
        let ranks: Vec<u32> = (0..)
            .zip(&have_folder)
            .filter(|(rank, has)| *rank == 0 || **has == [1])
            .map(|(rank, _)| rank)
            .collect();
        if ranks.len() == 1 {
            training.log([format!(
                "no other rank has rank 0's folder {}: only rank 0 writes checkpoints, each kind of tensors in one file",
                directory.display()
            )]);
            return Ok(None);
        }
        training.log([format!("{} of {} ranks write a part of each checkpoint", ranks.len(), group.size())]);
        let average = if spec.train.ema_decay <= 0.0 {
            AverageOn::NoRank
        } else if spec.parallel.is_hybrid() {
            AverageOn::EveryRank
        } else {
            AverageOn::FirstRank
        };
        let writers = Writers::divide(&plan.network, slots(spec.train.optimizer), average, &ranks);
        let retention =
            training.is_first().then(|| Retention::new(directory, &spec.checkpoint, best.cloned()));
        Ok(Some(Self { writers, run_name, begun_count: 0, pending: None, retention }))
    }

    /// Whether writing this rank's part of the current checkpoint has ended, successfully or not.
    pub(super) fn is_done(&self) -> bool {
        let is_done = |pending: &Pending| pending.thread.as_ref().is_none_or(JoinHandle::is_finished);
        self.pending.as_ref().is_some_and(is_done)
    }

    /// Begins to write this rank's part of a checkpoint. `snapshot` has the tensors of the part.
    fn begin(&mut self, training: &Training<'_>, snapshot: Snapshot) -> io::Result<()> {
        self.begun_count += 1;
        let unique = format!("{}.{}", self.run_name.trim_start_matches(TEMPORARY), self.begun_count);
        let folder = temporary_folder(training.checkpoints, &snapshot.state, &unique);
        let state = training.is_first().then(|| snapshot.state.clone());
        let part = self.writers.part_of(training.group.rank());
        let thread = part.map(|part| {
            let (folder, divides_average) = (folder.clone(), self.writers.divides_average());
            let write = move || {
                let began = Instant::now();
                let written = write_part(&folder, &snapshot, Some(part), divides_average);
                let took = began.elapsed();
                match written {
                    Ok(files) => Part { files, error: None, took },
                    Err(error) => Part { error: Some(error.to_string()), took, ..Part::default() },
                }
            };
            thread::Builder::new().name("checkpoints".into()).spawn(write)
        });
        self.pending = Some(Pending { folder, state, thread: thread.transpose()? });
        Ok(())
    }

    /// On rank 0: completes a checkpoint of which every rank has written its part. Returns the events to report.
    fn complete(
        &mut self,
        training: &Training<'_>,
        folder: PathBuf,
        state: &State,
        parts: Vec<Part>,
        is_retry: bool,
    ) -> Vec<CheckpointEvent> {
        let longest = parts.iter().map(|part| part.took).max().unwrap_or_default();
        let began = Instant::now().checked_sub(longest).unwrap_or_else(Instant::now);
        let failed = |(rank, part): (usize, &Part)| Some(format!("rank {rank}: {}", part.error.as_ref()?));
        let error = parts.iter().enumerate().find_map(failed);
        let files = parts.into_iter().flat_map(|part| part.files).collect();
        let complete = |best: Option<&Best>| match error {
            Some(error) => Err(CheckpointError::Io { path: folder.clone(), error: io::Error::other(error) }),
            None => complete_parts(training.checkpoints, &folder, state, best, files),
        };
        let events = self.retention.as_mut().map(|retention| retention.add(state, is_retry, began, complete));
        // Removes an incomplete or replaced checkpoint.
        let _ = fs::remove_dir_all(&folder);
        events.unwrap_or_default()
    }
}

impl Run<'_> {
    /// Begins to write this rank's part of a checkpoint of the steps so far. `own` has the tensors of the part.
    pub(super) fn begin_part(&mut self, own: Option<StateDict>) -> Result<(), TrainError> {
        let snapshot = self.snapshot(own.unwrap_or_default());
        let Some(writer) = &mut self.sharded_writer else { return Ok(()) };
        Ok(writer.begin(self.training, snapshot)?)
    }

    /// Collective: waits until all parts of the current checkpoint are on disk, and completes the checkpoint. The inner error tells
    /// why the checkpoint could not be written. Training then continues, and the previous checkpoint is kept.
    pub(super) fn complete_parts(&mut self, is_retry: bool) -> Result<Result<(), String>, TrainError> {
        let pending = self.sharded_writer.as_mut().and_then(|writer| writer.pending.take());
        let Some(Pending { folder, state, thread }) = pending else { return Ok(Ok(())) };
        let panicked = |_| Part { error: Some("its thread panicked".into()), ..Part::default() };
        let own = thread.map_or_else(Part::default, |thread| thread.join().unwrap_or_else(panicked));
        let group = self.training.group.as_ref();
        let parts = group.all_gather_bytes(&serde_json::to_vec(&own).map_err(io::Error::from)?)?;
        let mut failed = None;
        if let (Some(writer), Some(state)) = (&mut self.sharded_writer, state) {
            let parts = parts.iter().map(|part| serde_json::from_slice(part)).collect::<Result<_, _>>();
            let parts = parts.map_err(io::Error::from)?;
            let events = writer.complete(self.training, folder, &state, parts, is_retry);
            failed = events.iter().find_map(|event| match event {
                CheckpointEvent::Failed { reason, .. } => Some(reason.clone()),
                _ => None,
            });
            self.announce(events);
        }
        let failed = self.training.is_first().then_some(failed);
        Ok(broadcast_json::<Option<String>>(group, failed)?.map_or(Ok(()), Err))
    }

    /// Collective: waits until the newest checkpoint is on disk. If writing fails, retries about once per second for up
    /// to `max_wait`. All ranks make the same number of attempts.
    pub(super) fn flush_parts(&mut self, max_wait: Duration) -> Result<(), TrainError> {
        let mut tries = 0;
        while let Err(reason) = self.complete_parts(tries > 0)? {
            if tries >= max_wait.as_secs().max(1) {
                return Err(last_checkpoint_error(tries, &reason));
            }
            tries += 1;
            thread::sleep(RETRY);
            self.save()?;
        }
        Ok(())
    }
}
