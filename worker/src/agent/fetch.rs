//! Before ranks start, fetches from the server the files that this machine's disk lacks.

use super::{
    place::pretrained_dir,
    preflight::{
        Refusal,
        dataset::{describe_difference, read_note},
    },
    remote::{AttemptClient, RETRY, Remote, RequestError},
    state_dir::StoredAttempt,
};
use crate::checkpoint::{self, CheckpointError, MANIFEST, Manifest};
use lockstep_protocol::{backoff::Backoff, dataset::DATASET_NOTE, limits::MANIFEST_BYTES};
use reqwest::StatusCode;
use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

/// Maximum number of times that a checkpoint with wrong checksums is fetched again.
const MAX_REFETCHES: u32 = 3;

enum FetchError {
    Server(RequestError),
    Disk(PathBuf, io::Error),
    /// A checksum is wrong. The data that had arrived was removed.
    Damaged(String),
}

impl From<RequestError> for FetchError {
    fn from(failed: RequestError) -> Self {
        Self::Server(failed)
    }
}

fn on_disk(path: &Path) -> impl Fn(io::Error) -> FetchError + '_ {
    move |error| FetchError::Disk(path.into(), error)
}

/// Reports to the server that this attempt's files are on the agent's own disk. While the server is unreachable, the call
/// retries. Dropping the future ends the wait.
///
/// # Errors
/// The server refuses the report, and a retry would not help.
pub(super) async fn report_own_disk(stored: &StoredAttempt, remote: &Remote) -> Result<(), Refusal> {
    let mut backoff = RETRY;
    let begin = || async { remote.client(&stored.start.attempt)?.begin().await };
    while let Err(failed) = begin().await {
        wait_to_retry(remote, &mut backoff, failed.into()).await?;
    }
    Ok(())
}

/// Fetches missing files to the agent's own disk. While the server is unreachable, the call retries. Dropping the
/// future ends the wait.
///
/// # Errors
/// A file cannot be fetched, and a retry would not help.
pub(super) async fn fetch_missing(stored: &StoredAttempt, remote: &Remote) -> Result<(), Refusal> {
    let start = &stored.start;
    // The note has the fingerprint of the dataset with which the job began.
    if let Some(note) = &start.files.dataset {
        let path = stored.job_dir.join(DATASET_NOTE);
        let json = serde_json::to_vec(note).map_err(|e| Refusal::NotStarted(e.to_string()))?;
        lockstep_host::write_atomically(&path, &json)
            .map_err(|e| refusal(remote, &FetchError::Disk(path, e)))?;
    }
    // Rank 0 reads checkpoints, and sends their contents to the other ranks.
    if !start.has_rank_0() {
        return Ok(());
    }
    if let Some(name) = &start.resume {
        let id = format!("{}-{name}", start.attempt.job);
        ensure_checkpoint(stored, remote, &id, &stored.checkpoints_dir().join(name)).await
    } else if let Some(id) = &start.files.pretrained {
        ensure_checkpoint(stored, remote, id, &pretrained_dir(&stored.job_dir, id)).await
    } else {
        Ok(())
    }
}

/// Sends the dataset's fingerprint to the server after the preflight check of the job's first start. Machines on which
/// the job starts later compare their fingerprints with it.
///
/// # Errors
/// Another machine has started the job with a different dataset.
pub(super) async fn publish_dataset(stored: &StoredAttempt, remote: &Remote) -> Result<(), Refusal> {
    if stored.start.files.dataset.is_some() {
        return Ok(());
    }
    let path = stored.job_dir.join(DATASET_NOTE);
    let unreadable = || FetchError::Disk(path.clone(), io::ErrorKind::InvalidData.into());
    let own = read_note(&path).ok_or_else(|| refusal(remote, &unreadable()))?;
    // The server knows which machine sends the fingerprint.
    let note = serde_json::to_vec(&own.fingerprint).map_err(|e| Refusal::NotStarted(e.to_string()))?;
    let mut backoff = RETRY;
    let other = loop {
        match send_fingerprint(stored, remote, &note).await {
            Ok(None) => return Ok(()),
            Ok(Some(other)) => break other,
            Err(error) => wait_to_retry(remote, &mut backoff, error).await?,
        }
    };
    // Without the note, the next start compares with the server's fingerprint.
    let _ = fs::remove_file(&path);
    Err(Refusal::DatasetUnusable(describe_difference(stored, &own, &other)))
}

