//! A dataset that this machine does not have is copied from the server before ranks start, once, and kept up to a limit.

mod cache;
mod list;
mod pull;
mod size;

pub(super) use cache::Copies;

use super::{
    preflight::Refusal,
    remote::{Failed, Remote},
    state_dir::StoredAttempt,
};
use crate::data;
use cache::About;
use lockstep_protocol::{agent::ANEW_BYTES, reason::ReasonCode};
use reqwest::StatusCode;
use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

/// Pauses before trying again, the first and the longest.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(20));
/// How often a copy is begun anew because the dataset changes meanwhile, or tried again because what comes is damaged.
const IN_VAIN: u32 = 3;
/// How many tries in a row the server may answer and nothing more come.
const WITHOUT_MORE: u32 = 10;
/// How a user says where a machine has a dataset.
pub(super) const HINT: &str =
    "the agent's options --dataset NAME=PATH and --path-map say where its machine has a dataset";

/// Why a try has failed.
#[derive(Debug)]
enum CopyError {
    Server(Failed),
    Disk(PathBuf, io::Error),
    /// A file is not as it was listed.
    Changed(String),
    /// Sums are wrong.
    Damaged(String),
    Refused(ReasonCode, String),
}

impl From<Failed> for CopyError {
    fn from(failed: Failed) -> Self {
        Self::Server(failed)
    }
}

fn on_disk(path: &Path) -> impl Fn(io::Error) -> CopyError + '_ {
    move |error| CopyError::Disk(path.into(), error)
}

/// Does what may take long off the threads that serve others.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CopyError> + Send + 'static,
) -> Result<T, CopyError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| Err(CopyError::Disk(PathBuf::new(), io::Error::other(e))))
}

/// Makes sure that an attempt's dataset is on this machine, if the server has it. Where neither has it, the check before the start says so.
/// A server that is away is waited for; whoever does not want to wait drops this.
///
/// # Errors
/// It cannot be had.
pub(super) async fn have(
    stored: &mut StoredAttempt,
    remote: &Remote,
    copies: &Copies,
) -> Result<(), Refusal> {
    let path = PathBuf::from(&stored.start.dataset_path);
    // A file system that does not respond is the check's to report.
    let is_here = tokio::task::spawn_blocking(move || is_here(&path)).await;
    if is_here.unwrap_or(true) {
        return Ok(());
    }
    let (mut pause, mut tries, mut anew) = (RETRY.0, RetryCounts::default(), None);
    loop {
        let mut came = PullProgress::default();
        let tried = copy(stored, remote, copies, &mut came, &mut anew).await;
        if let Err(CopyError::Changed(why)) = &tried {
            anew = Some(why[..why.floor_char_boundary(ANEW_BYTES)].to_owned());
        }
        let why = match tried {
            Ok(Some(here)) => {
                stored.start.dataset_path = here.to_string_lossy().into_owned();
                return Ok(());
            }
            Ok(None) => return Ok(()),
            Err(trouble) => tries.note(trouble, came).map_err(|trouble| refusal(stored, remote, trouble))?,
        };
        tracing::warn!(why, "the dataset is not copied yet; trying again");
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY.1);
    }
}

/// What has come in a try.
#[derive(Debug, Clone, Copy, Default)]
struct PullProgress {
    /// The server has begun to send what was asked for.
    any: bool,
    /// Files, or parts of them, that were not there.
    more: bool,
}

/// Tries that have failed.
#[derive(Debug, Default)]
struct RetryCounts {
    in_vain: u32,
    without_more: u32,
}

impl RetryCounts {
    /// Why it is tried again. A server that is away comes back; one that answers and sends nothing does not get better by itself.
    ///
    /// # Errors
    /// It is not.
    fn note(&mut self, trouble: CopyError, came: PullProgress) -> Result<String, CopyError> {
        match trouble {
            CopyError::Server(Failed::Later(why)) => {
                self.without_more = match came {
                    PullProgress { more: true, .. } => 0,
                    PullProgress { any, .. } => self.without_more + u32::from(any),
                };
                if self.without_more < WITHOUT_MORE {
                    return Ok(why);
                }
                let why = format!("{why}; in {WITHOUT_MORE} tries nothing more has come");
                Err(CopyError::Refused(ReasonCode::DatasetUnusable, why))
            }
            CopyError::Changed(why) | CopyError::Damaged(why) if self.in_vain < IN_VAIN => {
                self.in_vain += 1;
                Ok(why)
            }
            trouble => Err(trouble),
        }
    }
}

