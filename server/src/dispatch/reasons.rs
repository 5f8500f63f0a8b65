//! Why jobs wait. What a round finds is in memory at once (`wait_reasons.rs`); the store gets it behind dispatch's back, so that
//! jobs that start do not wait for the reasons of those that do not.

use crate::{
    app::App,
    lifecycle,
    store::{JobRow, StoreError, quarantine},
};
use lockstep_protocol::{
    job::JobId,
    reason::{Facts, Reason},
};
use std::time::Duration;

/// Before reasons are written again when the database could not.
const PAUSE: Duration = Duration::from_millis(500);

/// Notes the reason why a job waits.
pub(super) fn note(app: &App, row: &JobRow, why: Reason) {
    // How many of the slots are free just now is no event of a job: `wait_reasons` has it.
    let steady = |reason: &Reason| {
        let facts = Facts { agent: None, slots_free: None, ..reason.facts().clone() };
        (reason.code().clone(), facts)
    };
    let is_known = row.job.cause.as_ref().is_some_and(|known| *known == why || steady(known) == steady(&why));
    let is_event =
        !is_known && lifecycle::tells_wait(&row.job, &why) && row.job.reason.as_deref() != Some(why.words());
    app.wait_reasons.set(&row.job.id, why, is_event);
}

/// Stores reasons, the newest of each job, until dropped.
pub(super) async fn run(app: App) {
    loop {
        let (job, why) = app.wait_reasons.next_unstored().await;
        if let Err(error) = store(&app, &job, why).await {
            // The next round notes it again.
            if error.may_pass() {
                tracing::warn!(%error, "why a job waits could not be stored");
                tokio::time::sleep(PAUSE).await;
            } else {
                quarantine::log_once(&format!("why job {job} waits cannot be stored: {error}"));
            }
        }
    }
}

async fn store(app: &App, job: &JobId, why: Reason) -> Result<(), StoreError> {
    match app.store.change_job(job, Box::new(move |row| lifecycle::waits(row, &why))).await {
        Ok(changed) => {
            app.waiting.note(&changed.job);
            app.hub.publish(&changed);
            Ok(())
        }
        Err(StoreError::NotFound(_)) => Ok(()),
        Err(error) => Err(error),
    }
}
