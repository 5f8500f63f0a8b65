//! Free space on the disk. Large files must leave space for the database and for other writers.

use std::{io, path::Path};

/// The number of bytes that must stay free when users' files are stored.
pub(crate) const SPARE_BYTES: u64 = 1 << 30;

/// Checks that `bytes` bytes fit on the disk of `path` and leave `spare` bytes free.
pub(crate) fn check_space(path: &Path, bytes: u64, spare: u64) -> io::Result<()> {
    let disk = rustix::fs::statvfs(path)?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free < bytes.saturating_add(spare) {
        let [needed, free, spare] = [bytes.saturating_add(spare).div_ceil(1 << 20), free >> 20, spare >> 20];
        let detail = format!(
            "{free} MiB of the disk are free, and {needed} MiB are needed, of which {spare} MiB stay free"
        );
        return Err(io::Error::new(io::ErrorKind::StorageFull, detail));
    }
    Ok(())
}
