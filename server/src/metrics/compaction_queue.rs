//! The queue of compaction: jobs whose newest rows of events are not compacted yet. A job is compacted when these rows make up a batch.

use crate::util::lock;
use lockstep_protocol::job::JobId;
use std::{collections::HashMap, sync::Mutex};
use tokio::sync::Notify;

/// Cost per rank (`EventRow::cost`, in bytes) of a batch of rows: 15 to 40 reports of a rank. Every compaction rewrites the newest chunk of
/// each series, so smaller batches would write more. Every query reads the rows that are not compacted, so larger batches would read more.
const COST_PER_RANK: u64 = 12 << 10;
/// Minimum cost of a batch, for jobs of few ranks.
const MIN_COST: u64 = 64 << 10;

/// Jobs with rows after their watermark.
#[derive(Debug, Default)]
pub(crate) struct CompactionQueue {
    waiting: Mutex<HashMap<JobId, Waiting>>,
    pub(crate) wake: Notify,
}

#[derive(Debug, Clone, Copy)]
struct Waiting {
    /// The cost of the job's waiting rows.
    cost: u64,
    /// The cost of a batch of the job.
    batch_cost: u64,
}

/// The cost of the rows in one compaction of a job with `ranks` ranks.
pub(crate) fn batch_cost(ranks: u32) -> u64 {
    (u64::from(ranks) * COST_PER_RANK).max(MIN_COST)
}

impl CompactionQueue {
    /// Adds `cost` to the cost of a job's waiting rows, and wakes the compaction task when they make up a batch.
    pub(crate) fn add_cost(&self, job: &JobId, ranks: u32, cost: u64) {
        if cost == 0 {
            return;
        }
        let mut jobs = lock(&self.waiting);
        let batch_cost = batch_cost(ranks);
        let waiting = jobs.entry(job.clone()).or_insert(Waiting { cost: 0, batch_cost });
        waiting.cost = waiting.cost.saturating_add(cost);
        if waiting.cost >= waiting.batch_cost {
            self.wake.notify_one();
        }
    }

    /// Removes a job whose rows make up a batch. Returns the job and the cost of a batch.
    pub(crate) fn take_batch(&self) -> Option<(JobId, u64)> {
        let mut jobs = lock(&self.waiting);
        let (job, waiting) = jobs.iter().find(|(_, waiting)| waiting.cost >= waiting.batch_cost)?;
        let (job, batch_cost) = (job.clone(), waiting.batch_cost);
        jobs.remove(&job);
        Some((job, batch_cost))
    }
}
