//! The cache directory, and the files that a package installs so that they need not be created in the cache. If these
//! files are lost, the next start takes longer; nothing else changes.

use std::path::PathBuf;

/// `$LOCKSTEP_CACHE`, or `lockstep` in the user's cache directory. `None` if no environment variable gives one of the two.
pub fn dir() -> Option<PathBuf> {
    let from = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    from("LOCKSTEP_CACHE")
        .or_else(|| from("XDG_CACHE_HOME").map(|d| d.join("lockstep")))
        .or_else(|| from("HOME").map(|d| d.join(".cache").join("lockstep")))
}

/// The folder `../share/lockstep/cache` beside the program's folder, where packages put compiled kernels. `None` if it
/// does not exist, as for a program that was built from source.
pub fn installed() -> Option<PathBuf> {
    let program = crate::own_program().ok()?;
    Some(program.parent()?.parent()?.join("share/lockstep/cache")).filter(|dir| dir.is_dir())
}
