//! The cache directory. Losing its files costs time at the next start and nothing else.

use std::path::PathBuf;

/// `$LOCKSTEP_CACHE`, else `lockstep` in the user's cache directory; none where no environment variable names one.
pub fn dir() -> Option<PathBuf> {
    let from = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    from("LOCKSTEP_CACHE")
        .or_else(|| from("XDG_CACHE_HOME").map(|d| d.join("lockstep")))
        .or_else(|| from("HOME").map(|d| d.join(".cache").join("lockstep")))
}
