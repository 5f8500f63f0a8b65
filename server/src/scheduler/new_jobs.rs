//! New jobs: stored with their folders, then published.

use super::Scheduler;
use crate::store::{Annotation, CreateResult, NewJob, StoreError};
use lockstep_protocol::{JobId, JobSpec, labels};
use std::{io, path::PathBuf};

/// The error if a job was not stored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NewJobError {
    #[error("the job's folder {} cannot be written: {error}", .folder.display())]
    Folder { folder: PathBuf, error: io::Error },
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A job with a checked specification, submitted by `owner`.
pub(crate) fn new_job(id: JobId, mut spec: JobSpec, owner: Option<String>) -> NewJob {
    // Tags and notes are not in the specification, because they can be changed after submission.
    let annotation = Annotation {
        notes: std::mem::take(&mut spec.notes),
        tags: labels::normalise_tags(&std::mem::take(&mut spec.tags)),
    };
    let at = crate::now();
    NewJob { annotation, owner, ..NewJob::of(id, spec, at) }
}

/// Stores a job with its folder, and publishes it.
///
/// # Errors
/// The folder or the database cannot be written.
pub(crate) async fn add_job(scheduler: &Scheduler, new: NewJob) -> Result<CreateResult, NewJobError> {
    // The folder is written before the row, so that every stored job has a folder. A folder without a job does no harm.
    let folder = scheduler.config.job_dir(&new.id);
    if let Err(error) = write_folder(&folder, &new.spec).await {
        return Err(NewJobError::Folder { folder, error });
    }
    let created = scheduler.store.create_job(new).await;
    match &created {
        Ok(CreateResult::New(changed)) => scheduler.events.publish(changed),
        _ => {
            let _ = tokio::fs::remove_dir_all(&folder).await;
        }
    }
    Ok(created?)
}

async fn write_folder(folder: &std::path::Path, spec: &JobSpec) -> io::Result<()> {
    tokio::fs::create_dir_all(folder).await?;
    let text = serde_json::to_string_pretty(spec).map_err(io::Error::other)?;
    tokio::fs::write(folder.join("spec.json"), text).await
}
