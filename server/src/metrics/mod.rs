//! Metrics at scale: chunks of columns, and rollups (minimum, maximum and sum over 16, 256, ... steps) above them.
//!
//! A report is stored as one row of events (`store/points.rs`). A background task ([`compaction`]) turns batches of rows into chunks, up to
//! a watermark in the job's event numbers. A query reads chunks up to the watermark and the rows after the watermark, so the result does
//! not depend on the progress of compaction.

pub(crate) mod chunk;
pub(crate) mod compaction;
mod compaction_queue;
pub(crate) mod query;
pub(crate) mod retire;

use crate::store::{ChangedJob, EventRow, RowContent, Store};
use compaction_queue::CompactionQueue;
use std::{sync::Arc, time::Duration};

/// Compaction and queries of the points of all jobs.
pub(crate) struct Metrics {
    store: Arc<dyn Store>,
    queue: CompactionQueue,
    /// How long points are kept in the events of a job after its end.
    keep_points: Duration,
}

impl Metrics {
    pub(crate) fn new(store: Arc<dyn Store>, keep_points: Duration) -> Self {
        Self { store, queue: CompactionQueue::default(), keep_points }
    }

    /// Adds the cost of a stored change's points to the job's waiting rows.
    pub(crate) fn note_change(&self, changed: &ChangedJob) {
        let points = changed.events.iter().filter(|row| matches!(row.content, RowContent::Points { .. }));
        self.queue.add_cost(&changed.job.id, changed.job.ranks, points.map(EventRow::cost).sum());
    }
}
