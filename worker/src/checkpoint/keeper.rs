//! Writes checkpoints beside training and deletes those that are no longer kept.

use super::{Best, CheckpointError, Snapshot, list, remove, write};
use lockstep_protocol::{agent::CheckpointInfo, spec::CheckpointSpec};
use std::{
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel},
    thread::JoinHandle,
};

/// What became of a snapshot.
#[derive(Debug, Clone, PartialEq)]
pub enum Kept {
    /// It is on disk, complete.
    Written(CheckpointInfo),
    /// An older one is gone, as `keep` says.
    Removed {
        /// Its epoch.
        epoch: u32,
        /// Its step.
        step: u64,
    },
}

/// A thread that takes snapshots and keeps the newest and the best.
#[derive(Debug)]
pub struct Keeper {
    snapshots: Option<SyncSender<Snapshot>>,
    news: Receiver<Result<Kept, CheckpointError>>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Keeps checkpoints under `directory`; `best` is the best one so far.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn start(directory: &Path, spec: &CheckpointSpec, best: Option<Best>) -> std::io::Result<Self> {
        // One may wait while another is being written; a third holds up training, rather than memory.
        let (snapshots, incoming) = sync_channel::<Snapshot>(1);
        let (outgoing, news) = sync_channel(1024);
        let mut shelf = Shelf {
            directory: directory.into(),
            keep: (spec.keep as usize).max(2),
            metric: spec.keep_best.clone(),
            best,
        };
        let keep = move || {
            for snapshot in incoming {
                let result = shelf.take(snapshot);
                let failed = result.is_err();
                let news = match result {
                    Ok(kept) => kept.into_iter().map(Ok).collect(),
                    Err(error) => vec![Err(error)],
                };
                for item in news {
                    if outgoing.send(item).is_err() {
                        return;
                    }
                }
                if failed {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("checkpoints".into()).spawn(keep)?;
        Ok(Self { snapshots: Some(snapshots), news, thread: Some(thread) })
    }

    /// Hands over a snapshot; its `state.best` is filled in here.
    ///
    /// # Errors
    /// An earlier one could not be written.
    pub fn keep(&self, snapshot: Snapshot) -> Result<(), CheckpointError> {
        let gone = self.snapshots.as_ref().is_none_or(|to| to.send(snapshot).is_err());
        if gone { self.next_error() } else { Ok(()) }
    }

    fn next_error(&self) -> Result<(), CheckpointError> {
        self.news.iter().find_map(Result::err).map_or(Ok(()), Err)
    }

    /// What has become of snapshots since the last call.
    ///
    /// # Errors
    /// One could not be written.
    pub fn news(&self) -> Result<Vec<Kept>, CheckpointError> {
        let mut news = Vec::new();
        loop {
            match self.news.try_recv() {
                Ok(item) => news.push(item?),
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return Ok(news),
            }
        }
    }

    /// Waits until all snapshots are on disk.
    ///
    /// # Errors
    /// One could not be written.
    pub fn finish(mut self) -> Result<Vec<Kept>, CheckpointError> {
        self.snapshots = None;
        let news = self.news.iter().collect();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        news
    }
}

impl Drop for Keeper {
    /// A process that ends because of another's failure still finishes the snapshot in hand.
    fn drop(&mut self) {
        self.snapshots = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Shelf {
    directory: PathBuf,
    keep: usize,
    metric: String,
    best: Option<Best>,
}

impl Shelf {
    fn take(&mut self, mut snapshot: Snapshot) -> Result<Vec<Kept>, CheckpointError> {
        let (epoch, step) = (snapshot.state.epoch, snapshot.state.step);
        let measured = match self.metric.as_str() {
            "val_accuracy" => snapshot.state.val_accuracy,
            "val_loss" => snapshot.state.val_loss,
            _ => None,
        };
        let better = |value: f64| {
            self.best.as_ref().is_none_or(|best| match self.metric.as_str() {
                "val_loss" => value < best.value,
                _ => value > best.value,
            })
        };
        let new_best = measured.filter(|value| better(*value));
        if let Some(value) = new_best {
            self.best = Some(Best { metric: self.metric.clone(), value, epoch, step });
        }
        snapshot.state.best.clone_from(&self.best);
        let size_bytes = write(&self.directory, &snapshot)?;
        let mut kept = vec![Kept::Written(CheckpointInfo {
            epoch,
            step,
            val_accuracy: snapshot.state.val_accuracy,
            val_loss: snapshot.state.val_loss,
            best: self.best.as_ref().is_some_and(|best| best.step == step),
            size_bytes,
        })];
        // Newest by step; there may be later ones than this, of an attempt that went further.
        let mut others = list(&self.directory)?;
        others.truncate(others.len().saturating_sub(self.keep));
        others.retain(|other| *other != (epoch, step));
        for (epoch, step) in others {
            let is_best = self.best.as_ref().is_some_and(|best| (best.epoch, best.step) == (epoch, step));
            if !is_best {
                remove(&self.directory, epoch, step)?;
                kept.push(Kept::Removed { epoch, step });
            }
        }
        Ok(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::snapshot, *};

    fn keep_all(directory: &Path, spec: &CheckpointSpec, accuracies: &[(u64, Option<f64>)]) -> Vec<Kept> {
        let keeper = Keeper::start(directory, spec, None).unwrap();
        for (step, accuracy) in accuracies {
            keeper.keep(snapshot(1, *step, *accuracy)).unwrap();
        }
        keeper.finish().unwrap()
    }

    #[test]
    fn the_newest_and_the_best_stay() {
        let dir = tempfile::tempdir().unwrap();
        let spec = CheckpointSpec { keep: 2, ..CheckpointSpec::default() };
        let accuracies = [(10, Some(0.5)), (20, Some(0.9)), (30, None), (40, Some(0.7)), (50, Some(0.9))];
        let news = keep_all(dir.path(), &spec, &accuracies);
        assert_eq!(list(dir.path()).unwrap(), [(1, 20), (1, 40), (1, 50)]);
        let best: Vec<_> = news
            .iter()
            .filter_map(|k| match k {
                Kept::Written(info) => Some((info.step, info.best)),
                Kept::Removed { .. } => None,
            })
            .collect();
        assert_eq!(best, [(10, true), (20, true), (30, false), (40, false), (50, false)]);
        assert!(news.contains(&Kept::Removed { epoch: 1, step: 10 }));
        let (state, _, _) = super::super::load(&dir.path().join("1-50")).unwrap();
        assert_eq!(state.best.unwrap().step, 20);
    }

    #[test]
    fn the_lowest_loss_can_be_best() {
        let dir = tempfile::tempdir().unwrap();
        let spec = CheckpointSpec { keep: 0, keep_best: "val_loss".into(), ..CheckpointSpec::default() };
        keep_all(dir.path(), &spec, &[(1, Some(0.9)), (2, Some(0.1)), (3, Some(0.2)), (4, Some(0.3))]);
        assert_eq!(list(dir.path()).unwrap(), [(1, 1), (1, 3), (1, 4)]);
    }

    #[test]
    fn a_disk_that_says_no_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("checkpoints");
        std::fs::write(&file, "").unwrap();
        let keeper = Keeper::start(&file, &CheckpointSpec::default(), None).unwrap();
        keeper.keep(snapshot(1, 1, None)).unwrap();
        assert!(keeper.finish().unwrap_err().to_string().contains("checkpoints"));
    }
}
