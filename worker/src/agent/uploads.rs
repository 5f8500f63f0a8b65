//! Uploads checkpoints from a disk that the server does not share, while training continues. Removes job folders that
//! are no longer needed.
//! All state is on disk: `jobs/<job>/here.json` names the last attempt on this machine, and `checkpoints/` contains its
//! checkpoints. So a restarted agent continues where the previous agent ended. The newest checkpoint is uploaded first,
//! because another machine would continue from it.

use super::{
    place::OwnDiskNote,
    remote::{AttemptClient, Remote, RequestError},
    state_dir::attempt_path,
};
use crate::checkpoint::{self, CheckpointError, MANIFEST, Manifest, OWN_DISK_NOTE};
use lockstep_host::lock;
use lockstep_protocol::{JobId, agent::WhatIsNeeded, backoff::Backoff};
use reqwest::StatusCode;
use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::io::{AsyncReadExt, AsyncSeekExt};

/// Interval between two checks of the folders.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Number of bytes of a file per request. The server accepts at most 8 MiB.
const PIECE_BYTES: u64 = 4 << 20;
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
/// Interval at which to ask the server whether a job's folder may be removed, if there is nothing to upload.
const ASK_EVERY: Duration = Duration::from_secs(5);
/// The same interval for a job that the server's database lacks.
const ASK_UNKNOWN_EVERY: Duration = Duration::from_secs(3600);
/// An empty file in the folder of a damaged checkpoint. It prevents the removal of the job's folder, because a user may
/// still be able to save files from the checkpoint.
const DAMAGED: &str = "DAMAGED";

/// Whether the agent's own disk contains no job, so that nothing has to be uploaded.
pub(super) fn has_no_job(dir: &Path) -> bool {
    let Ok(entries) = fs::read_dir(dir.join("jobs")) else { return true };
    entries.flatten().all(|entry| OwnDiskNote::read(&entry.path()).is_none())
}

#[derive(Default)]
struct JobUploads {
    /// For each checkpoint that the server has or refuses, or that is damaged here: the SHA-256 of its manifest.
    finished: HashMap<String, String>,
    /// When to try again after a failure, and the pauses after the next failures.
    retry: Option<(Instant, Backoff)>,
    /// When the server was last asked whether the job's folder may be removed.
    last_asked: Option<Instant>,
    /// Whether the server's database lacked the attempt when this agent asked.
    is_unknown: bool,
}

struct Uploads {
    dir: PathBuf,
    remote: Arc<Remote>,
    jobs: HashMap<JobId, JobUploads>,
}

