//! Files of agents with their own disk. Such an agent uploads its checkpoints to the server while training continues, and a machine
//! that continues the job downloads them from the server.
//!
//! Headers of a request name the agent and the fencing token of its attempt. The access token of the request must belong to that agent.
//! An agent may download the files that its current attempt may need. It may upload the checkpoints that it has reported: as the agent of
//! rank 0, or as another agent after a rank was lost. It may also upload these checkpoints after the attempt's end or during a later
//! attempt.

use super::requesting_agent::{AttemptPath, RequestingAgent};
use crate::api::prelude::*;
use crate::{
    api::{
        PieceQuery,
        checkpoints::{self, files as checkpoint_files},
        read_piece,
    },
    auth::Auth,
    checkpoints::{
        Checkpoints, disk_checks,
        manifest::MANIFEST,
        uploads::{PIECE_BYTES, Upload, UploadError},
    },
    datasets::notes,
    events::Events,
    http::error::{Code, disk_error, run_blocking},
    store::CheckpointRow,
};
use axum::{body::Body, extract::rejection::BytesRejection, http::Request};
use bytes::Bytes;
use lockstep_protocol::{
    JobId,
    agent::{AttemptRef, UploadState, WhatIsNeeded},
    dataset::DatasetNote,
};

/// Maximum size of a dataset's fingerprint, in bytes.
const FINGERPRINT_BYTES: usize = 64 << 10;

/// Report that an agent has its own disk
///
/// The agent sends this before it starts ranks of an attempt. The server then expects the agent to upload the attempt's checkpoints.
#[utoipa::path(post, path = "/agent/attempts/{job}/{attempt}", tag = "agents",
    params(("job" = String, Path), ("attempt" = u32, Path)),
    responses((status = 204), (status = 403, body = Problem, description = "The attempt does not belong to this agent")))]
pub(crate) async fn begin(
    State(checkpoints): State<Arc<Checkpoints>>,
    requester: RequestingAgent,
) -> Result<StatusCode> {
    requester.check_attempt(&checkpoints.agents)?;
    checkpoints.store.note_own_disk(&requester.attempt, &requester.agent_id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Check whether an attempt's files are still needed
///
/// An agent with its own disk sends this when it has uploaded all checkpoints.
#[utoipa::path(get, path = "/agent/attempts/{job}/{attempt}", tag = "agents",
    params(("job" = String, Path), ("attempt" = u32, Path)), responses((status = 200, body = WhatIsNeeded)))]
pub(crate) async fn needed(
    State(auth): State<Arc<Auth>>,
    requester: RequestingAgent,
) -> Result<Json<WhatIsNeeded>> {
    let AttemptRef { job, attempt, .. } = &requester.attempt;
    Ok(Json(match auth.store.job(job).await? {
        // After the restore of a backup, another attempt may have the same number, but not the same fencing token.
        Some(row) if auth.store.agent_place(&requester.attempt, &requester.agent_id).await?.is_some() => {
            if row.job.attempt == *attempt && !row.job.state.is_final() {
                WhatIsNeeded::Folder
            } else {
                WhatIsNeeded::Nothing
            }
        }
        None if was_deleted(&auth, job).await? => WhatIsNeeded::Nothing,
        _ => {
            let agent = requester.agent_id.as_str();
            tracing::warn!(
                %job, attempt, agent,
                "an agent has the folder of an attempt that the database lacks, as after the restore of a backup; the agent keeps \
                 jobs/{job} in its data directory"
            );
            WhatIsNeeded::Unknown
        }
    }))
}

/// Whether the audit log has the deletion of a job.
async fn was_deleted(auth: &Auth, job: &JobId) -> Result<bool> {
    // Entries are written after the response.
    auth.audit.flush().await;
    Ok(auth.store.has_audit_entry("DELETE /api/v1/jobs/{id}", &format!("/api/v1/jobs/{job}")).await?)
}

/// Download a file of a checkpoint to the agent that continues from it
///
/// If the checkpoint from which the attempt should continue is damaged and the job has another checkpoint, the damaged checkpoint is set
/// aside: the job's next attempt continues from the previous checkpoint.
#[utoipa::path(get, path = "/agent/attempts/{job}/{attempt}/checkpoints/{id}/{file}", tag = "agents",
    params(("job" = String, Path), ("attempt" = u32, Path), ("id" = String, Path), ("file" = String, Path)),
    responses((status = 200, content_type = "application/octet-stream"), (status = 206, description = "The requested range"),
        (status = 409, body = Problem, description = "The checkpoint is damaged, and the job has no other checkpoint"),
        (status = 422, body = Problem, description = "The checkpoint is damaged: end the attempt")))]
