//! Names of many files in one, as WebDataset's users write them: `train-{000..127}.tar`, `{train,val}-0.tar`.

pub(super) use lockstep_protocol::pattern::expand;
use std::path::{Path, PathBuf};

/// Shards of a dataset.
pub(super) const SHARDS: usize = 100_000;
/// Names of a pattern that are tried to see whether any exists.
const TRIED: usize = 64;

/// The folder before the first brace, and the pattern behind it. `None` when `path` is no pattern, or a file's own name.
pub(super) fn fixed_part(path: &Path) -> Option<(PathBuf, PathBuf)> {
    let is_pattern = |part: &std::ffi::OsStr| part.as_encoded_bytes().contains(&b'{');
    if !path.iter().any(is_pattern) || path.exists() {
        return None;
    }
    let fixed: PathBuf = path.iter().take_while(|part| !is_pattern(part)).collect();
    let rest = path.iter().skip_while(|part| !is_pattern(part)).collect();
    Some((fixed, rest))
}

/// Whether the files of a pattern are there: a folder may be, on a machine that has none of them.
pub(super) fn exists(folder: &Path, rest: &Path) -> bool {
    match expand(&rest.to_string_lossy(), SHARDS) {
        // Some may be missing, which is reported when they are read.
        Ok(names) => names.iter().take(TRIED).any(|name| folder.join(name).exists()),
        // A mistake in it is reported when it is read.
        Err(_) => folder.is_dir(),
    }
}
