//! Opens files of users, such as datasets and weights, or reports why a file cannot be opened.
//!
//! Registering a dataset, the preflight check of an attempt and the ranks of a job share these rules. Only regular
//! files are opened, because a pipe or a device may block its reader forever.

pub mod allowed;

use rustix::{fs::OFlags, io::Errno};
use std::{
    fs::{self, File, Metadata, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt},
    path::Path,
};

/// The kind of object at a path: a folder, or a regular file with the time of its last change ([`modified_ns`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    Folder,
    File { size_bytes: u64, modified_ns: i64 },
}

/// The kind of object at `path`. Links are followed, and nothing is opened.
///
/// # Errors
/// Why the path cannot be used, as a phrase to follow its name.
pub fn stat(path: &Path) -> Result<FileKind, String> {
    let found = fs::metadata(path).map_err(|error| describe_stat_error(path, &error))?;
    if found.is_dir() {
        return if is_link_to_ancestor(path) {
            Err("is a link to a folder that contains the link, so the path has no end; remove the link"
                .into())
        } else {
            Ok(FileKind::Folder)
        };
    }
    check_regular(&found)?;
    Ok(FileKind::File { size_bytes: found.len(), modified_ns: modified_ns(&found) })
}

/// The time of the last change of a file's content, times or owner, in nanoseconds since 1970. The modification time
/// is not sufficient, because `rsync -t` and `cp -p` write new content and then set an old modification time.
pub fn modified_ns(found: &Metadata) -> i64 {
    let ns = |secs: i64, rest: i64| secs.saturating_mul(1_000_000_000).saturating_add(rest);
    ns(found.mtime(), found.mtime_nsec()).max(ns(found.ctime(), found.ctime_nsec()))
}

/// Opens a regular file, and returns it with its size.
///
/// # Errors
/// Why the file cannot be used, as a phrase to follow its name.
pub fn open(path: &Path) -> Result<(File, u64), String> {
    if stat(path)? == FileKind::Folder {
        return Err("is a folder, not a file".into());
    }
    // The path may have become a pipe since the check. With these flags, opening it does not block.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(cannot_be_read)?;
    check_opened(file)
}

/// Returns the file with its size. Fails if it is not a regular file, or is a pointer of Git LFS.
fn check_opened(file: File) -> Result<(File, u64), String> {
    let found = file.metadata().map_err(cannot_be_read)?;
    check_regular(&found)?;
    if is_lfs_pointer(&file, found.len()) {
        return Err(
            "is a Git LFS pointer, not the file that it stands for: run `git lfs pull` in its repository"
                .into(),
        );
    }
    Ok((file, found.len()))
}

/// Whether the file is a pointer that Git LFS left in place of a large file
/// (<https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md>).
fn is_lfs_pointer(file: &File, size: u64) -> bool {
    const FIRST_LINE: &[u8] = b"version https://git-lfs.github.com/spec/";
    // Pointers are shorter. Larger files, such as pictures, need no second system call.
    const LIMIT: u64 = 1024;
    let mut head = [0; FIRST_LINE.len()];
    size < LIMIT && file.read_exact_at(&mut head, 0).is_ok() && head == FIRST_LINE
}

/// Reads a regular file of at most `max_bytes` bytes.
///
/// # Errors
/// Why the file cannot be used, as a phrase to follow its name.
pub fn read(path: &Path, max_bytes: u64) -> Result<Vec<u8>, String> {
    read_opened(open(path)?, max_bytes)
}

/// As [`read`], for a file opened by [`open`].
///
/// # Errors
/// Why the file cannot be used, as a phrase to follow its name.
pub fn read_opened((file, size): (File, u64), max_bytes: u64) -> Result<Vec<u8>, String> {
    let too_large = |size: u64| format!("has {size} bytes; at most {max_bytes} are allowed");
    if size > max_bytes {
        return Err(too_large(size));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or(0));
    file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes).map_err(cannot_be_read)?;
    // The file may have grown, or the system may not report its size.
    if bytes.len() as u64 > max_bytes { Err(too_large(bytes.len() as u64)) } else { Ok(bytes) }
}

/// Describes an error of the operating system, as a phrase to follow the file's name.
pub fn cannot_be_read(error: io::Error) -> String {
    format!("{READ_ERROR}{error}")
}

