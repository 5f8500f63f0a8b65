//! The fingerprint of a job's dataset at the job's first start, in the job's folder (`dataset.json`). Fingerprints of machines on which the
//! job starts later are compared with the stored fingerprint.

use lockstep_protocol::dataset::PicturesFingerprint;
use serde::Deserialize as _;
use serde_json::Value;
use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::Path,
    sync::{Mutex, PoisonError},
};

/// Name of the file with the fingerprint.
const NOTE: &str = "dataset.json";
/// Field of a fingerprint that names the agent of the copy.
const MACHINE: &str = "machine";

/// Held while a note is read and written, so that only one of two machines that start at the same time writes the first note.
static NOTE_LOCK: Mutex<()> = Mutex::new(());

/// Stores the fingerprint of a job's dataset on the agent `machine`, if the job has no fingerprint yet. If a different fingerprint is
/// stored, returns a text with the machine and the size of that copy.
///
/// # Errors
/// The note cannot be read or written.
pub(crate) fn keep_dataset_note(
    job_dir: &Path,
    mut note: Value,
    machine: &str,
) -> io::Result<Option<String>> {
    if let Some(fields) = note.as_object_mut() {
        fields.insert(MACHINE.into(), machine.into());
    }
    let _one_at_a_time = NOTE_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let text = match fs::read(job_dir.join(NOTE)) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    // A note that was damaged by a loss of power is replaced. Otherwise the job could never start again.
    let Ok(mut kept) = serde_json::from_slice::<Value>(&text) else {
        write(job_dir, &serde_json::to_vec(&note)?)?;
        return Ok(None);
    };
    let other = other_copy(&kept);
    // The machines are not compared.
    for fields in [&mut kept, &mut note].into_iter().filter_map(Value::as_object_mut) {
        fields.remove(MACHINE);
    }
    Ok((kept != note).then_some(other))
}

/// Writes a note. The temporary file is synced before it replaces the old note.
fn write(job_dir: &Path, text: &[u8]) -> io::Result<()> {
    let temporary = job_dir.join("dataset.new");
    let written = File::create(&temporary).and_then(|mut file| {
        file.write_all(text)?;
        file.sync_all()
    });
    let kept = written.and_then(|()| fs::rename(&temporary, job_dir.join(NOTE)));
    if kept.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    kept?;
    File::open(job_dir)?.sync_all()
}

/// Describes the copy of a fingerprint: `node-1 has 640 pictures of 3 MB, or other content`.
fn other_copy(note: &Value) -> String {
    let machine = note[MACHINE].as_str().unwrap_or("another machine of the job");
    match PicturesFingerprint::deserialize(note) {
        Ok(of) => format!("{machine} has {}, or other content", of.in_words()),
        Err(_) => format!("{machine} has another copy"),
    }
}

/// The stored fingerprint of a job's dataset. `None` if it is missing or damaged.
pub(crate) fn dataset_note(job_dir: &Path) -> Option<Value> {
    serde_json::from_slice(&fs::read(job_dir.join(NOTE)).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn damaged_notes_are_replaced_and_valid_ones_refuse_other_data() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NOTE);
        let print = |pictures: u64| json!({"pictures": pictures, "picture_bytes": 100, "sha256": "ab"});
        for torn in ["", "{\"pictures\": 4, \"by"] {
            fs::write(&path, torn).unwrap();
            let kept = keep_dataset_note(dir.path(), print(4), "a").unwrap();
            assert_eq!(kept, None, "{torn:?} is nobody's dataset");
            let mut stored = print(4);
            stored["machine"] = "a".into();
            assert_eq!(dataset_note(dir.path()), Some(stored));
        }
        assert_eq!(keep_dataset_note(dir.path(), print(4), "b").unwrap(), None, "the same");
        let other = keep_dataset_note(dir.path(), print(5), "b").unwrap();
        assert_eq!(other.as_deref(), Some("a has 4 pictures of 0 MB, or other content"));
    }

    /// The note is written to /dev/full, like to a full disk.
    #[test]
    fn a_note_that_cannot_be_written_leaves_no_files() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/full", dir.path().join("dataset.new")).unwrap();
        let error = keep_dataset_note(dir.path(), json!({"files": 4}), "a").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert_eq!(keep_dataset_note(dir.path(), json!({"files": 4}), "a").unwrap(), None);
        assert_eq!(dataset_note(dir.path()), Some(json!({"files": 4, "machine": "a"})));
    }
}
