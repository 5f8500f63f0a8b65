//! Writes checkpoints while training continues, and deletes checkpoints that are no longer kept.

use super::{
    Best, CheckpointError, Snapshot, State,
    files::write,
    folders::{folder_name, list, remove},
};
use lockstep_host::lock;
use lockstep_protocol::{agent::CheckpointInfo, spec::CheckpointSpec};
use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

#[derive(Debug, Clone, PartialEq)]
pub enum CheckpointEvent {
    /// The checkpoint is complete on disk, and writing it took this long.
    Written { info: CheckpointInfo, took: Duration },
    /// An older checkpoint was removed according to `checkpoint.keep`.
    Removed { epoch: u32, step: u64 },
    /// A newer snapshot replaced the waiting snapshot of this step, because an earlier checkpoint was still being written.
    Dropped { epoch: u32, step: u64 },
    /// The checkpoint could not be written (for example, the disk is full). The previous checkpoint is kept.
    Failed {
        epoch: u32,
        step: u64,
        reason: String,
        /// Whether this was a retry. The last checkpoint is retried until it succeeds.
        is_retry: bool,
    },
}

/// Pause between two attempts to write the last snapshot to a full disk.
pub(crate) const RETRY: Duration = Duration::from_secs(1);

/// A queue for one snapshot, which waits while another is being written.
#[derive(Debug, Default)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    waiting: Option<Snapshot>,
    is_closed: bool,
}

impl Queue {
    /// Waits for the next snapshot. `None` after the queue was closed.
    fn next(&self) -> Option<Snapshot> {
        let is_idle = |state: &mut QueueState| state.waiting.is_none() && !state.is_closed;
        let state = self.changed.wait_while(lock(&self.state), is_idle);
        let snapshot = state.unwrap_or_else(PoisonError::into_inner).waiting.take();
        self.changed.notify_all();
        snapshot
    }

    /// Puts a snapshot into the queue when no snapshot waits. After `max_wait`, replaces the waiting snapshot and
    /// returns the replaced snapshot.
    fn put(&self, snapshot: Snapshot, max_wait: Duration) -> Option<Snapshot> {
        let waited =
            self.changed.wait_timeout_while(lock(&self.state), max_wait, |state| state.waiting.is_some());
        let replaced = waited.unwrap_or_else(PoisonError::into_inner).0.waiting.replace(snapshot);
        self.changed.notify_all();
        replaced
    }

    fn close(&self) {
        lock(&self.state).is_closed = true;
        self.changed.notify_all();
    }
}

/// A thread that writes snapshots, and keeps the newest and the best checkpoints.
#[derive(Debug)]
pub struct CheckpointWriter {
    directory: PathBuf,
    queue: Arc<Queue>,
    /// Whether the last snapshot had to replace a waiting snapshot, because the disk was too slow.
    is_disk_slow: AtomicBool,
    events: Receiver<CheckpointEvent>,
    thread: Option<JoinHandle<()>>,
    /// Set when the writer must no longer wait for a full disk.
    should_give_up: Arc<AtomicBool>,
}

