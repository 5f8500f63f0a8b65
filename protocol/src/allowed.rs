//! Where files may be that somebody names by a path.

use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Folders that a path may lead to. The process that opens the file follows the links of its path first, on its own machine: there a
/// link may lead elsewhere than on the server's, and it may have been made after the server's check.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AllowedFolders {
    /// `serve --dataset-root`, absolute.
    pub below: Vec<String>,
    /// What may not be read although it may lie in one of these: the server's data directory.
    pub except: Vec<String>,
}

impl AllowedFolders {
    /// Whether a path without links lies where it may. `real` gives a folder's path without links, where it has one.
    pub fn have(&self, path: &Path, real: impl Fn(&Path) -> Option<PathBuf>) -> bool {
        let is_in = |folder: &String| {
            let folder = Path::new(folder);
            path.starts_with(folder) || real(folder).is_some_and(|real| path.starts_with(real))
        };
        self.below.iter().any(is_in) && !self.except.iter().any(is_in)
    }

    /// Why a file may not be used. It does not say where links lead, or whether there is anything.
    pub fn refusal(&self, path: &str) -> String {
        refusal(&format!("{path}, or where its links lead,"), &self.below)
    }
}

/// `what` is not below the folders that a server allows (`roots`).
pub fn refusal(what: &str, roots: &[String]) -> String {
    format!(
        "{what} is not below a folder that datasets and weights may come from: {} (`lockstep serve --dataset-root`)",
        roots.join(", ")
    )
}
