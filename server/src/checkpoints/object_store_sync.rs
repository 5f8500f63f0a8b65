//! Uploads checkpoints to the object store in the background, and deletes the objects of deleted checkpoints. Two checkpoints are processed
//! at a time, and their files are sent in parts, which limits memory and network use.
//!
//! The row of a copy is written before the copy's first object and deleted after its last object. A row without a checkpoint names objects
//! that are to be deleted, so no objects are left behind if the server is killed or the object store is unavailable.

use super::{
    Checkpoints, folder_name_of,
    manifest::{MANIFEST, ManifestFile, Verifier, sha256},
    object_storage::{MIN_PART_BYTES, Prefix, Unusable, describe, part_size_for},
    object_store_state::{ObjectStoreState, RequestKind},
};
use crate::{
    store::{self, CheckpointRow, Copies, StoreError, StoredCheckpoint},
    util::{blocking, regular_files},
};
use bytes::Bytes;
use lockstep_protocol::{JobId, backoff::Backoff};
use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
    sync::Arc,
    time::Duration,
};

/// Number of checkpoints that are processed at the same time.
const WORKERS: usize = 2;
/// Pauses after a failure: the first and the longest.
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// Number of rows that are read at a time.
const ROWS_PER_QUERY: u32 = 1000;

/// Why the upload or the deletion of a checkpoint failed.
enum SyncError {
    /// The object store does not respond, refuses a request, or is another server's. The text is the reason.
    ObjectStoreUnavailable(String),
    /// Another failure, for the log: what failed, and the error.
    Failed(&'static str, String),
    /// The checkpoint's files were removed or replaced during the upload. The removal or replacement queues the checkpoint itself.
    Changed,
    /// The checkpoint's files do not match the manifest.
    Damaged(String),
}

impl From<object_store::Error> for SyncError {
    fn from(error: object_store::Error) -> Self {
        Self::ObjectStoreUnavailable(describe(&error))
    }
}

impl From<Unusable> for SyncError {
    fn from(unusable: Unusable) -> Self {
        Self::ObjectStoreUnavailable(unusable.why)
    }
}

impl From<StoreError> for SyncError {
    fn from(error: StoreError) -> Self {
        Self::Failed("the database could not be read or written", error.to_string())
    }
}

impl From<io::Error> for SyncError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::Changed,
            // A retry would not help.
            io::ErrorKind::InvalidInput => Self::Damaged("one of its files is not a regular file".into()),
            _ => Self::Failed("a checkpoint could not be read", error.to_string()),
        }
    }
}

type Result<T> = std::result::Result<T, SyncError>;

/// Uploads and deletes until dropped. Begins with the work that an earlier server has not finished.
pub(crate) async fn run(checkpoints: Arc<Checkpoints>) {
    let Some(object_store) = &checkpoints.object_store else { return };
    let mut backoff = RETRY;
    while let Err(error) = queue_all_missing(&checkpoints, object_store).await {
        tracing::warn!(%error, "the list of checkpoints to upload cannot be read; trying again");
        tokio::time::sleep(backoff.next_pause()).await;
    }
    wait_until_usable(&checkpoints, object_store).await;
    futures_util::future::join_all((0..WORKERS).map(|_| run_worker(&checkpoints, object_store))).await;
}

/// Queues the checkpoints on this disk whose copies in the object store are missing or different, and the objects of deleted checkpoints.
async fn queue_all_missing(checkpoints: &Checkpoints, object_store: &ObjectStoreState) -> store::Result<()> {
    queue_abandoned(checkpoints, object_store).await?;
    let mut after = String::new();
    loop {
        let rows = checkpoints.store.checkpoints_after(&after, ROWS_PER_QUERY).await?;
        let Some(last) = rows.last() else { return Ok(()) };
        after.clone_from(&last.id);
        for row in rows {
            queue_if_missing(checkpoints, object_store, &row).await?;
        }
    }
}

