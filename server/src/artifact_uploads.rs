//! Brings checkpoints into the object store while everything else goes on: two at a time, each a part of a file at a time, so that
//! neither the network nor the memory is theirs.

use crate::{
    app::App,
    artifact_store::{ArtifactStore, Asked},
    artifacts,
    manifest::{MANIFEST, Written, hexadecimal, sha256},
    object_storage::{PART_BYTES, Place, Unusable, part_bytes, words},
    regular,
    store::{CheckpointRow, StoreError, StoredCheckpoint},
};
use bytes::Bytes;
use lockstep_protocol::JobId;
use sha2::{Digest, Sha256};
use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
    time::Duration,
};

/// Checkpoints at a time.
const AT_ONCE: usize = 2;
/// Pauses after a failure, the first and the longest.
const TRY_AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Rows that are read at a time.
const ROWS: u32 = 1000;

/// Why a checkpoint is not in the store yet.
enum UploadError {
    /// The store: it may be away.
    Store(object_store::Error),
    /// The store is not the one that it should be, or away; why.
    Away(String),
    /// The database.
    Database(StoreError),
    /// The disk.
    Disk(io::Error),
    /// Its files are gone or others by now: whoever changes them says so.
    Changed,
    /// Its files are not those that its manifest names.
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
            // Trying again does not make it one.
            io::ErrorKind::InvalidInput => Self::Damaged(format!("a file of it {error}")),
            _ => Self::Disk(error),
        }
    }
}

type Result<T> = std::result::Result<T, UploadError>;

/// Uploads until `app` stops: first what an earlier server did not get to.
pub(crate) async fn run(app: App) {
    let Some(store) = &app.artifact_store else { return };
    let mut pause = TRY_AGAIN.0;
    while let Err(error) = find(&app, store).await {
        tracing::warn!(%error, "which checkpoints the object store lacks could not be read; trying again");
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(TRY_AGAIN.1);
    }
    futures_util::future::join_all((0..AT_ONCE).map(|_| work(&app, store))).await;
}

/// Notes the checkpoints on this disk that the store does not have as they are.
async fn find(app: &App, store: &ArtifactStore) -> std::result::Result<(), StoreError> {
    let mut behind = String::new();
    loop {
        let rows = app.store.checkpoints_behind(&behind, ROWS).await?;
        let Some(last) = rows.last() else { return Ok(()) };
        behind.clone_from(&last.id);
        for row in rows {
            note_lacking(app, store, &row).await;
        }
    }
}

/// Notes a checkpoint on this disk, if the store does not have it as it is.
async fn note_lacking(app: &App, store: &ArtifactStore, row: &CheckpointRow) {
    let Ok(text) = regular::read(&app.checkpoint_dir(row).join(MANIFEST)).await else { return };
    if store.stored(&row.id).and_then(|stored| stored.manifest) != Some(sha256(&text)) {
        store.note(&row.id);
    }
}

/// The same for a job's checkpoints, of which some may have been stored without anybody being told.
///
/// # Errors
/// The database.
pub(crate) async fn catch_up(app: &App, job: &JobId) -> std::result::Result<(), StoreError> {
    let Some(store) = &app.artifact_store else { return Ok(()) };
    for row in app.store.checkpoints(job).await?.iter().rev() {
        note_lacking(app, store, row).await;
    }
    store.removed.notify_one();
    Ok(())
}

