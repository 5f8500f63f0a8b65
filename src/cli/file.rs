//! Files named on the command line. Opening a named pipe blocks until another process writes into it, and a device may never end. So
//! commands read only regular files and pipes that the caller's shell has connected to this process.

use super::usage_error;
use anyhow::Context;
use lockstep_host::files;
use std::{
    fs::{self, File},
    io::Read as _,
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
};

/// Prefixes of paths of files that this process inherited: `lockstep submit <(make-job)`, `... | lockstep submit /dev/stdin`.
const INHERITED: [&str; 3] = ["/dev/stdin", "/dev/fd/", "/proc/self/fd/"];

/// Number of bytes at the end of a file in which [`last_line`] searches.
const TAIL_BYTES: u64 = 4096;

/// Reads a whole file, or a whole pipe that the shell has connected.
///
/// # Errors
/// The file is not a regular file, has more than `max_bytes` bytes (then the error is `too_large`), or cannot be read. The error continues
/// a sentence that starts with the file's name.
pub(crate) fn read(path: &Path, max_bytes: u64, too_large: &str) -> Result<Vec<u8>, String> {
    let is_inherited = INHERITED.iter().any(|prefix| path.to_string_lossy().starts_with(prefix));
    let is_pipe = || fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_fifo());
    let file = if is_inherited && is_pipe() {
        File::open(path).map_err(|error| error.to_string())?
    } else {
        let (file, size) = files::open(path)?;
        if size > max_bytes {
            return Err(too_large.to_owned());
        }
        file
    };
    let mut bytes = Vec::new();
    file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > max_bytes { Err(too_large.to_owned()) } else { Ok(bytes) }
}

/// Formats `photos does not exist (looked for /home/ada/photos)`: a relative path refers to the working directory.
pub(super) fn missing_path_message(path: &Path) -> String {
    let absolute = std::path::absolute(path).ok().filter(|_| path.is_relative());
    let absolute = absolute.map(|absolute| format!(" (looked for {})", absolute.display()));
    format!("{} does not exist{}", path.display(), absolute.unwrap_or_default())
}

/// Checks that a file may be written as `path`. Commands write next to `path` and rename, which would replace a device or a pipe.
///
/// # Errors
/// Exit status 2: `path` is `-` or exists and is not a regular file, or its folder does not exist.
pub(crate) fn check_output(path: &Path) -> anyhow::Result<()> {
    if path == Path::new("-") {
        return Err(usage_error("-: this command does not write to standard output; name a file"));
    }
    let folder = folder_of(path);
    if !folder.is_dir() {
        let (path, folder) = (path.display(), folder.display());
        return Err(usage_error(format!("{path}: the folder {folder} does not exist")));
    }
    match fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => Err(usage_error(format!(
            "{}: is not a regular file, and this command would replace it; name another file",
            path.display()
        ))),
        _ => Ok(()),
    }
}

/// Returns the folder that contains `path`.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns the last line of a process's output in a file. Empty lines do not count. Returns an empty text if there is no line.
pub(crate) fn last_line(path: &Path) -> String {
    let bytes = files::read_end(path, TAIL_BYTES);
    let text = String::from_utf8_lossy(&bytes);
    text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default().to_owned()
}

/// Calls `write` with a path next to `target`, then renames the file to `target`. If `write` fails, `target` is unchanged.
///
/// # Errors
/// `write` fails, or the file cannot be renamed.
pub(crate) fn replace<T>(target: &Path, write: impl FnOnce(&Path) -> anyhow::Result<T>) -> anyhow::Result<T> {
    let partial = partial_path(target);
    // An earlier run may have left its partial file.
    let _ = fs::remove_file(&partial);
    let written = write(&partial).and_then(|written| {
        fs::rename(&partial, target).with_context(|| target.display().to_string())?;
        Ok(written)
    });
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    written
}

/// Returns the path of the unfinished file that becomes `target`.
pub(crate) fn partial_path(target: &Path) -> PathBuf {
    target.with_added_extension("part")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::mpsc, time::Duration};

    /// Reads up to four bytes, and fails if the read would block.
    fn read_at_once(path: PathBuf) -> Result<Vec<u8>, String> {
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || sender.send(read(&path, 4, "is larger than 4 bytes")));
        receiver.recv_timeout(Duration::from_secs(20)).expect("it does not wait")
    }

    #[test]
    fn pipes_and_devices_are_refused_at_once_and_files_have_a_maximum_size() {
        let dir = tempfile::tempdir().unwrap();
        let path_of = |name: &str| dir.path().join(name);
        let status = std::process::Command::new("mkfifo").arg(path_of("pipe")).status();
        assert!(status.unwrap().success());
        fs::write(path_of("file"), "four").unwrap();
        fs::write(path_of("larger"), "fives").unwrap();
        assert_eq!(read_at_once(path_of("file")), Ok(b"four".to_vec()));
        for (path, words) in [
            (path_of("pipe"), "is a named pipe (FIFO), not a regular file"),
            ("/dev/zero".into(), "is a device, not a regular file"),
            ("/dev/tty".into(), "is a device"),
            (dir.path().into(), "is a folder, not a file"),
            (path_of("larger"), "is larger than 4 bytes"),
            (path_of("none"), "No such file"),
        ] {
            let message = read_at_once(path.clone()).unwrap_err();
            assert!(message.contains(words), "{words:?} in {message}, of {}", path.display());
        }
        std::os::unix::fs::symlink(path_of("pipe"), path_of("link")).unwrap();
        for path in
            [path_of("pipe"), path_of("link"), "/dev/null".into(), dir.path().into(), path_of("none/file")]
        {
            assert!(check_output(&path).is_err(), "{}", path.display());
        }
        for path in [path_of("file"), path_of("none"), "Cargo.lock".into(), "none".into()] {
            assert!(check_output(&path).is_ok(), "{}", path.display());
        }
    }
}