/// Fetches the checkpoint `id` to `target`, unless a valid checkpoint is there.
async fn ensure_checkpoint(
    stored: &StoredAttempt,
    remote: &Remote,
    id: &str,
    target: &Path,
) -> Result<(), Refusal> {
    let is_valid = {
        let target = target.to_owned();
        tokio::task::spawn_blocking(move || checkpoint::validate(&target).is_ok()).await
    };
    if is_valid.unwrap_or(false) {
        return Ok(());
    }
    tracing::info!(checkpoint = id, "fetching a checkpoint from the server");
    let (mut backoff, mut refetches) = (RETRY, 0);
    while let Err(error) = fetch(stored, remote, id, target).await {
        let error = match error {
            FetchError::Damaged(why) if refetches < MAX_REFETCHES => {
                refetches += 1;
                FetchError::Server(RequestError::Later(why))
            }
            // The server has set the job's damaged checkpoint aside, so the next attempt continues from the checkpoint before.
            // A checkpoint of another job has no replacement.
            FetchError::Server(RequestError::Never(StatusCode::UNPROCESSABLE_ENTITY, why))
                if stored.start.resume.is_some() =>
            {
                return Err(Refusal::CheckpointDamaged(format!("on the machine {}: {why}", remote.name)));
            }
            error => error,
        };
        wait_to_retry(remote, &mut backoff, error).await?;
    }
    tracing::info!(checkpoint = id, "fetched");
    Ok(())
}

/// Sends the fingerprint. Returns the server's description of its own fingerprint of the job's dataset if the two
/// differ, and `None` if they are equal or the server had none.
async fn send_fingerprint(
    stored: &StoredAttempt,
    remote: &Remote,
    note: &[u8],
) -> Result<Option<String>, FetchError> {
    match remote.client(&stored.start.attempt)?.send_fingerprint(note.to_vec()).await {
        Err(RequestError::Never(StatusCode::CONFLICT, words)) => {
            // Strips the prefix "the server answered STATUS: ".
            Ok(Some(words.split_once(": ").map_or(words.as_str(), |(_, detail)| detail).to_owned()))
        }
        other => Ok(other.map(|()| None)?),
    }
}

/// One try to fetch. Data that has arrived is kept for the next try.
async fn fetch(stored: &StoredAttempt, remote: &Remote, id: &str, target: &Path) -> Result<(), FetchError> {
    let client = remote.client(&stored.start.attempt)?;
    let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else { return Ok(()) };
    let partial = parent.join(format!(".fetch-{}", name.to_string_lossy()));
    fs::create_dir_all(&partial).map_err(on_disk(&partial))?;
    let manifest_json = fetch_manifest(&client, id).await?;
    let manifest: Manifest = serde_json::from_slice(&manifest_json)
        .map_err(|e| FetchError::Damaged(format!("{MANIFEST}: {e}")))?;
    let path = partial.join(MANIFEST);
    // Files that belong to another manifest are of no use.
    if fs::read(&path).ok().as_ref() != Some(&manifest_json) {
        fs::remove_dir_all(&partial).map_err(on_disk(&partial))?;
        fs::create_dir_all(&partial).map_err(on_disk(&partial))?;
        fs::write(&path, &manifest_json).map_err(on_disk(&path))?;
    }

    for (file, expected) in &manifest.files {
        if Path::new(file).file_name() != Some(file.as_ref()) {
            return Err(FetchError::Damaged(format!("{MANIFEST} names {file:?}")));
        }
        let path = partial.join(file);
        let mut output = File::options().create(true).append(true).open(&path).map_err(on_disk(&path))?;
        let mut received = output.metadata().map_err(on_disk(&path))?.len();
        if received > expected.size_bytes {
            output.set_len(0).map_err(on_disk(&path))?;
            received = 0;
        }
        if received == expected.size_bytes {
            continue;
        }
        let mut download = client.file(id, file, received).await?;
        while let Some(bytes) = download.next().await? {
            received += bytes.len() as u64;
            if received > expected.size_bytes {
                break;
            }
            output.write_all(&bytes).map_err(on_disk(&path))?;
        }
    }

    let (parent, target) = (parent.to_owned(), target.to_owned());
    let finished = tokio::task::spawn_blocking(move || finish(&partial, &target, &parent)).await;
    finished.map_err(|e| FetchError::Disk(PathBuf::new(), io::Error::other(e)))?
}

