//! Free space on the disk. Large files must leave space for the database.

use std::{io, path::Path};

/// Minimum free space on the disk, in bytes.
const MIN_FREE_BYTES: u64 = 1 << 30;

/// Checks that `bytes` bytes fit on the disk of `path` and leave [`MIN_FREE_BYTES`] free.
pub(crate) fn check_space(path: &Path, bytes: u64) -> io::Result<()> {
    let disk = rustix::fs::statvfs(path)?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free < bytes.saturating_add(MIN_FREE_BYTES) {
        let (free, reserved) = (free >> 20, MIN_FREE_BYTES >> 20);
        let detail = format!("{free} MiB are free, of which {reserved} MiB must stay free");
        return Err(io::Error::new(io::ErrorKind::StorageFull, detail));
    }
    Ok(())
}
