//! Downloads a file over HTTP: continues after a broken connection, checks the file, and renames it only when it is complete.

use super::known::Remote;
use crate::cli::{file::partial, with_causes};
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
        match status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
            true => Failure::Unreachable(why),
            false => Failure::Refused(why),
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
    remote: &Remote,
    path: &Path,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), Failure> {
    if is_whole(path, remote)? {
        progress(remote.bytes);
        return Ok(());
    }
    let part = partial(path);
    let mut file = OpenOptions::new().create(true).read(true).write(true).truncate(false).open(&part)?;
    if file.try_lock().is_err() {
        return Err(Failure::Local(format!("{} is being written by another download", part.display())));
    }
    // Bytes of an earlier run may belong to another file. If the checksum differs, such bytes are downloaded again once; bytes of this run
    // are not.
    let mut from_before = file.metadata()?.len() > 0;
    loop {
        receive(client, url, remote, &mut file, progress).await?;
        let sum = sha256(&mut file)?;
        if sum == remote.sha256 {
            file.sync_all()?;
            fs::rename(&part, path)?;
            return Ok(());
        }
        file.set_len(0)?;
        if !from_before {
            let _ = fs::remove_file(&part);
            return Err(Failure::Refused(format!(
                "{url} does not have the content of {}: its SHA-256 is {sum}, not {}",
                remote.name, remote.sha256
            )));
        }
        from_before = false;
    }
}

/// Whether the file is complete and has the right checksum.
pub(super) fn is_whole(path: &Path, remote: &Remote) -> Result<bool, Failure> {
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
    remote: &Remote,
    file: &mut File,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), Failure> {
    let mut most = file.metadata()?.len();
    if most > remote.bytes {
        most = 0;
        file.set_len(0)?;
    }
    let mut in_vain = 0;
    loop {
        let have = file.metadata()?.len();
        progress(have);
        if have == remote.bytes {
            return Ok(());
        }
        let broken = match receive_once(client, url, remote, file, have, progress).await {
            Ok(()) => format!("{url}: the connection ended early"),
            Err(Failure::Unreachable(why)) => why,
            Err(other) => return Err(other),
        };
        let now = file.metadata()?.len();
        if now == remote.bytes {
            continue;
        }
        // A server without range requests sends the file from the beginning each time, so only bytes beyond the previous maximum count as
        // progress.
        in_vain = if now > most { 0 } else { in_vain + 1 };
        most = most.max(now);
        if in_vain >= MAX_ATTEMPTS {
            return Err(Failure::Unreachable(broken));
        }
        tokio::time::sleep(RETRY.after(in_vain + 1)).await;
    }
}

/// Uses one connection: receives the bytes after `have`, or the whole file if the server does not support range requests.
async fn receive_once(
    client: &Client,
    url: &str,
    remote: &Remote,
    file: &mut File,
    have: u64,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), Failure> {
    let mut request = client.get(url);
    if have > 0 {
        request = request.header(RANGE, format!("bytes={have}-"));
    }
    let lost = |error: reqwest::Error| Failure::Unreachable(with_causes(&error));
    let response = request.send().await.map_err(lost)?;
    let mut at = match response.status() {
        StatusCode::PARTIAL_CONTENT if begins_at(&response, have, remote.bytes) => have,
        // The length or the offset is wrong: start from the beginning.
        StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE if have > 0 => {
            file.set_len(0)?;
            return Err(Failure::Unreachable(format!("{url} does not continue at the requested position")));
        }
        StatusCode::OK => 0,
        status => return Err(Failure::from_status(url, status)),
    };
    let other = |bytes: u64| {
        Failure::Refused(format!("{url} has {bytes} bytes, but {} has {}", remote.name, remote.bytes))
    };
    if let Some(length) = response.content_length()
        && at + length != remote.bytes
    {
        return Err(other(at + length));
    }
    file.set_len(at)?;
    file.seek(SeekFrom::Start(at))?;
    let mut body = response.bytes_stream();
    while let Some(bytes) = body.next().await {
        let bytes = bytes.map_err(lost)?;
        at += bytes.len() as u64;
        if at > remote.bytes {
            file.set_len(0)?;
            return Err(other(at));
        }
        file.write_all(&bytes)?;
        progress(at);
    }
    Ok(())
}

/// Whether a partial response starts after `have` bytes of a file of `bytes` bytes.
fn begins_at(response: &Response, have: u64, bytes: u64) -> bool {
    let range = response.headers().get(CONTENT_RANGE).and_then(|value| value.to_str().ok());
    let range = range.and_then(|range| range.strip_prefix("bytes "));
    range.is_some_and(|range| {
        range.starts_with(&format!("{have}-"))
            && range.rsplit('/').next().is_some_and(|total| total == "*" || total == bytes.to_string())
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
