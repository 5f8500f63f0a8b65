//! Uploads checkpoints to the object store in the background: two at a time, each in parts of a file, which limits memory and network use.

use super::{
    Checkpoints,
    artifact_store::{ArtifactStore, Asked},
    manifest::{MANIFEST, ManifestFile, Verifier, sha256},
    object_storage::{PART_BYTES, Place, Unusable, part_bytes, words},
};
use crate::{
    store::{CheckpointRow, Copies, StoreError, StoredCheckpoint},
    util::regular,
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

/// Checkpoints at a time.
const AT_ONCE: usize = 2;
/// Pauses after a failure, the first and the longest.
const TRY_AGAIN: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// Rows that are read at a time.
const ROWS: u32 = 1000;

/// Why a checkpoint is not in the store yet.
enum UploadError {
    /// The object store failed; it may be unavailable.
    Store(object_store::Error),
    /// The object store is the wrong one or unavailable, for this reason.
    Away(String),
    /// The database.
    Database(StoreError),
    /// The disk.
    Disk(io::Error),
    /// Its files were removed or replaced meanwhile, which is notified separately.
    Changed,
    /// Its files do not match its manifest.
    Damaged(String),
}

impl From<object_store::Error> for UploadError {
    fn from(error: object_store::Error) -> Self {
        Self::Store(error)
    }
}

impl From<Unusable> for UploadError {
    fn from(unusable: Unusable) -> Self {
        Self::Away(unusable.why)
    }
}

impl From<StoreError> for UploadError {
    fn from(error: StoreError) -> Self {
        Self::Database(error)
    }
}

impl From<io::Error> for UploadError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::Changed,
            // Not a regular file: trying again would not help.
            io::ErrorKind::InvalidInput => Self::Damaged(format!("a file of it {error}")),
            _ => Self::Disk(error),
        }
    }
}

type Result<T> = std::result::Result<T, UploadError>;

/// Uploads until dropped: first what an earlier server did not get to.
pub(crate) async fn run(checkpoints: Arc<Checkpoints>) {
    let Some(store) = &checkpoints.artifact_store else { return };
    let mut backoff = TRY_AGAIN;
    while let Err(error) = find(&checkpoints, store).await {
        tracing::warn!(%error, "which checkpoints the object store lacks could not be read; trying again");
        tokio::time::sleep(backoff.pause()).await;
    }
    futures_util::future::join_all((0..AT_ONCE).map(|_| work(&checkpoints, store))).await;
}

/// Queues the checkpoints on this disk that differ from those in the object store.
async fn find(checkpoints: &Checkpoints, store: &ArtifactStore) -> std::result::Result<(), StoreError> {
    let mut behind = String::new();
    loop {
        let rows = checkpoints.store.checkpoints_behind(&behind, ROWS).await?;
        let Some(last) = rows.last() else { return Ok(()) };
        behind.clone_from(&last.id);
        for row in rows {
            note_lacking(checkpoints, store, &row).await?;
        }
    }
}

/// Queues a checkpoint on this disk, unless the object store has it with the same manifest.
async fn note_lacking(
    checkpoints: &Checkpoints,
    store: &ArtifactStore,
    row: &CheckpointRow,
) -> std::result::Result<(), StoreError> {
    let Ok(text) = regular::read(&checkpoints.folder(row).join(MANIFEST)).await else { return Ok(()) };
    let stored = checkpoints.store.stored_checkpoint(store.storage.url(), &row.id).await?;
    if stored.and_then(|stored| stored.manifest) != Some(sha256(&text)) {
        store.note(&row.id);
    }
    Ok(())
}

/// Queues a job's checkpoints. Some may have been stored without a notification.
///
/// # Errors
/// The database.
pub(crate) async fn catch_up(checkpoints: &Checkpoints, job: &JobId) -> std::result::Result<(), StoreError> {
    let Some(store) = &checkpoints.artifact_store else { return Ok(()) };
    for row in checkpoints.store.checkpoints(job).await?.iter().rev() {
        note_lacking(checkpoints, store, row).await?;
    }
    store.removed.notify_one();
    Ok(())
}

async fn work(checkpoints: &Checkpoints, store: &ArtifactStore) {
    let mut backoff = TRY_AGAIN;
    loop {
        let noted = store.waiting.notified();
        let Some(id) = store.take() else {
            noted.await;
            continue;
        };
        let done = upload(checkpoints, store, &id).await;
        let failed = match done {
            Ok(()) => false,
            // Its removal or replacement is notified separately.
            Err(UploadError::Changed) => false,
            Err(UploadError::Damaged(how)) => {
                tracing::warn!(
                    checkpoint = id,
                    how,
                    "a damaged checkpoint does not go into the object store"
                );
                if let Ok(true) = checkpoints.store.mark_damaged(Copies::SERVER, &id).await
                    && let Ok(Some(row)) = checkpoints.store.checkpoint(&id).await
                {
                    let name = format!("{}-{}", row.info.epoch, row.info.step);
                    let text = format!(
                        "checkpoint {name} on the server's disk is damaged ({how}); it does not go into the object store"
                    );
                    checkpoints.events.log(&row.job, text).await;
                }
                false
            }
            Err(UploadError::Store(error)) => {
                store.is_away(Asked::Write, &words(&error));
                true
            }
            Err(UploadError::Away(why)) => {
                store.is_away(Asked::Write, &why);
                true
            }
            Err(UploadError::Database(error)) => {
                tracing::warn!(%error, "a checkpoint could not be noted as stored; trying again");
                true
            }
            Err(UploadError::Disk(error)) => {
                tracing::warn!(%error, checkpoint = id, "a checkpoint could not be read; trying again");
                true
            }
        };
        if failed {
            store.note_again(&id);
            store.done(&id);
            tokio::time::sleep(backoff.pause()).await;
        } else {
            store.done(&id);
            backoff = TRY_AGAIN;
        }
    }
}

