//! A cache of the owners of jobs, which the gate needs for each request that names a job. A job's owner and whether it is private never
//! change, and deleting a job removes its entry, so entries stay valid. Datasets are not cached, because their names can be registered
//! again.

use crate::{store::Owned, util::lock};
use hashlink::LruCache;
use lockstep_protocol::JobId;
use std::sync::Mutex;

/// Maximum number of jobs. A job takes about 200 bytes.
const MAX_JOBS: usize = 8192;

/// The owners of the most recently requested jobs.
pub(crate) struct JobOwners(Mutex<LruCache<JobId, Owned>>);

impl Default for JobOwners {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(MAX_JOBS)))
    }
}

impl JobOwners {
    /// The owner of a job, if it is cached.
    pub(crate) fn get(&self, id: &JobId) -> Option<Owned> {
        lock(&self.0).get(id).cloned()
    }

    /// Caches the owner of a job, as read from the store.
    pub(crate) fn put(&self, id: &JobId, owned: Owned) {
        lock(&self.0).insert(id.clone(), owned);
    }

    /// Forgets a job that was deleted.
    pub(crate) fn remove(&self, id: &JobId) {
        lock(&self.0).remove(id);
    }
}
