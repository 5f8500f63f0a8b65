//! Confirms that an object store is the store that the database knows. Before the confirmation, nothing is written to the store, and
//! checkpoints that the store does not have do not count as lost.

use super::ObjectStoreState;
use crate::{
    checkpoints::{manifest::sha256, object_storage::Unusable, unreported},
    lifecycle,
    store::{JobRow, Store, StoreError, StoredCheckpoint},
};
use lockstep_protocol::{checkpoint_files::STATE, limits::STATE_FILE_BYTES};
use uuid::Uuid;

/// Maximum number of uploaded checkpoints that are looked for in a store without a marker. At least one of them must be there.
const MAX_EXAMINED: u32 = 100;

impl From<StoreError> for Unusable {
    fn from(error: StoreError) -> Self {
        Self { why: format!("the database: {error}"), is_temporary: true }
    }
}

impl ObjectStoreState {
    /// Checks that the store can be used. After the first success, this needs no request.
    pub(crate) async fn check(&self) -> Result<(), Unusable> {
        self.usable.get_or_try_init(|| self.storage.check()).await.copied()
    }

    /// Confirms that the store can be used and is the store that the database knows. After the first success, this needs a single request.
    ///
    /// # Errors
    /// The store cannot be used, or is another store.
    pub(crate) async fn confirm(&self, database: &dyn Store) -> Result<(), Unusable> {
        self.check().await?;
        let expected = self.marker.get_or_try_init(|| self.identify(database)).await?;
        match self.storage.marker().await? {
            Some(marker) if marker == *expected => Ok(()),
            marker => Err(self.storage.wrong_store_error(marker.as_deref(), expected)),
        }
    }

    /// The required identity in the marker: the identity in the database, otherwise the identity in the store's marker, otherwise a new
    /// identity.
    async fn identify(&self, database: &dyn Store) -> Result<String, Unusable> {
        let url = self.storage.url();
        let known = database.object_store_marker(url).await?;
        if let Some(known) = known.as_ref().filter(|known| !known.is_restored && !self.adopts) {
            return Ok(known.marker.clone());
        }
        let found = self.storage.marker().await?;
        if let Some(known) = known.filter(|known| found.as_ref() != Some(&known.marker)) {
            let wrong = self.storage.wrong_store_error(found.as_deref(), &known.marker);
            // If the marker is missing, the store's disk may not be mounted.
            let found = found.ok_or_else(|| wrong.clone())?;
            return self.adopt(database, &found, wrong).await;
        }
        let marker = match found {
            // The marker may be known under another address, because a store can be moved.
            Some(found) => match database.is_marker_restored(&found).await? {
                Some(false) => found,
                Some(true) => self.adopt(database, &found, self.storage.restored_database_error()).await?,
                None => self.adopt(database, &found, self.storage.other_server_error()).await?,
            },
            None => {
                self.check_not_empty(database).await?;
                let own = Uuid::new_v4();
                self.storage.write_marker(own).await?;
                own.to_string()
            }
        };
        database.put_object_store_marker(url, &marker).await?;
        Ok(marker)
    }

    /// Takes over another server's store: adds its checkpoints to the database, and writes a new marker. The other server then refuses to
    /// use the store. `refused` is the error without `--artifacts-adopt`.
    async fn adopt(&self, database: &dyn Store, found: &str, refused: Unusable) -> Result<String, Unusable> {
        if !self.adopts {
            return Err(refused);
        }
        self.add_unnamed_checkpoints(database).await?;
        let own = Uuid::new_v4();
        // The database is written first, because if the server is killed here, the next start knows which marker the store should have.
        database.replace_restored_marker(found, &own.to_string()).await?;
        database.put_object_store_marker(self.storage.url(), &own.to_string()).await?;
        self.storage.write_marker(own).await?;
        tracing::warn!(
            url = self.storage.url(),
            "the object store now belongs to this database, and no longer to another database"
        );
        Ok(own.to_string())
    }

    /// Adds the checkpoints of this database's jobs that the store has and the database does not name. They were stored after the backup
    /// from which the database was restored, or by another server.
    async fn add_unnamed_checkpoints(&self, database: &dyn Store) -> Result<(), Unusable> {
        let (storage, url) = (&self.storage, self.storage.url());
        for (job, id) in storage.complete_checkpoints().await? {
            let known = database.stored_checkpoint(url, &id).await?;
            let unfinished_upload = match known {
                Some(StoredCheckpoint { manifest: Some(_), .. }) => continue,
                known => known.and_then(|known| known.unfinished_upload),
            };
            let Some(prefix) = storage.prefix_of(&id) else { continue };
            let Some(bytes) = storage.manifest(&prefix).await? else { continue };
            let Ok(manifest) = prefix.parse_manifest(&bytes) else { continue };
            if database.checkpoint(&id).await?.is_none() && database.job(&job).await?.is_some() {
                let Some(file) = manifest.files.get(STATE) else { continue };
                let state = storage.read_start(&prefix.file_path(STATE, file), STATE_FILE_BYTES).await?;
                let Ok((info, _)) = unreported::describe(&manifest, bytes.len(), &state.unwrap_or_default())
                else {
                    continue;
                };
                let add = move |row: &mut JobRow| {
                    let events = unreported::report(&row.job, info.clone()).into_iter();
                    let added: Result<Vec<_>, _> =
                        events.map(|event| lifecycle::report(row, event, None, crate::now())).collect();
                    Ok(added?.concat())
                };
                match database.change_job(&job, Box::new(add)).await {
                    Err(error) if !error.is_temporary() => {
                        tracing::warn!(%error, checkpoint = id, "a checkpoint of the object store cannot be added to its job");
                        continue;
                    }
                    result => result?,
                };
                tracing::info!(checkpoint = id, "a checkpoint that only the object store had is added");
            }
            let stored = StoredCheckpoint { id, manifest: Some(sha256(&bytes)), unfinished_upload };
            // Stores nothing for a checkpoint of a job that this database does not have.
            database.put_stored_checkpoint(url, &stored).await?;
        }
        Ok(())
    }

    /// Checks that an unmarked store has at least one of the checkpoints that were uploaded to it, if any were uploaded.
    async fn check_not_empty(&self, database: &dyn Store) -> Result<(), Unusable> {
        let uploaded = database.uploaded_checkpoints(self.storage.url(), MAX_EXAMINED).await?;
        for id in &uploaded {
            let Some(prefix) = self.storage.prefix_of(id) else { continue };
            if self.storage.manifest(&prefix).await?.is_some() {
                return Ok(());
            }
        }
        if uploaded.is_empty() { Ok(()) } else { Err(self.storage.empty_store_error()) }
    }
}