pub(crate) async fn file(
    State(checkpoints): State<Arc<Checkpoints>>,
    requester: RequestingAgent,
    request: Request<Body>,
) -> Result<Response> {
    requester.check_attempt(&checkpoints.agents)?;
    let AttemptPath { id, file, .. } = &requester.path;
    let row = checkpoints::find(&*checkpoints.store, id).await?;
    if row.job != requester.attempt.job {
        let job = checkpoints.store.job(&requester.attempt.job).await?;
        let pretrained = job.and_then(|row| row.job.spec.model.pretrained);
        if pretrained.as_ref() != Some(id) {
            return Err(Error::Forbidden("the attempt does not need this checkpoint".into()));
        }
    }
    if file == MANIFEST {
        let megabytes = row.info.size_bytes as f64 / 1e6;
        let name = requester.agent_name(&checkpoints.agents);
        let text = format!("{name} fetches checkpoint {id} ({megabytes:.1} MB) from the server");
        checkpoints.events.log_once(&requester.attempt.job, requester.attempt.attempt, "fetched", text).await;
    }
    let path = Path((id.clone(), file.clone()));
    match checkpoint_files::file(State(Arc::clone(&checkpoints)), path, request).await {
        Err(error @ (Error::WithCode(Code::CheckpointDamaged, _) | Error::NotFound(_)))
            if row.job == requester.attempt.job =>
        {
            Err(fall_back(&checkpoints, &row, error).await?)
        }
        response => response,
    }
}

/// Sets a damaged checkpoint aside and removes its row, if the job has another checkpoint. Ranks that use the server's disk do the same.
/// Returns the error to respond with, which is `error` if the checkpoint is neither damaged nor missing.
async fn fall_back(checkpoints: &Checkpoints, row: &CheckpointRow, error: Error) -> Result<Error> {
    let copies = checkpoints.copies(&row.job).await?;
    let rows = checkpoints.store.checkpoints(&row.job).await?;
    let mut others = rows.iter().filter(|other| other.id != row.id);
    if !others.any(|other| checkpoints.has_copy(other, copies.of(&other.id))) {
        return Ok(match error {
            Error::WithCode(..) => Error::Conflict(format!(
                "checkpoint {} is damaged, and no valid checkpoint is left to continue from; submit the job again to begin from the start",
                row.id
            )),
            missing => missing,
        });
    }
    let folder = checkpoints.folder(row);
    if folder.exists() {
        let consequence = "the job continues from the previous one";
        disk_checks::set_damaged_aside(checkpoints, row, consequence).await.map_err(|e| disk_error(&e))?;
    }
    if folder.exists() {
        // The folder is not damaged, or another folder has replaced it meanwhile.
        return Ok(error);
    }
    let _guard = checkpoints.removal_lock.lock().await;
    let (removed, added) = (vec![(row.info.epoch, row.info.step)], Vec::new());
    checkpoints.change_rows(&row.job, removed, added).await?;
    let flaw = if matches!(error, Error::NotFound(_)) { "has no files on the server" } else { "is damaged" };
    let detail =
        format!("checkpoint {} {flaw}; the next attempt continues from the previous checkpoint", row.id);
    Ok(Error::WithCode(Code::CheckpointDamaged, detail))
}

/// Report the dataset's fingerprint at a job's first start
///
/// The first reported fingerprint is stored. 409 means that the dataset on this agent's machine differs.
#[utoipa::path(post, path = "/agent/attempts/{job}/{attempt}/dataset", tag = "agents",
    params(("job" = String, Path), ("attempt" = u32, Path)), request_body = Object,
    responses((status = 204), (status = 409, body = Problem, description = "Another machine of the job has another dataset")))]
pub(crate) async fn dataset(
    State(checkpoints): State<Arc<Checkpoints>>,
    requester: RequestingAgent,
    body: Result<Bytes, BytesRejection>,
) -> Result<StatusCode> {
    requester.check_attempt(&checkpoints.agents)?;
    let body = body?;
    if body.len() > FINGERPRINT_BYTES {
        let detail = format!("a dataset's fingerprint must have at most {FINGERPRINT_BYTES} bytes");
        return Err(Error::Refused(StatusCode::PAYLOAD_TOO_LARGE, detail));
    }
    let fingerprint = serde_json::from_slice(&body)
        .map_err(|e| Error::BadRequest(format!("a dataset's fingerprint must be JSON: {e}")))?;
    let job_dir = checkpoints.config.job_dir(&requester.attempt.job);
    let own = DatasetNote { fingerprint, machine: Some(requester.agent_name(&checkpoints.agents)) };
    let other = run_blocking(move || notes::keep_dataset_note(&job_dir, &own)).await?;
    match other.map_err(|e| disk_error(&e))? {
        None => Ok(StatusCode::NO_CONTENT),
        Some(other) => Err(Error::Conflict(other)),
    }
}

/// Show the uploaded part of a checkpoint
#[utoipa::path(get, path = "/agent/attempts/{job}/{attempt}/uploads/{name}", tag = "agents",
    params(("job" = String, Path), ("attempt" = u32, Path), ("name" = String, Path)), responses((status = 200, body = UploadState)))]
pub(crate) async fn upload_state(
    State(checkpoints): State<Arc<Checkpoints>>,
    requester: RequestingAgent,
) -> Result<Json<UploadState>> {
    requester.check_upload(&checkpoints).await?;
    let upload = Upload::of(&checkpoints.config.job_dir(&requester.attempt.job), &requester.path.name);
    let state = run_blocking(move || upload.state()).await?;
    Ok(Json(state.map_err(refusal)?))
}

