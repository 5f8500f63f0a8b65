//! Whether what answers is the store that the database knows. Before that is certain, nothing is written there, and nothing that it says
//! is missing counts as lost.

use super::ArtifactStore;
use crate::{
    checkpoints::object_storage::Unusable,
    store::{Store, StoreError},
};
use uuid::Uuid;

/// Checkpoints of which one has to be there, in a store that is not marked.
const SOME: u32 = 100;

impl From<StoreError> for Unusable {
    fn from(error: StoreError) -> Self {
        Self { why: format!("the database: {error}"), may_pass: true }
    }
}

impl ArtifactStore {
    /// It could be used when the server started.
    pub(crate) fn was_checked(&self) {
        // It is set already where it was.
        let _ = self.usable.set(());
    }

    /// Makes sure that the store can be used and is the one that the database knows, which is a request once that was so.
    ///
    /// # Errors
    /// Why it is not.
    pub(crate) async fn confirm(&self, database: &dyn Store) -> Result<(), Unusable> {
        self.usable.get_or_try_init(|| self.storage.check()).await?;
        let wanted = self.marker.get_or_try_init(|| self.identify(database)).await?;
        match self.storage.marker().await? {
            Some(found) if found == *wanted => Ok(()),
            found => Err(self.storage.another(found.as_deref(), wanted)),
        }
    }

    /// What the marker has to be: what the database says, or else what is there, or else a new one.
    async fn identify(&self, database: &dyn Store) -> Result<String, Unusable> {
        let url = self.storage.url();
        let known = database.artifact_marker(url).await?;
        if let Some(known) = known.as_ref().filter(|known| !known.is_restored) {
            return Ok(known.marker.clone());
        }
        let found = self.storage.marker().await?;
        if let Some(known) = known.filter(|known| found.as_ref() != Some(&known.marker)) {
            return Err(self.storage.another(found.as_deref(), &known.marker));
        }
        let marker = match found {
            // Of whatever address: a store may have been moved.
            Some(found) => match database.is_marker_restored(&found).await? {
                Some(false) => found,
                Some(true) => self.adopt(database, &found, self.storage.restored()).await?,
                None => self.adopt(database, &found, self.storage.of_another_server()).await?,
            },
            None => {
                self.has_something(database).await?;
                let own = Uuid::new_v4();
                self.storage.mark(own).await?;
                own.to_string()
            }
        };
        database.put_artifact_marker(url, &marker).await?;
        Ok(marker)
    }

    /// Gives another server's store another marker: that server no longer takes it for its own.
    async fn adopt(&self, database: &dyn Store, found: &str, refused: Unusable) -> Result<String, Unusable> {
        if !self.adopts {
            return Err(refused);
        }
        let own = Uuid::new_v4();
        // First what cannot be seen from outside: if this ends here, the next start says what the marker should be.
        database.replace_restored_marker(found, &own.to_string()).await?;
        database.put_artifact_marker(self.storage.url(), &own.to_string()).await?;
        self.storage.mark(own).await?;
        tracing::warn!(
            url = self.storage.url(),
            "the object store is this database's now, and no longer another one's"
        );
        Ok(own.to_string())
    }

    /// Whether an unmarked store has something of what should be there.
    async fn has_something(&self, database: &dyn Store) -> Result<(), Unusable> {
        let wanted = database.uploaded_checkpoints(self.storage.url(), SOME).await?;
        for id in &wanted {
            let Some(place) = self.storage.place(id) else { continue };
            if self.storage.manifest(&place).await?.is_some() {
                return Ok(());
            }
        }
        if wanted.is_empty() { Ok(()) } else { Err(self.storage.empty()) }
    }
}
