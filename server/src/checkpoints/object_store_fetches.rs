//! Fetches checkpoints from the object store if their copy on the server's disk is missing or damaged: for a download, an evaluation, a
//! prediction, a fork, or the next attempt of a job.

use super::{
    Checkpoints, Wait, disk_checks, folder_name_of,
    manifest::{MANIFEST, ManifestFile, Verifier},
    object_storage::{Prefix, describe},
    object_store_state::{Fetch, FetchError, FetchOutcome, ObjectStoreState, RequestKind},
};
use crate::{
    store::{self, CheckpointRow, Copies},
    util::{blocking, disk_space::check_space, if_exists},
};
use futures_util::StreamExt;
use lockstep_protocol::{
    job::Job,
    reason::{Reason, ReasonKind},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{fs::File, io::AsyncWriteExt};

/// Number of bytes that a fetch leaves free on the disk, for other writers.
const SPARE_BYTES: u64 = 256 << 20;
/// Time after the start of a plan until which a round of dispatch waits for checks. The round does nothing else while it waits.
pub(crate) const CHECK_TIMEOUT: Duration = Duration::from_millis(500);
/// Name of the folder, in a job's folder, of checkpoints that are being fetched.
const FETCHING: &str = "fetched";

impl From<object_store::Error> for FetchError {
    fn from(error: object_store::Error) -> Self {
        match error {
            object_store::Error::NotFound { .. } => Self::Missing,
            error => Self::ObjectStoreUnavailable(describe(&error)),
        }
    }
}

impl From<io::Error> for FetchError {
    fn from(error: io::Error) -> Self {
        Self::Disk(error.to_string())
    }
}

type Result<T> = std::result::Result<T, FetchError>;

/// The fetch of a checkpoint that is not on this disk. Starts a fetch if none runs. `None` if the checkpoint is on the disk, or is not in
/// the store.
pub(crate) fn fetch(checkpoints: &Arc<Checkpoints>, row: &CheckpointRow, copies: &Copies) -> Option<Fetch> {
    if !copies.may_be_fetched() || checkpoints.folder(row).exists() {
        return None;
    }
    begin_fetch(checkpoints, row, None).map(|(fetch, _)| fetch)
}

/// Checks a checkpoint that is on this disk and in the object store. A damaged checkpoint is set aside and fetched. The flag is true if
/// this call has started the check. `None` if the checkpoint is not in both places. `waiting_job`: the job whose next attempt needs the
/// checkpoint.
pub(crate) fn check(
    checkpoints: &Arc<Checkpoints>,
    row: &CheckpointRow,
    copies: &Copies,
    waiting_job: Option<&Job>,
) -> Option<(Fetch, bool)> {
    if !copies.is_stored() || !checkpoints.folder(row).exists() {
        return None;
    }
    begin_fetch(checkpoints, row, waiting_job)
}

/// Fetches a checkpoint if files on the disk are missing or have wrong sizes. `None` if all files have the right sizes, or if the checkpoint
/// is not in the store.
pub(crate) async fn fetch_if_incomplete(
    checkpoints: &Arc<Checkpoints>,
    row: &CheckpointRow,
    copies: &Copies,
) -> Option<Fetch> {
    if !copies.is_stored() {
        return None;
    }
    let folder = checkpoints.folder(row);
    let has_sizes = tokio::task::spawn_blocking(move || disk_checks::has_expected_sizes(&folder)).await;
    if has_sizes.unwrap_or(true) {
        return None;
    }
    check(checkpoints, row, copies, None).map(|(fetch, _)| fetch)
}

/// Joins the running fetch of a checkpoint, or starts a fetch that begins with a check of the copy on this disk. The flag is true if this
/// call has started the fetch. `None` without an object store.
fn begin_fetch(
    checkpoints: &Arc<Checkpoints>,
    row: &CheckpointRow,
    waiting_job: Option<&Job>,
) -> Option<(Fetch, bool)> {
    let object_store = checkpoints.object_store.clone()?;
    let (fetch, sender) = object_store.join_or_start_fetch(&row.id);
    let is_new = sender.is_some();
    if let Some(sender) = sender {
        let (checkpoints, row) = (Arc::clone(checkpoints), row.clone());
        let waiting_attempt = waiting_job.map(|job| (job.id.clone(), job.attempt));
        checkpoints.tasks.clone().spawn(async move {
            let mut outcome = ensure_undamaged(&checkpoints, &object_store, &row).await;
            // The checkpoint is not lost if this is not the object store to which it was uploaded.
            if let Err(FetchError::Missing | FetchError::Damaged(_)) = outcome
                && let Err(unusable) = object_store.confirm(&*checkpoints.store).await
            {
                outcome = Err(FetchError::ObjectStoreUnavailable(unusable.why));
            }
            match &outcome {
                Ok(()) => {
                    if let Some(attempt) = waiting_attempt {
                        object_store.note_checked(&row.id, attempt);
                    }
                }
                // Logged once and not for each fetch, because a waiting job fetches again and again.
                Err(FetchError::ObjectStoreUnavailable(why)) => drop(object_store.note_failure(RequestKind::Other, why)),
                Err(why) => tracing::warn!(checkpoint = row.id, %why, "a checkpoint cannot be fetched from the object store"),
            }
            object_store.end_fetch(&row.id, &sender, outcome);
            // A job may start now.
            checkpoints.agents.leases.wake_dispatch();
        });
    }
    Some((fetch, is_new))
}

/// Makes sure that an undamaged checkpoint is on this disk. Fetches the checkpoint from the object store if the copy on the disk is missing
/// or damaged.
async fn ensure_undamaged(
    checkpoints: &Checkpoints,
    object_store: &ObjectStoreState,
    row: &CheckpointRow,
) -> Result<()> {
    let folder = checkpoints.folder(row);
    if folder.exists() {
        let _permit = object_store.check_permits.acquire().await;
        // A disk error is not fatal here, because the process that reads the checkpoint reports the error.
        let consequence = "fetched from the object store";
        if let Err(error) = disk_checks::set_damaged_aside(checkpoints, row, consequence).await {
            tracing::warn!(%error, checkpoint = row.id, "a checkpoint on the disk cannot be checked");
        }
        if folder.exists() {
            return Ok(());
        }
    }
    let _permit = object_store.fetch_permits.acquire().await;
    let fetched = fetch_now(checkpoints, object_store, row).await;
    if fetched.is_err() {
        remove_partial(checkpoints, row).await;
    } else {
        object_store.note_success(RequestKind::Other);
        tracing::info!(checkpoint = row.id, "a checkpoint was fetched from the object store");
    }
    fetched
}

/// Whether a job can continue from a checkpoint, or begin from it.
pub(crate) enum Availability {
    /// The checkpoint is on the disk, or there is no object store.
    Here,
    /// The copy on the disk is being checked, or the checkpoint is being fetched from the object store. The job waits without a time limit,
    /// because an older checkpoint would lose training.
    Waits(Wait),
    /// The checkpoint is neither on the disk nor in the object store, or the copy in the object store is damaged.
    Lost,
}

/// Finds out whether a checkpoint is available, and begins to check or fetch it if necessary. `waiting_job` is the job that needs the
/// checkpoint, which may be another job than the one that wrote it.
pub(crate) async fn find_availability(
    checkpoints: &Arc<Checkpoints>,
    row: &CheckpointRow,
    copies: &Copies,
    waiting_job: &Job,
    check_deadline: Instant,
) -> store::Result<Availability> {
    let Some(object_store) = &checkpoints.object_store else { return Ok(Availability::Here) };
    let waits = |failed: Option<String>, keeps_slots: bool| {
        let (checkpoint, detail) = (row.id.as_str().into(), failed.map(Into::into));
        let why = ReasonKind::WaitingForCheckpoint { checkpoint, agent: None, detail };
        Availability::Waits(Wait { why: Reason::from(why).into(), keeps_slots })
    };
    // Without this check, a rank would rename a damaged checkpoint and continue from an older one.
    if !object_store.is_checked(&row.id, &waiting_job.id, waiting_job.attempt)
        && let Some((fetch, is_new)) = check(checkpoints, row, copies, Some(waiting_job))
    {
        // Most checks are quick. Without a wait, the job would start one round later.
        let timeout = check_deadline.saturating_duration_since(Instant::now());
        if wait(fetch, if is_new { timeout } else { Duration::ZERO }).await.is_none() {
            // A check is as fast as reading the checkpoint, so the slots are kept for the job. If the check has found damage, the
            // checkpoint is being fetched now.
            return Ok(waits(None, checkpoints.folder(row).exists()));
        }
    }
    let Some(fetch) = fetch(checkpoints, row, copies) else {
        let is_here = checkpoints.folder(row).exists();
        return Ok(if is_here { Availability::Here } else { Availability::Lost });
    };
    let outcome = fetch.outcome.borrow().clone();
    match outcome {
        // A fetch that has ended by now is found on the disk in the next round.
        None | Some(Ok(())) => Ok(waits(None, false)),
        Some(Err(FetchError::ObjectStoreUnavailable(why) | FetchError::Disk(why))) => {
            Ok(waits(Some(why), false))
        }
        Some(Err(why @ (FetchError::Missing | FetchError::Damaged(_)))) => {
            checkpoints.store.mark_damaged(object_store.storage.url(), &row.id).await?;
            checkpoints.events.log(&waiting_job.id, lost_message(row, waiting_job, &why)).await;
            Ok(Availability::Lost)
        }
    }
}

/// The line in the log of a job whose checkpoint is lost.
fn lost_message(row: &CheckpointRow, waiting_job: &Job, why: &FetchError) -> String {
    let how = match why {
        FetchError::Damaged(how) => format!("is damaged there ({how})"),
        _ => "is not there".to_owned(),
    };
    if row.job == waiting_job.id {
        let name = folder_name_of(row);
        return format!(
            "checkpoint {name} cannot be fetched from the object store: it {how}; the job continues from the previous checkpoint"
        );
    }
    let id = &row.id;
    format!("checkpoint {id} of model.pretrained cannot be fetched from the object store: it {how}")
}

/// Waits for the end of a fetch, at most for `timeout`. `None` if the fetch takes longer.
pub(crate) async fn wait(mut fetch: Fetch, timeout: Duration) -> FetchOutcome {
    let ended = tokio::time::timeout(timeout, fetch.outcome.wait_for(Option::is_some)).await;
    match ended {
        Ok(Ok(outcome)) => outcome.clone(),
        Ok(Err(_)) => Some(Err(FetchError::ObjectStoreUnavailable("the server is stopping".into()))),
        Err(_) => None,
    }
}

/// The folder into which the files of a checkpoint are fetched, until all have arrived.
fn partial_folder(checkpoints: &Checkpoints, row: &CheckpointRow) -> PathBuf {
    checkpoints.config.job_dir(&row.job).join(FETCHING).join(folder_name_of(row))
}

/// Removes the files of a failed fetch. If the job was deleted during the fetch, the fetch has created the job's folder again, which is
/// removed, too.
async fn remove_partial(checkpoints: &Checkpoints, row: &CheckpointRow) {
    let (partial, job_dir) = (partial_folder(checkpoints, row), checkpoints.config.job_dir(&row.job));
    if matches!(checkpoints.store.job(&row.job).await, Ok(None)) {
        let _ = tokio::fs::remove_dir_all(job_dir).await;
        return;
    }
    match if_exists(tokio::fs::remove_dir_all(&partial).await) {
        Err(error) => {
            tracing::warn!(%error, checkpoint = row.id, "the files of a failed fetch cannot be removed");
        }
        // Fails, as intended, if other checkpoints are being fetched.
        Ok(_) => drop(tokio::fs::remove_dir(job_dir.join(FETCHING)).await),
    }
}

/// Removes unfinished fetches of an earlier server.
pub(crate) fn remove_unfinished(jobs: &Path) -> io::Result<()> {
    for entry in if_exists(fs::read_dir(jobs))?.into_iter().flatten() {
        if_exists(fs::remove_dir_all(entry?.path().join(FETCHING)))?;
    }
    Ok(())
}

async fn fetch_now(
    checkpoints: &Checkpoints,
    object_store: &ObjectStoreState,
    row: &CheckpointRow,
) -> Result<()> {
    let prefix = object_store.storage.prefix_of(&row.id).ok_or(FetchError::Missing)?;
    let partial = partial_folder(checkpoints, row);
    let mut fetched = fetch_files(object_store, &prefix, &partial).await;
    if let Err(FetchError::Damaged(how)) = &fetched {
        // The error may come from the network.
        let id = &row.id;
        tracing::warn!(
            checkpoint = id,
            how,
            "the files from the object store are damaged; fetching them again"
        );
        fetched = fetch_files(object_store, &prefix, &partial).await;
    }
    fetched?;
    let folder = checkpoints.folder(row);
    blocking(move || move_into_place(&partial, &folder)).await?;
    // The checkpoint was removed during the fetch.
    if matches!(checkpoints.store.checkpoint(&row.id).await, Ok(None)) {
        let _ = tokio::fs::remove_dir_all(checkpoints.folder(row)).await;
        return Err(FetchError::Missing);
    }
    Ok(())
}

/// Fetches all files of a checkpoint, and checks their sizes and checksums.
async fn fetch_files(object_store: &ObjectStoreState, prefix: &Prefix, partial: &Path) -> Result<()> {
    if_exists(tokio::fs::remove_dir_all(partial).await)?;
    let manifest_bytes = object_store.storage.manifest(prefix).await?.ok_or(FetchError::Missing)?;
    let manifest = prefix.parse_manifest(&manifest_bytes).map_err(FetchError::Damaged)?;
    tokio::fs::create_dir_all(partial).await?;
    let needed = manifest.files.values().fold(0, |sum: u64, file| sum.saturating_add(file.size_bytes));
    check_space(partial, needed, SPARE_BYTES)?;
    for (name, expected) in &manifest.files {
        fetch_file(object_store, prefix, (name, expected), &partial.join(name)).await.map_err(
            |why| match why {
                // The manifest names the file, so the checkpoint is damaged.
                FetchError::Missing => FetchError::Damaged(format!("its {name} is missing")),
                why => why,
            },
        )?;
    }
    let path = partial.join(MANIFEST);
    tokio::fs::write(&path, &manifest_bytes).await?;
    Ok(File::open(&path).await?.sync_all().await?)
}

async fn fetch_file(
    object_store: &ObjectStoreState,
    prefix: &Prefix,
    (name, expected): (&str, &ManifestFile),
    path: &Path,
) -> Result<()> {
    let mut bytes = object_store.storage.get(&prefix.file_path(name, expected)).await?;
    let (mut file, mut verifier) = (File::create(path).await?, Verifier::default());
    while let Some(piece) = bytes.next().await {
        let piece = piece?;
        verifier.add(&piece);
        if verifier.size_bytes > expected.size_bytes {
            break;
        }
        file.write_all(&piece).await?;
    }
    file.flush().await?;
    verifier.finish(name, expected).map_err(FetchError::Damaged)?;
    Ok(file.sync_all().await?)
}

/// Syncs the fetched folder and renames it to the checkpoint's folder. If that folder exists by now, it is kept instead.
fn move_into_place(partial: &Path, folder: &Path) -> io::Result<()> {
    fs::File::open(partial)?.sync_all()?;
    if let Some(parent) = folder.parent() {
        fs::create_dir_all(parent)?;
        if folder.exists() {
            return fs::remove_dir_all(partial);
        }
        fs::rename(partial, folder)?;
        fs::File::open(parent)?.sync_all()?;
    }
    // Fails, as intended, if other checkpoints are being fetched.
    let _ = partial.parent().map(fs::remove_dir);
    Ok(())
}

#[cfg(test)]
mod tests;
