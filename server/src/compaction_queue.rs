//! Which jobs have so many points in rows of events that making chunks of them is worth the work.

use crate::store::{Changed, EventRow, Stored};
use lockstep_protocol::job::JobId;
use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};
use tokio::sync::Notify;

/// Rows that are made into chunks at a time, as their cost for each rank; fewer stay as they are, and a chart reads all of
/// them. Some 15 to 40 reports: each time the newest chunk of every series is written anew.
const COST_A_RANK: u64 = 12 << 10;
/// The same of the smallest jobs.
const LEAST_COST: u64 = 64 << 10;

/// Jobs with events that wait to become chunks.
#[derive(Debug, Default)]
pub(crate) struct CompactionQueue {
    waiting: Mutex<HashMap<JobId, Waiting>>,
    pub(crate) wake: Notify,
}

#[derive(Debug, Clone, Copy)]
struct Waiting {
    cost: u64,
    /// What is worth the work.
    batch_cost: u64,
}

/// The cost of the rows of a job of so many ranks that are made into chunks at a time.
pub(crate) fn batch_cost(ranks: u32) -> u64 {
    (u64::from(ranks) * COST_A_RANK).max(LEAST_COST)
}

impl CompactionQueue {
    fn lock(&self) -> MutexGuard<'_, HashMap<JobId, Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what was stored.
    pub(crate) fn note(&self, changed: &Changed) {
        let points = changed.events.iter().filter(|row| matches!(row.stored, Stored::Points { .. }));
        self.count(&changed.job.id, changed.job.ranks, points.map(EventRow::cost).sum());
    }

    /// Notes that rows of a job wait which cost so much.
    pub(crate) fn count(&self, job: &JobId, ranks: u32, cost: u64) {
        if cost == 0 {
            return;
        }
        let mut all = self.lock();
        let batch_cost = batch_cost(ranks);
        let waiting = all.entry(job.clone()).or_insert(Waiting { cost: 0, batch_cost });
        waiting.cost = waiting.cost.saturating_add(cost);
        if waiting.cost >= waiting.batch_cost {
            self.wake.notify_one();
        }
    }

    pub(crate) fn take(&self) -> Option<(JobId, u64)> {
        let mut all = self.lock();
        let (job, waiting) = all.iter().find(|(_, waiting)| waiting.cost >= waiting.batch_cost)?;
        let (job, batch_cost) = (job.clone(), waiting.batch_cost);
        all.remove(&job);
        Some((job, batch_cost))
    }
}
