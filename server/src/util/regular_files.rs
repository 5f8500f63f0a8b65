//! Opens regular files only. A job's folder may contain files that no rank has written. Opening a named pipe would block the thread until
//! another process opens the pipe for writing, possibly forever.

use super::blocking;
use rustix::fs::OFlags;
use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

/// Opens a file for reading.
///
/// # Errors
/// The file cannot be opened. If it is a pipe, a socket, a device or a folder, the kind is [`io::ErrorKind::InvalidInput`].
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let opened = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
    match opened {
        Ok(file) if file.metadata()?.is_file() => Ok(file),
        Ok(_) => Err(not_a_regular_file()),
        // Opening a socket always fails.
        Err(_) if path.metadata().is_ok_and(|metadata| !metadata.is_file()) => Err(not_a_regular_file()),
        Err(error) => Err(error),
    }
}

/// Reads a whole file into memory. Use it for small files.
///
/// # Errors
/// Same as [`open`], or the file cannot be read.
pub(crate) async fn read(path: &Path) -> io::Result<Vec<u8>> {
    let path = path.to_owned();
    blocking(move || read_blocking(&path)).await
}

/// Same as [`read`], on this thread.
pub(crate) fn read_blocking(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn not_a_regular_file() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "is not a regular file")
}