/// Upload a piece of a checkpoint's file
///
/// `MANIFEST.json` must be uploaded first, in one piece. The manifest limits the sizes of the other files.
#[utoipa::path(put, path = "/agent/attempts/{job}/{attempt}/uploads/{name}/{file}", tag = "agents",
    params(("job" = String, Path), ("attempt" = u32, Path), ("name" = String, Path), ("file" = String, Path), PieceQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"), responses((status = 204),
        (status = 409, body = Problem, description = "The piece does not follow the uploaded bytes"),
        (status = 422, body = Problem, description = "The manifest or the piece is invalid"),
        (status = 507, body = Problem, description = "The server's disk is full")))]
pub(crate) async fn upload_piece(
    State(checkpoints): State<Arc<Checkpoints>>,
    requester: RequestingAgent,
    Query(piece): Query<PieceQuery>,
    request: Request<Body>,
) -> Result<StatusCode> {
    requester.check_upload(&checkpoints).await?;
    // Read only after the check of the agent, because pieces are large.
    let body = read_piece(request.into_body(), PIECE_BYTES).await?;
    let upload = Upload::of(&checkpoints.config.job_dir(&requester.attempt.job), &requester.path.name);
    let is_live = requester.has_attempt(&checkpoints.agents);
    let file = requester.path.file.clone();
    let stored = run_blocking(move || match file.as_str() {
        MANIFEST => upload.begin(&body, is_live),
        file => upload.append(file, piece.offset, &body).map(|_| ()),
    });
    match stored.await? {
        Ok(()) => Ok(StatusCode::NO_CONTENT),
        Err(why) => Err(report_refusal(&checkpoints.events, &requester, why).await),
    }
}

/// Complete the upload of a checkpoint
///
/// The server checks the files against the manifest. Only then can the checkpoint be downloaded, forked or used for the next attempt.
#[utoipa::path(post, path = "/agent/attempts/{job}/{attempt}/uploads/{name}", tag = "agents",
    params(("job" = String, Path), ("attempt" = u32, Path), ("name" = String, Path)), responses((status = 204),
        (status = 422, body = Problem, description = "The files differ from the manifest: upload the checkpoint again"),
        (status = 507, body = Problem, description = "The server's disk is full")))]
pub(crate) async fn upload_done(
    State(checkpoints): State<Arc<Checkpoints>>,
    requester: RequestingAgent,
) -> Result<StatusCode> {
    requester.check_upload(&checkpoints).await?;
    let upload = Upload::of(&checkpoints.config.job_dir(&requester.attempt.job), &requester.path.name);
    let is_live = requester.has_attempt(&checkpoints.agents);
    if let Err(why) = run_blocking(move || upload.commit(is_live)).await? {
        return Err(report_refusal(&checkpoints.events, &requester, why).await);
    }
    if let Some(store) = &checkpoints.object_store {
        store.queue(&format!("{}-{}", requester.attempt.job, requester.path.name));
    }
    checkpoints.remove_old_after_upload(&requester.attempt).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Returns the error for a refused upload. Also reports a full disk or damaged files in the job's log, once.
async fn report_refusal(events: &Events, requester: &RequestingAgent, why: UploadError) -> Error {
    let (attempt, name) = (&requester.attempt, &requester.path.name);
    let (topic, text) = match &why {
        UploadError::Io(error) => (
            "disk",
            format!(
                "checkpoint {name} cannot be stored on the server: {error}; training continues, and the upload is retried"
            ),
        ),
        UploadError::Damaged(how) => (
            "damaged",
            format!(
                "checkpoint {name} was damaged during the upload to the server ({how}); the agent sends it again, or reports that the \
                 checkpoint is also damaged on the agent's machine"
            ),
        ),
        UploadError::Wrong(_) | UploadError::Offset(_) | UploadError::Busy => return refusal(why),
        UploadError::OtherWeightsStored => {
            let (job, attempt) = (&attempt.job, attempt.attempt);
            tracing::warn!(%job, attempt, name, "a stored checkpoint is not replaced by an attempt that is over");
            return refusal(why);
        }
    };
    tracing::warn!(job = %attempt.job, text);
    events.log_once(&attempt.job, attempt.attempt, topic, text).await;
    refusal(why)
}

fn refusal(why: UploadError) -> Error {
    match why {
        UploadError::Wrong(detail) => Error::unprocessable(detail),
        UploadError::Offset(stored) => {
            Error::Conflict(format!("the server has {stored} bytes of this file: continue at offset={stored}"))
        }
        UploadError::Damaged(how) => {
            Error::WithCode(Code::CheckpointDamaged, format!("{how}; send the checkpoint again"))
        }
        UploadError::Busy => Error::Unavailable("another request works on this checkpoint; try again".into()),
        UploadError::OtherWeightsStored => Error::Forbidden(
            "the server has this checkpoint with other weights and does not replace it, because the attempt is over"
                .into(),
        ),
        UploadError::Io(error) => disk_error(&error),
    }
}
