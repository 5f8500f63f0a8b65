//! Finds the shards in a folder, and the split of each shard.

use crate::{
    broken_file,
    image_folder::{entries, split_of},
};
use lockstep_host::files;
use lockstep_protocol::dataset::BrokenFile;
use std::path::{Path, PathBuf};

/// Further names of splits that are recognised in the path of a shard, as in Hugging Face's `datasets`, but not in the names of folders of
/// pictures.
const MORE_SPLITS: [&str; 3] = ["dev", "eval", "evaluation"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Tar,
    Parquet,
}

impl Kind {
    /// The kind according to the file's name.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let extension = path.extension()?;
        let kinds = [("tar", Kind::Tar), ("parquet", Kind::Parquet)];
        kinds.into_iter().find(|(name, _)| extension.eq_ignore_ascii_case(name)).map(|(_, kind)| kind)
    }

    pub(super) fn format(self) -> &'static str {
        match self {
            Kind::Tar => "webdataset",
            Kind::Parquet => "parquet",
        }
    }

    /// The definition of a sample, for a message.
    pub(super) fn sample(self) -> &'static str {
        match self {
            Kind::Tar => {
                "a sample is a picture and its class, such as 000017.jpg and 000017.cls or 000017.json with a \"label\""
            }
            Kind::Parquet => "a sample is a row with a picture (image) and its class (label)",
        }
    }
}

/// Whether a folder contains only compressed shards.
pub(crate) fn has_only_compressed(dir: &Path) -> bool {
    list_contents(Kind::Tar, dir).is_ok_and(|found| found.shards.is_empty() && !found.compressed.is_empty())
}

/// Usual extensions of compressed archives.
const COMPRESSED: [&str; 5] = [".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2"];

fn is_compressed(path: &Path) -> bool {
    let name = path.to_string_lossy();
    COMPRESSED.iter().any(|end| name.ends_with(end))
}

/// Whether a decompressed copy of a shard is in the same folder.
pub(super) fn is_unpacked(path: &Path) -> bool {
    let name = path.to_string_lossy();
    let stem = COMPRESSED.iter().find_map(|end| name.strip_suffix(end));
    stem.is_some_and(|stem| Path::new(&format!("{stem}.tar")).exists())
}

/// The content of a folder and of its subfolders with names of splits.
pub(super) struct FolderContents {
    pub(super) shards: Vec<PathBuf>,
    pub(super) compressed: Vec<PathBuf>,
    /// Subfolders with names of splits that cannot be listed.
    pub(super) unread: Vec<BrokenFile>,
}

pub(super) fn list_contents(kind: Kind, dir: &Path) -> Result<FolderContents, String> {
    let is_shard = |path: &Path| Kind::of(path) == Some(kind);
    // Parquet files are compressed internally.
    let is_compressed = |path: &Path| kind == Kind::Tar && is_compressed(path);
    let mut found = FolderContents { shards: Vec::new(), compressed: Vec::new(), unread: Vec::new() };
    for path in entries(dir)? {
        if is_shard(&path) {
            found.shards.push(path);
        } else if is_compressed(&path) {
            found.compressed.push(path);
        } else if path.file_name().is_some_and(|name| split_in_path(Path::new(name)).is_some()) {
            let inside = match files::stat(&path) {
                Ok(files::FileKind::Folder) => entries(&path),
                // For example, a list of names.
                Ok(files::FileKind::File { .. }) => continue,
                Err(_) if path.extension().is_some() => continue,
                Err(detail) => Err(detail),
            };
            match inside {
                Ok(inside) => {
                    let (compressed, others): (Vec<_>, _) =
                        inside.into_iter().partition(|p| is_compressed(p));
                    found.compressed.extend(compressed);
                    found.shards.extend(others.into_iter().filter(|path| is_shard(path)));
                }
                Err(detail) => found.unread.push(broken_file(&path, detail)),
            }
        }
    }
    Ok(found)
}

/// The split in a shard's path. The name of the file takes precedence over the names of folders.
pub(super) fn split_in_path(path: &Path) -> Option<&'static str> {
    let split = |word: &str| {
        let word = word.trim_end_matches(|c: char| c.is_ascii_digit());
        let further_split = || MORE_SPLITS.into_iter().find(|split| word.eq_ignore_ascii_case(split));
        split_of(Path::new(word)).or_else(further_split)
    };
    let split_in_part = |part: &str| part.split(|c: char| !c.is_ascii_alphanumeric()).find_map(split);
    path.iter().rev().filter_map(|part| part.to_str()).find_map(split_in_part)
}

/// Whether shards whose names begin with `name` are read as the split `name`.
pub(crate) fn is_split_prefix(name: &str) -> bool {
    split_in_path(Path::new(name)) == Some(name)
}
