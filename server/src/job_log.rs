//! Lines that the server itself writes into logs of jobs.

use crate::{app::App, lifecycle, store::JobRow};
use lockstep_protocol::{
    JobId,
    agent::{AttemptEvent, LogLine},
};

/// Lines of which it is remembered that they were written. Beyond, one may be written a second time.
const REMEMBERED: usize = 4096;

/// Writes a line into a job's log, unless the attempt's log has one about `what` already.
pub(crate) async fn log_once(app: &App, job: &JobId, attempt: u32, what: &'static str, text: String) {
    {
        let mut written = app.log_lines.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if written.len() >= REMEMBERED {
            written.clear();
        }
        if !written.insert((job.clone(), attempt, what)) {
            return;
        }
    }
    log(app, job, text).await;
}

/// Writes a line into a job's log.
pub(crate) async fn log(app: &App, job: &JobId, text: String) {
    // The lines of rank 0 are numbered from 1: this one is none of them.
    let line = LogLine { number: 0, at: crate::now(), text };
    let event = AttemptEvent::Log { rank: 0, lines: vec![line] };
    let change = move |row: &mut JobRow| lifecycle::report(row, event.clone(), None, crate::now());
    match app.store.change_job(job, Box::new(change)).await {
        Ok(changed) => app.announce(&changed),
        Err(error) => tracing::warn!(%error, %job, "a line of a job's log could not be stored"),
    }
}
