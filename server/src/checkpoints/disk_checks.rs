//! Checks checkpoints on the server's disk. The folder of a damaged checkpoint is renamed, so that the copy in the object store can replace
//! the checkpoint, or the job can continue from another checkpoint.

use super::{
    Checkpoints, folder_name_of,
    manifest::{MANIFEST, Manifest, is_media_error, verify_checkpoint},
};
use crate::{
    store::CheckpointRow,
    util::{blocking, if_exists, regular_files},
};
use std::{fs, io, path::Path};

/// Checks a checkpoint's folder, and renames the folder if it is damaged. `consequence` completes the line in the job's log: what happens
/// next.
///
/// # Errors
/// The folder cannot be checked or renamed.
pub(crate) async fn set_damaged_aside(
    checkpoints: &Checkpoints,
    row: &CheckpointRow,
    consequence: &str,
) -> io::Result<()> {
    let folder = checkpoints.folder(row);
    if let Some(how) = blocking(move || set_aside(&folder)).await? {
        tracing::warn!(checkpoint = row.id, how, "a checkpoint on the disk is damaged; it is set aside");
        let name = folder_name_of(row);
        let text = format!(
            "checkpoint {name} on the server's disk is damaged ({how}); it is set aside and {consequence}"
        );
        checkpoints.events.log(&row.job, text).await;
    }
    Ok(())
}

/// Checks a folder. If it is damaged, renames the folder and returns a description of the damage.
fn set_aside(folder: &Path) -> io::Result<Option<String>> {
    // An error of the folder itself, such as too many open files, is not damage.
    if_exists(fs::read_dir(folder))?;
    let manifest = || regular_files::read_blocking(&folder.join(MANIFEST)).ok();
    let before = manifest();
    let how = match verify_checkpoint(folder) {
        Ok(()) => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => error.to_string(),
        Err(error) if is_media_error(&error) => format!("it cannot be read ({error})"),
        Err(error) => return Err(error),
    };
    // The checkpoint is not damaged, but was replaced or removed during the check.
    if !folder.exists() || manifest() != before {
        return Ok(None);
    }
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let aside = folder.with_file_name(format!("damaged-{name}"));
    if_exists(fs::remove_dir_all(&aside))?;
    fs::rename(folder, &aside)?;
    Ok(Some(how))
}

/// Whether all files of a checkpoint exist with the right sizes. The contents are not read.
pub(crate) fn has_expected_sizes(folder: &Path) -> bool {
    let Ok(bytes) = regular_files::read_blocking(&folder.join(MANIFEST)) else { return false };
    let Ok(manifest) = serde_json::from_slice::<Manifest>(&bytes) else { return false };
    manifest.files.iter().all(|(name, listed)| {
        let metadata = folder.join(name).metadata();
        metadata.is_ok_and(|metadata| metadata.is_file() && metadata.len() == listed.size_bytes)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoints::manifest::sha256;
    use serde_json::json;

    fn checkpoint(folder: &Path) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("state.json"), b"{}").unwrap();
        let files = json!({"state.json": {"size_bytes": 2, "sha256": sha256(b"{}")}});
        let text = json!({"epoch": 1, "step": 10, "files": files}).to_string();
        fs::write(folder.join(MANIFEST), text).unwrap();
    }

    #[test]
    fn damaged_checkpoints_are_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, aside) = (dir.path().join("1-10"), dir.path().join("damaged-1-10"));
        checkpoint(&folder);
        assert!(set_aside(&folder).unwrap().is_none() && has_expected_sizes(&folder));
        // Changed bytes, a missing file, a file that the disk cannot read, a folder instead of a file, the manifest. Each folder that
        // is set aside replaces the previous one.
        let damages: [(&str, bool, fn(&Path)); 5] = [
            ("the bytes of its state.json", true, |folder| {
                fs::write(folder.join("state.json"), b"[]").unwrap()
            }),
            ("its state.json is missing", false, |folder| {
                fs::remove_file(folder.join("state.json")).unwrap()
            }),
            // Reading fails with EIO, like for a bad sector.
            ("its state.json cannot be read (Input/output error", false, |folder| {
                fs::remove_file(folder.join("state.json")).unwrap();
                std::os::unix::fs::symlink("/proc/self/mem", folder.join("state.json")).unwrap();
            }),
            ("its state.json is not a regular file", false, |folder| {
                fs::remove_file(folder.join("state.json")).unwrap();
                fs::create_dir(folder.join("state.json")).unwrap();
            }),
            ("its MANIFEST.json cannot be read", false, |folder| {
                fs::write(folder.join(MANIFEST), b"{").unwrap();
            }),
        ];
        for (detail, has_sizes, damage) in damages {
            checkpoint(&folder);
            damage(&folder);
            assert_eq!(has_expected_sizes(&folder), has_sizes, "{detail}");
            let how = set_aside(&folder).unwrap().expect("it is damaged");
            assert!(how.starts_with(detail), "{how}");
            assert!(!folder.exists() && aside.exists());
        }
    }
}
