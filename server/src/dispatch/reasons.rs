//! Events that say why jobs wait. The store gets them behind dispatch's back, so that jobs that start do not wait for the reasons of those
//! that do not.

use super::BACK_WITHIN;
use crate::{
    app::App,
    lifecycle,
    store::{Change, JobRow, StoreError, quarantine},
};
use lockstep_protocol::{
    job::{Job, JobId},
    reason::{Facts, Reason, ReasonCode},
};
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::sync::Notify;

/// Before reasons are written again when the database could not.
const PAUSE: Duration = Duration::from_millis(500);
/// Reasons of one transaction, at most: a claim may have to wait for its end.
const TOGETHER: usize = 16;

/// Reasons that are to be stored, the newest of each job: the oldest jobs first.
#[derive(Debug, Default)]
pub(super) struct Unstored {
    reasons: Mutex<BTreeMap<JobId, Reason>>,
    wake: Notify,
}

impl Unstored {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<JobId, Reason>> {
        self.reasons.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes why a job waits, if that is an event of the job.
    pub(super) fn note(&self, app: &App, row: &JobRow, why: &Reason) {
        let is_event = !machines_may_come_back(app, &row.job)
            && lifecycle::tells_wait(&row.job, why)
            && row.job.reason.as_deref() != Some(why.words())
            && !row.job.cause.as_ref().is_some_and(|known| is_steady(known, why));
        if is_event {
            self.lock().insert(row.job.id.clone(), why.clone());
            self.wake.notify_one();
        }
    }

    /// Stores reasons until dropped.
    pub(super) async fn store_all(&self, app: &App) {
        loop {
            let reasons: Vec<_> = {
                let mut reasons = self.lock();
                std::iter::from_fn(|| reasons.pop_first()).take(TOGETHER).collect()
            };
            if reasons.is_empty() {
                self.wake.notified().await;
            } else {
                store_each(app, &reasons).await;
            }
        }
    }
}

/// Whether a job was waiting when this server was started, a moment ago: machines that were there are on their way back, and a reason that
/// is stored meanwhile would be stored again when they are. That is as many events as there are waiting jobs, several times over.
fn machines_may_come_back(app: &App, job: &Job) -> bool {
    let up = app.up_since.elapsed();
    up < BACK_WITHIN && crate::now().duration_since(job.created_at).unsigned_abs() > up
}

/// Whether two reasons differ at most in how many slots there are, are free or kept just now, which is no event of a job: the last plan
/// has it. Machines come and go, and each may have a thousand jobs waiting.
fn is_steady(known: &Reason, why: &Reason) -> bool {
    // The names of drained machines.
    let is_named = matches!(why.code(), ReasonCode::NoAgentAccepts | ReasonCode::TooFewSlots);
    let steady = |facts: &Facts| Facts {
        detail: facts.detail.clone().filter(|_| !is_named),
        agent: None,
        machines: None,
        slots_total: None,
        slots_free: None,
        slots_kept: None,
        kept_for: Vec::new(),
        ..facts.clone()
    };
    known.code() == why.code() && steady(known.facts()) == steady(why.facts())
}

async fn store_each(app: &App, reasons: &[(JobId, Reason)]) {
    match store(app, reasons).await {
        Ok(()) => {}
        // The next round notes them again.
        Err(error) if error.may_pass() => {
            tracing::warn!(%error, "why jobs wait could not be stored");
            tokio::time::sleep(PAUSE).await;
        }
        // One that is refused does not keep back the others.
        Err(_) => {
            for reason in reasons {
                if let Err(error) = store(app, std::slice::from_ref(reason)).await {
                    quarantine::log_once(&format!("why job {} waits cannot be stored: {error}", reason.0));
                }
            }
        }
    }
}

async fn store(app: &App, reasons: &[(JobId, Reason)]) -> Result<(), StoreError> {
    let change = |(job, why): &(JobId, Reason)| -> (JobId, Change) {
        let why = why.clone();
        (job.clone(), Box::new(move |row| lifecycle::waits(row, &why)))
    };
    let changes: Vec<_> = reasons.iter().map(change).collect();
    // One that was deleted meanwhile has none.
    for changed in app.store.change_jobs(&changes).await?.into_iter().flatten() {
        app.waiting.note(&changed.job);
        app.hub.publish(&changed);
    }
    Ok(())
}
