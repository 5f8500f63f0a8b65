//! The upload of a large file to the store in parts. The object appears with the last part.

use super::{ObjectStorage, Result, optional, store_error, with_timeout};
use bytes::Bytes;
use object_store::{
    MultipartUpload, ObjectStoreExt,
    aws::AmazonS3,
    multipart::{MultipartStore, PartId},
    path::Path,
};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) enum FileUpload {
    /// An upload to a bucket.
    Parts { bucket: Arc<AmazonS3>, path: Path, id: String, sent: Vec<PartId> },
    /// An upload to a directory.
    Stream(Box<dyn MultipartUpload>),
}

impl ObjectStorage {
    /// Begins the upload of a file in parts.
    pub(crate) async fn begin_upload(&self, path: Path) -> Result<FileUpload> {
        match &self.bucket {
            Some(bucket) => {
                let id = with_timeout(bucket.create_multipart(&path)).await?;
                Ok(FileUpload::Parts { bucket: bucket.clone(), path, id, sent: Vec::new() })
            }
            None => {
                self.remove_incomplete(&path).await?;
                Ok(FileUpload::Stream(with_timeout(self.objects.put_multipart(&path)).await?))
            }
        }
    }

    /// Aborts the multipart upload of a server that was killed. Until then, the bucket keeps the parts and charges for them. `upload_id` is
    /// the result of [`FileUpload::upload_id`] for the upload.
    pub(crate) async fn abort_upload(&self, upload_id: &str) -> Result<()> {
        let (Some(bucket), Some((path, id))) = (&self.bucket, upload_id.split_once(' ')) else {
            return Ok(());
        };
        // The bucket does not have the upload if it was finished, or if the bucket has dropped it.
        optional(with_timeout(bucket.abort_multipart(&Path::from(path), &id.to_owned())).await).map(drop)
    }

    /// Removes the incomplete uploads of a file in a directory. Names of incomplete uploads end in `#` and a number.
    async fn remove_incomplete(&self, path: &Path) -> Result<()> {
        let Some(directory) = &self.directory else { return Ok(()) };
        let file = directory.join(path.as_ref());
        let (Some(folder), Some(name)) = (file.parent(), file.file_name()) else { return Ok(()) };
        let Ok(mut entries) = tokio::fs::read_dir(folder).await else { return Ok(()) };
        let prefix = format!("{}#", name.to_string_lossy());
        while let Some(entry) = entries.next_entry().await.map_err(store_error)? {
            if entry.file_name().to_string_lossy().starts_with(&prefix) {
                tokio::fs::remove_file(entry.path()).await.map_err(store_error)?;
            }
        }
        Ok(())
    }
}

impl FileUpload {
    /// Identifies the upload for [`ObjectStorage::abort_upload`]. `None` for an upload to a directory, whose next upload removes incomplete
    /// files.
    pub(crate) fn upload_id(&self) -> Option<String> {
        match self {
            Self::Parts { path, id, .. } => Some(format!("{path} {id}")),
            Self::Stream(_) => None,
        }
    }

    /// Sends the next part. All parts except the last must have the same size.
    pub(crate) async fn send(&mut self, part: Bytes) -> Result<()> {
        match self {
            Self::Parts { bucket, path, id, sent } => {
                let part_id = with_timeout(bucket.put_part(path, id, sent.len(), part.into())).await?;
                sent.push(part_id);
                Ok(())
            }
            Self::Stream(upload) => with_timeout(upload.put_part(part.into())).await,
        }
    }

    /// Combines the parts into an object.
    pub(crate) async fn finish(&mut self) -> Result<()> {
        match self {
            Self::Parts { bucket, path, id, sent } => {
                with_timeout(bucket.complete_multipart(path, id, std::mem::take(sent))).await.map(drop)
            }
            Self::Stream(upload) => with_timeout(upload.complete()).await.map(drop),
        }
    }

    /// Removes the parts that were sent. If this fails, the next upload of the file removes them.
    pub(crate) async fn abort(mut self) {
        let aborted = match &mut self {
            Self::Parts { bucket, path, id, .. } => with_timeout(bucket.abort_multipart(path, id)).await,
            Self::Stream(upload) => with_timeout(upload.abort()).await,
        };
        if let Err(error) = aborted {
            tracing::debug!(%error, "parts of an upload could not be removed");
        }
    }
}
