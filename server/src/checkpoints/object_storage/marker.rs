//! The object by which the store is known again: `LOCKSTEP.json`, at its root. An empty folder where a disk should be mounted, another
//! server's bucket of the same name and a proxy that knows nothing do not have it, and what they lack is not lost.

use super::{ObjectStorage, Unusable, within};
use bytes::Bytes;
use object_store::{Error, GetOptions, ObjectStoreExt, path::Path};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The object's name.
pub(crate) const MARKER: &str = "LOCKSTEP.json";
/// What is read of it at most.
const MARKER_BYTES: u64 = 1024;

/// What it says.
#[derive(Serialize, Deserialize)]
struct Marker {
    store: Uuid,
}

impl ObjectStorage {
    fn marker_path(&self) -> Path {
        self.root.clone().join(MARKER)
    }

    /// Which store this is; none where nobody has marked it.
    ///
    /// # Errors
    /// The store, or a marker that says nothing.
    pub(crate) async fn marker(&self) -> Result<Option<String>, Unusable> {
        let options = GetOptions::new().with_range(Some(0..MARKER_BYTES));
        let found = match within(self.objects.get_opts(&self.marker_path(), options)).await {
            Ok(found) => within(found.bytes()).await?,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let marker: Marker = serde_json::from_slice(&found).map_err(|error| {
            Unusable::for_good(format!(
                "its {MARKER}, by which it is known again, cannot be read ({error}): put the one back that was there"
            ))
        })?;
        Ok(Some(marker.store.to_string()))
    }

    /// Marks a store, from now on known by `store`.
    ///
    /// # Errors
    /// The store.
    pub(crate) async fn mark(&self, store: Uuid) -> Result<(), Unusable> {
        let text = format!("{}\n", serde_json::json!({"store": store}));
        within(self.objects.put(&self.marker_path(), Bytes::from(text).into())).await?;
        Ok(())
    }

    /// The database is a restored one.
    pub(crate) fn restored(&self) -> Unusable {
        Unusable::for_good(format!(
            "this database was restored from a backup, and {} is the store of the server that the backup was made of: each of the two would delete \
             what the other needs. If that server is gone, or is not to use the store again, start this one with --artifacts-adopt: the store is \
             then its alone. For a trial leave --artifacts out",
            self.url
        ))
    }

    /// The database knows no store of this marker.
    pub(crate) fn of_another_server(&self) -> Unusable {
        Unusable::for_good(format!(
            "{} belongs to another server: its {MARKER} is of a database that is not this one. Name {} that was never used, or the database of \
             that server. If that server is gone, or is not to use the store again, start this one with --artifacts-adopt: the store is then its \
             alone, and what the other has there stays",
            self.url,
            if self.directory.is_some() { "a directory" } else { "a prefix" },
        ))
    }

    /// It is another store than the one that the database knows.
    pub(crate) fn another(&self, found: Option<&str>, wanted: &str) -> Unusable {
        let found = found.map_or_else(
            || "is missing".to_owned(),
            |found| format!("names {found} (a server with a restored copy of this database may have adopted the store)"),
        );
        Unusable::for_good(format!(
            "{} is not the store that has this database's checkpoints: its {MARKER} {found}, and should be {{\"store\":\"{wanted}\"}}; \
             {} If that store is lost for good, name {} that was never used: what is still on the server's disk is copied there",
            self.url,
            self.hint(),
            if self.directory.is_some() { "a directory" } else { "a prefix" },
        ))
    }

    /// Nothing is there of what the database knows.
    pub(crate) fn empty(&self) -> Unusable {
        Unusable::for_good(format!(
            "{} has none of the checkpoints that the database says are there; {} If they are lost for good, name {} that was never \
             used: what is still on the server's disk is copied there",
            self.url,
            self.hint(),
            if self.directory.is_some() { "a directory" } else { "a prefix" },
        ))
    }

    fn hint(&self) -> &'static str {
        if self.directory.is_some() {
            "is the disk mounted?"
        } else {
            "are the bucket, its prefix and AWS_ENDPOINT_URL the right ones?"
        }
    }
}
