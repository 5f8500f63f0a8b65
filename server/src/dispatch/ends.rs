//! Ending attempts from outside: by the server or a user, not by their ranks.

use crate::{
    app::App,
    lifecycle,
    store::{JobRow, Result, StoreError},
};
use lockstep_protocol::{
    agent::AttemptRef,
    job::JobState,
    reason::{Reason, ReasonCode},
    stream::EventBody,
};

/// Changes the job of an attempt, if that attempt may still write.
pub(super) async fn end_attempt(
    app: &App,
    attempt: &AttemptRef,
    change: impl Fn(&mut JobRow) -> std::result::Result<Vec<EventBody>, lifecycle::Refused>
    + Send
    + Sync
    + 'static,
) -> Result<()> {
    let expected = attempt.clone();
    let change = move |row: &mut JobRow| {
        if row.live().as_ref() == Some(&expected) { change(row) } else { Ok(Vec::new()) }
    };
    match app.store.change_job(&attempt.job, Box::new(change)).await {
        Ok(changed) => {
            app.announce(&changed);
            // Whatever the job is doing now, it is not this attempt any more.
            app.leases.release(&attempt.job, attempt.attempt);
            Ok(())
        }
        Err(StoreError::NotFound(_)) => {
            app.leases.release(&attempt.job, attempt.attempt);
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// The reason why a job's ranks must end, if they must, and whether they write a checkpoint first.
pub(super) fn wanted(row: &JobRow) -> Option<(String, bool)> {
    match (&row.stop, row.job.state) {
        (Some(stop), _) => Some((stop.words().to_owned(), false)),
        (None, JobState::Pausing) => Some((Reason::from(ReasonCode::PausedByUser).words().to_owned(), true)),
        (None, _) => None,
    }
}
