//! Fetches checkpoints from the object store whose copy on the server's disk is gone or damaged: for a download, an evaluation, a
//! prediction, a fork, or the next attempt of a job.

use super::{
    Checkpoints, artifact_checks,
    artifact_store::{ArtifactStore, Asked, Fetch, Fetched, NotFetched},
    manifest::{MANIFEST, ManifestFile, Verifier},
    object_storage::{Place, words},
};
use crate::store::{self, CheckpointRow, Copies};
use futures_util::StreamExt;
use lockstep_protocol::{
    agent::CheckpointInfo,
    job::Job,
    reason::{Reason, ReasonKind},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{fs::File, io::AsyncWriteExt, time::Instant};

/// How often a checkpoint with a wrong checksum is fetched before it counts as damaged: the network may be at fault.
const TRIES: usize = 2;
/// Bytes of the disk that a fetch leaves free: others write there, too.
const SPARE_BYTES: u64 = 256 << 20;
/// How long a round of dispatch waits for checks, all of them together. It does nothing else meanwhile.
const CHECK_WAIT: Duration = Duration::from_millis(500);
/// The folder, in a job's folder, with what has arrived of checkpoints that are being fetched.
const FETCHED: &str = "fetched";

impl From<object_store::Error> for NotFetched {
    fn from(error: object_store::Error) -> Self {
        match error {
            object_store::Error::NotFound { .. } => Self::Missing,
            error => Self::Away(words(&error)),
        }
    }
}

impl From<io::Error> for NotFetched {
    fn from(error: io::Error) -> Self {
        Self::Disk(error.to_string())
    }
}

type Result<T> = std::result::Result<T, NotFetched>;

/// The fetch of a checkpoint that is not on this disk; starts one if none runs. `None`: it is on the disk, or not in the store.
pub(crate) fn fetch(
    checkpoints: &Arc<Checkpoints>,
    row: &CheckpointRow,
    copies: Option<&Copies>,
) -> Option<Fetch> {
    let store = checkpoints.artifact_store.as_deref()?;
    if !copies.is_some_and(Copies::may_be_fetched) || checkpoints.folder(row).exists() {
        return None;
    }
    Some(begin(checkpoints, store, row, None).0)
}

/// Checks a checkpoint that is on this disk and in the object store; one that is damaged is set aside and fetched. The flag says whether
/// this call has started the check. `None`: it is not in both places. `waiting`: the job whose next attempt needs it.
pub(crate) fn check(
    checkpoints: &Arc<Checkpoints>,
    row: &CheckpointRow,
    copies: Option<&Copies>,
    waiting: Option<&Job>,
) -> Option<(Fetch, bool)> {
    let store = checkpoints.artifact_store.as_deref()?;
    if !copies.is_some_and(Copies::is_stored) || !checkpoints.folder(row).exists() {
        return None;
    }
    Some(begin(checkpoints, store, row, waiting))
}

/// As [`check`], but only if files are missing or have other sizes. `None`: all are there with their sizes, or the store lacks it.
pub(crate) async fn mend(
    checkpoints: &Arc<Checkpoints>,
    row: &CheckpointRow,
    copies: Option<&Copies>,
) -> Option<Fetch> {
    if !copies.is_some_and(Copies::is_stored) {
        return None;
    }
    let folder = checkpoints.folder(row);
    let looks_whole = tokio::task::spawn_blocking(move || artifact_checks::looks_whole(&folder)).await;
    if looks_whole.unwrap_or(true) {
        return None;
    }
    check(checkpoints, row, copies, None).map(|(fetch, _)| fetch)
}

fn begin(
    checkpoints: &Arc<Checkpoints>,
    store: &ArtifactStore,
    row: &CheckpointRow,
    waiting: Option<&Job>,
) -> (Fetch, bool) {
    let (fetch, mine) = store.fetch(&row.id);
    let begins = mine.is_some();
    if let Some(sender) = mine {
        let (checkpoints, row) = (Arc::clone(checkpoints), row.clone());
        let waiting = waiting.map(|job| (job.id.clone(), job.attempt));
        checkpoints.tasks.clone().spawn(async move {
            let Some(store) = &checkpoints.artifact_store else { return };
            let mut outcome = have_whole(&checkpoints, store, &row).await;
            // Not lost if this is another store than the one that it was uploaded to.
            if let Err(NotFetched::Missing | NotFetched::Damaged(_)) = outcome
                && let Err(unusable) = store.confirm(&*checkpoints.store).await
            {
                outcome = Err(NotFetched::Away(unusable.why));
            }
            match &outcome {
                Ok(()) => {
                    if let Some(waiting) = waiting {
                        store.checked(&row.id, waiting);
                    }
                }
                // Logged once and not for each fetch: a job that waits for it asks again and again.
                Err(NotFetched::Away(why)) => store.is_away(Asked::Other, why),
                Err(why) => tracing::warn!(checkpoint = row.id, %why, "not fetched from the object store"),
            }
            store.fetched(&row.id, &sender, outcome);
            // A job may start now.
            checkpoints.agents.leases.poke();
        });
    }
    (fetch, begins)
}

/// Puts a whole checkpoint on this disk: the copy that is there, unless it is damaged, else that of the object store.
async fn have_whole(checkpoints: &Checkpoints, store: &ArtifactStore, row: &CheckpointRow) -> Result<()> {
    let folder = checkpoints.folder(row);
    let is_stopping = || NotFetched::Away("the server is stopping".into());
    if folder.exists() {
        let _one = store.checking.acquire().await.map_err(|_| is_stopping())?;
        // A disk error is not fatal here: whoever reads the checkpoint reports it.
        if let Err(error) = artifact_checks::set_damaged_aside(checkpoints, row).await {
            tracing::warn!(%error, checkpoint = row.id, "a checkpoint on the disk cannot be checked");
        }
        if folder.exists() {
            return Ok(());
        }
    }
    let _one = store.fetching.acquire().await.map_err(|_| is_stopping())?;
    let fetched = bring_back(checkpoints, store, row).await;
    if fetched.is_err() {
        clean(checkpoints, row).await;
    } else {
        store.answers(Asked::Other);
        tracing::info!(checkpoint = row.id, "fetched from the object store");
    }
    fetched
}

/// What is left of the time that a round of dispatch waits for checks.
#[derive(Debug)]
pub(crate) struct CheckWait(Duration);

impl Default for CheckWait {
    fn default() -> Self {
        Self(CHECK_WAIT)
    }
}

impl CheckWait {
    /// Waits for a check to end while time is left.
    async fn wait(&mut self, check: Fetch) -> Fetched {
        let began = Instant::now();
        let ended = wait(check, self.0).await;
        self.0 = self.0.saturating_sub(began.elapsed());
        ended
    }
}

/// Whether a job can continue from a checkpoint, or begin from it.
pub(crate) enum Availability {
    /// It is on the disk, or there is no object store to fetch it from.
    Here,
    /// Its copy on the disk is being checked.
    Checking(Reason),
    /// It is being fetched from the object store. The job waits for as long as that takes: an older checkpoint would lose training.
    Fetching(Reason),
    /// It is on neither the disk nor the object store, or is damaged there.
    Lost,
}

/// `waiting`: the job that needs it, which need not be the one that wrote it.
///
/// # Errors
/// The database.
pub(crate) async fn fetch_if_missing(
    checkpoints: &Arc<Checkpoints>,
    row: &CheckpointRow,
    copies: Option<&Copies>,
    waiting: &Job,
    patience: &mut CheckWait,
) -> store::Result<Availability> {
    let Some(store) = &checkpoints.artifact_store else { return Ok(Availability::Here) };
    let waits = |failed: Option<String>| -> Reason {
        let (checkpoint, detail) = (row.id.as_str().into(), failed.map(Into::into));
        ReasonKind::WaitingForCheckpoint { checkpoint, agent: None, detail }.into()
    };
    // A rank would set a damaged one aside and continue from an older one.
    if !store.is_checked(&row.id, &waiting.id, waiting.attempt)
        && let Some((fetch, begins)) = check(checkpoints, row, copies, Some(waiting))
    {
        // Most checks end at once; without a wait the job would start a round later.
        let ended = if begins { patience.wait(fetch).await } else { wait(fetch, Duration::ZERO).await };
        if ended.is_none() {
            let why = waits(None);
            // One that was found damaged is fetched by now.
            return Ok(match checkpoints.folder(row).exists() {
                true => Availability::Checking(why),
                false => Availability::Fetching(why),
            });
        }
    }
    let Some(fetch) = fetch(checkpoints, row, copies) else {
        let is_here = checkpoints.folder(row).exists();
        return Ok(if is_here { Availability::Here } else { Availability::Lost });
    };
    let outcome = fetch.outcome.borrow().clone();
    match outcome {
        None | Some(Ok(())) => Ok(Availability::Fetching(waits(None))),
        Some(Err(NotFetched::Away(why) | NotFetched::Disk(why))) => {
            Ok(Availability::Fetching(waits(Some(why))))
        }
        Some(Err(why @ (NotFetched::Missing | NotFetched::Damaged(_)))) => {
            checkpoints.store.mark_damaged(store.storage.url(), &row.id).await?;
            checkpoints.events.log(&waiting.id, lost(row, waiting, &why)).await;
            Ok(Availability::Lost)
        }
    }
}

/// What the log says of a job whose checkpoint is lost.
fn lost(row: &CheckpointRow, waiting: &Job, why: &NotFetched) -> String {
    let how = match why {
        NotFetched::Damaged(how) => format!("is damaged there ({how})"),
        _ => "is not there".to_owned(),
    };
    if row.job == waiting.id {
        let CheckpointInfo { epoch, step, .. } = row.info;
        return format!(
            "checkpoint {epoch}-{step} cannot be fetched from the object store: it {how}; the job continues from the one before"
        );
    }
    let id = &row.id;
    format!(
        "checkpoint {id}, which model.pretrained names, cannot be fetched from the object store: it {how}"
    )
}

/// Waits for a fetch to end, at most for `patience`; `None` if it takes longer.
pub(crate) async fn wait(mut fetch: Fetch, patience: Duration) -> Fetched {
    let ended = tokio::time::timeout(patience, fetch.outcome.wait_for(Option::is_some)).await;
    match ended {
        Ok(Ok(outcome)) => outcome.clone(),
        Ok(Err(_)) => Some(Err(NotFetched::Away("the server is stopping".into()))),
        Err(_) => None,
    }
}

/// The folder in which the files of a checkpoint arrive.
fn gathering(checkpoints: &Checkpoints, row: &CheckpointRow) -> PathBuf {
    let name = format!("{}-{}", row.info.epoch, row.info.step);
    checkpoints.config.job_dir(&row.job).join(FETCHED).join(name)
}

/// Removes what a failed fetch has left. If the job was deleted meanwhile, the fetch has made its folder again: that goes, too.
async fn clean(checkpoints: &Checkpoints, row: &CheckpointRow) {
    let (gathering, job_dir) = (gathering(checkpoints, row), checkpoints.config.job_dir(&row.job));
    if matches!(checkpoints.store.job(&row.job).await, Ok(None)) {
        let _ = tokio::fs::remove_dir_all(job_dir).await;
        return;
    }
    match tokio::fs::remove_dir_all(&gathering).await {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(%error, checkpoint = row.id, "what came of a checkpoint stays on the disk");
        }
        // Fails, as it should, while other checkpoints arrive there.
        _ => drop(tokio::fs::remove_dir(job_dir.join(FETCHED)).await),
    }
}