impl CheckpointWriter {
    /// Starts a writer for `directory`. `best` is the best checkpoint so far.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(directory: &Path, spec: &CheckpointSpec, best: Option<Best>) -> std::io::Result<Self> {
        let queue = Arc::new(Queue::default());
        let incoming = queue.clone();
        let (outgoing, events) = channel();
        let should_give_up = Arc::new(AtomicBool::new(false));
        let give_up_flag = should_give_up.clone();
        let mut retention = Retention::new(directory, spec, best);
        let write_all = move || {
            let mut unwritten = None;
            let is_retry = false;
            while let Some(snapshot) = incoming.next() {
                unwritten = retention.try_to_write(snapshot, is_retry, &outgoing);
            }
            // No newer snapshot will come, so this snapshot is retried until `should_give_up` is set.
            let is_retry = true;
            while let Some(snapshot) = unwritten {
                std::thread::sleep(RETRY);
                if give_up_flag.load(Ordering::Relaxed) {
                    return;
                }
                unwritten = retention.try_to_write(snapshot, is_retry, &outgoing);
            }
        };
        let thread = std::thread::Builder::new().name("checkpoints".into()).spawn(write_all)?;
        Ok(Self {
            directory: directory.into(),
            queue,
            is_disk_slow: AtomicBool::new(false),
            events,
            thread: Some(thread),
            should_give_up,
        })
    }

    /// Queues a snapshot. One snapshot may wait while another is being written. A third snapshot waits for at most
    /// `max_wait`, during which the other ranks wait for this rank, and then replaces the waiting snapshot. So memory
    /// does not grow, and a disk that hangs does not block training. Returns the event of the replaced snapshot.
    ///
    /// # Errors
    /// [`CheckpointError::NotFinite`] if the values are not finite. Nothing is written then, and existing checkpoints are kept. Or the
    /// thread has ended.
    pub fn save(
        &self,
        snapshot: Snapshot,
        max_wait: Duration,
    ) -> Result<Option<CheckpointEvent>, CheckpointError> {
        // The training thread checks the values itself, so that training does not continue with values that are not finite.
        let name = folder_name(snapshot.state.epoch, snapshot.state.step);
        if let Some(detail) = snapshot.first_invalid() {
            return Err(CheckpointError::NotFinite { name, detail });
        }
        if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            let error = std::io::Error::other("the thread that writes checkpoints ended");
            return Err(CheckpointError::Io { path: self.directory.join(name), error });
        }
        // If the disk hangs, waiting again for each further snapshot would be useless.
        let max_wait = if self.is_disk_slow.load(Ordering::Relaxed) { Duration::ZERO } else { max_wait };
        let dropped = self.queue.put(snapshot, max_wait);
        self.is_disk_slow.store(dropped.is_some(), Ordering::Relaxed);
        Ok(dropped
            .map(|Snapshot { state, .. }| CheckpointEvent::Dropped { epoch: state.epoch, step: state.step }))
    }

    pub fn events(&self) -> Vec<CheckpointEvent> {
        self.events.try_iter().collect()
    }

    /// Closes the queue of snapshots. Returns the events after a short wait, or `None` when all snapshots are on disk and
    /// reported. Writes to a full disk are retried until the writer is dropped.
    pub fn finish(&mut self) -> Option<Vec<CheckpointEvent>> {
        self.queue.close();
        match self.events.recv_timeout(Duration::from_millis(500)) {
            Ok(first) => Some(std::iter::once(first).chain(self.events.try_iter()).collect()),
            Err(RecvTimeoutError::Timeout) => Some(Vec::new()),
            Err(RecvTimeoutError::Disconnected) => None,
        }
    }
}

