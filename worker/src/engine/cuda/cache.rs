//! Files that save work at the next start: compiled kernels and the choice of convolution plans.
//! Losing them costs seconds, so trouble with them is only logged.

use crate::{
    cache::dir,
    host::{lock_within, open_lock},
};
use std::{
    fs::{self, File},
    time::Duration,
};

/// The content of `name`, if it is there.
pub(super) fn read(name: &str) -> Option<Vec<u8>> {
    fs::read(dir()?.join(name)).ok()
}

/// Writes `name` whole or not at all; several ranks may do so at the same time.
pub(super) fn write(name: &str, content: &[u8]) {
    let Some(dir) = dir() else { return };
    let attempt = || -> std::io::Result<()> {
        fs::create_dir_all(&dir)?;
        let mut file = tempfile::NamedTempFile::new_in(&dir)?;
        std::io::Write::write_all(&mut file, content)?;
        file.persist(dir.join(name))?;
        Ok(())
    };
    if let Err(error) = attempt() {
        tracing::warn!("{}: {error}; the next start will do this work again", dir.join(name).display());
    }
}

/// A lock for who makes the content of `name`; others that want it wait meanwhile. None: there is no cache, or it took too long.
pub(super) fn lock(name: &str, within: Duration) -> Option<File> {
    let dir = dir()?;
    fs::create_dir_all(&dir).ok()?;
    let file = open_lock(&dir.join(format!("{name}.lock"))).ok()?;
    lock_within(&file, within).ok()?.then_some(file)
}