/// Uploads as long as the agent runs. `dir` is the agent's folder. After each pass that left nothing to upload, sets
/// `uploaded` to the time at which the pass began: all earlier checkpoints are on the server or were refused.
pub(super) async fn run(dir: PathBuf, remote: Arc<Remote>, uploaded: Arc<Mutex<Option<Instant>>>) {
    let mut uploads = Uploads { dir, remote, jobs: HashMap::new() };
    loop {
        let began = Instant::now();
        if uploads.upload_all().await {
            *lock(&uploaded) = Some(began);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

#[derive(Debug, PartialEq, Eq)]
enum UploadResult {
    /// The server has the checkpoint, or has refused it permanently.
    Done,
    /// The files have changed since they were written, so the checkpoint cannot be uploaded.
    Damaged,
    /// The server does not yet have the report about the checkpoint, or the checkpoint was replaced meanwhile.
    NotYet,
}

impl Uploads {
    /// Uploads the checkpoints of all jobs once. Returns whether nothing is left to be uploaded.
    async fn upload_all(&mut self) -> bool {
        let Ok(entries) = fs::read_dir(self.dir.join("jobs")) else { return true };
        let mut all_done = true;
        let found: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        self.jobs.retain(|job, _| found.iter().any(|path| path.ends_with(job.as_str())));
        for job_dir in found {
            let Some(note) = OwnDiskNote::read(&job_dir) else { continue };
            let mut job_uploads = self.jobs.remove(&note.attempt.job).unwrap_or_default();
            if job_uploads.retry.is_some_and(|(until, _)| Instant::now() < until) {
                all_done = false;
            } else {
                match self.upload_job(&note, &job_dir, &mut job_uploads).await {
                    Ok(is_done) => {
                        all_done &= is_done;
                        job_uploads.retry = None;
                    }
                    Err(failed) => {
                        all_done = false;
                        let mut backoff = job_uploads.retry.map_or(RETRY, |(_, backoff)| backoff);
                        if job_uploads.retry.is_none() {
                            let job = note.attempt.job.as_str();
                            tracing::warn!(
                                job,
                                why = failed.detail(),
                                "checkpoints are not uploaded for now"
                            );
                        }
                        job_uploads.retry = Some((Instant::now() + backoff.next_pause(), backoff));
                    }
                }
            }
            self.jobs.insert(note.attempt.job.clone(), job_uploads);
        }
        all_done
    }

    /// Whether ranks of the attempt run on this machine, or the server has not acknowledged all reports of the attempt.
    fn is_active(&self, note: &OwnDiskNote) -> bool {
        attempt_path(&self.dir, &note.attempt).exists()
    }

    /// Uploads the checkpoints of one job that the server lacks. Removes the job's folder when the server no longer
    /// needs it. Returns whether nothing is left to do.
    async fn upload_job(
        &self,
        note: &OwnDiskNote,
        job_dir: &Path,
        job_uploads: &mut JobUploads,
    ) -> Result<bool, RequestError> {
        // Checked before the folder is listed. So if the attempt is over by now, the list includes its last checkpoint.
        let is_active = self.is_active(note);
        let mut is_done = true;
        let folder = job_dir.join("checkpoints");
        let names = checkpoint::list(&folder).map_err(|e| RequestError::Later(e.to_string()))?;
        let names: Vec<_> = names.into_iter().map(|(e, s)| checkpoint::folder_name(e, s)).collect();
        job_uploads.finished.retain(|name, _| names.contains(name));
        for name in names.iter().rev() {
            let path = folder.join(name).join(MANIFEST);
            let Ok(manifest_json) = fs::read(&path) else { continue };
            // Without rank 0 on this machine, a checkpoint older than the attempt was reported by an earlier attempt. No
            // report about it is in flight, so the server's refusal is final. With rank 0, the agent asks again until the
            // server has acknowledged all reports of the attempt.
            let is_earlier = !note.has_rank_0 && is_older(&path, &job_dir.join(OWN_DISK_NOTE));
            let report_may_be_in_flight = is_active && !is_earlier;
            let sum = hex::encode(Sha256::digest(&manifest_json));
            if job_uploads.finished.get(name) == Some(&sum) {
                continue;
            }
            let client = self.remote.client(&note.attempt)?;
            match upload(&client, &folder.join(name), name, &manifest_json, &sum, report_may_be_in_flight)
                .await?
            {
                UploadResult::Done => {
                    job_uploads.finished.insert(name.clone(), sum);
                }
                UploadResult::Damaged => {
                    tracing::error!(
                        folder = %folder.join(name).display(),
                        "this checkpoint is damaged on this disk and is not uploaded; its job's folder stays here"
                    );
                    fs::write(folder.join(name).join(DAMAGED), "")
                        .map_err(|e| RequestError::Later(e.to_string()))?;
                    job_uploads.finished.insert(name.clone(), sum);
                }
                UploadResult::NotYet => is_done = false,
            }
        }
        // Intact files of a damaged checkpoint may exist only on this disk.
        if names.iter().any(|name| folder.join(name).join(DAMAGED).exists()) {
            return Ok(is_done);
        }
        let pause = if job_uploads.is_unknown { ASK_UNKNOWN_EVERY } else { ASK_EVERY };
        if is_active || !is_done || job_uploads.last_asked.is_some_and(|asked| asked.elapsed() < pause) {
            return Ok(is_done);
        }
        job_uploads.last_asked = Some(Instant::now());
        // An error, or a response that is not the server's (a proxy's), removes no files.
        let needed = self.remote.client(&note.attempt)?.what_is_needed().await?;
        let is_unknown = needed == WhatIsNeeded::Unknown;
        if is_unknown && !job_uploads.is_unknown {
            tracing::warn!(
                job = %note.attempt.job,
                folder = %job_dir.display(),
                "the server's database lacks this attempt, as after the restore of an older backup; the job's folder stays here until \
                 somebody removes it"
            );
        }
        job_uploads.is_unknown = is_unknown;
        // A new attempt may have begun meanwhile.
        let is_same = OwnDiskNote::read(job_dir).is_some_and(|now| now == *note);
        if needed == WhatIsNeeded::Nothing && is_same && !self.is_active(note) {
            tracing::info!(job = %note.attempt.job, "the job no longer needs its folder on this machine");
            if let Err(error) = fs::remove_dir_all(job_dir) {
                tracing::warn!(%error, folder = %job_dir.display(), "the job's folder cannot be removed");
            }
        }
        Ok(true)
    }
}

/// Whether a file was last written before another file.
fn is_older(path: &Path, other: &Path) -> bool {
    let written = |path: &Path| path.metadata().and_then(|about| about.modified()).ok();
    written(path).zip(written(other)).is_some_and(|(path, other)| path < other)
}

/// Sends the parts of a checkpoint that the server lacks. `sum` is the SHA-256 of the manifest.
async fn upload(
    client: &AttemptClient<'_>,
    folder: &Path,
    name: &str,
    manifest_json: &[u8],
    sum: &str,
    report_may_be_in_flight: bool,
) -> Result<UploadResult, RequestError> {
    let state = match client.upload_state(name).await {
        Ok(state) => state,
        Err(failed) => return handle_refusal(failed, name, report_may_be_in_flight),
    };
    if state.stored.as_deref() == Some(sum) {
        return Ok(UploadResult::Done);
    }
    let Ok(manifest) = serde_json::from_slice::<Manifest>(manifest_json) else {
        return Ok(UploadResult::Damaged);
    };
    let began = Instant::now();
    let mut received = state.received;
    if state.manifest.as_deref() != Some(sum) {
        client.upload_piece(name, MANIFEST, 0, manifest_json.to_vec()).await.map_err(make_temporary)?;
        received.clear();
    }
    for (file, entry) in &manifest.files {
        let mut offset = received.get(file).copied().unwrap_or(0);
        while offset < entry.size_bytes {
            let size = (entry.size_bytes - offset).min(PIECE_BYTES);
            let Ok(piece) = read(&folder.join(file), offset, size).await else {
                // The checkpoint may be damaged, or retention has removed it, or a newer checkpoint of the same step
                // has replaced it. The next upload checks again.
                let is_same = fs::read(folder.join(MANIFEST)).is_ok_and(|now| now == manifest_json);
                let is_damaged = is_same && is_damaged(folder.to_owned()).await;
                return Ok(if is_damaged { UploadResult::Damaged } else { UploadResult::NotYet });
            };
            client.upload_piece(name, file, offset, piece).await.map_err(make_temporary)?;
            offset += size;
        }
        // An empty file must be sent as well.
        if entry.size_bytes == 0 && !received.contains_key(file) {
            client.upload_piece(name, file, 0, Vec::new()).await.map_err(make_temporary)?;
        }
    }
    if let Err(failed) = client.finish_upload(name).await {
        if matches!(failed, RequestError::Never(..)) && is_damaged(folder.to_owned()).await {
            return Ok(UploadResult::Damaged);
        }
        // A file may have been damaged in transit, or replaced meanwhile.
        return Err(make_temporary(failed));
    }
    tracing::info!(checkpoint = name, secs = began.elapsed().as_secs_f64(), "uploaded");
    Ok(UploadResult::Done)
}

/// Handles the server's refusal to report the state of an upload. If `report_may_be_in_flight`, a report in flight may still
/// announce this checkpoint or end the attempt, so the refusal is not final.
fn handle_refusal(
    failed: RequestError,
    name: &str,
    report_may_be_in_flight: bool,
) -> Result<UploadResult, RequestError> {
    match failed {
        RequestError::Never(StatusCode::NOT_FOUND | StatusCode::FORBIDDEN, _) if report_may_be_in_flight => {
            Ok(UploadResult::NotYet)
        }
        RequestError::Never(_, why) => {
            tracing::info!(checkpoint = name, why, "the checkpoint is not uploaded");
            Ok(UploadResult::Done)
        }
        failed => Err(failed),
    }
}

/// Whether files of a checkpoint differ from its manifest. Files that cannot be read now may be intact.
async fn is_damaged(folder: PathBuf) -> bool {
    let checked = tokio::task::spawn_blocking(move || checkpoint::validate(&folder)).await;
    matches!(checked, Ok(Err(CheckpointError::Damaged { .. })))
}

/// Makes a failure temporary, because the next upload asks the server again which files it has.
fn make_temporary(failed: RequestError) -> RequestError {
    RequestError::Later(failed.detail().to_owned())
}

async fn read(path: &Path, offset: u64, size: u64) -> io::Result<Vec<u8>> {
    let mut file = tokio::fs::File::open(path).await?;
    file.seek(io::SeekFrom::Start(offset)).await?;
    let mut piece = vec![0; size as usize];
    file.read_exact(&mut piece).await?;
    Ok(piece)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::agent::{AttemptRef, FencingToken};
    use std::time::SystemTime;

    /// Creates a job's folder on the agent's own disk. Returns its attempt, and the empty folder of a checkpoint.
    fn job_on_own_disk(dir: &Path, attempt: u32, has_rank_0: bool) -> (AttemptRef, PathBuf) {
        let attempt = AttemptRef { job: JobId::generate(), attempt, fencing_token: FencingToken::NONE };
        let job_dir = dir.join("jobs").join(attempt.job.as_str());
        let folder = job_dir.join("checkpoints/1-10");
        fs::create_dir_all(&folder).unwrap();
        OwnDiskNote { attempt: attempt.clone(), has_rank_0 }.write(&job_dir).unwrap();
        (attempt, folder)
    }

    #[tokio::test]
    async fn checkpoints_of_earlier_attempts_are_offered_for_upload() {
        for has_rank_0 in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let (remote, requests) = super::super::test_server::server();
            let (attempt, folder) = job_on_own_disk(dir.path(), 2, has_rank_0);
            fs::write(folder.join(MANIFEST), br#"{"version":1,"epoch":1,"step":10,"files":{}}"#).unwrap();
            let written = fs::File::options().write(true).open(folder.join(MANIFEST)).unwrap();
            written.set_modified(SystemTime::now() - Duration::from_secs(60)).unwrap();
            // This file marks the attempt as active: its reports may still be in flight.
            fs::create_dir(dir.path().join("attempts")).unwrap();
            fs::write(dir.path().join(format!("attempts/{}-2.json", attempt.job)), "").unwrap();
            let mut uploads =
                Uploads { dir: dir.path().into(), remote: Arc::new(remote), jobs: HashMap::new() };
            let is_done = uploads.upload_all().await;
            assert_eq!(*requests.lock().unwrap(), ["GET uploads/1-10"]);
            // Without rank 0, no report about an earlier checkpoint is in flight.
            assert_eq!(is_done, !has_rank_0);
        }
    }

    #[tokio::test]
    async fn a_damaged_checkpoint_is_kept_and_damage_in_transit_is_retried() {
        for damage in [Some("abd"), Some("ab"), None] {
            let damaged_here = damage.is_some();
            let dir = tempfile::tempdir().unwrap();
            let (remote, requests) = super::super::test_server::server_with(|method| match method {
                "GET" => ("200 OK", r#"{"received":{},"needed":"nothing"}"#),
                "POST" => {
                    ("422 Unprocessable Entity", r#"{"code":"checkpoint_damaged","detail":"it differs"}"#)
                }
                _ => ("204 No Content", ""),
            });
            let (_, folder) = job_on_own_disk(dir.path(), 1, true);
            let entry = format!(r#"{{"size_bytes":3,"sha256":"{}"}}"#, hex::encode(Sha256::digest(b"abc")));
            let names = ["model.safetensors", "optimizer.safetensors", "state.json"];
            for name in names {
                fs::write(folder.join(name), "abc").unwrap();
            }
            if let Some(bytes) = damage {
                fs::write(folder.join(names[0]), bytes).unwrap();
            }
            let files = names.map(|name| format!(r#""{name}":{entry}"#)).join(",");
            let manifest = format!(r#"{{"version":1,"epoch":1,"step":10,"files":{{{files}}}}}"#);
            fs::write(folder.join(MANIFEST), manifest).unwrap();
            let mut uploads =
                Uploads { dir: dir.path().into(), remote: Arc::new(remote), jobs: HashMap::new() };
            uploads.upload_all().await;
            let job = uploads.jobs.values().next().unwrap();
            assert_eq!(job.finished.contains_key("1-10"), damaged_here, "{:?}", requests.lock().unwrap());
            assert_eq!(job.retry.is_none(), damaged_here, "the upload is retried after a pause");
            // The files also stay after a restart of the agent.
            for jobs in [std::mem::take(&mut uploads.jobs), HashMap::new()] {
                uploads.jobs = jobs;
                uploads.upload_all().await;
                assert!(folder.join(names[1]).exists(), "no other copy of the intact files may exist");
            }
        }
    }

    #[test]
    fn a_refusal_is_final_only_without_reports_in_flight() {
        let never = |status| RequestError::Never(status, "no".into());
        for status in [StatusCode::NOT_FOUND, StatusCode::FORBIDDEN] {
            assert_eq!(handle_refusal(never(status), "1-17", true), Ok(UploadResult::NotYet), "{status}");
            assert_eq!(handle_refusal(never(status), "1-17", false), Ok(UploadResult::Done), "{status}");
        }
        assert_eq!(
            handle_refusal(never(StatusCode::UNPROCESSABLE_ENTITY), "1-17", true),
            Ok(UploadResult::Done)
        );
        // The server answers 503 while another machine uploads the checkpoint. This machine asks again, in case that
        // machine is lost.
        for report_may_be_in_flight in [true, false] {
            let later = RequestError::Later("503".into());
            assert_eq!(handle_refusal(later.clone(), "1-17", report_may_be_in_flight), Err(later));
        }
    }
}