/// Queues the deletion of objects whose checkpoint was deleted.
async fn queue_abandoned(checkpoints: &Checkpoints, object_store: &ObjectStoreState) -> store::Result<()> {
    let mut after = String::new();
    loop {
        let ids = checkpoints
            .store
            .abandoned_checkpoints(object_store.storage.url(), &after, ROWS_PER_QUERY)
            .await?;
        let Some(last) = ids.last() else { return Ok(()) };
        after.clone_from(last);
        ids.iter().for_each(|id| object_store.queue(id));
    }
}

/// Queues a checkpoint on this disk, unless the object store has the checkpoint with the same manifest.
async fn queue_if_missing(
    checkpoints: &Checkpoints,
    object_store: &ObjectStoreState,
    row: &CheckpointRow,
) -> store::Result<()> {
    let Ok(manifest) = regular_files::read(&checkpoints.folder(row).join(MANIFEST)).await else {
        return Ok(());
    };
    let stored = checkpoints.store.stored_checkpoint(object_store.storage.url(), &row.id).await?;
    if stored.and_then(|stored| stored.manifest) != Some(sha256(&manifest)) {
        object_store.queue(&row.id);
    }
    Ok(())
}

/// Queues a job's checkpoints, and the objects of deleted checkpoints, because some may have been stored or deleted without a notification.
pub(crate) async fn catch_up(checkpoints: &Checkpoints, job: &JobId) -> store::Result<()> {
    let Some(object_store) = &checkpoints.object_store else { return Ok(()) };
    queue_abandoned(checkpoints, object_store).await?;
    for row in checkpoints.store.checkpoints(job).await?.iter().rev() {
        queue_if_missing(checkpoints, object_store, row).await?;
    }
    Ok(())
}

/// Waits until the store can be used and is the right store. If the store was unavailable when the server started, a wrong configuration is
/// found only now.
async fn wait_until_usable(checkpoints: &Checkpoints, object_store: &ObjectStoreState) {
    let (mut backoff, mut is_logged) = (RETRY, false);
    while let Err(unusable) = object_store.confirm(&*checkpoints.store).await {
        object_store.note_failure(RequestKind::Other, &unusable.why);
        if !unusable.is_temporary && !is_logged {
            tracing::error!(error = unusable.why, "the object store cannot be used with this configuration");
            is_logged = true;
        }
        tokio::time::sleep(backoff.next_pause()).await;
    }
    object_store.note_success(RequestKind::Other);
}

async fn run_worker(checkpoints: &Checkpoints, object_store: &ObjectStoreState) {
    let mut backoff = RETRY;
    loop {
        let noted = object_store.queue_changed.notified();
        let Some(id) = object_store.take_next() else {
            noted.await;
            continue;
        };
        let (request_kind, result) = match checkpoints.store.checkpoint(&id).await {
            Ok(Some(row)) => (RequestKind::Write, upload(checkpoints, object_store, &row).await),
            Ok(None) => (RequestKind::Other, delete(checkpoints, object_store, &id).await),
            Err(error) => (RequestKind::Other, Err(error.into())),
        };
        let has_failed = match result {
            Ok(()) | Err(SyncError::Changed) => false,
            Err(SyncError::Damaged(how)) => {
                record_damage(checkpoints, &id, &how).await;
                false
            }
            Err(SyncError::ObjectStoreUnavailable(why)) => {
                object_store.note_failure(request_kind, &why);
                true
            }
            Err(SyncError::Failed(what, error)) => {
                tracing::warn!(error, checkpoint = id, "{what}; trying again");
                true
            }
        };
        if has_failed {
            // Until `ObjectStoreState::finish`, the other worker does not process this checkpoint.
            tokio::time::sleep(backoff.next_pause()).await;
            object_store.requeue(&id);
        } else {
            backoff = RETRY;
        }
        object_store.finish(&id);
    }
}