/// Removes unfinished fetches of an earlier server.
pub(crate) fn sweep(jobs: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(jobs) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        match fs::remove_dir_all(entry?.path().join(FETCHED)) {
            Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Err(error);
            }
            _ => {}
        }
    }
    Ok(())
}

async fn bring_back(checkpoints: &Checkpoints, store: &ArtifactStore, row: &CheckpointRow) -> Result<()> {
    let place = store.storage.place(&row.id).ok_or(NotFetched::Missing)?;
    let gathering = gathering(checkpoints, row);
    let mut tries = 1;
    loop {
        match gather(store, &place, &gathering).await {
            Err(NotFetched::Damaged(how)) if tries < TRIES => {
                tracing::warn!(
                    checkpoint = row.id,
                    how,
                    "what came from the object store is damaged; fetching it again"
                );
                tries += 1;
            }
            other => break other?,
        }
    }
    let to = checkpoints.folder(row);
    tokio::task::spawn_blocking(move || publish(&gathering, &to)).await.map_err(io::Error::other)??;
    // It was removed meanwhile.
    if matches!(checkpoints.store.checkpoint(&row.id).await, Ok(None)) {
        let _ = tokio::fs::remove_dir_all(checkpoints.folder(row)).await;
        return Err(NotFetched::Missing);
    }
    Ok(())
}

