//! Downloads a file over HTTP: continues after a broken connection, checks the file, and renames it only when it is complete.

use super::known::RemoteFile;
use crate::cli::{file::partial_path, usage_error, with_causes};
use anyhow::anyhow;
use futures_util::StreamExt as _;
use lockstep_protocol::backoff::Backoff;
use reqwest::{
    Client, Response, StatusCode,
    header::{CONTENT_RANGE, RANGE},
};
use sha2::{Digest as _, Sha256};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    path::Path,
    time::Duration,
};

/// Maximum number of successive connections without new bytes.
const MAX_ATTEMPTS: u32 = 4;
const RETRY: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(2));

/// The reason why a download failed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The server does not respond, or connections break. Received bytes are kept for the next attempt.
    Unreachable(String),
    /// The URL has no such file, or a different file.
    Refused(String),
    /// An error of this machine: a full disk, or a folder that cannot be written.
    Local(String),
}

impl Failure {
    /// Returns the failure of a request that got an unexpected status.
    pub(crate) fn from_status(url: &str, status: StatusCode) -> Self {
        let why = format!("{url} answers {status}");
        if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
            Failure::Unreachable(why)
        } else {
            Failure::Refused(why)
        }
    }

    /// Returns the error of a command that downloads to `target`.
    pub(crate) fn explain(self, target: &Path, advice: &str) -> anyhow::Error {
        match self {
            Failure::Unreachable(why) => {
                anyhow!("{why}\nDownloaded bytes are kept, and the same command continues.\n{advice}")
            }
            Failure::Refused(why) => {
                usage_error(format!("{why}\n{} was not written.\n{advice}", target.display()))
            }
            Failure::Local(why) => anyhow!("{}: {why}", target.display()),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure::Local(error.to_string())
    }
}

/// Downloads `url`, whose content must match `remote`, to `path`. `progress` receives the number of bytes so far.
///
/// # Errors
/// See [`Failure`]. Bytes with a wrong checksum are deleted.
pub(crate) async fn download(
    client: &Client,
    url: &str,
    remote: &RemoteFile,
    path: &Path,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), Failure> {
    if is_complete(path, remote)? {
        progress(remote.bytes);
        return Ok(());
    }
    let part = partial_path(path);
    let mut file = OpenOptions::new().create(true).read(true).write(true).truncate(false).open(&part)?;
    if file.try_lock().is_err() {
        return Err(Failure::Local(format!("{} is being written by another download", part.display())));
    }
    // Bytes of an earlier run may belong to another file. So if the checksum is wrong, a download that continued such bytes starts again,
    // once.
    let mut continues_earlier_run = file.metadata()?.len() > 0;
    loop {
        receive(client, url, remote, &mut file, progress).await?;
        let sum = sha256(&mut file)?;
        if sum == remote.sha256 {
            file.sync_all()?;
            fs::rename(&part, path)?;
            return Ok(());
        }
        file.set_len(0)?;
        if !continues_earlier_run {
            let _ = fs::remove_file(&part);
            return Err(Failure::Refused(format!(
                "{url} does not have the content of {}: its SHA-256 is {sum}, not {}",
                remote.name, remote.sha256
            )));
        }
        continues_earlier_run = false;
    }
}

/// Whether the file is complete and has the right checksum.
fn is_complete(path: &Path, remote: &RemoteFile) -> Result<bool, Failure> {
    match File::open(path) {
        Ok(mut file) => Ok(file.metadata()?.len() == remote.bytes && sha256(&mut file)? == remote.sha256),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Fills `file` up to the length of `remote`, over as many connections as necessary.
async fn receive(
    client: &Client,
    url: &str,
    remote: &RemoteFile,
    file: &mut File,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), Failure> {
    let mut longest_size = file.metadata()?.len();
    if longest_size > remote.bytes {
        longest_size = 0;
        file.set_len(0)?;
    }
    let mut failed_attempts = 0;
    loop {
        let size = file.metadata()?.len();
        progress(size);
        if size == remote.bytes {
            return Ok(());
        }
        let why = match receive_once(client, url, remote, file, size, progress).await {
            Ok(()) => format!("{url}: the connection ended early"),
            Err(Failure::Unreachable(why)) => why,
            Err(other) => return Err(other),
        };
        let size = file.metadata()?.len();
        if size == remote.bytes {
            continue;
        }
        // A server without range requests sends the file from the beginning each time, so only bytes beyond the previous maximum count as
        // progress.
        failed_attempts = if size > longest_size { 0 } else { failed_attempts + 1 };
        longest_size = longest_size.max(size);
        if failed_attempts >= MAX_ATTEMPTS {
            return Err(Failure::Unreachable(why));
        }
        tokio::time::sleep(RETRY.pause_after(failed_attempts + 1)).await;
    }
}

/// Uses one connection: receives the bytes from the offset `start`, or the whole file if the server does not support range requests.
async fn receive_once(
    client: &Client,
    url: &str,
    remote: &RemoteFile,
    file: &mut File,
    start: u64,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), Failure> {
    let mut request = client.get(url);
    if start > 0 {
        request = request.header(RANGE, format!("bytes={start}-"));
    }
    let lost = |error: reqwest::Error| Failure::Unreachable(with_causes(&error));
    let response = request.send().await.map_err(lost)?;
    let mut offset = match response.status() {
        StatusCode::PARTIAL_CONTENT if starts_at(&response, start, remote.bytes) => start,
        // The length or the offset is wrong: start from the beginning.
        StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE if start > 0 => {
            file.set_len(0)?;
            return Err(Failure::Unreachable(format!("{url} does not continue at the requested position")));
        }
        StatusCode::OK => 0,
        status => return Err(Failure::from_status(url, status)),
    };
    let wrong_size = |bytes: u64| {
        Failure::Refused(format!("{url} has {bytes} bytes, but {} has {}", remote.name, remote.bytes))
    };
    if let Some(length) = response.content_length()
        && offset + length != remote.bytes
    {
        return Err(wrong_size(offset + length));
    }
    file.set_len(offset)?;
    file.seek(SeekFrom::Start(offset))?;
    let mut body = response.bytes_stream();
    while let Some(bytes) = body.next().await {
        let bytes = bytes.map_err(lost)?;
        offset += bytes.len() as u64;
        if offset > remote.bytes {
            file.set_len(0)?;
            return Err(wrong_size(offset));
        }
        file.write_all(&bytes)?;
        progress(offset);
    }
    Ok(())
}

/// Whether a partial response starts at the offset `start` of a file that has `size` bytes.
fn starts_at(response: &Response, start: u64, size: u64) -> bool {
    let range = response.headers().get(CONTENT_RANGE).and_then(|value| value.to_str().ok());
    let range = range.and_then(|range| range.strip_prefix("bytes "));
    range.is_some_and(|range| {
        range.starts_with(&format!("{start}-"))
            && range.rsplit('/').next().is_some_and(|total| total == "*" || total == size.to_string())
    })
}

fn sha256(file: &mut File) -> io::Result<String> {
    file.seek(SeekFrom::Start(0))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    while let read @ 1.. = file.read(&mut buffer)? {
        hash.update(&buffer[..read]);
    }
    Ok(hex::encode(hash.finalize()))
}
