//! Deletes the objects of checkpoints that are no more. What there is to delete, the database says: a record of objects without a
//! checkpoint. It is made by the deletion itself, so nothing is left behind by a server that is killed, or a store that is away.

use crate::{
    app::App,
    artifact_store::{ArtifactStore, Asked},
    object_storage::words,
    store::StoredCheckpoint,
};
use std::time::Duration;

/// Pauses after a failure, the first and the longest. The longest is also how often the database is asked.
const TRY_AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Records that are read at a time.
const ROWS: u32 = 100;

/// Why the objects of a checkpoint are still there.
enum Failed {
    /// The store is away, or the database: the others would wait for nothing, one after the other.
    All,
    /// These alone cannot be deleted, with why.
    These(String),
}

/// Deletes until `app` stops: first what an earlier server did not get to.
pub(crate) async fn run(app: App) {
    let Some(store) = &app.artifact_store else { return };
    wait_for(&app, store).await;
    let (mut pause, mut reported) = (TRY_AGAIN.0, 0);
    loop {
        let removed = store.removed.notified();
        match delete_some(&app, store, &mut reported).await {
            Ok(true) => pause = TRY_AGAIN.0,
            Ok(false) => {
                pause = TRY_AGAIN.0;
                // Some that are busy are not told of again.
                let _ = tokio::time::timeout(TRY_AGAIN.1, removed).await;
            }
            Err(()) => {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(TRY_AGAIN.1);
            }
        }
    }
}

/// Waits until the store can be used and is the one that it should be. It may have been away when the server started: then what somebody
/// has to change is known only now.
async fn wait_for(app: &App, store: &ArtifactStore) {
    let (mut pause, mut is_told) = (TRY_AGAIN.0, false);
    while let Err(unusable) = store.confirm(&*app.store).await {
        store.is_away(Asked::Other, &unusable.why);
        if !unusable.may_pass && !is_told {
            tracing::error!(error = unusable.why, "the object store cannot be used as it is");
            is_told = true;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(TRY_AGAIN.1);
    }
    store.answers(Asked::Other);
}

/// Whether there was something to delete. One that cannot be deleted does not hold up the others: `reported` is of how many that the log says.
async fn delete_some(app: &App, store: &ArtifactStore, reported: &mut usize) -> Result<bool, ()> {
    let url = store.storage.url();
    let (mut deleted, mut failed, mut behind) = (false, 0, String::new());
    let mut first = None;
    loop {
        let abandoned = app.store.abandoned_checkpoints(url, &behind, ROWS).await.map_err(|error| {
            tracing::warn!(%error, "which objects are to be deleted could not be read; trying again");
        })?;
        let Some(last) = abandoned.last() else { break };
        behind.clone_from(&last.id);
        for record in abandoned {
            if !store.take_this(&record.id) {
                continue;
            }
            // It may have begun a file since it was read.
            let record = store.stored(&record.id).unwrap_or(record);
            // It may have been written anew meanwhile, under the same name: nobody uploads it while it is taken.
            let is_gone = matches!(app.store.checkpoint(&record.id).await, Ok(None));
            let done = if is_gone { delete(app, store, &record).await } else { Ok(()) };
            if !matches!(app.store.checkpoint(&record.id).await, Ok(None)) {
                store.note(&record.id);
            }
            store.done(&record.id);
            match done {
                Ok(()) => deleted |= is_gone,
                Err(Failed::All) => return Err(()),
                Err(Failed::These(why)) => {
                    failed += 1;
                    first.get_or_insert((record.id, why));
                }
            }
        }
    }
    if let Some((checkpoint, error)) = &first
        && failed != *reported
    {
        tracing::warn!(
            checkpoint,
            error,
            failed,
            "the objects of checkpoints cannot be deleted, of this one first; trying again"
        );
    }
    *reported = failed;
    if first.is_some() { Err(()) } else { Ok(deleted) }
}

async fn delete(app: &App, store: &ArtifactStore, record: &StoredCheckpoint) -> Result<(), Failed> {
    if let Some(place) = store.storage.place(&record.id) {
        // What is there may be another server's: one with a copy of this database, which has adopted the store.
        confirm(app, store).await?;
        let gone = async {
            if let Some(parts) = &record.parts {
                store.storage.drop_parts(parts).await?;
            }
            store.storage.delete(&place, None).await
        };
        let gone = gone.await;
        // Where there is nothing, nothing is there to delete either.
        confirm(app, store).await?;
        store.answers(Asked::Other);
        gone.map_err(|error| Failed::These(words(&error)))?;
    }
    let forgotten = app.store.forget_stored_checkpoint(store.storage.url(), &record.id).await;
    forgotten.map_err(|error| {
        tracing::warn!(%error, "deleted objects could not be forgotten; trying again");
        Failed::All
    })?;
    store.forget(&record.id);
    Ok(())
}

/// Whether it is the store that the database knows.
async fn confirm(app: &App, store: &ArtifactStore) -> Result<(), Failed> {
    store.confirm(&*app.store).await.map_err(|unusable| {
        store.is_away(Asked::Other, &unusable.why);
        Failed::All
    })
}