/// Whether `detail` describes an error of the operating system (see [`cannot_be_read`]). Such an error may not occur again at
/// the next attempt. Other details concern the kind or the content of the file.
pub fn is_read_error(detail: &str) -> bool {
    detail.contains(READ_ERROR)
}

const READ_ERROR: &str = "cannot be read: ";

fn check_regular(found: &Metadata) -> Result<(), String> {
    let kind = found.file_type();
    let kind = if kind.is_fifo() {
        "a named pipe (FIFO)"
    } else if kind.is_socket() {
        "a socket"
    } else if kind.is_char_device() || kind.is_block_device() {
        "a device"
    } else {
        return Ok(());
    };
    Err(format!("is {kind}, not a regular file, and is not opened"))
}

fn describe_stat_error(path: &Path, error: &io::Error) -> String {
    let target = fs::read_link(path);
    match (target, error.kind()) {
        (Ok(_), _) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
            "is a link that leads back to itself; repair the link".into()
        }
        (Ok(target), io::ErrorKind::NotFound) => {
            format!("is a link to {}, which does not exist; repair the link", target.display())
        }
        _ => format!("{READ_ERROR}{error}"),
    }
}

/// Whether `path` is a link to a folder that contains the link.
fn is_link_to_ancestor(path: &Path) -> bool {
    let is_link = fs::symlink_metadata(path).is_ok_and(|m| m.is_symlink());
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    is_link
        && parent
            .canonicalize()
            .is_ok_and(|parent| path.canonicalize().is_ok_and(|target| parent.starts_with(target)))
}

/// Reads the last `max_bytes` bytes of a file of any length, such as the output of a process. Empty if the file cannot be read.
pub fn read_end(path: &Path, max_bytes: u64) -> Vec<u8> {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(max_bytes)))?;
        let mut bytes = Vec::new();
        file.take(max_bytes).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    read().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::{fs::symlink, net::UnixListener};

    #[test]
    fn only_regular_files_are_opened_and_errors_say_what_others_are() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "four").unwrap();
        symlink("file", at("link")).unwrap();
        assert!(matches!(stat(&at("link")), Ok(FileKind::File { size_bytes: 4, .. })));
        assert_eq!(stat(dir.path()), Ok(FileKind::Folder));
        assert_eq!(read(&at("link"), 4).unwrap(), b"four");
        assert_eq!(read(&at("file"), 3).unwrap_err(), "has 4 bytes; at most 3 are allowed");

        rustix::fs::mknodat(
            rustix::fs::CWD,
            at("pipe"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        symlink("/dev/zero", at("zero")).unwrap();
        symlink("gone", at("dangling")).unwrap();
        symlink("loop", at("loop")).unwrap();
        fs::create_dir(at("inner")).unwrap();
        symlink("../..", at("inner/up")).unwrap();
        // A file of this process, for which every read fails.
        symlink("/proc/self/mem", at("unreadable")).unwrap();
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n";
        fs::write(at("pointer"), pointer).unwrap();
        for (name, detail) in [
            ("pipe", "is a named pipe (FIFO), not a regular file"),
            ("socket", "is a socket, not a regular file"),
            ("zero", "is a device, not a regular file"),
            ("dangling", "is a link to gone, which does not exist"),
            ("loop", "is a link that leads back to itself"),
            ("inner/up", "is a link to a folder that contains the link"),
            ("nothing", "cannot be read: No such file"),
            ("unreadable", "cannot be read: Input/output error"),
            ("pointer", "is a Git LFS pointer, not the file that it stands for: run `git lfs pull`"),
        ] {
            let message = read(&at(name), 100).unwrap_err();
            assert!(message.starts_with(detail), "{name}: {message}");
            assert_eq!(stat(&at(name)).is_ok(), ["unreadable", "pointer"].contains(&name), "{name}");
        }
        assert_eq!(read(dir.path(), 9).unwrap_err(), "is a folder, not a file");
    }

    #[test]
    fn the_end_of_a_file_larger_than_memory_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("printed");
        assert_eq!(read_end(&path, 4), b"");
        for (text, end) in [("", ""), ("abcd", "abcd"), ("abcde", "bcde")] {
            fs::write(&path, text).unwrap();
            assert_eq!(read_end(&path, 4), end.as_bytes());
        }
        // Larger than memory; the file is a hole except for its end.
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(1 << 40).unwrap();
        file.write_all_at(b"end", (1 << 40) - 3).unwrap();
        assert_eq!(read_end(&path, 4), b"\0end");
    }
}
