//! Free space on the disk: large files leave some for the database.

use std::{io, path::Path};

/// This much of the disk stays free.
const FREE_BYTES: u64 = 1 << 30;

/// Checks that so many bytes fit on the disk of `path`.
///
/// # Errors
/// The disk would be full.
pub(crate) fn check_space(path: &Path, bytes: u64) -> io::Result<()> {
    let disk = rustix::fs::statvfs(path)?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free < bytes.saturating_add(FREE_BYTES) {
        let words = format!("{} MiB are free, of which {} stay free", free >> 20, FREE_BYTES >> 20);
        return Err(io::Error::new(io::ErrorKind::StorageFull, words));
    }
    Ok(())
}
