//! A cache of the owners of jobs, which the gate needs for each request that names a job. A job's owner and whether it is private never
//! change, and deleting a job removes its entry, so entries stay valid. Datasets are not cached, because their names can be registered
//! again.

use crate::store::Owned;
use lockstep_protocol::JobId;
use std::{
    collections::HashMap,
    mem,
    sync::{Mutex, PoisonError},
};

/// Maximum number of jobs in each generation. A job takes about 200 bytes.
const GENERATION_SIZE: usize = 4096;

/// The owners of the most recently requested jobs.
#[derive(Default)]
pub(crate) struct JobOwners(Mutex<TwoGenerations>);

/// When the newer generation is full, it replaces the older one. Jobs that were not requested meanwhile are forgotten.
#[derive(Default)]
struct TwoGenerations {
    newer: HashMap<JobId, Owned>,
    older: HashMap<JobId, Owned>,
}

impl JobOwners {
    /// The owner of a job, if it is cached.
    pub(crate) fn get(&self, id: &JobId) -> Option<Owned> {
        let mut halves = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(owned) = halves.newer.get(id) {
            return Some(owned.clone());
        }
        let owned = halves.older.remove(id)?;
        halves.put(id, owned.clone());
        Some(owned)
    }

    /// Caches the owner of a job, as read from the store.
    pub(crate) fn put(&self, id: &JobId, owned: Owned) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).put(id, owned);
    }

    /// Forgets a job that was deleted.
    pub(crate) fn remove(&self, id: &JobId) {
        let mut halves = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        halves.newer.remove(id);
        halves.older.remove(id);
    }
}

impl TwoGenerations {
    fn put(&mut self, id: &JobId, owned: Owned) {
        if self.newer.len() >= GENERATION_SIZE && !self.newer.contains_key(id) {
            self.older = mem::take(&mut self.newer);
        }
        self.newer.insert(id.clone(), owned);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_limited_and_keeps_recently_used_jobs() {
        let owners = JobOwners::default();
        let owned = |owner: &str| Owned { owner: Some(owner.into()), private: true };
        let len = || {
            let halves = owners.0.lock().unwrap();
            halves.newer.len() + halves.older.len()
        };
        let jobs: Vec<_> = (0..=2 * GENERATION_SIZE).map(|_| JobId::generate()).collect();
        for (n, job) in jobs[..2 * GENERATION_SIZE].iter().enumerate() {
            owners.put(job, owned(&n.to_string()));
        }
        assert_eq!(len(), 2 * GENERATION_SIZE);
        assert_eq!(owners.get(&jobs[GENERATION_SIZE]), Some(owned(&GENERATION_SIZE.to_string())));
        assert_eq!(owners.get(&jobs[2 * GENERATION_SIZE]), None);
        // Above the limit, the older generation is removed.
        owners.put(&jobs[2 * GENERATION_SIZE], owned("last"));
        assert_eq!(len(), GENERATION_SIZE + 1);
        assert_eq!(owners.get(&jobs[0]), None);
        assert_eq!(owners.get(&jobs[GENERATION_SIZE]), Some(owned(&GENERATION_SIZE.to_string())));
        owners.remove(&jobs[GENERATION_SIZE]);
        assert_eq!(owners.get(&jobs[GENERATION_SIZE]), None);
    }
}
