//! Confirms that an object store is the store that the database knows. Before the confirmation, nothing is written to the store, and
//! checkpoints that the store does not have do not count as lost.

use super::ObjectStoreState;
use crate::{
    checkpoints::object_storage::Unusable,
    store::{Store, StoreError},
};
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
        if let Some(known) = known.as_ref().filter(|known| !known.is_restored) {
            return Ok(known.marker.clone());
        }
        let found = self.storage.marker().await?;
        if let Some(restored) = known.filter(|known| found.as_ref() != Some(&known.marker)) {
            return Err(self.storage.wrong_store_error(found.as_deref(), &restored.marker));
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

    /// Takes over another server's store by writing a new marker. The other server then refuses to use the store. `refused` is the error
    /// without `--artifacts-adopt`.
    async fn adopt(&self, database: &dyn Store, found: &str, refused: Unusable) -> Result<String, Unusable> {
        if !self.adopts {
            return Err(refused);
        }
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
