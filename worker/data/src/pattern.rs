//! Brace patterns for the names of many files, as used with WebDataset: `train-{000..127}.tar`, `{train,val}-0.tar`.

pub(super) use lockstep_protocol::pattern::expand;
use lockstep_protocol::pattern::has_brace;
use std::path::{Path, PathBuf};

/// Maximum number of shards of a dataset.
pub(super) const MAX_SHARDS: usize = 100_000;
/// Maximum number of files of a pattern whose existence is checked.
const MAX_CHECKED: usize = 64;

/// Splits the path of a pattern before its first component with a brace. `None` if `path` has no braces, or is the name
/// of an existing file.
pub(super) fn fixed_part(path: &Path) -> Option<(PathBuf, PathBuf)> {
    if !path.iter().any(has_brace) || path.exists() {
        return None;
    }
    let fixed: PathBuf = path.iter().take_while(|part| !has_brace(part)).collect();
    let rest = path.iter().skip_while(|part| !has_brace(part)).collect();
    Some((fixed, rest))
}

/// Whether files of a pattern exist. A machine may have the folder without any of the files.
pub(super) fn exists(folder: &Path, rest: &Path) -> bool {
    match expand(&rest.to_string_lossy(), MAX_SHARDS) {
        // Missing shards are reported when the dataset is read.
        Ok(names) => names.iter().take(MAX_CHECKED).any(|name| folder.join(name).exists()),
        // An invalid pattern is reported when the dataset is read.
        Err(_) => folder.is_dir(),
    }
}