/// Whether `wanted` bytes fit on a disk with `free` free ones, less [`SPARE_BYTES`].
fn check_room(wanted: u64, free: u64) -> Result<()> {
    if wanted.saturating_add(SPARE_BYTES) <= free {
        return Ok(());
    }
    let megabytes = |bytes: u64| bytes.div_ceil(1_000_000);
    Err(NotFetched::Disk(format!(
        "it has {} MB and {} MB are free on the disk, of which {} MB are left free",
        megabytes(wanted),
        megabytes(free),
        megabytes(SPARE_BYTES)
    )))
}

/// Fetches all files of a checkpoint, each with the size and checksum that the manifest has.
async fn gather(store: &ArtifactStore, place: &Place, gathering: &Path) -> Result<()> {
    match tokio::fs::remove_dir_all(gathering).await {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let text = store.storage.manifest(place).await?.ok_or(NotFetched::Missing)?;
    let manifest = place.read(&text).map_err(NotFetched::Damaged)?;
    tokio::fs::create_dir_all(gathering).await?;
    let disk = rustix::fs::statvfs(gathering).map_err(io::Error::from)?;
    let wanted = manifest.files.values().fold(0, |sum: u64, file| sum.saturating_add(file.size_bytes));
    check_room(wanted, disk.f_bavail.saturating_mul(disk.f_frsize))?;
    for (name, wanted) in &manifest.files {
        receive(store, place, (name, wanted), &gathering.join(name)).await.map_err(|why| match why {
            // The manifest says that it is there.
            NotFetched::Missing => NotFetched::Damaged(format!("its {name} is missing")),
            why => why,
        })?;
    }
    let path = gathering.join(MANIFEST);
    tokio::fs::write(&path, &text).await?;
    Ok(File::open(&path).await?.sync_all().await?)
}

async fn receive(
    store: &ArtifactStore,
    place: &Place,
    (name, wanted): (&str, &ManifestFile),
    path: &Path,
) -> Result<()> {
    let mut bytes = store.storage.get(place, name, &wanted.sha256).await?;
    let (mut file, mut verifier) = (File::create(path).await?, Verifier::default());
    while let Some(piece) = bytes.next().await {
        let piece = piece?;
        verifier.add(&piece);
        if verifier.size_bytes > wanted.size_bytes {
            break;
        }
        file.write_all(&piece).await?;
    }
    file.flush().await?;
    verifier.finish(name, wanted).map_err(NotFetched::Damaged)?;
    Ok(file.sync_all().await?)
}

/// Renames the gathered folder to the checkpoint's name and syncs both. A checkpoint that came another way meanwhile stays.
fn publish(gathering: &Path, to: &Path) -> io::Result<()> {
    fs::File::open(gathering)?.sync_all()?;
    if let Some(all) = to.parent() {
        fs::create_dir_all(all)?;
        if to.exists() {
            return fs::remove_dir_all(gathering);
        }
        fs::rename(gathering, to)?;
        fs::File::open(all)?.sync_all()?;
    }
    // Fails, as it should, while other checkpoints arrive there.
    let _ = gathering.parent().map(fs::remove_dir);
    Ok(())
}

#[cfg(test)]
mod tests;
