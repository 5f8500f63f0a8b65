//! Checks that a machine's dataset can be read and has not changed since it was registered, or since the job began.

use super::StoredAttempt;
use crate::inspect;
use lockstep_protocol::{
    agent::{AgentReply, AgentRequest},
    dataset::{DATASET_NOTE, DatasetNote, PicturesFingerprint},
};
use std::{
    fs::{self, Permissions},
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};
use tempfile::NamedTempFile;

/// The note about the dataset with which a job began. `None` if the note is missing or damaged.
pub(in super::super) fn read_note(path: &Path) -> Option<DatasetNote> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Checks that the dataset can be read, and is the dataset with which the job began. Before the job's first start, it
/// is compared with the registered fingerprint.
///
/// # Errors
/// What is wrong, and what to change.
pub(super) fn check(
    stored: &StoredAttempt,
    program: &Path,
    cancelled: &AtomicBool,
    machine: &str,
) -> Result<(), String> {
    let path = lockstep_data::resolve(
        Path::new(&stored.start.dataset_path),
        stored.start.files.dataset_in.as_ref(),
    )?;
    let path = path.as_path();
    let note = stored.job_dir.join(DATASET_NOTE);
    let first_note = read_note(&note);
    let fingerprint = take_fingerprint(path, first_note.is_some(), program, cancelled)?;
    let own = DatasetNote { fingerprint, machine: Some(machine.to_owned()) };
    // Before the first start the server has no fingerprint to send. If there is a note, another machine of this
    // attempt wrote it meanwhile.
    let is_first_start = stored.start.files.dataset.is_none();
    match (first_note, &stored.start.files.registered) {
        (Some(first_note), _) if first_note.fingerprint != own.fingerprint => {
            if is_first_start && first_note.machine.is_some() && first_note.machine != own.machine {
                return Err(describe_difference(stored, &own, &first_note.in_words()));
            }
            let on_machine =
                first_note.machine.as_ref().map(|name| format!(" on {name}")).unwrap_or_default();
            Err(format!(
                "the dataset {} differs from the dataset with which the job began{on_machine}: {} now, {} then, or other content; \
                 restore the old dataset and retry the job, or submit a new job",
                path.display(),
                own.fingerprint.in_words(),
                first_note.fingerprint.in_words(),
            ))
        }
        (Some(_), _) => Ok(()),
        (None, Some(registered)) if *registered != own.fingerprint => Err(format!(
            "the dataset {} differs from the dataset that was registered as {:?}: {} on this machine, {} when it was registered, or \
             other content; copy the registered dataset to this machine and retry the job or, if the dataset was changed on purpose, \
             inspect it again on the page Datasets and retry the job",
            path.display(),
            stored.start.spec.data.dataset,
            own.fingerprint.in_words(),
            registered.in_words(),
        )),
        // The caller no longer waits for this check, and another check may have begun, so no note is stored.
        (None, _) if cancelled.load(Ordering::Relaxed) => Err("cancelled".into()),
        (None, _) => store_note(stored, &own),
    }
}

/// The fingerprint of the dataset now. Before the job has begun, each file is examined, so that ranks need not do so.
/// Later starts examine only folders.
fn take_fingerprint(
    path: &Path,
    has_begun: bool,
    program: &Path,
    cancelled: &AtomicBool,
) -> Result<PicturesFingerprint, String> {
    // If the process died, the fingerprint is unknown. Nothing must be recorded, because later starts of the job
    // compare with the note.
    let not_examined =
        |e: String| format!("the dataset {} was not examined: {e}; retry the job", path.display());
    let request = AgentRequest::Fingerprint { path: path.display().to_string(), has_begun };
    match inspect::request_blocking(program, &request, cancelled).map_err(not_examined)? {
        Ok(AgentReply::Fingerprint { found }) => Ok(found),
        Ok(_) => Err(not_examined("the inspecting process gave a reply of another kind".into())),
        Err(detail) => Err(format!("the dataset cannot be read: {detail}; correct this and retry the job")),
    }
}

/// Stores the note of a job's first start. Agents of one attempt may share the job's folder and arrive at the same
/// time: the first note counts, and the other agent compares its dataset with the note.
fn store_note(stored: &StoredAttempt, own: &DatasetNote) -> Result<(), String> {
    let note = stored.job_dir.join(DATASET_NOTE);
    let failed = |e: io::Error| format!("{}: {e}", note.display());
    let write = || -> io::Result<NamedTempFile> {
        let mut file = tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o644))
            .tempfile_in(&stored.job_dir)?;
        file.write_all(&serde_json::to_vec(own)?)?;
        Ok(file)
    };
    let Err(not_stored) = write().map_err(failed)?.persist_noclobber(&note) else { return Ok(()) };
    match read_note(&note) {
        Some(first_note) if first_note.fingerprint != own.fingerprint => {
            Err(describe_difference(stored, own, &first_note.in_words()))
        }
        Some(_) => Ok(()),
        // The note was written only partly, or the file system can only replace files.
        None => not_stored.file.persist(&note).map(drop).map_err(|e| failed(e.error)),
    }
}

/// The error if two machines of a job have different datasets. `other` describes the dataset of the other machine.
pub(in super::super) fn describe_difference(
    stored: &StoredAttempt,
    own: &DatasetNote,
    other: &str,
) -> String {
    format!(
        "the copies of the dataset {:?} differ: {} has {} at {}, and {other}. Lockstep cannot tell which of the two is correct: compare \
         them, and copy the correct files to the other machine",
        stored.start.spec.data.dataset,
        own.machine.as_deref().unwrap_or("this machine"),
        own.fingerprint.in_words(),
        stored.start.dataset_path,
    )
}
