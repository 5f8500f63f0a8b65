//! New jobs, and the results of changes of jobs.

use super::{Annotation, EventRow, NewTrial};
use crate::lifecycle::Fork;
use jiff::Timestamp;
use lockstep_protocol::{
    job::{External, Job, JobId},
    spec::JobSpec,
};

#[derive(Debug, Clone)]
pub struct NewJob {
    pub id: JobId,
    /// The validated specification. Tags and notes are in `annotation`.
    pub spec: JobSpec,
    pub annotation: Annotation,
    pub at: Timestamp,
    /// The client's idempotency key and the hash of the request.
    pub idempotency: Option<(String, String)>,
    /// The checkpoint of another job from which this job continues.
    pub fork: Option<Fork>,
    /// Name of the person or token that submits the job.
    pub owner: Option<String>,
    /// The sweep that starts the job, and the trial's number in the sweep.
    pub trial: Option<NewTrial>,
    /// The additional fields of a run from elsewhere, which is running from the beginning.
    pub external: Option<External>,
}

impl NewJob {
    /// A job without tags, notes and an owner.
    pub fn of(id: JobId, spec: JobSpec, at: Timestamp) -> Self {
        let annotation = Annotation::default();
        Self {
            id,
            spec,
            annotation,
            at,
            idempotency: None,
            fork: None,
            owner: None,
            trial: None,
            external: None,
        }
    }
}

/// The job after a change, and the events that the change stored.
#[derive(Debug, Clone)]
pub struct ChangedJob {
    pub job: Job,
    /// The stored events, in order; may be empty.
    pub events: Vec<EventRow>,
}

/// The result of [`crate::store::Store::create_job`].
#[derive(Debug, Clone)]
pub enum CreateResult {
    New(Box<ChangedJob>),
    /// The job that an earlier, identical request created.
    Existing(Box<Job>),
}