/// Checks a fetched checkpoint, syncs it and renames it to its final name.
fn finish(partial: &Path, target: &Path, parent: &Path) -> Result<(), FetchError> {
    let manifest = match checkpoint::validate(partial) {
        Ok(manifest) => manifest,
        Err(CheckpointError::Io { path, error }) => return Err(FetchError::Disk(path, error)),
        Err(error) => {
            fs::remove_dir_all(partial).map_err(on_disk(partial))?;
            return Err(FetchError::Damaged(error.to_string()));
        }
    };
    let sync = |path: &Path| File::open(path).and_then(|file| file.sync_all()).map_err(on_disk(path));
    for file in manifest.files.keys().map(String::as_str).chain([MANIFEST]) {
        sync(&partial.join(file))?;
    }
    sync(partial)?;
    if target.exists() {
        // The checkpoint there is damaged.
        fs::remove_dir_all(target).map_err(on_disk(target))?;
    }
    fs::rename(partial, target).map_err(on_disk(target))?;
    sync(parent)
}

async fn fetch_manifest(client: &AttemptClient<'_>, id: &str) -> Result<Vec<u8>, FetchError> {
    let mut download = client.file(id, MANIFEST, 0).await?;
    let mut content = Vec::new();
    while let Some(bytes) = download.next().await? {
        content.extend_from_slice(&bytes);
        if content.len() > MANIFEST_BYTES {
            return Err(FetchError::Damaged(format!("{MANIFEST} has more than {MANIFEST_BYTES} bytes")));
        }
    }
    Ok(content)
}

/// Waits until it is time for another try after the temporary `error`.
///
/// # Errors
/// The error is permanent.
async fn wait_to_retry(remote: &Remote, backoff: &mut Backoff, error: FetchError) -> Result<(), Refusal> {
    let FetchError::Server(RequestError::Later(why)) = error else { return Err(refusal(remote, &error)) };
    tracing::warn!(why, "waiting for the server before ranks can start");
    tokio::time::sleep(backoff.next_pause()).await;
    Ok(())
}

fn refusal(remote: &Remote, error: &FetchError) -> Refusal {
    let machine = &remote.name;
    match error {
        FetchError::Server(failed) => Refusal::NotStarted(format!(
            "{machine} cannot fetch the job's files from the server: {}",
            failed.detail()
        )),
        FetchError::Disk(path, error) if error.kind() == io::ErrorKind::StorageFull => {
            let path = path.display();
            Refusal::DiskFull(format!("{machine}: {path}: {error}; free some space and retry the job"))
        }
        FetchError::Disk(path, error) => {
            Refusal::NotStarted(format!("{machine}: {}: {error}", path.display()))
        }
        FetchError::Damaged(why) => {
            Refusal::NotStarted(format!("{machine} fetched a damaged checkpoint from the server: {why}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::{agent::StartAttempt, spec::JobSpec};

    #[tokio::test]
    async fn a_damaged_checkpoint_is_replaced_in_the_next_attempt_if_the_job_has_another() {
        type Answer = fn(&str) -> (&'static str, &'static str);
        let damaged: Answer =
            |_| ("422 Unprocessable Entity", r#"{"code":"checkpoint_damaged","detail":"it is damaged"}"#);
        let last: Answer = |_| ("409 Conflict", r#"{"code":"conflict","detail":"it was the last"}"#);
        for (answer, is_own, is_replaced) in
            [(damaged, true, true), (last, true, false), (damaged, false, false)]
        {
            let dir = tempfile::tempdir().unwrap();
            let (remote, _) = super::super::test_server::server_with(answer);
            let mut start = StartAttempt::local(JobSpec::default(), "/none", 1);
            match is_own {
                true => start.resume = Some("1-20".into()),
                false => start.files.pretrained = Some("another-1-20".into()),
            }
            let stored = StoredAttempt { start, job_dir: dir.path().into() };
            let refused = fetch_missing(&stored, &remote).await.unwrap_err();
            assert_eq!(matches!(refused, Refusal::CheckpointDamaged(_)), is_replaced, "{refused:?}");
        }
    }
}