impl Drop for CheckpointWriter {
    /// A process that ends because of another rank's failure still completes the snapshot that is being written.
    fn drop(&mut self) {
        self.should_give_up.store(true, Ordering::Relaxed);
        self.queue.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Keeps the newest checkpoints and the best checkpoint, and removes the other checkpoints.
#[derive(Debug)]
pub struct Retention {
    directory: PathBuf,
    keep_count: usize,
    metric: String,
    best: Option<Best>,
}

impl Retention {
    /// Keeps checkpoints in `directory`. `best` is the best checkpoint so far.
    pub fn new(directory: &Path, spec: &CheckpointSpec, best: Option<Best>) -> Self {
        let (keep_count, metric) = ((spec.keep as usize).max(2), spec.keep_best.clone());
        Self { directory: directory.into(), keep_count, metric, best }
    }

    /// Writes a snapshot, and sends the events of this checkpoint and of removed checkpoints. Returns the snapshot if
    /// writing failed.
    fn try_to_write(
        &mut self,
        snapshot: Snapshot,
        is_retry: bool,
        sender: &Sender<CheckpointEvent>,
    ) -> Option<Snapshot> {
        let directory = self.directory.clone();
        let began = Instant::now();
        let events = self.add(&snapshot.state, is_retry, began, |best| write(&directory, &snapshot, best));
        let is_written = matches!(events[..], [CheckpointEvent::Written { .. }, ..]);
        // Sending fails if no one receives events any more. Only the files matter then.
        let _ = events.into_iter().try_for_each(|event| sender.send(event));
        (!is_written).then_some(snapshot)
    }

    /// Writes the checkpoint of `state` and removes older checkpoints. `write` gets the best checkpoint so far, including this
    /// checkpoint, and returns the size in bytes. Writing began at `began`. Returns the events of this checkpoint and of removed
    /// checkpoints.
    pub fn add(
        &mut self,
        state: &State,
        is_retry: bool,
        began: Instant,
        write: impl FnOnce(Option<&Best>) -> Result<u64, CheckpointError>,
    ) -> Vec<CheckpointEvent> {
        let best = Best::if_better(self.best.as_ref(), &self.metric, state).or_else(|| self.best.clone());
        let size_bytes = match write(best.as_ref()) {
            Ok(size_bytes) => size_bytes,
            Err(error) => {
                let (epoch, step, reason) = (state.epoch, state.step, error.to_string());
                return vec![CheckpointEvent::Failed { epoch, step, reason, is_retry }];
            }
        };
        self.best = best;
        let info = state.info(self.best.as_ref(), size_bytes);
        let mut events = vec![CheckpointEvent::Written { info, took: began.elapsed() }];
        if let Err(error) = self.remove_old((state.epoch, state.step), &mut events) {
            tracing::warn!(%error, "an old checkpoint cannot be removed now; the removal is retried after the next checkpoint");
        }
        events
    }

    /// Removes all checkpoints except `newest`, those of the last steps, and the best.
    fn remove_old(
        &self,
        newest: (u32, u64),
        events: &mut Vec<CheckpointEvent>,
    ) -> Result<(), CheckpointError> {
        // Keep the checkpoints of the last steps. An earlier attempt may have written later steps than this attempt.
        let mut others = list(&self.directory)?;
        others.truncate(others.len().saturating_sub(self.keep_count));
        let best = self.best.as_ref().map(|best| (best.epoch, best.step));
        for (epoch, step) in others.into_iter().filter(|other| *other != newest && Some(*other) != best) {
            remove(&self.directory, epoch, step)?;
            events.push(CheckpointEvent::Removed { epoch, step });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{MANIFEST, tests::snapshot},
        *,
    };
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::fs::{self, File};

    const LONG: Duration = Duration::from_secs(60);

    fn keep_all(
        directory: &Path,
        spec: &CheckpointSpec,
        accuracies: &[(u64, Option<f64>)],
    ) -> Vec<CheckpointEvent> {
        let writer = CheckpointWriter::start(directory, spec, None).unwrap();
        for (step, accuracy) in accuracies {
            writer.save(snapshot(1, *step, *accuracy), LONG).unwrap();
        }
        finish_and_collect_events(writer)
    }

    fn finish_and_collect_events(mut writer: CheckpointWriter) -> Vec<CheckpointEvent> {
        let mut all = Vec::new();
        while let Some(events) = writer.finish() {
            all.extend(events);
        }
        all
    }

    /// The step of each written checkpoint, and whether it was the best.
    fn written(events: &[CheckpointEvent]) -> Vec<(u64, bool)> {
        let written = |event: &CheckpointEvent| match event {
            CheckpointEvent::Written { info, .. } => Some((info.step, info.best)),
            _ => None,
        };
        events.iter().filter_map(written).collect()
    }

    #[test]
    fn the_newest_and_the_best_checkpoints_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let spec = CheckpointSpec { keep: 2, ..CheckpointSpec::default() };
        let accuracies = [(10, Some(0.5)), (20, Some(0.9)), (30, None), (40, Some(0.7)), (50, Some(0.8))];
        let events = keep_all(dir.path(), &spec, &accuracies);
        assert_eq!(list(dir.path()).unwrap(), [(1, 20), (1, 40), (1, 50)]);
        assert_eq!(written(&events), [(10, true), (20, true), (30, false), (40, false), (50, false)]);
        assert!(events.contains(&CheckpointEvent::Removed { epoch: 1, step: 10 }));
        let state = super::super::load(&dir.path().join("1-50")).unwrap().state;
        assert_eq!(state.best.unwrap().step, 20);
    }

    #[test]
    fn the_lowest_loss_is_best_with_keep_best_val_loss() {
        let dir = tempfile::tempdir().unwrap();
        let spec = CheckpointSpec { keep: 0, keep_best: "val_loss".into(), ..CheckpointSpec::default() };
        keep_all(dir.path(), &spec, &[(1, Some(0.9)), (2, Some(0.1)), (3, Some(0.2)), (4, Some(0.3))]);
        assert_eq!(list(dir.path()).unwrap(), [(1, 1), (1, 3), (1, 4)]);
    }

    #[test]
    fn an_evaluation_that_is_not_finite_is_never_the_best() {
        for (metric, accuracy, loss) in [
            ("val_accuracy", Some(0.9), Some(f64::NAN)),
            ("val_accuracy", Some(f64::NAN), Some(0.1)),
            ("val_loss", Some(0.9), Some(f64::NEG_INFINITY)),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let spec = CheckpointSpec { keep_best: metric.into(), ..CheckpointSpec::default() };
            let writer = CheckpointWriter::start(dir.path(), &spec, None).unwrap();
            let mut wrong = snapshot(1, 1, accuracy);
            wrong.state.val_loss = loss;
            writer.save(wrong, LONG).unwrap();
            writer.save(snapshot(1, 2, Some(0.5)), LONG).unwrap();
            let reported = written(&finish_and_collect_events(writer));
            assert_eq!(reported, [(1, false), (2, true)], "{metric} {accuracy:?} {loss:?}");
        }
    }

    #[test]
    fn a_diverged_snapshot_is_refused_and_older_checkpoints_kept() {
        let dir = tempfile::tempdir().unwrap();
        let writer = CheckpointWriter::start(dir.path(), &CheckpointSpec::default(), None).unwrap();
        writer.save(snapshot(1, 1, Some(0.5)), LONG).unwrap();
        let mut diverged = snapshot(1, 2, Some(0.9));
        diverged.parameters.get_mut("fc.weight").unwrap().values[7] = f32::NAN;
        let error = writer.save(diverged, LONG).unwrap_err();
        assert!(matches!(error, CheckpointError::NotFinite { .. }));
        let message = error.to_string();
        assert!(
            message.contains("checkpoint 1-2") && message.contains("fc.weight contains NaN at index 7"),
            "{message}"
        );
        let mut diverged = snapshot(1, 2, None);
        diverged.optimizer.get_mut("conv1.weight.exp_avg").unwrap().values[0] = f32::INFINITY;
        let message = writer.save(diverged, LONG).unwrap_err().to_string();
        assert!(message.contains("optimizer's state conv1.weight.exp_avg contains inf"), "{message}");
        finish_and_collect_events(writer);
        assert_eq!(list(dir.path()).unwrap(), [(1, 1)]);
    }

    #[test]
    fn a_failing_disk_is_reported_and_retried() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("checkpoints");
        std::fs::write(&path, "").unwrap();
        let mut writer = CheckpointWriter::start(&path, &CheckpointSpec::default(), None).unwrap();
        writer.save(snapshot(1, 1, None), LONG).unwrap();
        let mut failures = 0;
        let mut written = Vec::new();
        while let Some(events) = writer.finish() {
            for item in events {
                match item {
                    CheckpointEvent::Failed { step: 1, reason, is_retry, .. } => {
                        assert!(reason.contains("checkpoints"), "{reason}");
                        assert_eq!(is_retry, failures > 0);
                        failures += 1;
                        if failures == 2 {
                            std::fs::remove_file(&path).unwrap();
                        }
                    }
                    CheckpointEvent::Written { info, .. } => written.push(info.step),
                    other => panic!("{other:?}"),
                }
            }
        }
        assert_eq!((failures, written), (2, vec![1]));
        assert!(super::super::load(&path.join("1-1")).is_ok());
    }

    /// A pipe without a reader behaves like a disk that does not respond.
    #[test]
    fn a_hanging_disk_does_not_block_and_the_newest_snapshot_waits() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("1-1").join(MANIFEST);
        fs::create_dir(pipe.parent().unwrap()).unwrap();
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let writer = CheckpointWriter::start(dir.path(), &CheckpointSpec::default(), None).unwrap();
        let save = |step, max_wait| match writer.save(snapshot(1, step, None), max_wait).unwrap() {
            Some(CheckpointEvent::Dropped { step, .. }) => Some(step),
            other => other.map(|event| panic!("{event:?}")),
        };
        // The first snapshot is written, the second waits.
        assert_eq!((save(1, LONG), save(2, LONG)), (None, None));
        assert_eq!(save(3, Duration::from_millis(50)), Some(2));
        let began = Instant::now();
        assert_eq!(save(4, LONG), Some(3), "the writer is known to hang");
        assert!(began.elapsed() < LONG);
        // The reader of the pipe now gets the end of the file.
        drop(File::options().write(true).open(&pipe).unwrap());
        let written = finish_and_collect_events(writer).into_iter().map(|event| match event {
            CheckpointEvent::Written { info, .. } => info.step,
            other => panic!("{other:?}"),
        });
        assert_eq!(written.collect::<Vec<_>>(), [1, 4]);
    }
}