/// Records that the copy on the server's disk is damaged, also in the job's log.
async fn record_damage(checkpoints: &Checkpoints, id: &str, how: &str) {
    tracing::warn!(checkpoint = id, how, "a damaged checkpoint is not uploaded to the object store");
    if let Ok(true) = checkpoints.store.mark_damaged(Copies::SERVER, id).await
        && let Ok(Some(row)) = checkpoints.store.checkpoint(id).await
    {
        let name = folder_name_of(&row);
        let text = format!(
            "checkpoint {name} on the server's disk is damaged ({how}); it is not uploaded to the object store"
        );
        checkpoints.events.log(&row.job, text).await;
    }
}

/// Deletes the objects of a deleted checkpoint, then the row of the copy.
async fn delete(checkpoints: &Checkpoints, object_store: &ObjectStoreState, id: &str) -> Result<()> {
    let url = object_store.storage.url();
    let Some(record) = checkpoints.store.stored_checkpoint(url, id).await? else { return Ok(()) };
    if let Some(prefix) = object_store.storage.prefix_of(id) {
        // Another server that has a copy of this database may have adopted the object store. The objects then belong to that server.
        object_store.confirm(&*checkpoints.store).await?;
        let deleted = async {
            if let Some(upload_id) = &record.unfinished_upload {
                object_store.storage.abort_upload(upload_id).await?;
            }
            object_store.storage.delete(&prefix, None).await
        };
        let deleted = deleted.await;
        // A directory that is not mounted looks empty, so the deletion counts only if the object store is confirmed again.
        object_store.confirm(&*checkpoints.store).await?;
        object_store.note_success(RequestKind::Other);
        let failed = "the objects of a checkpoint cannot be deleted";
        deleted.map_err(|error| SyncError::Failed(failed, describe(&error)))?;
    }
    checkpoints.store.forget_copy(url, id).await?;
    object_store.forget(id);
    Ok(())
}

/// Uploads a checkpoint, unless the object store has the checkpoint with the same manifest.
async fn upload(
    checkpoints: &Checkpoints,
    object_store: &ObjectStoreState,
    row: &CheckpointRow,
) -> Result<()> {
    let Some(prefix) = object_store.storage.prefix_of(&row.id) else { return Ok(()) };
    let folder = checkpoints.folder(row);
    let manifest = regular_files::read(&folder.join(MANIFEST)).await?;
    let known = checkpoints.store.stored_checkpoint(object_store.storage.url(), &row.id).await?;
    if known.as_ref().and_then(|known| known.manifest.as_ref()) == Some(&sha256(&manifest)) {
        return Ok(());
    }
    let manifest = Bytes::from(manifest);
    let record = StoredCheckpoint {
        id: row.id.clone(),
        manifest: None,
        unfinished_upload: known.and_then(|known| known.unfinished_upload),
    };
    match send_files(checkpoints, object_store, &prefix, &folder, &manifest, record).await {
        // The checkpoint is not damaged, but was replaced during the upload, and is queued again.
        Err(SyncError::Damaged(_)) if regular_files::read(&folder.join(MANIFEST)).await? != manifest => {
            Err(SyncError::Changed)
        }
        Err(error) => Err(error),
        Ok(()) => {
            object_store.note_success(RequestKind::Write);
            // Ranks do not remove checkpoints that only the object store has.
            Ok(checkpoints.remove_old_in_object_store(&row.job).await?)
        }
    }
}

