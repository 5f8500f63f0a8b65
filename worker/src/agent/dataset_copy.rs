//! Copies of datasets. A dataset that this machine does not have is copied from the server once, before ranks start,
//! and kept within a limit of disk space.

mod cache;
mod list;
mod pull;

pub(super) use cache::Copies;

use super::{
    AgentError, Options,
    preflight::Refusal,
    remote::{RETRY, Remote, RequestError},
    state_dir::StoredAttempt,
};
use lockstep_protocol::agent::ANEW_BYTES;
use reqwest::StatusCode;
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Maximum number of times that a copy is restarted because the dataset has changed meanwhile, or because data arrived damaged.
const MAX_RESTARTS: u32 = 3;
/// Maximum number of consecutive tries in which the server responds but no new data arrives.
const MAX_TRIES_WITHOUT_PROGRESS: u32 = 10;
/// A hint for messages: how to configure a dataset's path on a machine.
pub(super) const DATASET_PATH_HINT: &str =
    "the agent's options --dataset NAME=PATH and --path-map say where its machine has a dataset";

/// Opens the copies of datasets. `None` if datasets are not copied.
pub(super) fn open(
    options: &Options,
    state_dir: &Path,
    adopted: &[StoredAttempt],
) -> Result<Option<Arc<Copies>>, AgentError> {
    if options.dataset_cache_bytes == 0 {
        return Ok(None);
    }
    let dir = options.dataset_cache.clone().unwrap_or_else(|| state_dir.join("datasets"));
    let live: Vec<_> = adopted.iter().map(|stored| &stored.start.attempt).collect();
    let copies = Copies::open(&dir, options.dataset_cache_bytes, &live);
    copies.map(|copies| Some(Arc::new(copies))).map_err(AgentError::InvalidOptions)
}

/// Why a try to copy failed.
#[derive(Debug)]
enum CopyError {
    Server(RequestError),
    Disk(PathBuf, io::Error),
    /// A file on the server differs from the list.
    Changed(String),
    /// Data arrived damaged: a checksum is wrong, or a response has the wrong form.
    Damaged(String),
    Unusable(String),
    NoSpace(String),
}

impl From<RequestError> for CopyError {
    fn from(failed: RequestError) -> Self {
        Self::Server(failed)
    }
}

fn on_disk(path: &Path) -> impl Fn(io::Error) -> CopyError + '_ {
    move |error| CopyError::Disk(path.into(), error)
}

/// Runs blocking work on a separate thread, so that the runtime's threads stay available.
async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CopyError> + Send + 'static,
) -> Result<T, CopyError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| Err(CopyError::Disk(PathBuf::new(), io::Error::other(e))))
}

/// Copies the dataset of an attempt from the server, if this machine lacks it, and sets the path in `stored` to the copy. If the
/// server lacks the dataset too, the call succeeds, and the preflight check reports the missing dataset. While the server is
/// unreachable, the call retries. Dropping the future ends the wait.
///
/// # Errors
/// The dataset cannot be copied, and a retry would not help.
pub(super) async fn ensure(
    stored: &mut StoredAttempt,
    remote: &Remote,
    copies: &Copies,
) -> Result<(), Refusal> {
    let path = PathBuf::from(&stored.start.dataset_path);
    let is_here = tokio::task::spawn_blocking(move || is_here(&path)).await;
    // If the thread has failed, the preflight check examines the dataset.
    if is_here.unwrap_or(true) {
        return Ok(());
    }
    let (mut backoff, mut tries, mut restart_reason) = (RETRY, RetryCounts::default(), None);
    loop {
        let mut progress = PullProgress::default();
        let result = copy(stored, remote, copies, &mut progress, &mut restart_reason).await;
        if let Err(CopyError::Changed(why)) = &result {
            restart_reason = Some(why[..why.floor_char_boundary(ANEW_BYTES)].to_owned());
        }
        let why = match result {
            Ok(Some(copy_path)) => {
                stored.start.dataset_path = copy_path.to_string_lossy().into_owned();
                stored.start.files.dataset_in = None;
                return Ok(());
            }
            Ok(None) => return Ok(()),
            Err(error) => {
                tries.count_failure(error, progress).map_err(|error| refusal(stored, remote, error))?
            }
        };
        tracing::warn!(why, "the dataset is not copied yet; retrying");
        tokio::time::sleep(backoff.next_pause()).await;
    }
}

/// The progress of one try to copy.
#[derive(Debug, Clone, Copy, Default)]
struct PullProgress {
    /// Whether the server has begun to send a response.
    has_answered: bool,
    /// Whether files, or parts of files, have arrived that the copy did not have.
    has_advanced: bool,
}

