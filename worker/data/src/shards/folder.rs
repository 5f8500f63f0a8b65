//! Which files of a folder are shards, and which split each belongs to.

use super::named_broken;
use crate::Format;
use lockstep_host::files;
use lockstep_protocol::dataset::BrokenFile;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Names of splits in a shard's path, as Hugging Face's `datasets` knows them.
const SPLITS: [&str; 10] =
    ["train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"];

/// Kinds of shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Tar,
    Parquet,
}

impl Kind {
    /// By the file's name.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let extension = path.extension()?;
        let kinds = [("tar", Kind::Tar), ("parquet", Kind::Parquet)];
        kinds.into_iter().find(|(name, _)| extension.eq_ignore_ascii_case(name)).map(|(_, kind)| kind)
    }

    pub(super) fn format(self) -> Format {
        match self {
            Kind::Tar => Format::Shards,
            Kind::Parquet => Format::Parquet,
        }
    }

    /// What a sample is, for a sentence.
    pub(super) fn sample(self) -> &'static str {
        match self {
            Kind::Tar => {
                "a sample is a picture and its class, such as 000017.jpg and 000017.cls or 000017.json with a \"label\""
            }
            Kind::Parquet => "a sample is a row with a picture (image) and its class (label)",
        }
    }
}

/// Whether there are shards, but none that is not compressed.
pub(crate) fn only_compressed(dir: &Path) -> bool {
    contents(Kind::Tar, dir).is_ok_and(|found| found.shards.is_empty() && !found.compressed.is_empty())
}

/// Ends of the names of compressed archives, as their packers call them.
const COMPRESSED: [&str; 5] = [".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2"];

fn is_compressed(path: &Path) -> bool {
    let name = path.to_string_lossy();
    COMPRESSED.iter().any(|end| name.ends_with(end))
}

/// Whether the shard that a compressed one was packed from lies next to it.
pub(super) fn is_unpacked(path: &Path) -> bool {
    let name = path.to_string_lossy();
    let stem = COMPRESSED.iter().find_map(|end| name.strip_suffix(end));
    stem.is_some_and(|stem| Path::new(&format!("{stem}.tar")).exists())
}

/// What lies in a folder and in folders of it that are called as splits are.
pub(super) struct FolderContents {
    pub(super) shards: Vec<PathBuf>,
    pub(super) compressed: Vec<PathBuf>,
    /// Folders called as splits that cannot be listed.
    pub(super) unread: Vec<BrokenFile>,
}

pub(super) fn contents(kind: Kind, dir: &Path) -> Result<FolderContents, String> {
    let is_one = |path: &Path| Kind::of(path) == Some(kind);
    // Parquet files are compressed inside.
    let is_compressed = |path: &Path| kind == Kind::Tar && is_compressed(path);
    let mut found = FolderContents { shards: Vec::new(), compressed: Vec::new(), unread: Vec::new() };
    for path in listed(dir)? {
        if is_one(&path) {
            found.shards.push(path);
        } else if is_compressed(&path) {
            found.compressed.push(path);
        } else if path
            .file_name()
            .and_then(|n| n.to_str())
            .is_some_and(|n| split_in_path(Path::new(n)).is_some())
        {
            let inside = match files::stat(&path) {
                Ok(files::FileKind::Folder) => listed(&path),
                // A list of names, or a link whose name is that of a folder of shards.
                Ok(files::FileKind::File { .. }) => continue,
                Err(_) if path.extension().is_some() => continue,
                Err(detail) => Err(detail),
            };
            match inside {
                Ok(inside) => {
                    let (compressed, others): (Vec<_>, _) =
                        inside.into_iter().partition(|p| is_compressed(p));
                    found.compressed.extend(compressed);
                    found.shards.extend(others.into_iter().filter(|path| is_one(path)));
                }
                Err(detail) => found.unread.push(named_broken(&path, detail)),
            }
        }
    }
    Ok(found)
}

/// What lies in a folder, by name, hidden files left out.
pub(super) fn listed(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).map_err(files::cannot_be_read)? {
        let entry = entry.map_err(files::cannot_be_read)?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            all.push(entry.path());
        }
    }
    all.sort();
    Ok(all)
}

/// The split in a shard's path; the file's name counts before its folders'.
pub(super) fn split_in_path(path: &Path) -> Option<&'static str> {
    let words = |part: &str| -> Option<&'static str> {
        let word = |word: &str| {
            let word = word.trim_end_matches(|c: char| c.is_ascii_digit()).to_ascii_lowercase();
            SPLITS.iter().find(|split| **split == word)
        };
        part.split(|c: char| !c.is_ascii_alphanumeric()).find_map(word).copied()
    };
    let found = path.iter().rev().filter_map(|part| part.to_str()).find_map(words)?;
    Some(match found {
        "training" => "train",
        "testing" => "test",
        other => other,
    })
}

/// Whether shards that begin with a split's name are read as this split's.
pub(crate) fn names_split(name: &str) -> bool {
    split_in_path(Path::new(name)) == Some(name)
}
