//! Incremental deletion, concurrent with all other writes: first a deleted job's files, then its rows. The rows are deleted last, so
//! that a server that is stopped in between continues at its next start.

use super::{Store, StoreError};
use crate::config::ServeConfig;
use lockstep_protocol::JobId;
use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::Notify;

/// Pause after a failure. The database may be unreachable.
const RETRY_PAUSE: Duration = Duration::from_secs(5);
/// Maximum number of further attempts to remove a folder in which files appear meanwhile.
const MAX_RETRIES: usize = 10;
/// Maximum pause between two steps.
const MAX_PAUSE: Duration = Duration::from_millis(200);

/// Removes the files and rows of deleted jobs.
pub(crate) struct DeletedJobs {
    store: Arc<dyn Store>,
    config: Arc<ServeConfig>,
    wake: Notify,
}

impl DeletedJobs {
    pub(crate) fn new(store: Arc<dyn Store>, config: Arc<ServeConfig>) -> Self {
        Self { store, config, wake: Notify::new() }
    }

    /// Wakes the task after a job was deleted.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    /// Removes deleted jobs until dropped, the oldest deletion first.
    pub(crate) async fn run(&self) {
        let mut job_without_files = None;
        loop {
            match self.store.oldest_deleted_job().await {
                Ok(None) => self.wake.notified().await,
                Ok(Some(id)) => {
                    if job_without_files.as_ref() != Some(&id) {
                        self.remove_files(&id).await;
                        job_without_files = Some(id.clone());
                    }
                    let began = Instant::now();
                    match self.store.purge_some_rows(&id).await {
                        // Takes at most half of the writer's time, because reports of running jobs come first.
                        Ok(()) => tokio::time::sleep(began.elapsed().min(MAX_PAUSE)).await,
                        Err(error) => pause_after(&error).await,
                    }
                }
                Err(error) => pause_after(&error).await,
            }
        }
    }

    async fn remove_files(&self, id: &JobId) {
        let folder = self.config.job_dir(id);
        for tried in 0..=MAX_RETRIES {
            match tokio::fs::remove_dir_all(&folder).await {
                // A file was written there meanwhile, such as the result of an evaluation.
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && tried < MAX_RETRIES => {}
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    // Users no longer see the job. The remaining files only use disk space.
                    tracing::warn!(folder = %folder.display(), %error, "the folder of a deleted job could not be removed");
                    return;
                }
                _ => return,
            }
        }
    }
}

async fn pause_after(error: &StoreError) {
    tracing::warn!(%error, "deleted jobs could not be removed from the database; trying again");
    tokio::time::sleep(RETRY_PAUSE).await;
}
