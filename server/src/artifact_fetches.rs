//! Brings checkpoints back from the object store to this disk, where the server's own copy is gone: for a download, an evaluation, a
//! prediction, a fork, or the next attempt of a job.

use crate::{
    app::App,
    artifact_store::{ArtifactStore, Fetch, Fetched, NotFetched},
    manifest::{MANIFEST, Written, hexadecimal},
    object_storage::{Place, words},
    store::CheckpointRow,
};
use futures_util::StreamExt;
use sha2::{Digest, Sha256};
use std::{fs, io, path::Path, time::Duration};
use tokio::{fs::File, io::AsyncWriteExt};

/// A checkpoint whose sums are wrong is fetched so often before it counts as damaged: the network may have done it.
const TRIES: usize = 2;

impl From<object_store::Error> for NotFetched {
    fn from(error: object_store::Error) -> Self {
        match error {
            object_store::Error::NotFound { .. } => Self::Missing,
            error => Self::Away(words(&error)),
        }
    }
}

impl From<io::Error> for NotFetched {
    fn from(error: io::Error) -> Self {
        Self::Disk(error.to_string())
    }
}

type Result<T> = std::result::Result<T, NotFetched>;

/// A fetch of a checkpoint that is not on this disk, begun where none runs; none where it is here, or the store does not have it.
pub(crate) fn fetch(app: &App, row: &CheckpointRow) -> Option<Fetch> {
    let store = app.artifact_store.as_ref()?;
    if !store.has(&row.id) || app.checkpoint_dir(row).exists() {
        return None;
    }
    let (fetch, mine) = store.fetch(&row.id);
    if let Some(sender) = mine {
        let (app, row) = (app.clone(), row.clone());
        app.clone().spawn(async move {
            let Some(store) = &app.artifact_store else { return };
            let mut outcome = bring_back(&app, store, &row).await;
            // What another store lacks, or has otherwise, is not lost.
            if let Err(NotFetched::Missing | NotFetched::Damaged(_)) = outcome
                && let Err(unusable) = store.confirm(&*app.store).await
            {
                outcome = Err(NotFetched::Away(unusable.why));
            }
            match &outcome {
                Ok(()) => {
                    store.answers();
                    tracing::info!(checkpoint = row.id, "fetched from the object store");
                }
                // A job that waits for it asks again and again.
                Err(NotFetched::Away(why)) => store.is_away(why),
                Err(why) => tracing::warn!(checkpoint = row.id, ?why, "not fetched from the object store"),
            }
            store.fetched(&row.id, &sender, outcome);
        });
    }
    Some(fetch)
}

/// Waits for a checkpoint that is fetched, but not for longer than this; none where it needs longer.
pub(crate) async fn wait(mut fetch: Fetch, patience: Duration) -> Fetched {
    let ended = tokio::time::timeout(patience, fetch.outcome.wait_for(Option::is_some)).await;
    match ended {
        Ok(Ok(outcome)) => outcome.clone(),
        Ok(Err(_)) => Some(Err(NotFetched::Away("the server is stopping".into()))),
        Err(_) => None,
    }
}

async fn bring_back(app: &App, store: &ArtifactStore, row: &CheckpointRow) -> Result<()> {
    let place = store.storage.place(&row.id).ok_or(NotFetched::Missing)?;
    let name = format!("{}-{}", row.info.epoch, row.info.step);
    let job_dir = app.job_dir(&row.job);
    let gathering = job_dir.join("fetched").join(&name);
    let mut tries = 1;
    loop {
        match gather(store, &place, &gathering).await {
            Err(NotFetched::Damaged(how)) if tries < TRIES => {
                tracing::warn!(
                    checkpoint = row.id,
                    how,
                    "what came from the object store is damaged; fetching it again"
                );
                tries += 1;
            }
            other => break other?,
        }
    }
    let (from, to) = (gathering.clone(), app.checkpoint_dir(row));
    tokio::task::spawn_blocking(move || publish(&from, &to)).await.map_err(io::Error::other)??;
    // A job that was deleted meanwhile has no folder, and nobody would remove this one.
    if matches!(app.store.checkpoint(&row.id).await, Ok(None)) {
        let folder =
            if matches!(app.store.job(&row.job).await, Ok(None)) { job_dir } else { app.checkpoint_dir(row) };
        let _ = tokio::fs::remove_dir_all(folder).await;
        return Err(NotFetched::Missing);
    }
    Ok(())
}

/// All files of a checkpoint, each as its manifest has it.
async fn gather(store: &ArtifactStore, place: &Place, gathering: &Path) -> Result<()> {
    match tokio::fs::remove_dir_all(gathering).await {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    tokio::fs::create_dir_all(gathering).await?;
    let text = store.storage.manifest(place).await?.ok_or(NotFetched::Missing)?;
    let manifest = place.read(&text).map_err(NotFetched::Damaged)?;
    for (name, wanted) in &manifest.files {
        receive(store, place, (name, wanted), &gathering.join(name)).await.map_err(|why| match why {
            // The manifest says that it is there.
            NotFetched::Missing => NotFetched::Damaged(format!("its {name} is missing")),
            why => why,
        })?;
    }
    let path = gathering.join(MANIFEST);
    tokio::fs::write(&path, &text).await?;
    Ok(File::open(&path).await?.sync_all().await?)
}

async fn receive(
    store: &ArtifactStore,
    place: &Place,
    (name, wanted): (&str, &Written),
    path: &Path,
) -> Result<()> {
    let mut bytes = store.storage.get(place, name, &wanted.sha256).await?;
    let (mut file, mut hash, mut size) = (File::create(path).await?, Sha256::new(), 0);
    while let Some(piece) = bytes.next().await {
        let piece = piece?;
        size += piece.len() as u64;
        if size > wanted.size_bytes {
            break;
        }
        hash.update(&piece);
        file.write_all(&piece).await?;
    }
    file.flush().await?;
    if size != wanted.size_bytes {
        return Err(NotFetched::Damaged(format!(
            "its {name} has not the {} bytes that were written",
            wanted.size_bytes
        )));
    }
    if hexadecimal(hash.finalize().as_slice()) != wanted.sha256 {
        return Err(NotFetched::Damaged(format!("the bytes of its {name} are not those that were written")));
    }
    Ok(file.sync_all().await?)
}

/// Gives it its name, synced. One that has come by another way meanwhile stays.
fn publish(gathering: &Path, to: &Path) -> io::Result<()> {
    fs::File::open(gathering)?.sync_all()?;
    if let Some(all) = to.parent() {
        fs::create_dir_all(all)?;
        if to.exists() {
            return fs::remove_dir_all(gathering);
        }
        fs::rename(gathering, to)?;
        fs::File::open(all)?.sync_all()?;
    }
    // Others may be fetched.
    let _ = gathering.parent().map(fs::remove_dir);
    Ok(())
}
