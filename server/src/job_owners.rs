//! Whose jobs are, in memory: the gate asks for each request that names one. A job has its owner and is private or not from its submission
//! on, and no later job gets its id, so what was read once stays true. Datasets are not kept: a name can be given to another one.

use crate::store::Owned;
use lockstep_protocol::JobId;
use std::{
    collections::HashMap,
    mem,
    sync::{Mutex, PoisonError},
};

/// Jobs of each half. A job takes some 200 bytes.
const HALF: usize = 4096;

/// The last few thousand jobs that somebody asked for.
#[derive(Default)]
pub(crate) struct JobOwners(Mutex<TwoGenerations>);

/// When the newer half is full, it takes the place of the older one: what was not asked for meanwhile is forgotten.
#[derive(Default)]
struct TwoGenerations {
    newer: HashMap<JobId, Owned>,
    older: HashMap<JobId, Owned>,
}

impl JobOwners {
    /// Whose a job is, where that is known.
    pub(crate) fn get(&self, id: &JobId) -> Option<Owned> {
        let mut halves = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(owned) = halves.newer.get(id) {
            return Some(owned.clone());
        }
        let owned = halves.older.remove(id)?;
        halves.put(id, owned.clone());
        Some(owned)
    }

    /// Keeps what the store says.
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
        if self.newer.len() >= HALF && !self.newer.contains_key(id) {
            self.older = mem::take(&mut self.newer);
        }
        self.newer.insert(id.clone(), owned);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_has_an_end_and_keeps_what_is_asked_for() {
        let owners = JobOwners::default();
        let owned = |owner: &str| Owned { owner: Some(owner.into()), private: true };
        let len = || {
            let halves = owners.0.lock().unwrap();
            halves.newer.len() + halves.older.len()
        };
        let jobs: Vec<_> = (0..=2 * HALF).map(|_| JobId::generate()).collect();
        for (n, job) in jobs[..2 * HALF].iter().enumerate() {
            owners.put(job, owned(&n.to_string()));
        }
        assert_eq!(len(), 2 * HALF);
        assert_eq!(owners.get(&jobs[HALF]), Some(owned(&HALF.to_string())));
        assert_eq!(owners.get(&jobs[2 * HALF]), None);
        // One past it: the older half goes, the newer one stays.
        owners.put(&jobs[2 * HALF], owned("last"));
        assert_eq!(len(), HALF + 1);
        assert_eq!(owners.get(&jobs[0]), None);
        assert_eq!(owners.get(&jobs[HALF]), Some(owned(&HALF.to_string())));
        owners.remove(&jobs[HALF]);
        assert_eq!(owners.get(&jobs[HALF]), None);
    }
}
