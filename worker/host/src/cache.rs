//! The cache directory. If its files are lost, the next start takes longer; nothing else changes.

use std::path::PathBuf;

/// `$LOCKSTEP_CACHE`, or `lockstep` in the user's cache directory. `None` if no environment variable names either.
pub fn dir() -> Option<PathBuf> {
    let from = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    from("LOCKSTEP_CACHE")
        .or_else(|| from("XDG_CACHE_HOME").map(|d| d.join("lockstep")))
        .or_else(|| from("HOME").map(|d| d.join(".cache").join("lockstep")))
}
