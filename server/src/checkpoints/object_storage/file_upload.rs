//! A large file on its way into the store, part by part: it appears with the last one.

use super::{ObjectStorage, Place, Result, other, within};
use bytes::Bytes;
use object_store::{
    Error, MultipartUpload, ObjectStoreExt,
    aws::AmazonS3,
    multipart::{MultipartStore, PartId},
    path::Path,
};
use std::sync::Arc;

/// A file of which some parts are sent.
#[derive(Debug)]
pub(crate) enum FileUpload {
    /// To a bucket.
    Parts { bucket: Arc<AmazonS3>, path: Path, id: String, sent: Vec<PartId> },
    /// To a directory.
    Stream(Box<dyn MultipartUpload>),
}

impl ObjectStorage {
    /// Begins to send a file in parts.
    ///
    /// # Errors
    /// The store.
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

    /// Aborts the multipart upload of a server that was killed. Until it is aborted, the bucket keeps its parts and charges for them.
    /// `parts` is what [`FileUpload::parts`] was then.
    ///
    /// # Errors
    /// The store.
    pub(crate) async fn drop_parts(&self, parts: &str) -> Result<()> {
        let (Some(bucket), Some((path, id))) = (&self.bucket, parts.split_once(' ')) else { return Ok(()) };
        match within(bucket.abort_multipart(&Path::from(path), &id.to_owned())).await {
            // It came to its end, or the store has dropped it itself.
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The same for a directory, where parts are a file whose name ends in `#` and a number.
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
    /// By what its parts are dropped should nobody else do so; none where nothing stays behind for long.
    pub(crate) fn parts(&self) -> Option<String> {
        match self {
            Self::Parts { path, id, .. } => Some(format!("{path} {id}")),
            Self::Stream(_) => None,
        }
    }

    /// The next part; all but the last have one size.
    ///
    /// # Errors
    /// The store.
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

    /// Makes an object of the parts.
    ///
    /// # Errors
    /// The store.
    pub(crate) async fn finish(&mut self) -> Result<()> {
        match self {
            Self::Parts { bucket, path, id, sent } => {
                within(bucket.complete_multipart(path, id, std::mem::take(sent))).await.map(drop)
            }
            Self::Stream(upload) => within(upload.complete()).await.map(drop),
        }
    }

    /// Drops what was sent. What stays of it after a failure is dropped when the file is sent anew.
    pub(crate) async fn abort(mut self) {
        let aborted = match &mut self {
            Self::Parts { bucket, path, id, .. } => within(bucket.abort_multipart(path, id)).await,
            Self::Stream(upload) => within(upload.abort()).await,
        };
        if let Err(error) = aborted {
            tracing::debug!(%error, "parts of an upload could not be dropped");
        }
    }
}
