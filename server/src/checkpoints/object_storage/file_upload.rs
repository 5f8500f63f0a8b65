//! The upload of a large file to the store in parts. The object appears with the last part.

use super::{ObjectStorage, Place, Result, optional, other, within};
use bytes::Bytes;
use object_store::{
    MultipartUpload, ObjectStoreExt,
    aws::AmazonS3,
    multipart::{MultipartStore, PartId},
    path::Path,
};
use std::sync::Arc;

/// The upload of a file in parts.
#[derive(Debug)]
pub(crate) enum FileUpload {
    /// An upload to a bucket.
    Parts { bucket: Arc<AmazonS3>, path: Path, id: String, sent: Vec<PartId> },
    /// An upload to a directory.
    Stream(Box<dyn MultipartUpload>),
}

impl ObjectStorage {
    /// Begins the upload of a file in parts.
    pub(crate) async fn begin(&self, place: &Place, name: &str, sha256: &str) -> Result<FileUpload> {
        let path = place.file(name, sha256);
        match &self.bucket {
            Some(bucket) => {
                let id = within(bucket.create_multipart(&path)).await?;
                Ok(FileUpload::Parts { bucket: bucket.clone(), path, id, sent: Vec::new() })
            }
            None => {
                self.drop_torn(&path).await?;
                Ok(FileUpload::Stream(within(self.objects.put_multipart(&path)).await?))
            }
        }
    }

    /// Aborts the multipart upload of a server that was killed. Until then, the bucket keeps the parts and charges for them. `parts` is the
    /// result of [`FileUpload::parts`] for the upload.
    pub(crate) async fn drop_parts(&self, parts: &str) -> Result<()> {
        let (Some(bucket), Some((path, id))) = (&self.bucket, parts.split_once(' ')) else { return Ok(()) };
        // Nothing is found if the upload was finished, or was dropped by the store.
        optional(within(bucket.abort_multipart(&Path::from(path), &id.to_owned())).await).map(drop)
    }

    /// Removes the incomplete uploads of a file in a directory. Names of incomplete uploads end in `#` and a number.
    async fn drop_torn(&self, path: &Path) -> Result<()> {
        let Some(directory) = &self.directory else { return Ok(()) };
        let at = directory.join(path.as_ref());
        let (Some(folder), Some(name)) = (at.parent(), at.file_name()) else { return Ok(()) };
        let Ok(mut entries) = tokio::fs::read_dir(folder).await else { return Ok(()) };
        let torn = format!("{}#", name.to_string_lossy());
        while let Some(entry) = entries.next_entry().await.map_err(other)? {
            if entry.file_name().to_string_lossy().starts_with(&torn) {
                tokio::fs::remove_file(entry.path()).await.map_err(other)?;
            }
        }
        Ok(())
    }
}

impl FileUpload {
    /// Identifies the upload for [`ObjectStorage::drop_parts`]. `None` for an upload to a directory, whose next upload removes incomplete
    /// files.
    pub(crate) fn parts(&self) -> Option<String> {
        match self {
            Self::Parts { path, id, .. } => Some(format!("{path} {id}")),
            Self::Stream(_) => None,
        }
    }

    /// Sends the next part. All parts except the last must have the same size.
    pub(crate) async fn send(&mut self, part: Bytes) -> Result<()> {
        match self {
            Self::Parts { bucket, path, id, sent } => {
                let done = within(bucket.put_part(path, id, sent.len(), part.into())).await?;
                sent.push(done);
                Ok(())
            }
            Self::Stream(upload) => within(upload.put_part(part.into())).await,
        }
    }

    /// Combines the parts into an object.
    pub(crate) async fn finish(&mut self) -> Result<()> {
        match self {
            Self::Parts { bucket, path, id, sent } => {
                within(bucket.complete_multipart(path, id, std::mem::take(sent))).await.map(drop)
            }
            Self::Stream(upload) => within(upload.complete()).await.map(drop),
        }
    }

    /// Removes the parts that were sent. If this fails, the next upload of the file removes them.
    pub(crate) async fn abort(mut self) {
        let aborted = match &mut self {
            Self::Parts { bucket, path, id, .. } => within(bucket.abort_multipart(path, id)).await,
            Self::Stream(upload) => within(upload.abort()).await,
        };
        if let Err(error) = aborted {
            tracing::debug!(%error, "parts of an upload could not be removed");
        }
    }
}
