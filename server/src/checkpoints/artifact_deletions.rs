//! Deletes the objects of deleted checkpoints. The database has a record for the objects of each checkpoint; a record without a checkpoint
//! is to be deleted. So nothing is left behind if the server is killed or the object store is unavailable.

use super::{
    Checkpoints,
    artifact_store::{ArtifactStore, Asked},
    object_storage::words,
};
use crate::store::StoredCheckpoint;
use lockstep_protocol::backoff::Backoff;
use std::{sync::Arc, time::Duration};

/// Pauses after a failure, the first and the longest. The longest is also the time between two queries.
const TRY_AGAIN: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// Records that are read at a time.
const ROWS: u32 = 100;

/// Why the objects of a checkpoint are still there.
enum Failed {
    /// The store or the database is unavailable, so no other deletion would succeed either.
    All,
    /// Only these objects cannot be deleted, for this reason.
    These(String),
}

/// Deletes until dropped: first what an earlier server did not get to.
pub(crate) async fn run(checkpoints: Arc<Checkpoints>) {
    let Some(store) = &checkpoints.artifact_store else { return };
    wait_for(&checkpoints, store).await;
    let (mut backoff, mut reported) = (TRY_AGAIN, 0);
    loop {
        let removed = store.removed.notified();
        match delete_some(&checkpoints, store, &mut reported).await {
            Ok(true) => backoff = TRY_AGAIN,
            Ok(false) => {
                backoff = TRY_AGAIN;
                // Records that are busy cause no further notification.
                let _ = tokio::time::timeout(TRY_AGAIN.longest, removed).await;
            }
            Err(()) => tokio::time::sleep(backoff.pause()).await,
        }
    }
}

/// Waits until the store can be used and is the right one. If it was unavailable when the server started, a wrong configuration is found
/// only now.
async fn wait_for(checkpoints: &Checkpoints, store: &ArtifactStore) {
    let (mut backoff, mut is_told) = (TRY_AGAIN, false);
    while let Err(unusable) = store.confirm(&*checkpoints.store).await {
        store.is_away(Asked::Other, &unusable.why);
        if !unusable.may_pass && !is_told {
            tracing::error!(error = unusable.why, "the object store cannot be used as it is");
            is_told = true;
        }
        tokio::time::sleep(backoff.pause()).await;
    }
    store.answers(Asked::Other);
}

/// Deletes all objects that can be deleted; false if there were none. `reported`: how many failures were logged last.
async fn delete_some(
    checkpoints: &Checkpoints,
    store: &ArtifactStore,
    reported: &mut usize,
) -> Result<bool, ()> {
    let url = store.storage.url();
    let (mut deleted, mut failed, mut behind) = (false, 0, String::new());
    let mut first = None;
    loop {
        let abandoned =
            checkpoints.store.abandoned_checkpoints(url, &behind, ROWS).await.map_err(|error| {
                tracing::warn!(%error, "which objects are to be deleted could not be read; trying again");
            })?;
        let Some(last) = abandoned.last() else { break };
        behind.clone_from(&last.id);
        for record in abandoned {
            if !store.take_this(&record.id) {
                continue;
            }
            // An upload may have begun since the record was read.
            let newer = checkpoints.store.stored_checkpoint(url, &record.id).await;
            let record = newer.ok().flatten().unwrap_or(record);
            // The checkpoint may have been written again under its name. Nothing uploads it while it is taken.
            let is_gone = matches!(checkpoints.store.checkpoint(&record.id).await, Ok(None));
            let done = if is_gone { delete(checkpoints, store, &record).await } else { Ok(()) };
            if !matches!(checkpoints.store.checkpoint(&record.id).await, Ok(None)) {
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

async fn delete(
    checkpoints: &Checkpoints,
    store: &ArtifactStore,
    record: &StoredCheckpoint,
) -> Result<(), Failed> {
    if let Some(place) = store.storage.place(&record.id) {
        // The objects may belong to another server, which has a copy of this database and has adopted the store.
        confirm(checkpoints, store).await?;
        let gone = async {
            if let Some(parts) = &record.parts {
                store.storage.drop_parts(parts).await?;
            }
            store.storage.delete(&place, None).await
        };
        let gone = gone.await;
        // A store that is not mounted looks empty, so it is confirmed again.
        confirm(checkpoints, store).await?;
        store.answers(Asked::Other);
        gone.map_err(|error| Failed::These(words(&error)))?;
    }
    let forgotten = checkpoints.store.forget_stored_checkpoint(store.storage.url(), &record.id).await;
    forgotten.map_err(|error| {
        tracing::warn!(%error, "deleted objects could not be forgotten; trying again");
        Failed::All
    })?;
    store.forget(&record.id);
    Ok(())
}

/// Confirms that this is the store that the database knows.
async fn confirm(checkpoints: &Checkpoints, store: &ArtifactStore) -> Result<(), Failed> {
    store.confirm(&*checkpoints.store).await.map_err(|unusable| {
        store.is_away(Asked::Other, &unusable.why);
        Failed::All
    })
}
