//! The jobs that wait for slots, as the store has them. Rows of earlier reads stay in memory, because a row has a whole specification. Each
//! read compares these rows with the store and reads only the jobs that have changed.

use crate::store::{JobRow, Result, Store, WaitingFingerprint};
use jiff::Timestamp;
use lockstep_protocol::job::{JobId, JobState};
use std::{cmp::Reverse, collections::HashMap, sync::Arc};
use tokio::sync::Mutex;

/// Number of jobs that are read at a time.
const READ_SIZE: usize = 1000;

/// The rows of earlier reads.
#[derive(Debug, Default)]
pub(crate) struct JobQueue(Mutex<HashMap<JobId, Arc<JobRow>>>);

/// The sort key of the queue: highest priority first, then the oldest job.
fn sort_key(row: &JobRow) -> (Reverse<i32>, Timestamp, &JobId) {
    (Reverse(row.job.spec.priority), row.job.created_at, &row.job.id)
}

fn is_waiting(state: JobState) -> bool {
    // A lost job is restarted or fails next; until then it keeps its place.
    state.is_waiting() || state == JobState::Lost
}

fn fingerprint(row: &JobRow) -> WaitingFingerprint {
    let job = &row.job;
    WaitingFingerprint { last_seq: job.last_seq, priority: job.spec.priority, project: job.project.clone() }
}

impl JobQueue {
    /// The waiting jobs in order. Jobs that this version of the program cannot read are left out.
    ///
    /// # Errors
    /// Errors of the store.
    pub(crate) async fn read(&self, store: &dyn Store) -> Result<Vec<Arc<JobRow>>> {
        let mut rows = self.0.lock().await;
        let stored = store.waiting_fingerprints().await?;
        rows.retain(|id, row| stored.get(id) == Some(&fingerprint(row)));
        let changed: Vec<JobId> = stored.into_keys().filter(|id| !rows.contains_key(id)).collect();
        for ids in changed.chunks(READ_SIZE) {
            let read = store.jobs_by_id(ids).await?;
            let waiting = read.into_iter().filter(|(_, row)| is_waiting(row.job.state));
            rows.extend(waiting.map(|(id, row)| (id, Arc::new(row))));
        }
        let mut waiting: Vec<_> = rows.values().cloned().collect();
        waiting.sort_unstable_by(|a, b| sort_key(a).cmp(&sort_key(b)));
        Ok(waiting)
    }
}