/// Uploads the files that the object store lacks, then the manifest, then stores the record.
async fn send_files(
    checkpoints: &Checkpoints,
    object_store: &ObjectStoreState,
    prefix: &Prefix,
    folder: &Path,
    manifest_bytes: &Bytes,
    mut record: StoredCheckpoint,
) -> Result<()> {
    let manifest = prefix.parse_manifest(manifest_bytes).map_err(SyncError::Damaged)?;
    object_store.confirm(&*checkpoints.store).await?;
    if let Some(upload_id) = record.unfinished_upload.take() {
        object_store.storage.abort_upload(&upload_id).await?;
    }
    // The row is written before the first object exists, so that every object can be found and deleted.
    write_record(checkpoints, object_store, &record).await?;
    // An earlier server may have been killed after the upload of the manifest and before the row was updated.
    if object_store.storage.manifest(prefix).await?.as_ref() != Some(manifest_bytes) {
        for (name, file) in &manifest.files {
            let target = prefix.file_path(name, file);
            if !object_store.storage.has(&target, file.size_bytes).await? {
                send_file(checkpoints, object_store, &folder.join(name), (name, file), target, &mut record)
                    .await?;
            }
        }
        object_store.storage.put(&prefix.manifest_path(), manifest_bytes.clone()).await?;
    }
    // Deletes the remaining files of the checkpoint that this upload replaces.
    object_store.storage.delete(prefix, Some(&manifest)).await?;
    // If the store's disk was unmounted during the upload, the files were written into the mount point's folder.
    object_store.confirm(&*checkpoints.store).await?;
    // If the server's copy is damaged, it is now replaced from the store: removes its damage mark.
    checkpoints.store.forget_copy(Copies::SERVER, &record.id).await?;
    record.manifest = Some(sha256(manifest_bytes));
    write_record(checkpoints, object_store, &record).await
}

/// Writes the row of a copy that is in the object store, or is about to be.
async fn write_record(
    checkpoints: &Checkpoints,
    object_store: &ObjectStoreState,
    record: &StoredCheckpoint,
) -> Result<()> {
    if !checkpoints.store.put_stored_checkpoint(object_store.storage.url(), record).await? {
        // The checkpoint was removed during the upload.
        return Err(SyncError::Changed);
    }
    Ok(())
}

/// A file that is read part by part, and its checksum.
struct Reader {
    file: File,
    verifier: Verifier,
}

/// Reads the next part, of at most `bytes` bytes.
async fn read_part(mut reader: Reader, bytes: u64) -> io::Result<(Bytes, Reader)> {
    blocking(move || {
        let mut part = Vec::with_capacity(usize::try_from(bytes).unwrap_or(0));
        (&mut reader.file).take(bytes).read_to_end(&mut part)?;
        reader.verifier.add(&part);
        Ok((Bytes::from(part), reader))
    })
    .await
}

/// Uploads a file to the object `target`, which appears after the last part has arrived and the checksum is correct.
async fn send_file(
    checkpoints: &Checkpoints,
    object_store: &ObjectStoreState,
    path: &Path,
    (name, expected): (&str, &ManifestFile),
    target: object_store::path::Path,
    record: &mut StoredCheckpoint,
) -> Result<()> {
    let part_size = part_size_for(expected.size_bytes);
    let path = path.to_owned();
    let file = blocking(move || regular_files::open(&path)).await?;
    let mut reader = Reader { file, verifier: Verifier::default() };
    let first_part;
    (first_part, reader) = read_part(reader, part_size).await?;
    if expected.size_bytes <= MIN_PART_BYTES {
        reader.verifier.finish(name, expected).map_err(SyncError::Damaged)?;
        return Ok(object_store.storage.put(&target, first_part).await?);
    }
    let mut upload = object_store.storage.begin_upload(target).await?;
    let sent: Result<()> = async {
        record.unfinished_upload = upload.upload_id();
        if record.unfinished_upload.is_some() {
            write_record(checkpoints, object_store, record).await?;
        }
        let mut part = first_part;
        while !part.is_empty() {
            upload.send(part).await?;
            (part, reader) = read_part(reader, part_size).await?;
        }
        reader.verifier.finish(name, expected).map_err(SyncError::Damaged)?;
        Ok(upload.finish().await?)
    }
    .await;
    if sent.is_ok() {
        record.unfinished_upload = None;
    } else {
        upload.abort().await;
    }
    sent
}
