//! The note in a job's folder about the job's dataset at its first start. When the job starts on another machine later, the dataset of that
//! machine is compared with the note.

use crate::util::{if_exists, lock, private_files};
use lockstep_protocol::dataset::{DATASET_NOTE, DatasetNote};
use std::{fs, io, path::Path, sync::Mutex};

/// Held while a note is read and written, so that only one of two machines that start at the same time writes the first note.
static NOTE_LOCK: Mutex<()> = Mutex::new(());

/// Stores the note of a job's first start, if the job has no note yet. If the stored note is about another dataset, returns the description
/// of that dataset.
pub(crate) fn keep_dataset_note(job_dir: &Path, note: &DatasetNote) -> io::Result<Option<String>> {
    let _one_at_a_time = lock(&NOTE_LOCK);
    let path = job_dir.join(DATASET_NOTE);
    let bytes = if_exists(fs::read(&path))?.unwrap_or_default();
    // A note that was damaged by a loss of power is replaced. Otherwise the job could never start again.
    let Ok(stored) = serde_json::from_slice::<DatasetNote>(&bytes) else {
        private_files::replace(&path, &serde_json::to_vec(note)?)?;
        return Ok(None);
    };
    Ok((stored.fingerprint != note.fingerprint).then(|| stored.in_words()))
}

/// The stored note of a job. `None` if it is missing or damaged.
pub(crate) fn dataset_note(job_dir: &Path) -> Option<DatasetNote> {
    serde_json::from_slice(&fs::read(job_dir.join(DATASET_NOTE)).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::dataset::PicturesFingerprint;

    fn note(pictures: u64, machine: &str) -> DatasetNote {
        let fingerprint = PicturesFingerprint { pictures, picture_bytes: 100, sha256: "ab".into() };
        DatasetNote { fingerprint, machine: Some(machine.into()) }
    }

    #[test]
    fn damaged_notes_are_replaced_and_valid_ones_refuse_other_data() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(DATASET_NOTE);
        for torn in ["", "{\"pictures\": 4, \"by"] {
            fs::write(&path, torn).unwrap();
            let kept = keep_dataset_note(dir.path(), &note(4, "a")).unwrap();
            assert_eq!(kept, None, "{torn:?} describes no dataset");
            assert_eq!(dataset_note(dir.path()), Some(note(4, "a")));
        }
        assert_eq!(keep_dataset_note(dir.path(), &note(4, "b")).unwrap(), None, "the same");
        let other = keep_dataset_note(dir.path(), &note(5, "b")).unwrap();
        assert_eq!(other.as_deref(), Some("a has 4 pictures of 0 MB, or other content"));
    }
}