/// Uploads one checkpoint, unless the object store has it with the same manifest.
async fn upload(checkpoints: &Checkpoints, store: &ArtifactStore, id: &str) -> Result<()> {
    let Some(row) = checkpoints.store.checkpoint(id).await? else { return Ok(()) };
    let Some(place) = store.storage.place(id) else { return Ok(()) };
    let folder = checkpoints.folder(&row);
    let text = regular::read(&folder.join(MANIFEST)).await?;
    let known = checkpoints.store.stored_checkpoint(store.storage.url(), id).await?;
    if known.as_ref().and_then(|known| known.manifest.as_ref()) == Some(&sha256(&text)) {
        return Ok(());
    }
    let text = Bytes::from(text);
    let begun =
        StoredCheckpoint { id: id.to_owned(), manifest: None, parts: known.and_then(|known| known.parts) };
    match bring(checkpoints, store, &place, &folder, &text, begun).await {
        // Not damaged: it was replaced meanwhile, and is queued again.
        Err(UploadError::Damaged(_)) if regular::read(&folder.join(MANIFEST)).await? != text => {
            Err(UploadError::Changed)
        }
        Err(trouble) => Err(trouble),
        Ok(()) => {
            store.answers(Asked::Write);
            // Ranks remove only checkpoints that are on the disk, not those that only the object store has.
            Ok(checkpoints.forget_old(&row.job).await?)
        }
    }
}

/// Uploads the files that the object store lacks, then the manifest, then stores the record.
async fn bring(
    checkpoints: &Checkpoints,
    store: &ArtifactStore,
    place: &Place,
    folder: &Path,
    text: &Bytes,
    mut record: StoredCheckpoint,
) -> Result<()> {
    let manifest = place.read(text).map_err(UploadError::Damaged)?;
    store.confirm(&*checkpoints.store).await?;
    if let Some(parts) = record.parts.take() {
        store.storage.drop_parts(&parts).await?;
    }
    // Recorded before the first object exists, so that every object can be found and deleted.
    write(checkpoints, store, &record).await?;
    // An earlier server may have been killed between the upload of the manifest and its record.
    if store.storage.manifest(place).await?.as_ref() != Some(text) {
        for (name, file) in &manifest.files {
            if !store.storage.has(place, name, &file.sha256, file.size_bytes).await? {
                send(checkpoints, store, place, (name, file), &folder.join(name), &mut record).await?;
            }
        }
        store.storage.put_manifest(place, text.clone()).await?;
    }
    // Remaining files of the checkpoint that this one replaces.
    store.storage.delete(place, Some(&manifest)).await?;
    // If the store's disk was unmounted meanwhile, everything went into the folder below it.
    store.confirm(&*checkpoints.store).await?;
    record.manifest = Some(sha256(text));
    write(checkpoints, store, &record).await
}

/// Stores the record of what is in the object store, or will be.
async fn write(checkpoints: &Checkpoints, store: &ArtifactStore, record: &StoredCheckpoint) -> Result<()> {
    if !checkpoints.store.put_stored_checkpoint(store.storage.url(), record).await? {
        // It was removed meanwhile.
        store.removed.notify_one();
        return Err(UploadError::Changed);
    }
    Ok(())
}

/// A file that is read and verified part by part.
struct Reader {
    file: File,
    verifier: Verifier,
}

impl Reader {
    fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { file: regular::open(path)?, verifier: Verifier::default() })
    }

    fn part(&mut self, bytes: u64) -> io::Result<Bytes> {
        let mut part = Vec::with_capacity(usize::try_from(bytes).unwrap_or(0));
        (&mut self.file).take(bytes).read_to_end(&mut part)?;
        self.verifier.add(&part);
        Ok(part.into())
    }
}

async fn next(mut reader: Reader, bytes: u64) -> io::Result<(Bytes, Reader)> {
    blocking(move || reader.part(bytes).map(|part| (part, reader))).await
}

/// Runs blocking work on the disk on a thread of its own.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

/// Uploads one file. It becomes an object once its last part has arrived and its checksum is correct.
async fn send(
    checkpoints: &Checkpoints,
    store: &ArtifactStore,
    place: &Place,
    (name, wanted): (&str, &ManifestFile),
    path: &Path,
    record: &mut StoredCheckpoint,
) -> Result<()> {
    let part = part_bytes(wanted.size_bytes);
    let opened = {
        let path = path.to_owned();
        blocking(move || Reader::open(&path)).await
    };
    let mut reader = opened?;
    let bytes;
    (bytes, reader) = next(reader, part).await?;
    if wanted.size_bytes <= PART_BYTES {
        reader.verifier.finish(name, wanted).map_err(UploadError::Damaged)?;
        return Ok(store.storage.put(place, name, &wanted.sha256, bytes).await?);
    }
    let mut upload = store.storage.begin(place, name, &wanted.sha256).await?;
    let sent = async {
        record.parts = upload.parts();
        if record.parts.is_some() {
            write(checkpoints, store, record).await?;
        }
        let mut bytes = bytes;
        while !bytes.is_empty() {
            upload.send(bytes).await?;
            (bytes, reader) = next(reader, part).await?;
        }
        reader.verifier.finish(name, wanted).map_err(UploadError::Damaged)?;
        Ok(upload.finish().await?)
    }
    .await;
    match sent {
        Ok(()) => record.parts = None,
        Err(trouble) => {
            upload.abort().await;
            return Err(trouble);
        }
    }
    Ok(())
}
