//! Files of a run from elsewhere: the folder `files` in the job's folder, which is removed with the job.

use crate::util::{
    disk_space::{SPARE_BYTES, check_space},
    if_exists, lock,
};
use lockstep_protocol::{
    job::RunFile,
    limits::{MAX_RUN_FILES, RUN_FILE_PATH_BYTES, RUN_FILES_BYTES},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Mutex,
    time::{Duration, UNIX_EPOCH},
};

/// Maximum time of a modification: the last millisecond of the year 9999, which file systems can store.
const MAX_MODIFIED_MS: u64 = 253_402_300_799_999;
/// The folder of files that are being uploaded, in the job's folder.
const INCOMING: &str = "incoming";
/// Held while a file is moved to its path, so that concurrent requests do not exceed the limits of a run.
static MOVE_LOCK: Mutex<()> = Mutex::new(());

/// Why a file is refused.
#[derive(Debug)]
pub(crate) enum FileError {
    Path(String),
    /// A file or folder conflicts with the path.
    Taken(String),
    /// The run has too many files, or they are too large.
    Full(String),
    Io(io::Error),
}

impl From<io::Error> for FileError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

type Result<T> = std::result::Result<T, FileError>;

/// The files of one run.
#[derive(Debug, Clone)]
pub(crate) struct RunFiles {
    job_dir: PathBuf,
}

/// A file that is being uploaded. Dropping this removes the file, unless it was moved to its path.
#[derive(Debug)]
pub(crate) struct Incoming(PathBuf);

