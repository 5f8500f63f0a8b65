//! Opens regular files only. A job's folder may hold more than its ranks wrote: opening a named pipe blocks until somebody writes
//! into it, for ever if need be, on a thread that cannot be interrupted.

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
/// It cannot be opened, or it is a pipe, a socket, a device or a folder: [`io::ErrorKind::InvalidInput`].
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let opened = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
    match opened {
        Ok(file) if file.metadata()?.is_file() => Ok(file),
        Ok(_) => Err(irregular()),
        // A socket cannot be opened at all.
        Err(_) if path.metadata().is_ok_and(|there| !there.is_file()) => Err(irregular()),
        Err(error) => Err(error),
    }
}

/// All of a file. Meant for small ones.
///
/// # Errors
/// As [`open`].
pub(crate) async fn read(path: &Path) -> io::Result<Vec<u8>> {
    let path = path.to_owned();
    let read = tokio::task::spawn_blocking(move || {
        let mut bytes = Vec::new();
        open(&path)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    });
    read.await.map_err(io::Error::other)?
}

fn irregular() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "is no regular file")
}
