//! Files that save work at the next start: compiled kernels and the choice of convolution plans.
//! Losing them costs seconds, so trouble with them is only logged.

use crate::cache::dir;
use std::fs;

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