#[derive(Debug, Default)]
struct RetryCounts {
    restarts: u32,
    without_progress: u32,
}

impl RetryCounts {
    /// Counts a failed try, and returns the reason to log before the next try. Tries are limited if the server responds but sends
    /// nothing new. They are not limited while the server is unreachable.
    ///
    /// # Errors
    /// There is no further try.
    fn count_failure(&mut self, error: CopyError, progress: PullProgress) -> Result<String, CopyError> {
        match error {
            CopyError::Server(RequestError::Later(why)) => {
                if progress.has_advanced {
                    self.without_progress = 0;
                } else if progress.has_answered {
                    self.without_progress += 1;
                }
                if self.without_progress < MAX_TRIES_WITHOUT_PROGRESS {
                    return Ok(why);
                }
                let why = format!("{why}; no further data arrived in {MAX_TRIES_WITHOUT_PROGRESS} attempts");
                Err(CopyError::Unusable(why))
            }
            CopyError::Changed(why) | CopyError::Damaged(why) if self.restarts < MAX_RESTARTS => {
                self.restarts += 1;
                Ok(why)
            }
            error => Err(error),
        }
    }
}

/// Whether the dataset is on this machine. An empty folder does not count, because it may be the mount point of a dataset that
/// is not mounted here.
fn is_here(path: &Path) -> bool {
    let is_empty = || fs::read_dir(path).is_ok_and(|mut inside| inside.next().is_none());
    lockstep_data::exists(path) && !is_empty()
}

/// One try to copy. Returns the path of the copy, or `None` if the server does not have the files either. Data that has
/// arrived is kept for the next try. If the copy starts again, `restart_reason` is sent with the first request and then
/// cleared.
async fn copy(
    stored: &StoredAttempt,
    remote: &Remote,
    copies: &Copies,
    progress: &mut PullProgress,
    restart_reason: &mut Option<String>,
) -> Result<Option<PathBuf>, CopyError> {
    let start = &stored.start;
    let client = remote.client(&start.attempt)?;
    let list = match list::fetch(&client, copies.dir(), start, progress).await {
        Err(CopyError::Server(RequestError::Never(StatusCode::NOT_FOUND, why))) => {
            tracing::info!(why, "the server does not have the dataset either");
            return Ok(None);
        }
        other => other?,
    };
    let (key, about) = (list.key.clone(), list.about.clone());
    let (copy, evicted) = copies.reserve(list, &start.attempt)?;
    run_blocking(move || cache::remove(&evicted)).await?;
    // If several jobs need this copy, one job pulls it, and the other jobs then find it complete.
    let copy_lock = copies.lock_copy(&copy).await;
    if pull::pull_missing(&client, (&copy, &copy_lock), &about, copies, (progress, restart_reason)).await? {
        // The server notices that a file changes while it is sent, but not later changes or new files. So the lists are
        // compared.
        let current = list::fetch(&client, copies.dir(), start, progress).await?;
        if current.key != key {
            return Err(CopyError::Changed(
                "its files have changed since they were listed for the copy".into(),
            ));
        }
    }
    copy.record_read(&start.attempt).map_err(on_disk(copy.dir()))?;
    Ok(Some(match about.within.as_str() {
        "" => copy.data(),
        within => copy.data().join(within),
    }))
}

fn refusal(stored: &StoredAttempt, remote: &Remote, error: CopyError) -> Refusal {
    let (machine, dataset) = (&remote.name, &stored.start.spec.data.dataset);
    let unusable = |why: &str| {
        Refusal::DatasetUnusable(format!(
            "on the machine {machine}: the dataset {dataset} is missing and cannot be copied from the server: {why} ({DATASET_PATH_HINT})"
        ))
    };
    match error {
        CopyError::Server(failed) => unusable(failed.detail()),
        CopyError::Changed(why) => {
            let times = MAX_RESTARTS + 1;
            unusable(&format!(
                "{why}; it changed during each of {times} attempts to copy it: retry the job when no program writes to it"
            ))
        }
        CopyError::Damaged(why) | CopyError::Unusable(why) => unusable(&why),
        CopyError::NoSpace(why) => Refusal::DiskFull(format!("on the machine {machine}: {why}")),
        CopyError::Disk(path, error) if error.kind() == io::ErrorKind::StorageFull => {
            Refusal::DiskFull(format!(
                "on the machine {machine}: {}: {error}; free some space, or give its agent another folder for copies of datasets with \
                 --dataset-cache, and retry the job",
                path.display()
            ))
        }
        CopyError::Disk(path, error) => {
            Refusal::NotStarted(format!("on the machine {machine}: {}: {error}", path.display()))
        }
    }
}

#[cfg(test)]
mod tests;