async fn work(app: &App, store: &ArtifactStore) {
    let mut pause = TRY_AGAIN.0;
    loop {
        let noted = store.waiting.notified();
        let Some(id) = store.take() else {
            noted.await;
            continue;
        };
        let done = upload(app, store, &id).await;
        let failed = match done {
            Ok(()) => false,
            // Whoever removes or replaces it says so.
            Err(UploadError::Changed) => false,
            Err(UploadError::Damaged(how)) => {
                tracing::warn!(
                    checkpoint = id,
                    how,
                    "a damaged checkpoint does not go into the object store"
                );
                if store.refuse(&id)
                    && let Ok(Some(row)) = app.store.checkpoint(&id).await
                {
                    let name = format!("{}-{}", row.info.epoch, row.info.step);
                    let text = format!(
                        "checkpoint {name} on the server's disk is damaged ({how}); it does not go into the object store"
                    );
                    artifacts::log(app, &row.job, text).await;
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
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(TRY_AGAIN.1);
        } else {
            store.done(&id);
            pause = TRY_AGAIN.0;
        }
    }
}

/// One checkpoint; nothing where the store has it as it is on the disk.
async fn upload(app: &App, store: &ArtifactStore, id: &str) -> Result<()> {
    let Some(row) = app.store.checkpoint(id).await? else { return Ok(()) };
    let Some(place) = store.storage.place(id) else { return Ok(()) };
    let folder = app.checkpoint_dir(&row);
    let text = regular::read(&folder.join(MANIFEST)).await?;
    let known = store.stored(id);
    if known.as_ref().and_then(|known| known.manifest.as_ref()) == Some(&sha256(&text)) {
        return Ok(());
    }
    let text = Bytes::from(text);
    let begun =
        StoredCheckpoint { id: id.to_owned(), manifest: None, parts: known.and_then(|known| known.parts) };
    match bring(app, store, &place, &folder, &text, begun).await {
        // Files of two moments are no damage: whoever has replaced them has noted it.
        Err(UploadError::Damaged(_)) if regular::read(&folder.join(MANIFEST)).await? != text => {
            Err(UploadError::Changed)
        }
        Err(trouble) => Err(trouble),
        Ok(()) => {
            store.answers(Asked::Write);
            // Ranks remove what they find on the disk, and would never remove what is in the store alone.
            Ok(artifacts::forget_old(app, &row.job).await?)
        }
    }
}

/// The files of a checkpoint that the store does not have, then its manifest, and the record of that.
async fn bring(
    app: &App,
    store: &ArtifactStore,
    place: &Place,
    folder: &Path,
    text: &Bytes,
    mut record: StoredCheckpoint,
) -> Result<()> {
    let manifest = place.read(text).map_err(UploadError::Damaged)?;
    store.confirm(&*app.store).await?;
    if let Some(parts) = record.parts.take() {
        store.storage.drop_parts(&parts).await?;
    }
    // Recorded before anything is there: so nothing is there that nobody knows of.
    write(app, store, &record).await?;
    // An earlier server may have been killed between this manifest and its record.
    if store.storage.manifest(place).await?.as_ref() != Some(text) {
        for (name, file) in &manifest.files {
            if !store.storage.has(place, name, &file.sha256, file.size_bytes).await? {
                send(app, store, place, (name, file), &folder.join(name), &mut record).await?;
            }
        }
        store.storage.put_manifest(place, text.clone()).await?;
    }
    // What is left of the one that it replaces.
    store.storage.delete(place, Some(&manifest)).await?;
    // A disk may have been taken away meanwhile, and everything have gone into the folder below.
    store.confirm(&*app.store).await?;
    record.manifest = Some(sha256(text));
    write(app, store, &record).await
}

/// Records what is in the store, or will be.
async fn write(app: &App, store: &ArtifactStore, record: &StoredCheckpoint) -> Result<()> {
    if !app.store.put_stored_checkpoint(store.storage.url(), record).await? {
        // It was removed meanwhile.
        store.removed.notify_one();
        return Err(UploadError::Changed);
    }
    store.set(record.clone());
    Ok(())
}

/// A file that is read and hashed part by part.
struct Reader {
    file: File,
    hash: Sha256,
}

impl Reader {
    fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { file: regular::open(path)?, hash: Sha256::new() })
    }

    fn part(&mut self, bytes: u64) -> io::Result<Bytes> {
        let mut part = Vec::with_capacity(usize::try_from(bytes).unwrap_or(0));
        (&mut self.file).take(bytes).read_to_end(&mut part)?;
        self.hash.update(&part);
        Ok(part.into())
    }
}

async fn next(mut reader: Reader, bytes: u64) -> io::Result<(Bytes, Reader)> {
    blocking(move || reader.part(bytes).map(|part| (part, reader))).await
}

/// Work on the disk, in a thread of its own.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

/// One file. It becomes an object when its last part is there and all bytes were those of the manifest.
async fn send(
    app: &App,
    store: &ArtifactStore,
    place: &Place,
    (name, wanted): (&str, &Written),
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
        check(name, wanted, bytes.len() as u64, &reader)?;
        return Ok(store.storage.put(place, name, &wanted.sha256, bytes).await?);
    }
    let mut upload = store.storage.begin(place, name, &wanted.sha256).await?;
    let sent = async {
        record.parts = upload.parts();
        if record.parts.is_some() {
            write(app, store, record).await?;
        }
        let (mut bytes, mut size) = (bytes, 0);
        while !bytes.is_empty() {
            size += bytes.len() as u64;
            upload.send(bytes).await?;
            (bytes, reader) = next(reader, part).await?;
        }
        check(name, wanted, size, &reader)?;
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

/// Whether what was read is what the manifest names.
fn check(name: &str, wanted: &Written, size_bytes: u64, reader: &Reader) -> Result<()> {
    if size_bytes != wanted.size_bytes {
        return Err(UploadError::Damaged(format!(
            "its {name} has {size_bytes} bytes and was written with {}",
            wanted.size_bytes
        )));
    }
    if hexadecimal(reader.hash.clone().finalize().as_slice()) != wanted.sha256 {
        return Err(UploadError::Damaged(format!("the bytes of its {name} are not those that were written")));
    }
    Ok(())
}
