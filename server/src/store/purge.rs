//! Incremental deletion, concurrent with all other writes: first a deleted job's files, then its rows. The rows last, so that a
//! server that is stopped in between finds the rest at its next start.

use super::{Store, StoreError};
use crate::config::ServeConfig;
use lockstep_protocol::JobId;
use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::Notify;

/// After a failure: the database may be away.
const TRY_AGAIN: Duration = Duration::from_secs(5);
/// How often a folder is emptied in which something appears meanwhile.
const TRIES: usize = 10;
/// The longest pause between two steps.
const LONGEST_REST: Duration = Duration::from_millis(200);

/// Deleted jobs of which something is left.
pub(crate) struct DeletedJobs {
    store: Arc<dyn Store>,
    config: Arc<ServeConfig>,
    wake: Notify,
}

impl DeletedJobs {
    pub(crate) fn new(store: Arc<dyn Store>, config: Arc<ServeConfig>) -> Self {
        Self { store, config, wake: Notify::new() }
    }

    /// A job was deleted whose files and rows are still to be removed.
    pub(crate) fn note(&self) {
        self.wake.notify_one();
    }

    /// Removes until dropped: first what an earlier server did not get to.
    pub(crate) async fn run(&self) {
        let mut without_files = None;
        loop {
            match self.store.oldest_deleted().await {
                Ok(None) => self.wake.notified().await,
                Ok(Some(id)) => {
                    if without_files.as_ref() != Some(&id) {
                        self.remove_files(&id).await;
                        without_files = Some(id.clone());
                    }
                    let began = Instant::now();
                    match self.store.purge_deleted(&id).await {
                        // Half of the writer's time at most: reports of running jobs come first.
                        Ok(()) => tokio::time::sleep(began.elapsed().min(LONGEST_REST)).await,
                        Err(error) => rest(&error).await,
                    }
                }
                Err(error) => rest(&error).await,
            }
        }
    }

    async fn remove_files(&self, id: &JobId) {
        let folder = self.config.job_dir(id);
        let mut removed = tokio::fs::remove_dir_all(&folder).await;
        for _ in 0..TRIES {
            match &removed {
                // Something was written there meanwhile, such as the answer to an evaluation.
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                    removed = tokio::fs::remove_dir_all(&folder).await;
                }
                _ => break,
            }
        }
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                // The job is gone for its users; what stays is only space.
                tracing::warn!(folder = %folder.display(), %error, "the folder of a deleted job could not be removed");
            }
            _ => {}
        }
    }
}

async fn rest(error: &StoreError) {
    tracing::warn!(%error, "what is left of deleted jobs could not be removed; trying again");
    tokio::time::sleep(TRY_AGAIN).await;
}
