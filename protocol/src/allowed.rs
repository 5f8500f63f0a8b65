//! The folders from which files may be read.

use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Folders that a path may lead to. The server checks a path, and so does the process that opens the file, after it has
/// followed the links in the path: on that process's machine a link may have another target, or may be newer than the
/// server's check.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AllowedFolders {
    /// Folders of `serve --dataset-root`, absolute.
    pub below: Vec<String>,
    /// Folders in these folders that may not be read: the server's data directory.
    pub except: Vec<String>,
}

impl AllowedFolders {
    /// Whether a path without links is allowed. `resolve` returns a folder's path without links, if the folder exists.
    pub fn contain(&self, path: &Path, resolve: impl Fn(&Path) -> Option<PathBuf>) -> bool {
        let is_in = |folder: &String| {
            let folder = Path::new(folder);
            path.starts_with(folder) || resolve(folder).is_some_and(|resolved| path.starts_with(resolved))
        };
        self.below.iter().any(is_in) && !self.except.iter().any(is_in)
    }

    /// The error for a file that may not be used. It reveals neither where links lead nor whether the file exists.
    pub fn refusal(&self, path: &str) -> String {
        refusal(&format!("{path}, or where its links lead,"), &self.below)
    }
}

/// The error if `what` is not below the folders that a server allows (`roots`).
pub fn refusal(what: &str, roots: &[String]) -> String {
    format!(
        "{what} is not below a folder that datasets and weights may come from: {} (`lockstep serve --dataset-root`)",
        roots.join(", ")
    )
}
