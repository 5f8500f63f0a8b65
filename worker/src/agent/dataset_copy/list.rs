//! The list of a dataset's files, as sent by the server and stored with a copy.

use super::{super::remote::AttemptClient, CopyError, PullProgress, on_disk};
use lockstep_protocol::agent::{DatasetEntry, StartAttempt};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    fs::File,
    io::{self, BufRead, BufReader, BufWriter, Write},
    path::{Component, Path},
};
use tempfile::NamedTempFile;

/// Maximum length of a line. Paths have at most 4096 bytes.
const LINE_BYTES: usize = 64 << 10;
/// Prefix of a list's file name until the list is complete.
pub(super) const LIST_PREFIX: &str = ".list-";
/// Maximum size of a list: about a hundred million files.
const LIST_BYTES: u64 = 8 << 30;

pub(super) struct List {
    pub(super) file: NamedTempFile,
    /// The hash of the list. It changes if a file, its modification time or the path on the server changes.
    pub(super) key: String,
    pub(super) about: About,
}

/// The dataset of a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct About {
    pub(super) dataset: String,
    /// The dataset's path on the server.
    pub(super) path: String,
    /// The path to open, relative to the files of the copy. See [`DatasetEntry::Begin`].
    pub(super) within: String,
    /// The number of files.
    pub(super) files: u64,
    /// The sum of the files' sizes.
    pub(super) bytes: u64,
}

/// Fetches the list of an attempt's dataset on the server into a file in `dir`.
///
/// # Errors
/// The list did not arrive completely, or the server reports why there is none.
pub(super) async fn fetch(
    client: &AttemptClient<'_>,
    dir: &Path,
    start: &StartAttempt,
    progress: &mut PullProgress,
) -> Result<List, CopyError> {
    let mut download = client.dataset_list().await?;
    progress.has_answered = true;
    let mut file = NamedTempFile::with_prefix_in(LIST_PREFIX, dir).map_err(on_disk(dir))?;
    let mut reader = ListReader::new(&start.spec.data.dataset, &start.dataset_path, LIST_BYTES);
    let mut out = BufWriter::new(file.as_file_mut());
    while let Some(chunk) = download.next().await? {
        reader.parse_chunk(&chunk)?;
        out.write_all(&chunk).map_err(on_disk(dir))?;
    }
    out.flush().map_err(on_disk(dir))?;
    drop(out);
    reader.finish(file)
}

/// Parses a list while it arrives.
struct ListReader {
    /// The number of bytes that may still arrive.
    remaining_bytes: u64,
    hash: Sha256,
    /// The beginning of an incomplete line.
    line: Vec<u8>,
    about: About,
    has_begun: bool,
    has_ended: bool,
}

impl ListReader {
    fn new(dataset: &str, path: &str, remaining_bytes: u64) -> Self {
        let hash = Sha256::new().chain_update(path).chain_update([0]);
        let (dataset, path, within) = (dataset.into(), path.into(), String::new());
        let about = About { dataset, path, within, files: 0, bytes: 0 };
        Self { remaining_bytes, hash, line: Vec::new(), about, has_begun: false, has_ended: false }
    }

    fn parse_chunk(&mut self, chunk: &[u8]) -> Result<(), CopyError> {
        let remaining = self.remaining_bytes.checked_sub(chunk.len() as u64).ok_or_else(|| {
            let why = "the list of its files is too long; put the data into fewer files, such as shards";
            CopyError::Unusable(why.into())
        })?;
        self.remaining_bytes = remaining;
        self.hash.update(chunk);
        for piece in chunk.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(piece);
            if self.line.len() > LINE_BYTES {
                return Err(CopyError::Damaged(format!(
                    "a line of the list has more than {LINE_BYTES} bytes"
                )));
            }
            if piece.ends_with(b"\n") {
                let entry = serde_json::from_slice(&self.line);
                self.line.clear();
                self.add(entry.map_err(|e| CopyError::Damaged(format!("the list of its files: {e}")))?)?;
            }
        }
        Ok(())
    }

    fn add(&mut self, entry: DatasetEntry) -> Result<(), CopyError> {
        let invalid = |what: String| Err(CopyError::Damaged(format!("the list of its files {what}")));
        if self.has_ended {
            return invalid("goes on after its end".into());
        }
        match entry {
            DatasetEntry::Begin(within) if !self.has_begun => {
                if !within.is_empty() && !is_below(&within) {
                    return invalid(format!("begins with {within:?}"));
                }
                (self.about.within, self.has_begun) = (within, true);
            }
            DatasetEntry::Folder(path) if is_below(&path) => {}
            DatasetEntry::File(path, size, _) if is_below(&path) => {
                self.about.files += 1;
                self.about.bytes = self.about.bytes.saturating_add(size);
            }
            DatasetEntry::End(files, bytes) if (files, bytes) == (self.about.files, self.about.bytes) => {
                self.has_ended = true;
            }
            DatasetEntry::Failed(why) => return Err(CopyError::Unusable(why)),
            entry => return invalid(format!("has {entry:?}")),
        }
        Ok(())
    }

    fn finish(self, file: NamedTempFile) -> Result<List, CopyError> {
        if !self.has_begun || !self.has_ended {
            return Err(CopyError::Server(super::RequestError::Later(
                "the list of its files is cut off".into(),
            )));
        }
        Ok(List { file, key: hex::encode(&self.hash.finalize()[..16]), about: self.about })
    }
}

