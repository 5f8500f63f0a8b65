//! A response with parts of files. Parts are written as they arrive.

use super::super::{CopyError, PullProgress, RequestError, cache::CopyLock, on_disk};
use crate::agent::remote::Download;
use bytes::BytesMut;
use lockstep_protocol::agent::{DatasetPart, PART_CHANGED, PART_FOLLOWS, PART_REFUSED, SUM_BYTES};
use sha2::{Digest, Sha256};
use std::{fs::File, os::unix::fs::FileExt, path::Path};

/// Number of bytes to buffer before they are written together.
const BUFFER_BYTES: usize = 4 << 20;
/// Maximum length of a reason that the server sends instead of a part.
const MAX_REASON_BYTES: usize = 64 << 10;

/// A part of a file, its bytes, and the checksum sent with it.
pub(super) struct ReceivedPart {
    pub(super) part: DatasetPart,
    pub(super) bytes: BytesMut,
    pub(super) sum: BytesMut,
}

struct Incoming {
    download: Download,
    bytes: BytesMut,
}

impl Incoming {
    async fn take(&mut self, count: usize) -> Result<BytesMut, RequestError> {
        while self.bytes.len() < count {
            match self.download.next().await? {
                Some(chunk) => self.bytes.extend_from_slice(&chunk),
                None => return Err(RequestError::Later("the files are cut off".into())),
            }
        }
        Ok(self.bytes.split_to(count))
    }

    /// The bytes and the checksum of the next part.
    async fn next_part(&mut self, length: u64) -> Result<(BytesMut, BytesMut), CopyError> {
        match self.take(1).await?[..] {
            [PART_FOLLOWS] => {
                let bytes = self.take(length as usize).await?;
                Ok((bytes, self.take(SUM_BYTES).await?))
            }
            [PART_CHANGED] => Err(CopyError::Changed(self.read_reason().await?)),
            [PART_REFUSED] => Err(CopyError::Unusable(self.read_reason().await?)),
            _ => Err(unexpected_response()),
        }
    }

    /// The reason that the server sends instead of a part.
    async fn read_reason(&mut self) -> Result<String, CopyError> {
        let size = self.take(4).await?;
        let size = size.iter().fold(0, |size, byte| size << 8 | usize::from(*byte));
        if size > MAX_REASON_BYTES {
            return Err(unexpected_response());
        }
        Ok(String::from_utf8_lossy(&self.take(size).await?).into_owned())
    }
}

fn unexpected_response() -> CopyError {
    CopyError::Damaged("the server's response does not match the request".into())
}

/// Writes parts as they arrive. After an error, the parts that arrived before it are still written.
pub(super) async fn receive(
    download: Download,
    parts: Vec<DatasetPart>,
    destination: (&Path, &CopyLock),
    progress: &mut PullProgress,
) -> Result<(), CopyError> {
    let mut incoming = Incoming { download, bytes: BytesMut::new() };
    let (mut buffered, mut buffered_bytes) = (Vec::new(), 0);
    for part in parts {
        match incoming.next_part(part.length).await {
            Ok((bytes, sum)) => {
                buffered_bytes += bytes.len();
                buffered.push(ReceivedPart { part, bytes, sum });
            }
            Err(error) => {
                store(std::mem::take(&mut buffered), destination, progress).await?;
                return Err(error);
            }
        }
        if buffered_bytes >= BUFFER_BYTES {
            store(std::mem::take(&mut buffered), destination, progress).await?;
            buffered_bytes = 0;
        }
    }
    store(buffered, destination, progress).await?;
    // Read the response to its end, so that the connection can be reused.
    let _ = incoming.download.next().await;
    Ok(())
}

async fn store(
    buffered: Vec<ReceivedPart>,
    (folder, copy_lock): (&Path, &CopyLock),
    progress: &mut PullProgress,
) -> Result<(), CopyError> {
    let (folder, has_parts) = (folder.to_owned(), !buffered.is_empty());
    copy_lock.run_blocking(move || buffered.iter().try_for_each(|part| write(part, &folder))).await?;
    progress.has_advanced |= has_parts;
    Ok(())
}

/// Checks a part, and writes it to its file at its offset. The file must exist.
///
/// # Errors
/// The checksum is wrong, or writing fails.
pub(super) fn write(received: &ReceivedPart, folder: &Path) -> Result<(), CopyError> {
    let ReceivedPart { part, bytes, sum } = received;
    if Sha256::digest(bytes)[..] != sum[..] {
        return Err(CopyError::Damaged(format!("{} was damaged in transit from the server", part.path)));
    }
    let path = folder.join(&part.path);
    let file = File::options().write(true).open(&path).map_err(on_disk(&path))?;
    file.write_all_at(bytes, part.offset).map_err(on_disk(&path))
}