impl Incoming {
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl RunFiles {
    /// `job_dir`: the job's folder.
    pub(crate) fn of(job_dir: PathBuf) -> Self {
        Self { job_dir }
    }

    fn folder(&self) -> PathBuf {
        self.job_dir.join("files")
    }

    /// All files, in the order of their paths.
    pub(crate) fn list(&self) -> io::Result<Vec<RunFile>> {
        let mut files = Vec::new();
        collect_files(&self.folder(), "", &mut files)?;
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(files)
    }

    /// The path of a file on the disk.
    ///
    /// # Errors
    /// The path is not allowed.
    pub(crate) fn disk_path(&self, path: &str) -> Result<PathBuf> {
        let refuse = |why: &str| Err(FileError::Path(format!("no file of a run may have this path: {why}")));
        if path.len() > RUN_FILE_PATH_BYTES {
            return refuse(&format!(
                "it has {} bytes, at most {RUN_FILE_PATH_BYTES} are allowed",
                path.len()
            ));
        }
        if path.chars().any(|c| c.is_control() || c == '\\') {
            return refuse("it has a control character or a backslash");
        }
        if path.split('/').any(|part| part.is_empty() || part == "." || part == ".." || part.len() > 255) {
            return refuse(
                "it must have names of at most 255 bytes with '/' between them, and none may be '.' or '..'",
            );
        }
        Ok(self.folder().join(path))
    }

    /// The maximum size in bytes of a file with this path.
    ///
    /// # Errors
    /// The path is not allowed, or the run has too many files.
    pub(crate) fn max_size(&self, path: &str) -> Result<u64> {
        self.disk_path(path)?;
        let mut others = self.list()?;
        others.retain(|file| file.path != path);
        if others.len() >= MAX_RUN_FILES {
            let detail = format!("a run has at most {MAX_RUN_FILES} files: delete some first");
            return Err(FileError::Full(detail));
        }
        Ok(RUN_FILES_BYTES.saturating_sub(others.iter().map(|file| file.size_bytes).sum()))
    }

    /// A new file for an upload.
    pub(crate) fn create_incoming(&self) -> io::Result<Incoming> {
        let folder = self.job_dir.join(INCOMING);
        fs::create_dir_all(&folder)?;
        check_space(&folder, 0, SPARE_BYTES)?;
        let incoming = Incoming(folder.join(uuid::Uuid::new_v4().simple().to_string()));
        fs::File::create_new(incoming.path())?;
        Ok(incoming)
    }

    /// Moves an uploaded file of `size_bytes` to its path, and replaces a file with the same path.
    ///
    /// # Errors
    /// The file is incomplete or exceeds the run's limits, or a folder has this path.
    pub(crate) fn put(
        &self,
        path: &str,
        incoming: Incoming,
        size_bytes: u64,
        modified_ms: Option<u64>,
    ) -> Result<RunFile> {
        use io::ErrorKind::{AlreadyExists, DirectoryNotEmpty, IsADirectory, NotADirectory};
        let target = self.disk_path(path)?;
        if let Some(ms) = modified_ms {
            if ms > MAX_MODIFIED_MS {
                return Err(FileError::Path("modified_ms is later than the year 9999".into()));
            }
            let file = fs::File::options().write(true).open(incoming.path())?;
            file.set_modified(UNIX_EPOCH + Duration::from_millis(ms))?;
        }
        let metadata = fs::metadata(incoming.path())?;
        if metadata.len() != size_bytes {
            let detail = format!("{} of {size_bytes} bytes were written", metadata.len());
            return Err(FileError::Io(io::Error::other(detail)));
        }
        let _lock = lock(&MOVE_LOCK);
        check_size(metadata.len(), self.max_size(path)?)?;
        let put = || -> io::Result<()> {
            if let Some(folder) = target.parent() {
                fs::create_dir_all(folder)?;
            }
            fs::rename(incoming.path(), &target)
        };
        match put() {
            Ok(()) => Ok(describe(path.to_owned(), &metadata)),
            Err(e)
                if matches!(e.kind(), AlreadyExists | DirectoryNotEmpty | IsADirectory | NotADirectory) =>
            {
                Err(FileError::Taken(format!(
                    "the run has a folder {path}, or a file where this path needs a folder: delete that file or folder first"
                )))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Removes a file, or a folder with all its files. Returns whether it existed.
    ///
    /// # Errors
    /// The path is not allowed, or a disk error.
    pub(crate) fn remove(&self, path: &str) -> Result<bool> {
        let target = self.disk_path(path)?;
        let _lock = lock(&MOVE_LOCK);
        let removed = match fs::symlink_metadata(&target) {
            Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(&target),
            Ok(_) => fs::remove_file(&target),
            Err(error) => Err(error),
        };
        if if_exists(removed)?.is_none() {
            return Ok(false);
        }
        // Empty folders are removed.
        let folder = self.folder();
        for parent in target.ancestors().skip(1).take_while(|parent| **parent != folder) {
            if fs::remove_dir(parent).is_err() {
                break;
            }
        }
        Ok(true)
    }
}

/// Removes the files of interrupted uploads from the folders of all jobs.
pub(crate) fn clear_incoming(jobs: &Path) {
    for job in fs::read_dir(jobs).into_iter().flatten().flatten() {
        let _ = fs::remove_dir_all(job.path().join(INCOMING));
    }
}

/// Checks that a file has at most `max_bytes` bytes ([`RunFiles::max_size`]).
pub(crate) fn check_size(size_bytes: u64, max_bytes: u64) -> Result<()> {
    if size_bytes <= max_bytes {
        return Ok(());
    }
    Err(FileError::Full(format!(
        "the files of a run may have at most {RUN_FILES_BYTES} bytes together, of which {max_bytes} are left for this file"
    )))
}

fn collect_files(folder: &Path, prefix: &str, files: &mut Vec<RunFile>) -> io::Result<()> {
    for entry in if_exists(fs::read_dir(folder))?.into_iter().flatten() {
        let entry = entry?;
        // A file that was removed meanwhile is left out.
        let (Ok(name), Ok(metadata)) = (entry.file_name().into_string(), entry.metadata()) else { continue };
        let path = format!("{prefix}{name}");
        if metadata.is_dir() {
            collect_files(&entry.path(), &format!("{path}/"), files)?;
        } else {
            files.push(describe(path, &metadata));
        }
    }
    Ok(())
}

fn describe(path: String, metadata: &fs::Metadata) -> RunFile {
    let since = metadata.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let modified_ms = since.and_then(|since| i64::try_from(since.as_millis()).ok()).unwrap_or(0);
    RunFile { path, size_bytes: metadata.len(), modified_ms }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_out_of_the_folder_of_the_run_are_refused() {
        let files = RunFiles::of("/jobs/j1".into());
        for path in ["a", "a/b.c", "a b/ü.json", "..a/b..", ".hidden"] {
            assert_eq!(files.disk_path(path).unwrap(), Path::new("/jobs/j1/files").join(path));
        }
        let long = format!("{}/{}", "a".repeat(600), "b".repeat(600));
        for path in
            ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a/./b", "a\\b", "a\0b", "a\nb", long.as_str()]
        {
            assert!(matches!(files.disk_path(path), Err(FileError::Path(_))), "{path:?}");
        }
        assert!(files.disk_path(&"a".repeat(256)).is_err());
    }

    #[test]
    fn incomplete_files_do_not_replace_others() {
        let dir = tempfile::tempdir().unwrap();
        let files = RunFiles::of(dir.path().join("j1"));
        let put = |content: &str, size_bytes| {
            let incoming = files.create_incoming().unwrap();
            fs::write(incoming.path(), content).unwrap();
            files.put("a", incoming, size_bytes, None)
        };
        put("whole", 5).unwrap();
        assert!(matches!(put("who", 5), Err(FileError::Io(_))));
        assert_eq!(fs::read_to_string(files.disk_path("a").unwrap()).unwrap(), "whole");
        // A crash left an incomplete file.
        let incoming_dir = dir.path().join("j1").join(INCOMING);
        fs::write(incoming_dir.join("part"), "x").unwrap();
        clear_incoming(dir.path());
        assert!(!incoming_dir.exists() && files.disk_path("a").unwrap().exists());
    }
}