/// Whether a relative path stays below its folder: not empty, not absolute, and without `..`.
fn is_below(path: &str) -> bool {
    !path.is_empty() && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}

pub(super) struct Entries(io::Lines<BufReader<File>>);

impl Entries {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self(BufReader::new(File::open(path)?).lines()))
    }
}

impl Iterator for Entries {
    type Item = io::Result<DatasetEntry>;

    fn next(&mut self) -> Option<Self::Item> {
        let entry = self.0.next()?.and_then(|line| Ok(serde_json::from_str(&line)?));
        // The list was checked when it arrived. The file belongs to this agent, but may have been damaged.
        Some(entry.and_then(|entry| match &entry {
            DatasetEntry::Folder(path) | DatasetEntry::File(path, ..) if !is_below(path) => {
                Err(io::Error::other(format!("{path:?} leads out of the copy")))
            }
            _ => Ok(entry),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(chunks: &[&str]) -> Result<List, CopyError> {
        read_with_limit(chunks, LIST_BYTES)
    }

    fn read_with_limit(chunks: &[&str], max_bytes: u64) -> Result<List, CopyError> {
        let mut reader = ListReader::new("x", "/data/x", max_bytes);
        for chunk in chunks {
            reader.parse_chunk(chunk.as_bytes())?;
        }
        reader.finish(NamedTempFile::new().unwrap())
    }

    #[test]
    fn an_incomplete_or_invalid_list_is_refused() {
        let list = "{\"begin\":\"\"}\n{\"folder\":\"a\"}\n{\"file\":[\"a/b\",5,1]}\n{\"end\":[1,5]}\n";
        let whole = read(&[list]).unwrap();
        let About { files, bytes, within, .. } = &whole.about;
        assert_eq!((*files, *bytes, within.as_str()), (1, 5, ""));
        for cut in 0..list.len() {
            let (first, rest) = list.split_at(cut);
            assert_eq!(read(&[first, rest]).unwrap().key, whole.key, "wherever it is cut on its way");
            assert!(
                matches!(read(&[first]), Err(CopyError::Server(super::super::RequestError::Later(_)))),
                "{first}"
            );
        }
        assert_ne!(read(&[&list.replace("5,1", "5,2")]).unwrap().key, whole.key, "another time");
        for (from, to) in
            [("a/b", "../b"), ("a/b", "/b"), ("a/b", ""), ("[1,5]", "[2,5]"), ("\"\"", "\"..\"")]
        {
            assert!(matches!(read(&[&list.replace(from, to)]), Err(CopyError::Damaged(_))), "{to}");
        }
        assert!(matches!(read(&[list, "{\"folder\":\"b\"}\n"]), Err(CopyError::Damaged(_))));
        let failed = read(&["{\"begin\":\"\"}\n{\"failed\":\"x is a link\"}\n"]);
        assert!(matches!(failed, Err(CopyError::Unusable(why)) if why == "x is a link"));
        let size = list.len() as u64;
        assert!(read_with_limit(&[list], size).is_ok());
        let too_long = read_with_limit(&[list], size - 1);
        assert!(matches!(too_long, Err(CopyError::Unusable(why)) if why.contains("too long")));
        let long = format!("{{\"begin\":\"{}\"}}\n", "x".repeat(LINE_BYTES - 13));
        assert_eq!(long.len(), LINE_BYTES);
        assert!(read(&[&long, "{\"end\":[0,0]}\n"]).is_ok());
        assert!(matches!(read(&[&long.replacen('x', "xx", 1)]), Err(CopyError::Damaged(_))));
    }
}
