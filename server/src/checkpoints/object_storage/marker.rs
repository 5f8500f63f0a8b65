//! The object `LOCKSTEP.json` at the root of a store, which identifies the store. It is missing in an empty folder where a disk should be
//! mounted, in another server's bucket of the same name, and behind a wrong proxy. Checkpoints that such a store does not have are not
//! lost.

use super::{ObjectStorage, Unusable};
use object_store::path::Path;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Name of the object that identifies a store.
pub(crate) const MARKER: &str = "LOCKSTEP.json";
/// Maximum number of bytes that are read of the object.
const MARKER_BYTES: u64 = 1024;

/// The content of the object [`MARKER`].
#[derive(Serialize, Deserialize)]
struct Marker {
    store: Uuid,
}

impl ObjectStorage {
    fn marker_path(&self) -> Path {
        self.root.clone().join(MARKER)
    }

    /// The store's identity. `None` if the store has no marker.
    ///
    /// # Errors
    /// A store error, or the marker is invalid.
    pub(crate) async fn marker(&self) -> Result<Option<String>, Unusable> {
        let Some(bytes) = self.read_start(&self.marker_path(), MARKER_BYTES).await? else { return Ok(None) };
        let marker: Marker = serde_json::from_slice(&bytes).map_err(|error| {
            Unusable::permanent(format!(
                "its {MARKER}, which identifies the store, cannot be read ({error}): restore the original object"
            ))
        })?;
        Ok(Some(marker.store.to_string()))
    }

    pub(crate) async fn write_marker(&self, store: Uuid) -> Result<(), Unusable> {
        let text = format!("{}\n", serde_json::json!({"store": store}));
        Ok(self.put(&self.marker_path(), text.into()).await?)
    }

    /// The error for a restored database.
    pub(crate) fn restored_database_error(&self) -> Unusable {
        Unusable::permanent(format!(
            "this database was restored from a backup, and {} is the store of the server from which the backup was made: each of the two servers \
             would delete checkpoints that the other needs. If that server no longer exists or will not use the store again, start this server with \
             --artifacts-adopt: only this server can then use the store. For a trial, leave --artifacts out",
            self.url
        ))
    }

    /// The error for a store whose marker is not in the database.
    pub(crate) fn other_server_error(&self) -> Unusable {
        Unusable::permanent(format!(
            "{} belongs to another server: its {MARKER} was written for another database. Name {} that was never used, or the database of \
             that server. If that server no longer exists or will not use the store again, start this server with --artifacts-adopt: only this server can \
             then use the store, and the other server's objects stay there",
            self.url,
            if self.directory.is_some() { "a directory" } else { "a prefix" },
        ))
    }

    /// The error for another store than the store that the database knows.
    pub(crate) fn wrong_store_error(&self, found: Option<&str>, expected: &str) -> Unusable {
        let found = found.map_or_else(
            || "is missing".to_owned(),
            |found| {
                format!(
                    "names {found} (a server with a restored copy of this database may have adopted the store; if no other server uses it now, \
                     start this server with --artifacts-adopt)"
                )
            },
        );
        Unusable::permanent(format!(
            "{} is not the store that has this database's checkpoints: its {MARKER} {found}, and should be {{\"store\":\"{expected}\"}}; \
             {}",
            self.url,
            self.advice("that store is"),
        ))
    }

    /// The error for a store that has none of the checkpoints in the database.
    pub(crate) fn empty_store_error(&self) -> Unusable {
        Unusable::permanent(format!(
            "{} has none of the checkpoints that were uploaded there; {}",
            self.url,
            self.advice("they are"),
        ))
    }

    /// What to do if this is the wrong store. `subject` is what may be lost, with its verb, such as "they are".
    fn advice(&self, subject: &str) -> String {
        let (question, unused) = match self.directory {
            Some(_) => ("is the disk mounted?", "a directory"),
            None => ("are the bucket, its prefix and AWS_ENDPOINT_URL correct?", "a prefix"),
        };
        format!(
            "{question} If {subject} lost, name {unused} that was never used: checkpoints that are still on the server's disk are copied there"
        )
    }
}
