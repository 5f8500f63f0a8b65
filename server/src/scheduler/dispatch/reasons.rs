//! Events with the reasons why jobs wait. A separate task stores them, so that starts do not wait for these writes.

use super::RECONNECT_TIME;
use crate::{
    lifecycle,
    scheduler::Scheduler,
    store::{Change, JobRow, StoreError, unreadable},
    util::lock,
};
use lockstep_protocol::{
    job::{Job, JobId},
    reason::{Reason, ReasonKind, SlotWait},
};
use std::{collections::BTreeMap, sync::Mutex, time::Duration};
use tokio::sync::Notify;

/// Pause after a failed write.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
/// Maximum number of reasons in a transaction. A claim may have to wait for the transaction's end.
const BATCH_SIZE: usize = 16;

/// The newest reason of each job, to be stored. The oldest jobs come first.
#[derive(Debug, Default)]
pub(super) struct UnstoredReasons {
    reasons: Mutex<BTreeMap<JobId, Reason>>,
    wake: Notify,
}

impl UnstoredReasons {
    /// Queues the reason why a job waits, unless the job shows the same reason already, or agents are still reconnecting.
    pub(super) fn note(&self, scheduler: &Scheduler, row: &JobRow, why: &Reason) {
        let is_event = !machines_may_come_back(scheduler, &row.job)
            && lifecycle::shows_wait_reason(&row.job, why)
            && row.job.reason.as_deref() != Some(why.words())
            && !row.job.cause.as_ref().is_some_and(|known| differ_only_in_counts(known, why));
        if is_event {
            lock(&self.reasons).insert(row.job.id.clone(), why.clone());
            self.wake.notify_one();
        }
    }

    /// Stores reasons until dropped.
    pub(super) async fn store_all(&self, scheduler: &Scheduler) {
        loop {
            let reasons: Vec<_> = {
                let mut reasons = lock(&self.reasons);
                std::iter::from_fn(|| reasons.pop_first()).take(BATCH_SIZE).collect()
            };
            if reasons.is_empty() {
                self.wake.notified().await;
            } else {
                store_each(scheduler, &reasons).await;
            }
        }
    }
}

/// Whether the server was started a moment ago and the job was waiting before. Agents are still reconnecting, so the reason is about to
/// change, and storing it now would write several events for each waiting job.
fn machines_may_come_back(scheduler: &Scheduler, job: &Job) -> bool {
    let uptime = scheduler.up_since.elapsed();
    uptime < RECONNECT_TIME && crate::now().duration_since(job.created_at).unsigned_abs() > uptime
}

/// Whether two reasons are equal or differ only in numbers of slots. Such a change is not worth an event, because the last plan shows
/// these numbers, and each machine that connects or disconnects changes them for all waiting jobs.
fn differ_only_in_counts(known: &Reason, why: &Reason) -> bool {
    use ReasonKind::{NoAgentAccepts, TooFewSlots, WaitingForSlots};
    let needed = |wait: &SlotWait| (wait.device, wait.slots_needed);
    match (known.kind(), why.kind()) {
        // The details of these reasons name drained machines.
        (NoAgentAccepts { .. }, NoAgentAccepts { .. }) => true,
        (TooFewSlots(known), TooFewSlots(why)) => needed(known) == needed(why),
        (WaitingForSlots(known), WaitingForSlots(why)) => {
            needed(known) == needed(why) && known.detail == why.detail
        }
        (known, why) => known == why,
    }
}

async fn store_each(scheduler: &Scheduler, reasons: &[(JobId, Reason)]) {
    match store(scheduler, reasons).await {
        Ok(()) => {}
        // The next round of dispatch queues these reasons again.
        Err(error) if error.is_temporary() => {
            tracing::warn!(%error, "the reasons why jobs wait could not be stored");
            tokio::time::sleep(RETRY_PAUSE).await;
        }
        // The other reasons are stored even if one reason is refused.
        Err(_) => {
            for reason in reasons {
                if let Err(error) = store(scheduler, std::slice::from_ref(reason)).await {
                    unreadable::log_once(&format!(
                        "the reason why job {} waits cannot be stored: {error}",
                        reason.0
                    ));
                }
            }
        }
    }
}

async fn store(scheduler: &Scheduler, reasons: &[(JobId, Reason)]) -> Result<(), StoreError> {
    let change = |(job, why): &(JobId, Reason)| -> (JobId, Change) {
        let why = why.clone();
        (job.clone(), Box::new(move |row| lifecycle::set_wait_reason(row, &why)))
    };
    let changes: Vec<_> = reasons.iter().map(change).collect();
    // For a job that was deleted meanwhile, the result is `None`.
    for changed in scheduler.store.change_jobs(&changes).await?.into_iter().flatten() {
        scheduler.waiting.note_change(&changed.job);
        scheduler.events.hub.publish(&changed);
    }
    Ok(())
}