/// Whether the dataset is there. A folder without anything in it is where one is mounted on other machines.
fn is_here(path: &Path) -> bool {
    let is_empty = || fs::read_dir(path).is_ok_and(|mut inside| inside.next().is_none());
    data::exists(path) && !is_empty()
}

/// One try, which gives the path of the copy; none where the server has no such files either. What has come stays for the next.
/// `anew`: why it is begun anew, until the server was told.
async fn copy(
    stored: &StoredAttempt,
    remote: &Remote,
    copies: &Copies,
    came: &mut PullProgress,
    anew: &mut Option<String>,
) -> Result<Option<PathBuf>, CopyError> {
    let start = &stored.start;
    let client = remote.client(&start.attempt)?;
    let list = match list::fetch(&client, copies.dir(), &start.dataset_path, came).await {
        Err(CopyError::Server(Failed::Never(StatusCode::NOT_FOUND, why))) => {
            tracing::info!(why, "the server has not the dataset either");
            return Ok(None);
        }
        other => other?,
    };
    let about = About {
        dataset: start.spec.data.dataset.clone(),
        path: start.dataset_path.clone(),
        within: list.within.clone(),
        files: list.files,
        bytes: list.bytes,
    };
    let key = list.key.clone();
    let (entry, gone) = copies.reserve(list, &about, &start.attempt)?;
    blocking(move || cache::remove(&gone)).await?;
    // Of several jobs one pulls, and the others find it done.
    let turn = copies.turn(&entry).await;
    if pull::complete(&client, (&entry, &turn), &about, copies, (came, anew)).await? {
        // The server compares what it sends. What changed after it was sent, or came on top, it does not see.
        let now = list::fetch(&client, copies.dir(), &start.dataset_path, came).await?;
        if now.key != key {
            return Err(CopyError::Changed(
                "its files are not those that were listed when the copy began".into(),
            ));
        }
    }
    entry.note_read(&start.attempt).map_err(on_disk(entry.dir()))?;
    Ok(Some(match about.within.as_str() {
        "" => entry.data(),
        within => entry.data().join(within),
    }))
}

fn refusal(stored: &StoredAttempt, remote: &Remote, trouble: CopyError) -> Refusal {
    let (on, dataset) = (&remote.name, &stored.start.spec.data.dataset);
    let unusable = |why: &str| Refusal {
        code: ReasonCode::DatasetUnusable,
        detail: format!(
            "on the machine {on}: the dataset {dataset} is not there and cannot be copied from the server: {why} ({HINT})"
        ),
    };
    match trouble {
        CopyError::Server(failed) => unusable(failed.words()),
        CopyError::Changed(why) => {
            let times = IN_VAIN + 1;
            unusable(&format!(
                "{why}; it changed in each of {times} tries to copy it: retry the job when nothing writes into it"
            ))
        }
        CopyError::Damaged(why) => unusable(&why),
        CopyError::Refused(ReasonCode::DatasetUnusable, why) => unusable(&why),
        CopyError::Refused(code, why) => Refusal { code, detail: format!("on the machine {on}: {why}") },
        CopyError::Disk(path, error) if error.kind() == io::ErrorKind::StorageFull => Refusal {
            code: ReasonCode::DiskFull,
            detail: format!(
                "on the machine {on}: {}: {error}; free some space, or give its agent another folder for copies of datasets with \
                 --dataset-cache, and retry the job",
                path.display()
            ),
        },
        CopyError::Disk(path, error) => {
            Refusal::other(format!("on the machine {on}: {}: {error}", path.display()))
        }
    }
}

#[cfg(test)]
mod tests;
